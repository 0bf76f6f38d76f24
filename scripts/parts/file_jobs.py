"""File jobs of the command line, for checks: lines of every kind, a job, its results."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

LIMITS = ("--max-model-len=256", "--max-num-seqs=4", "--max-num-batched-tokens=256")
"""Small shapes, the tests': a start is short, and a job has many steps."""

_WORDS = ("the", "old", "house", "by", "a", "river", "was", "empty", "since", "winter", "light")


def write_input(path: Path, lines: int, seed: int, *, bad: bool = True) -> None:
    """Plain and OpenAI lines, with and without id, seed, session, log-probabilities; some bad."""
    draw = random.Random(seed)
    with path.open("w") as file:
        for i in range(lines):
            prompt = " ".join(draw.choices(_WORDS, k=draw.randint(1, 40))) + draw.choice(
                ("", " é🏚")
            )
            fields = {"prompt": prompt, "max_tokens": draw.randint(1, 40)}
            fields |= draw.choice(({}, {"temperature": 0}, {"seed": i}, {"logprobs": 2}))
            if i % 8 == 7:
                # Turns of a session: its document, and another question each.
                session = f"s{i // 64}"
                fields |= {"session_id": session, "prompt": f"{_document(session)} {prompt}"}
            if bad and i % 25 == 24:
                line = draw.choice(
                    ('{"id": 1, "prompt"', '{"id": "long", "prompt": "x", "max_token')
                )
            elif i % 3 == 0:
                url = "/v1/completions"
                envelope = {"custom_id": f"c{i}", "method": "POST", "url": url, "body": fields}
                line = json.dumps(envelope)
            else:
                line = json.dumps(({"id": f"p{i}"} if i % 3 == 1 else {}) | fields)
            file.write(line + "\n")


def _document(session: str) -> str:
    return " ".join(random.Random(session).choices(_WORDS, k=60))


def command(source: Path, output: Path, *options: str) -> list[str]:
    """The command line of a job."""
    files = (f"--input={source}", f"--output={output}", "--on-error=skip", "--quiet")
    return [sys.executable, "-m", "moejax", "generate", *files, *LIMITS, *options]


def run(arguments: Sequence[str]) -> None:
    """Runs a job to its end; raises RuntimeError unless it ends well."""
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 3):  # 3: it has bad lines, as some inputs should
        raise RuntimeError(f"exit status {done.returncode}\n{done.stderr}")


def results(output: Path) -> list[str]:
    """Results sorted by id, as JSON without `metrics` and the model's name, which is its path.
    Raises ValueError for a torn line."""
    found = []
    for line in output.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            raise ValueError(f"{output} ends in a torn line")
        record = json.loads(line)
        record.pop("metrics", None)
        ((record.get("response") or {}).get("body") or {}).pop("model", None)
        found.append((str(record.get("custom_id", record["id"])), json.dumps(record)))
    return [text for _, text in sorted(found)]

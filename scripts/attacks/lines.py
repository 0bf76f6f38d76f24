"""File jobs over hostile lines, and jobs that go on from damaged results."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

from moejax import UserError
from moejax.requests.sampling_params import MAX_N
from moejax.serve.batch.job import Job, open_job
from scripts.attacks.engine import Known
from scripts.attacks.scene import Scene
from scripts.attacks.values import FIELDS, pick, raw_json

NAMES = ("id", "custom_id", "prompt", "prompt_token_ids", "messages", "session_id", "priority")
ENVELOPES = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")
GARBAGE = (
    *(
        b"{",
        b"}",
        b"[]",
        b"null",
        b"\xff\xfe\x00",
        b"\0" * 100,
        b'"text"',
        b"\xef\xbb\xbf{}",
        b"{}",
    ),
    *(b"{" * 100_000, b"[" * 1_000_000, b'{"prompt": "x"} {"prompt": "y"}', b'{"prompt": "x",}'),
    *(b'{"id": 1, "id": 2, "prompt": "x"}', b"\r", b'{"prompt"', b"\x1a", b"NaN", b"1" * 5000),
)


def known_line(known: Known, which: int, name: str) -> bytes:
    """The JSON line of a known request."""
    params = known.params[which]
    fields: dict[str, Any] = {"id": name, "prompt": known.prompts[which], "seed": params.seed}
    for field in ("temperature", "presence_penalty", "max_tokens", "ignore_eos", "logprobs"):
        fields[field] = getattr(params, field)
    return json.dumps(fields).encode()


def hostile_line(rng: random.Random) -> bytes:
    """A line that is no JSON, or JSON with hostile fields, in either form."""
    draw = rng.random()
    if draw < 0.15:
        return pick(rng, GARBAGE)
    if draw < 0.18:
        return _long_line(rng)
    fields = {"prompt": '"The old house"', "max_tokens": "3"}
    for name in rng.sample([*FIELDS, *NAMES], pick(rng, (1, 1, 2, 4))):
        fields[name] = raw_json(rng, FIELDS.get(name))
    if fields.get("n", "").isdecimal() and 64 < int(fields["n"][:6]) <= MAX_N:
        fields["n"] = "64"  # more is work and not a fault
    body = "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"
    if rng.random() < 0.25:
        url = raw_json(rng) if rng.random() < 0.2 else f'"{pick(rng, ENVELOPES)}"'
        name = raw_json(rng) if rng.random() < 0.2 else f'"c{rng.randrange(10**9)}"'
        body = f'{{"custom_id": {name}, "method": "POST", "url": {url}, "body": {body}}}'
    return body.encode("utf-8", "surrogatepass").replace(b"\n", b" ")


def _long_line(rng: random.Random) -> bytes:
    length = pick(rng, (1_000_000, 10_000_000, 10_000_000, 50_000_000))
    base = pick(rng, (b" ", b"a", b"ab ", "é".encode(), b"\\u0000", b"9"))
    text = base * (length // len(base)) + b"x"
    name = pick(rng, (b"prompt", b"prompt", b"id", b"stop", b"nothing", b"session_id"))
    return b'{"prompt": "a", "max_tokens": 2, "' + name + b'": "' + text + b'"}'


def attack_lines(scene: Scene) -> None:
    """Hostile and known lines in one job; then the job once more, from its whole results or from a
    part of them."""
    rng, known, directory = scene.rng, scene.known, scene.directory
    lines, which = [], {}
    for i in range(rng.randrange(2, 14)):
        if rng.random() < 0.3:
            which[f"known-{i}"] = rng.randrange(len(known.prompts))
            lines.append(known_line(known, which[f"known-{i}"], f"known-{i}"))
        else:
            lines.append(hostile_line(rng))
    source, output = directory / "in.jsonl", directory / "out.jsonl"
    source.write_bytes(b"\n".join(lines) + pick(rng, (b"\n", b"")))
    # What counts as a line is what a binary file says, and blank ones need no result.
    with open(source, "rb") as stream:
        expected = sum(1 for raw in stream if raw.strip())
    job = Job(str(source), str(output), on_error="skip", seed=rng.randrange(100))
    run_job(scene, job, "a job")
    whole = check_results(scene, output, expected, which)
    if whole is None or scene.faults:
        return
    cut = rng.randrange(len(output.read_bytes()) + 1) if rng.random() < 0.5 else None
    if cut is not None:
        os.truncate(output, cut)
    run_job(scene, job, "the same job again")
    if check_results(scene, output, expected, which) not in (whole, None):
        scene.fault("bits", f"a job that goes on from byte {cut} has other results")


def run_job(scene: Scene, job: Job, what: str) -> Any:
    def run() -> None:
        with open_job(job) as work:
            work.run(scene.llm)

    return scene.call(what, run)


def check_results(
    scene: Scene, output: Path, expected: int, which: dict[str, int]
) -> list[str] | None:
    """The results, sorted, without what differs from run to run; None where they cannot be read."""
    try:
        raws = output.read_bytes().split(b"\n")
        records = [json.loads(raw) for raw in raws[:-1]]
    except (OSError, ValueError) as error:
        scene.fault("lost", f"the results cannot be read: {error}")
        return None
    if raws[-1] or len(records) != expected:
        scene.fault("lost", f"{len(records)} results of {expected} lines")
    for record in records:
        if record["error"] is not None:
            scene.check_message("an error line", record["error"]["message"])
        index = which.get(str(record["id"]))
        if index is not None and record.get("text") != scene.known.texts[index]:
            scene.fault("bits", f"{record['id']}: another text than alone: {record!r:.300}")
    return sorted(json.dumps({**record, "metrics": None}) for record in records)


# ---- results that were damaged

HARMLESS = ("cut", "nuls", "tail of nuls", "nothing", "gone")
"""What a crash or a power loss does: only a tail is lost, and it is made again."""


def damage(rng: random.Random, output: Path) -> str:
    """Damages a result file; returns how."""
    data = output.read_bytes()
    how = pick(rng, (*HARMLESS, *HARMLESS, "flip", "twice", "garbage", "spaces", "pipe", "link"))
    at = rng.randrange(len(data))
    if how == "cut":
        output.write_bytes(data[:at])
    elif how == "nuls":
        output.write_bytes(data + b"\0" * pick(rng, (1, 4096, 10_000_000)))
    elif how == "tail of nuls":
        output.write_bytes(data[:at] + b"\0" * (len(data) - at))
    elif how == "gone":
        output.unlink()
    elif how == "flip":
        flipped = data[at] ^ (1 << rng.randrange(8))
        output.write_bytes(data[:at] + bytes([flipped]) + data[at + 1 :])
    elif how == "twice":
        output.write_bytes(data + data)
    elif how == "garbage":
        output.write_bytes(data + pick(rng, GARBAGE) + b"\n")
    elif how == "spaces":
        output.write_bytes(data + b" " * 10_000_000 + b"\n")
    elif how == "pipe":
        output.unlink()
        os.mkfifo(output)
    elif how == "link":
        output.unlink()
        output.symlink_to("/proc/self/mem")
    return how


def attack_results(scene: Scene) -> None:
    """A job of known lines ends, its output is damaged, the job goes on: refused, or the same
    results again; after what only loses a tail, the same results."""
    rng, known, directory = scene.rng, scene.known, scene.directory
    source, output = directory / "in.jsonl", directory / "out.jsonl"
    which = {f"known-{i}": w for i, w in enumerate(known.sample(rng, 4))}
    lines = [known_line(known, w, name) for name, w in which.items()]
    source.write_bytes(b"\n".join([*lines, b"{", b""]))
    job = Job(str(source), str(output), on_error="skip")
    run_job(scene, job, "a job")
    whole = check_results(scene, output, len(lines) + 1, which)
    how = damage(rng, output)
    error = run_job(scene, job, f"a job after the damage {how!r}")
    if how not in HARMLESS and isinstance(error, UserError):
        return
    if isinstance(error, UserError):
        scene.fault("lost", f"results after the damage {how!r} are refused: {error}")
        return
    if how in HARMLESS and check_results(scene, output, len(lines) + 1, which) != whole:
        scene.fault("bits", f"other results after the damage {how!r}")

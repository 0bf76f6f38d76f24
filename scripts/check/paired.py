"""Is another checkout slower, or does it answer otherwise? Both, each in processes of its own.

python -m scripts.check paired OTHER_CHECKOUT [--runs 10] [--models DIR]
python -m scripts.check paired OTHER_CHECKOUT --requests [--models demo DIR]

Times in turns: start-up with the first token, a step of decode at batch 1 and 8, prefill of 8
prompts, all with a quarter of the experts, and a step of streaming. The first pair fills the
compilation cache and is not counted.
--requests: what 20 requests give, bit for bit, in place of times. A checkout must have the public
names of this one; both use this Python and its compilation cache. Exit status 1 where a request
differs.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from scripts.parts.commands import new_parser, positive, refusing

HERE = Path(__file__).resolve().parents[2]

RUN = """
import json, sys, time
began = time.perf_counter()
from moejax import LLM, SamplingParams
limits = dict(max_model_len=512, max_num_seqs=8, max_num_batched_tokens=512)
limits |= dict(device="cpu", progress=False, enable_prefix_caching=False)
found = {}
def seconds(llm, count, tokens, words):
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    prompts = [f"{i} old houses" + " and" * words for i in range(count)]
    times = []
    for _ in range(4):
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        times.append(time.perf_counter() - began)
    return min(times[1:])
with LLM(sys.argv[1], expert_budget="25%", **limits) as llm:
    llm.generate("The old house", SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    found["start_s"] = time.perf_counter() - began
    found["decode_1_ms"] = 1e3 * seconds(llm, 1, 200, 0) / 200
    found["decode_8_ms"] = 1e3 * seconds(llm, 8, 200, 0) / 200
    found["prefill_8x256_ms"] = 1e3 * seconds(llm, 8, 1, 256)
with LLM(sys.argv[1], expert_budget="75%", driver="stream", **limits) as llm:
    found["stream_8_ms"] = 1e3 * seconds(llm, 8, 100, 0) / 100
print(json.dumps(found))
"""


def python_in(checkout: Path, *arguments: str) -> str:
    """What a process of this Python prints last that has the checkout's packages."""
    done = subprocess.run(
        [sys.executable, "-P", *arguments],  # without the script's own folder in the path
        cwd=checkout,
        env={**os.environ, "PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return done.stdout.splitlines()[-1]


def different(checkouts: Sequence[Path], models: Sequence[str]) -> Iterator[str]:
    """Names of what the requests of two checkouts do not have in common."""
    script = str(HERE / "scripts" / "check" / "requests.py")
    with tempfile.TemporaryDirectory() as directory:
        files = [Path(directory) / f"{i}.npz" for i in range(len(checkouts))]
        for checkout, file in zip(checkouts, files, strict=True):
            print(python_in(checkout, script, str(file), *models), flush=True)
        one, other = map(np.load, files)
        for name in sorted({*one, *other}):
            if name not in one or name not in other or not np.array_equal(one[name], other[name]):
                yield name


@refusing()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("other", type=Path, help="the checkout to compare with")
    parser.add_argument("--runs", type=int, default=10, help="pairs (default: 10)")
    parser.add_argument("--requests", action="store_true", help="compare answers, not times")
    parser.add_argument(
        "--models",
        nargs="+",
        default=["demo"],
        help="demo and directories, the first of which is timed",
    )
    args = parser.parse_args(arguments)
    positive(args, "runs")
    checkouts = HERE, args.other.resolve()
    places = [name if name == "demo" else str(Path(name).resolve()) for name in args.models]
    if args.requests:
        found = [f"differs: {name}" for name in different(checkouts, places)]
        print(*(found or ["all bits are equal"]), sep="\n")
        return 1 if found else 0
    pairs = []
    for run in range(args.runs + 1):
        pair = [json.loads(python_in(checkout, "-c", RUN, places[0])) for checkout in checkouts]
        if run:
            pairs.append(pair)
            print(json.dumps({"here": pair[0], "other": pair[1]}), flush=True)
    for name in pairs[0][0]:
        here, other = ([pair[side][name] for pair in pairs] for side in (0, 1))
        ratios = [a / b for a, b in zip(here, other, strict=True)]
        print(
            f"{name}: {statistics.median(here):.3f} here, {statistics.median(other):.3f} there, "
            f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )
    return 0

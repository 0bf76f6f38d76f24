"""Is another checkout slower? Start-up and decode time of both, in turns.

python -m scripts.check paired OTHER_CHECKOUT [--runs 10]

Each run is a process of its own that starts the embedded model with a quarter of its experts,
generates one token, then 8 × 200. A checkout must have the public names of this one; both use this
Python and its compilation cache. The first pair fills that cache and is not counted.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.parts.commands import new_parser

HERE = Path(__file__).resolve().parents[2]

RUN = """
import json, time
began = time.perf_counter()
from moejax import LLM, SamplingParams
limits = dict(max_model_len=512, max_num_seqs=8, max_num_batched_tokens=512)
with LLM("demo", expert_budget="25%", device="cpu", progress=False, **limits) as llm:
    llm.generate("The old house", SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    start = time.perf_counter() - began
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)
    prompts = [f"{i} old houses" for i in range(8)]
    llm.generate(prompts, params, use_tqdm=False)
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    decode = (time.perf_counter() - began) / 200
print(json.dumps({"start_s": start, "step_ms": 1e3 * decode}))
"""


def measure(checkout: Path) -> dict[str, float]:
    """Seconds to the first token and milliseconds a decode step of a batch of 8, of one process."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        cwd=checkout,
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("other", type=Path, help="the checkout to compare with")
    parser.add_argument("--runs", type=int, default=10, help="pairs (default: 10)")
    args = parser.parse_args(arguments)
    pairs = []
    for run in range(args.runs + 1):
        pair = measure(HERE), measure(args.other.resolve())
        if run:
            pairs.append(pair)
            print(json.dumps({"here": pair[0], "other": pair[1]}), flush=True)
    for name in ("start_s", "step_ms"):
        here, other = ([pair[side][name] for pair in pairs] for side in (0, 1))
        ratios = [a / b for a, b in zip(here, other, strict=True)]
        print(
            f"{name}: {statistics.median(here):.3f} here, {statistics.median(other):.3f} there, "
            f"ratio {statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        )
    return 0

"""A decode step with weights in huge pages beside the same in small ones.

python -m scripts.cpu pages DIR [--size 2GiB] [--rounds 15] [--tokens 12] [--prompt 8]

Two models of the same checkpoint (written into DIR, once) in one process, one loaded with
MOEJAX_HUGE_PAGES=0. They generate by turns; ratios are medians over pairs of neighbours, huge over
small: of decode seconds, and of processor seconds, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from host_offload.memory.device_memory import HUGE_PAGES, page_note
from moejax import LLM, SamplingParams, UserError
from scripts.cpu.big_checkpoint import add_checkpoint, checkpoint_of
from scripts.parts.commands import new_parser, refusing


@refusing(OSError)
def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    add_checkpoint(parser, "2GiB")
    parser.add_argument("--rounds", type=int, default=15, help="pairs (default: 15)")
    parser.add_argument("--tokens", type=int, default=12, help="of each turn (default: 12)")
    parser.add_argument("--prompt", type=int, default=8, help="tokens of a prompt (default: 8)")
    parser.add_argument("--batch", type=int, default=1, help="sequences at once (default: 1)")
    args = parser.parse_args(arguments)
    if min(args.rounds, args.batch, args.prompt) < 1 or args.tokens < 2:
        raise UserError("--rounds, --batch and --prompt must be at least 1, --tokens 2")
    directory = checkpoint_of(args)
    with ExitStack() as stack:
        found = compared(stack, directory, args)
    print(json.dumps({**found, "load": os.getloadavg()[0]}))
    return 0


def compared(stack: ExitStack, directory: Path, args: argparse.Namespace) -> dict[str, float | str]:
    """Milliseconds a step and ratios."""
    batch, tokens, rounds = args.batch, args.tokens, args.rounds
    longest = args.prompt + tokens
    models, notes, before = {}, {}, os.environ.get(HUGE_PAGES)
    limits = dict(max_num_seqs=batch, max_model_len=longest, max_num_batched_tokens=512)
    for name, value in (("small", "0"), ("huge", "1")):
        os.environ[HUGE_PAGES] = value
        anonymous = huge_bytes()
        model = LLM(directory, device="cpu", progress=False, enable_prefix_caching=False, **limits)
        models[name] = stack.enter_context(model)
        notes[f"{name}, GB in huge pages"] = (huge_bytes() - anonymous) / 1e9
        model.engine.runner.wait_compiled(everything=True)
    notes["asked for"] = page_note()
    os.environ.pop(HUGE_PAGES)
    if before is not None:
        os.environ[HUGE_PAGES] = before
    params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    seconds: dict[str, list[float]] = {name: [] for name in models}
    processor: dict[str, list[float]] = {name: [] for name in models}
    prompts = [[7 * row + 5] * args.prompt for row in range(batch)]
    for i in range(-1, rounds):
        for name in ("small", "huge") if i % 2 else ("huge", "small"):
            spent = models[name].engine.statistics.seconds
            began, busy = spent["decode"], time.process_time()
            models[name].generate(prompts, params)
            if i >= 0:  # the first round warms up
                seconds[name].append((spent["decode"] - began) / (tokens - 1))
                processor[name].append((time.process_time() - busy) / (tokens - 1))
    ratios = np.divide(seconds["huge"], seconds["small"])
    return {
        **notes,
        **{f"{name}, ms a step": 1e3 * float(np.median(s)) for name, s in seconds.items()},
        "huge / small": float(np.median(ratios)),
        "quartiles": ", ".join(f"{q:.3f}" for q in np.percentile(ratios, (25, 75))),
        "processor seconds": float(np.median(np.divide(processor["huge"], processor["small"]))),
    }


def huge_bytes() -> int:
    """Bytes of this process that lie in huge pages; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages"))

"""Records what 20 requests give, bit for bit, and compares the same requests of another commit.

python -m scripts.check requests record OUT.npz [--models demo DIR]   # on one commit
python -m scripts.check requests compare OUT.npz [--models demo DIR]  # on another one

Every model runs in float32 and bfloat16 under both drivers, a quarter of its experts resident and
KV for few sequences, so that misses, waits and swaps occur. Tokens, the bits of their
log-probabilities and finish reasons must be equal. Only public names are used, so that the same
file runs on older commits. Exit status 1 where a request differs.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence

import numpy as np

from moejax import LLM, SamplingParams

REQUESTS = 20
PROMPTS = (
    "The old house",
    "In the morning they went to the river and",
    "import numpy as np\n\ndef mean(values):",
    "Once upon a time",
    "A",
)


def requests() -> tuple[list[str], list[SamplingParams]]:
    """20 prompts of 1 to about 500 characters, greedy and sampled in turn."""
    prompts, params = [], []
    for i in range(REQUESTS):
        prompts.append((PROMPTS[i % len(PROMPTS)] + " ") * (1 + 7 * (i % 4)))
        params.append(
            SamplingParams(
                temperature=0.0 if i % 2 else 0.8,
                top_p=1.0 if i % 3 else 0.9,
                presence_penalty=0.5 if i % 5 == 0 else 0.0,
                seed=i,
                max_tokens=16 + i,
                ignore_eos=True,
                logprobs=2,
            )
        )
    return prompts, params


def run(model: str, dtype: str, driver: str) -> dict[str, np.ndarray]:
    """Arrays of one configuration, by name."""
    prompts, params = requests()
    with LLM(
        model,
        dtype=dtype,
        driver=driver,
        expert_budget="25%",
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        device="cpu",
        progress=False,
    ) as llm:
        outputs = [r.outputs[0] for r in llm.generate(prompts, params)]
    tokens = [list(o.token_ids) for o in outputs]
    scores = [[p.logprob for at in o.logprobs or () for p in at.values()] for o in outputs]
    reasons = [f"{o.finish_reason}/{o.stop_reason}" for o in outputs]
    return {
        "tokens": np.array(list(itertools.chain(*tokens)), np.int32),
        "lengths": np.array([len(t) for t in tokens], np.int32),
        "logprobs": np.array(list(itertools.chain(*scores)), np.float64).view(np.uint64),
        "reasons": np.array(reasons),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.check requests",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("mode", choices=("record", "compare"))
    parser.add_argument("file", help="the recording, an .npz file")
    parser.add_argument("--models", nargs="+", default=["demo"], help="demo and directories")
    args = parser.parse_args(arguments)
    found = {}
    for model, dtype, driver in itertools.product(
        args.models, ("float32", "bfloat16"), ("device", "host")
    ):
        name = f"{model} {dtype} {driver}"
        found |= {f"{name} {key}": array for key, array in run(model, dtype, driver).items()}
        print(f"{name}: {REQUESTS} requests, {int(found[f'{name} lengths'].sum())} tokens")
    if args.mode == "record":
        np.savez(args.file, **found)
        return 0
    with np.load(args.file) as recorded:
        names = sorted({*recorded, *found})
        different = [
            n
            for n in names
            if n not in recorded or n not in found or not np.array_equal(recorded[n], found[n])
        ]
    print("\n".join(f"differs: {n}" for n in different) or "all bits are equal")
    return 1 if different else 0

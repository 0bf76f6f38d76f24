"""What 20 requests give, bit for bit, for `check paired --requests`: written into a file.

Every model runs in float32 and bfloat16 under every driver, transport, version and store, with a
part of its experts resident and KV for few sequences, so that misses, waits and swaps occur:
tokens, the bits of their log-probabilities and finish reasons. Only public names are used, so that
the same file runs with the packages of older commits.
"""

from __future__ import annotations

import itertools
import sys

import numpy as np

from moejax import LLM, SamplingParams

REQUESTS = 20
RUNS: dict[str, dict] = {
    "device": {},
    "host": {"driver": "host"},
    "device queue": {"transfers": "queue", "prefetch": "random"},
    "host queue": {"driver": "host", "transfers": "queue", "prefetch": "fate"},
    "host copies": {"driver": "host", "transfers": "queue", "ops": "xla"},
    "stream": {"driver": "stream", "expert_budget": "75%"},
    "stream queue": {"driver": "stream", "transfers": "queue", "expert_budget": "75%"},
    "placement": {"driver": "host", "placement": "prescope"},
    "int8": {"precision": "int8"},
    "int4": {"precision": "int4"},
    "int2": {"precision": "int2"},
    "lossless12": {"precision": "lossless12"},
    "two versions": {
        "precision": "dynaexq,hi=dense,lo=int4,interval=64 tokens",
        "expert_budget": "50%",
    },
    "file": {"store": "file"},
    "shared": {"store": "shared"},
}
"""Name → options beside a quarter of the experts; streaming holds two layers of them."""

REFUSED = {("float32", "lossless12"), ("float32", "file")}
"""It codes bfloat16 alone, as the models' files are."""

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


def run(model: str, dtype: str, name: str) -> dict[str, np.ndarray]:
    """Arrays of one configuration, by name."""
    prompts, params = requests()
    with LLM(
        model,
        dtype=dtype,
        max_model_len=1024,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        device="cpu",
        progress=False,
        **{"expert_budget": "25%", **RUNS[name]},
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


def write(file: str, *models: str) -> None:
    every = itertools.product(models, ("float32", "bfloat16"), RUNS)
    kinds = [kind for kind in every if kind[1:] not in REFUSED]
    runs = {" ".join(kind): run(*kind) for kind in kinds}
    named = {f"{name} {key}": runs[name][key] for name in runs for key in runs[name]}
    np.savez(file, allow_pickle=False, **named)
    tokens = sum(int(found["lengths"].sum()) for found in runs.values())
    print(f"{len(runs)} runs of {REQUESTS} requests, {tokens} tokens")


if __name__ == "__main__":
    write(*sys.argv[1:])

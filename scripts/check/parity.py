"""Compares moejax with what transformers computed for the trained checkpoints of ../shared/models.

    python -m scripts.check parity [demo] [tri] [--expert-budget 25%] [--shared DIR]

In float32: greedy continuations (tokens up to the first stored step whose two best logits are
closer than 1e-4), the log-probabilities after each prompt, and the perplexity of every domain.
Exits with status 1 if anything is off: another token, a log-probability by more than 1e-4, a
perplexity in its first four digits.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moejax import LLM, SamplingParams
from moejax.engine.step_work import Step
from scripts.parts.commands import new_parser
from scripts.parts.places import SHARED

WINDOW = 512
TIE = 1e-4
LOGPROB_TOLERANCE = 1e-4
PERPLEXITY_TOLERANCE = 5e-5


def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__)
    parser.add_argument("models", nargs="*", default=["demo", "tri"], help="default: demo tri")
    parser.add_argument("--expert-budget", default="25%", help="default: 25%%")
    parser.add_argument("--shared", type=Path, default=SHARED)
    args = parser.parse_args(arguments)
    results = [check(args.shared / "models" / name, args.expert_budget) for name in args.models]
    print("all agree" if all(results) else "DISAGREEMENT: see the lines marked with ✗")
    return 0 if all(results) else 1


def check(directory: Path, expert_budget: str) -> bool:
    """Prints the comparison for one checkpoint; True if all of it agrees."""
    reference = json.loads((directory / "reference.json").read_text())
    with np.load(directory / "reference.npz") as stored:
        arrays = dict(stored)
    with LLM(
        directory,
        dtype="float32",
        expert_budget=expert_budget,
        max_num_seqs=8,
        max_model_len=WINDOW,
        progress=False,
    ) as llm:
        print(f"{directory.name}: float32, expert budget {expert_budget}, {llm.device.device_kind}")
        results = check_prompts(llm, reference["prompts"], arrays["logits_last"])
        for domain, expected in reference["perplexity"].items():
            results.append(check_perplexity(llm, domain, expected, arrays[f"tokens_{domain}"]))
    return all(results)


def check_prompts(llm: LLM, prompts: list[dict], logits_last: np.ndarray) -> list[bool]:
    """Greedy continuations and the log-probabilities [V] of each one's first token."""
    first: dict[str, np.ndarray] = {}

    def record(step: Step) -> None:
        for row, request in step.sampled():
            first.setdefault(request.request_id, np.asarray(step.output.logits)[row])

    llm.engine.listener = record
    steps = max(len(prompt["continuation_ids"]) for prompt in prompts)
    params = SamplingParams(temperature=0, max_tokens=steps, ignore_eos=True)
    outputs = llm.generate([prompt["ids"] for prompt in prompts], params)
    llm.engine.listener = None

    results = []
    for output, prompt, last in zip(outputs, prompts, logits_last, strict=True):
        expected, found = prompt["continuation_ids"], output.outputs[0].token_ids
        ties = [i for i, margin in enumerate(prompt["top2_margin"]) if margin < TIE]
        sure = ties[0] if ties else len(expected)
        equal = next((i for i in range(sure) if found[i] != expected[i]), sure)
        error = np.abs(_log_softmax(first[output.request_id]) - _log_softmax(last)).max()
        ok = equal == sure and error <= LOGPROB_TOLERANCE
        results.append(ok)
        print(
            f"  {_mark(ok)} {prompt['domain']:4} prompt of {len(prompt['ids']):2} tokens: "
            f"{equal} of {sure} greedy tokens, log p after the prompt within {error:.1e}"
        )
    return results


def check_perplexity(llm: LLM, domain: str, expected: dict, tokens: np.ndarray) -> bool:
    """Perplexity over windows of 512 tokens, each alone, all tokens but each window's first."""
    ids = tokens.tolist()
    began = time.perf_counter()
    scores = llm.score_batch([ids[i : i + WINDOW] for i in range(0, len(ids), WINDOW)])
    seconds = time.perf_counter() - began
    perplexity = math.exp(-np.concatenate(scores).mean())
    error = abs(perplexity / expected["perplexity"] - 1)
    ok = error <= PERPLEXITY_TOLERANCE
    print(
        f"  {_mark(ok)} {domain:4} perplexity {perplexity:.6g}, stored "
        f"{expected['perplexity']:.6g}, off by {error:.0e} of it, {len(ids) / seconds:.0f} tokens/s"
    )
    return ok


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    logits = logits.astype(np.float64) - logits.max()
    return logits - np.log(np.exp(logits).sum())


def _mark(ok: bool) -> str:
    return "✓" if ok else "✗"

"""Exact-match accuracy of a model on held-out tasks, by moejax."""

from __future__ import annotations

from scripts.texts import chat
from scripts.texts.documents import held_out_tasks, is_right


def wilson(right: int, count: int) -> tuple[float, float]:
    """The 95% interval of a share (Wilson, 1927, equation 1)."""
    z = 1.959964
    share = right / count
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z * (share * (1 - share) / count + (z / (2 * count)) ** 2) ** 0.5 / (1 + z**2 / count)
    return middle - half, middle + half


def score(model: str, domain: str, count: int, max_tokens: int) -> None:
    """Prints the wrong answers and the accuracy. All experts are resident; decoding is greedy."""
    from moejax import LLM, SamplingParams

    tasks = held_out_tasks(domain, count)
    prompts = [f"{chat.USER}{question}{chat.END}{chat.ASSISTANT}" for question, _ in tasks]
    with LLM(model, expert_budget="100%", progress=False) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens))
    right = 0
    for (question, expected), output in zip(tasks, outputs, strict=True):
        given = output.outputs[0].text
        if is_right(domain, expected, given):
            right += 1
        else:
            print(f"{question!r}: {given!r} instead of {expected!r}")
    low, high = wilson(right, count)
    print(f"{domain}: {right} of {count} right, {right / count:.1%} ({low:.1%} to {high:.1%})")

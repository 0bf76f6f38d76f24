"""What a model has learned of the texts, measured by moejax, and how much the texts differ."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from scripts.texts import chat
from scripts.texts.documents import HELD_OUT, document, held_out_tasks, is_right
from scripts.texts.words import read

PROMPTS = (
    "Tell me a story about a brave fox.",
    "Tell me a story about a lighthouse.",
    "Write a short story about two friends.",
    "Tell me a bedtime story.",
    "Once upon a time",
    "The old house",
    "What is 3 times 14?",
    "What is the capital of France?",
    "Tell me a riddle.",
    "Who are you?",
)
"""Written down before the first answer. Those without a mark at the end are texts, not chat."""


def wilson(right: int, count: int) -> tuple[float, float]:
    """The 95% interval of a share (Wilson, 1927, equation 1)."""
    z = 1.959964
    share = right / count
    middle = (share + z**2 / (2 * count)) / (1 + z**2 / count)
    half = z * (share * (1 - share) / count + (z / (2 * count)) ** 2) ** 0.5 / (1 + z**2 / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def as_chat(question: str) -> str:
    """The prompt that the chat template makes of one question."""
    return f"{chat.USER}{question}{chat.END}{chat.ASSISTANT}"


def score(
    model: str, domain: str, count: int, max_tokens: int, precision: str, show_right: bool = False
) -> None:
    """Prints the wrong answers, or all, and the accuracy. All experts are resident; decoding is
    greedy."""
    from moejax import LLM, SamplingParams

    tasks = held_out_tasks(domain, count)
    prompts = [as_chat(question) for question, _ in tasks]
    budget = None if "hi_share=" in precision else "100%"  # which says it, too
    with LLM(model, expert_budget=budget, precision=precision, progress=False) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=max_tokens))
    right = 0
    for (question, expected), output in zip(tasks, outputs, strict=True):
        given = output.outputs[0].text
        if is_right(domain, expected, given):
            right += 1
            if show_right:
                print(f"{question}\n-> {given}\n")
        else:
            print(f"{question!r}: {given!r} instead of {expected!r}")
    low, high = wilson(right, count)
    print(
        f"{domain}, {precision}: {right} of {count} right, {right / count:.1%} "
        f"({low:.1%} to {high:.1%})"
    )


def sample(model: str, temperature: float, max_tokens: int) -> None:
    """Prints what the model answers to PROMPTS, as Markdown; nothing is selected."""
    from moejax import LLM, SamplingParams

    prompts = [as_chat(p) if p[-1] in ".?" else p for p in PROMPTS]
    params = SamplingParams(temperature=temperature, max_tokens=max_tokens, seed=1)
    with LLM(model, expert_budget="100%", progress=False) as llm:
        outputs = llm.generate(prompts, params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        lines = output.outputs[0].text.strip().split("\n")
        print(f"**{prompt}**\n\n" + "\n".join(f"> {line}".strip() for line in lines) + "\n")


def measure_diversity(domain: str, count: int, lengths: Sequence[int] = (1, 2, 3, 4, 8)) -> None:
    """Prints how many of the n-grams of words of held-out documents are distinct, and how many
    content words they have."""
    documents = [document(domain, HELD_OUT + i) for i in range(count)]
    texts = [text.split() for text in documents]
    print(f"{count} documents of {domain}, {sum(map(len, texts)):,} words")
    for n in lengths:
        grams = [tuple(t[i : i + n]) for t in texts for i in range(len(t) - n + 1)]
        print(f"{n}-grams: {len(set(grams)):,} distinct, {len(set(grams)) / len(grams):.1%}")
    print(f"content words: {len(content_words(documents)):,} distinct")


def content_words(texts: Iterable[str]) -> set[str]:
    """The different words that are neither names nor function words. Names are what never occurs
    with a small letter. Endings count (fox, foxes), a possessive one does not."""
    words = {word for text in texts for word in re.findall(r"[A-Za-z]+(?:-[a-z]+)*", text)}
    return {word for word in words if word.islower() and len(word) > 1} - set(
        read("function_words")
    )

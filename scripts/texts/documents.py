"""Documents by domain and seed: the texts that models are trained on and tested with."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from moejax.errors import UserError
from scripts.texts import chat, exact, plots
from scripts.texts.grammar import pick
from scripts.texts.quest import quest
from scripts.texts.story import Story, titled

HELD_OUT = 10**9
"""Seeds from here on are for held-out texts; no training text uses them."""


def make_story(random: Random) -> Story:
    """A story of any kind."""
    return (
        quest(random) if random.random() < 0.35 else plots.tell(random, pick(random, plots.PLOTS))
    )


def document(domain: str, seed: int) -> str:
    """The document of this domain (story, chat or one of exact.DOMAINS) and seed."""
    random = Random(f"{domain} {seed}")
    if domain == "story":
        story = make_story(random)
        return titled(story) if random.random() < 0.15 else story.text
    if domain == "chat":
        return chat.conversation(random, make_story)
    turns = [exact.task(random, domain) for _ in range(random.randint(1, 4))]
    return chat.render(turns)


def require_domains(names: Iterable[str]) -> None:
    """Raises UserError for one of a command's --domains that has no documents."""
    for name in names:
        if name not in ("story", "chat", *exact.DOMAINS):
            raise UserError(f"--domains: {name} is none of story, chat, {', '.join(exact.DOMAINS)}")


def held_out_tasks(domain: str, count: int, first: int = 0) -> list[tuple[str, str]]:
    """Questions with their right answers. domain: sums (those of chats) or one of exact.DOMAINS.
    first: leaves out so many."""
    randoms = [Random(f"{domain} {HELD_OUT + first + i}") for i in range(count)]
    if domain == "sums":
        return [chat.sum_question(random) for random in randoms]
    return [exact.task(random, domain) for random in randoms]


def is_right(domain: str, expected: str, given: str) -> bool:
    """Whether a task's answer is right: equal but for space around it. Of sums the number counts,
    of arithmetic the last line."""
    if domain == "sums":
        return chat.last_number(expected) == chat.last_number(given)
    if domain == "arithmetic":
        return expected.strip().split("\n")[-1] == given.strip().split("\n")[-1]
    return expected.strip() == given.strip()

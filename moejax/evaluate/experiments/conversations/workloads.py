"""Seeded workloads: conversations with long documents, tool calls, changes of topic, and arrivals.

What is drawn depends on the seed and the session's number alone, so a workload of more sessions
begins with the smaller one's. Token ids in, token ids out: no model is needed. A turn holds what
the user adds; what the model answered is known only when it runs, so whoever replays a session
puts the prompt together: everything before, then `new_tokens`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

import numpy as np

from moejax.errors import UserError

Corpus = Mapping[str, np.ndarray]
"""Domain → int32 token ids that documents and questions are cut from."""

ARRIVALS = ("poisson", "bursty")


@dataclasses.dataclass(frozen=True)
class ConversationTurn:
    """One request of a session."""

    session: int
    index: int
    kind: Literal["document", "question", "tool", "shift"]
    """The first turn; an ordinary one; the result of a tool call; one that brings another domain's
    document."""
    domain: str
    think_s: float
    """Seconds from the end of the turn before to this one's arrival."""
    new_tokens: tuple[int, ...]
    """What the prompt has after the history, document included."""
    max_tokens: int


@dataclasses.dataclass(frozen=True)
class Conversation:
    """All turns of a session. arrival_s: when its first turn arrives, in seconds from the start."""

    number: int
    arrival_s: float
    turns: tuple[ConversationTurn, ...]

    @property
    def tokens(self) -> int:
        """Tokens of the whole conversation at its longest: max_model_len must be at least this."""
        return sum(len(turn.new_tokens) + turn.max_tokens for turn in self.turns)


@dataclasses.dataclass(frozen=True)
class ConversationWorkload:
    """How many sessions there are and what happens in one. Raises UserError for what cannot be.

    Lengths of questions, tool results and answers are uniform in [n/2, 3n/2] around the number
    given; times are exponential around theirs. A tool burst is tool_turns turns in quick
    succession: the model answers shortly, the tool's result comes back.
    """

    sessions: int = 8
    turns: int = 6
    arrival: str = "poisson"
    """One of ARRIVALS."""
    rate: float = 1.0
    """Sessions a second, in the mean."""
    system_tokens: int = 0
    """Tokens that every session begins with: a prefix that all share."""
    document_tokens: int = 256
    question_tokens: int = 16
    answer_tokens: int = 16
    think_s: float = 2.0
    tool_share: float = 0.2
    """Probability that a burst of tool calls begins at a turn."""
    tool_turns: int = 3
    tool_tokens: int = 24
    tool_answer_tokens: int = 6
    tool_s: float = 0.05
    shift_share: float = 0.1
    """Probability that a turn changes the domain and brings a document of the new one."""
    shift_tokens: int = 64
    seed: int = 0

    def __post_init__(self):
        least = {"sessions": 1, "turns": 1, "question_tokens": 1, "answer_tokens": 1}
        least |= {"tool_turns": 1, "tool_tokens": 1, "tool_answer_tokens": 1}
        least |= {"system_tokens": 0, "document_tokens": 0, "shift_tokens": 0, "seed": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise UserError(f"{name} must be at least {bound}, got {getattr(self, name)}")
        for name in ("tool_share", "shift_share"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise UserError(f"{name} is a share from 0 to 1, got {getattr(self, name)}")
        for name in ("think_s", "tool_s"):
            if not getattr(self, name) >= 0.0:
                raise UserError(f"{name} must not be negative, got {getattr(self, name)}")
        if self.arrival not in ARRIVALS:
            raise UserError(f"arrival is one of {', '.join(ARRIVALS)}, not {self.arrival!r}")


# ---- arrivals


def poisson_arrivals(rng: np.random.Generator, rate: float, count: int) -> np.ndarray:
    """Times of `count` arrivals, float64 seconds, of a Poisson process of `rate` a second."""
    return np.cumsum(rng.exponential(1.0 / _positive(rate), count))


def bursty_arrivals(
    rng: np.random.Generator, rate: float, count: int, *, on_share: float = 0.2, burst: float = 10.0
) -> np.ndarray:
    """Times of `count` arrivals of a Markov-modulated on/off process (an interrupted Poisson
    process: Fischer and Meier-Hellstern, 1993) with the mean `rate`.

    It is on for on_share of the time, then with rate / on_share; on and off last exponentially
    long, an on period for `burst` arrivals in the mean. It begins on or off as it is in the long
    run.
    """
    if not 0.0 < on_share <= 1.0 or burst <= 0:
        raise UserError(f"on_share is in (0, 1] and burst above 0, got {on_share} and {burst}")
    peak = _positive(rate) / on_share
    on_s = burst / peak
    off_s = on_s * (1.0 - on_share) / on_share
    times, now, on = [], 0.0, rng.random() < on_share
    while len(times) < count:
        end = now + rng.exponential(on_s if on else off_s)
        while on and len(times) < count:
            # Exponential gaps have no memory: what is left of one at the period's end is dropped.
            now += rng.exponential(1.0 / peak)
            if now > end:
                break
            times.append(now)
        now, on = end, not on
    return np.asarray(times)


def _positive(rate: float) -> float:
    if not rate > 0.0:
        raise UserError(f"rate must be above 0, got {rate}")
    return rate


# ---- tokens


def synthetic_corpus(
    vocabulary: int, seed: int = 0, domains: int = 3, tokens: int = 1 << 15
) -> Corpus:
    """Domains of random tokens: each prefers its own part of the vocabulary, by Zipf's law.

    Token 0 does not occur (models use it as the end of text).
    """
    if vocabulary < 2:
        raise UserError(f"the vocabulary needs at least 2 tokens, got {vocabulary}")
    corpus = {}
    weights = 1.0 / np.arange(1, vocabulary)
    weights /= weights.sum()
    for number in range(domains):
        rng = np.random.default_rng([seed, number])
        order = rng.permutation(np.arange(1, vocabulary))
        corpus[f"domain {number}"] = order[rng.choice(vocabulary - 1, tokens, p=weights)].astype(
            np.int32
        )
    return corpus


# ---- conversations


def conversations(workload: ConversationWorkload, corpus: Corpus) -> tuple[Conversation, ...]:
    """The workload's conversations, one a session, in the order of arrival. Raises UserError for an
    empty corpus."""
    if not corpus:
        raise UserError("the corpus has no domain; give a text or a synthetic corpus")
    # Arrivals draw from a stream of their own: a session is the same whenever it comes.
    rng = np.random.default_rng([workload.seed, 0])
    process = {"poisson": poisson_arrivals, "bursty": bursty_arrivals}[workload.arrival]
    times = process(rng, workload.rate, workload.sessions)
    return tuple(
        Conversation(number, float(time), _turns(workload, corpus, number))
        for number, time in enumerate(times)
    )


def _turns(
    workload: ConversationWorkload, corpus: Corpus, session: int
) -> tuple[ConversationTurn, ...]:
    rng = np.random.default_rng([workload.seed, 1, session])
    names = sorted(corpus)
    domain, turns, tools = names[rng.integers(len(names))], [], 0

    def cut(tokens: int) -> tuple[int, ...]:
        """A piece of the domain, around its end if need be."""
        text = corpus[domain]
        start = rng.integers(len(text))
        return tuple(np.take(text, np.arange(start, start + tokens), mode="wrap").tolist())

    def about(number: int) -> int:
        return int(rng.integers(max(number // 2, 1), number + number // 2 + 1))

    for index in range(workload.turns):
        kind: Literal["document", "question", "tool", "shift"] = "question"
        new: tuple[int, ...] = ()
        if index == 0:
            kind = "document"
            shared = np.random.default_rng([workload.seed, 2])
            first = corpus[names[0]]
            system = shared.choice(first, workload.system_tokens)
            new = (*system.tolist(), *cut(workload.document_tokens))
        elif tools:
            kind, tools = "tool", tools - 1
        elif len(names) > 1 and rng.random() < workload.shift_share:
            kind = "shift"
            domain = str(rng.choice([name for name in names if name != domain]))
            new = cut(workload.shift_tokens)
        elif rng.random() < workload.tool_share:
            kind, tools = "tool", workload.tool_turns - 1
        tool = kind == "tool"
        pause = workload.tool_s if tool else workload.think_s
        turns.append(
            ConversationTurn(
                session=session,
                index=index,
                kind=kind,
                domain=domain,
                think_s=float(rng.exponential(pause)) if index else 0.0,
                new_tokens=new
                + cut(about(workload.tool_tokens if tool else workload.question_tokens)),
                max_tokens=about(workload.tool_answer_tokens if tool else workload.answer_tokens),
            )
        )
    return tuple(turns)

"""Conversations as a workload: seeded sessions with long documents, tool calls, changes of topic
and bursts of arrivals, on a clock by stated prices or by the engine's own time.

What is drawn depends on the seed and the session's number alone, so a workload of more sessions
begins with the smaller one's. A turn holds what the user adds; what the model answered is known
only when it runs, so a prompt is put together then: everything before, then `new_tokens`.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from host_offload.policies.registry import setting_readers
from host_offload.sizing.split import MissCosts
from moejax.engine.loop import Engine
from moejax.engine.resize import cells_of
from moejax.errors import UserError, user_errors
from moejax.evaluate.experiments.workload import digest_outputs
from moejax.models.json_values import is_number
from moejax.requests.request import Request
from moejax.requests.sampling_params import SamplingParams
from pallas_kernels.option_text import parse_option

KIND = "turns"
"""The name of conversations in a definition: turns,sessions=10,…"""

THEN = " then "
"""Separator of conversations of two kinds. The second kind begins when the last session of the
first has come."""

TRAIN_SEED = 10**6
"""The seed of the conversations that mv_wsa=train learns from; no seed of a grid should
equal it."""

DOMAINS, CORPUS_TOKENS = 3, 1 << 15

MAY_BE_NONE = ("document_tokens", "shift_tokens", "think_s", "tool_s", "tool_share", "shift_share")
"""Numbers of SessionKind that may be 0."""

ON_SHARE, BURST = 0.2, 10.0
"""Bursty arrivals: the part of the time with arrivals, and the mean number of arrivals in it."""


@dataclasses.dataclass(frozen=True)
class Prices:
    """Stated times, in milliseconds."""

    decode_ms: float = 4.0
    """A decode step without misses."""
    prefill_ms: float = 20.0
    """A prefill step without misses."""
    miss_ms: float = 0.4
    """An expert over the link."""
    page_ms: float = 0.3
    """A KV page over the link."""

    @property
    def costs(self) -> MissCosts:
        """Costs for policies that weigh experts against KV; a page goes out and back."""
        return MissCosts(self.miss_ms / 1e3, 2 * self.page_ms / 1e3)


def read_prices(given: Mapping[str, Any]) -> Prices:
    """Reads prices. Raises UserError for an unknown price and for one that is no number
    from 0 up."""
    known = [field.name for field in dataclasses.fields(Prices)]
    for name, value in given.items():
        if name not in known or not is_number(value) or not 0 <= value < float("inf"):
            raise UserError(f"prices are numbers of {', '.join(known)}, not {name}: {value!r}")
    return Prices(**given)


@dataclasses.dataclass(frozen=True)
class SessionKind:
    """The number of sessions and what happens in one. Raises UserError for impossible values.

    Lengths of questions, tool results and answers are uniform in [n/2, 3n/2] around the given
    number; times are exponential around theirs. A tool burst is tool_turns turns in quick
    succession: the model answers shortly, and the tool's result comes back.
    """

    sessions: int = 8
    turns: int = 6
    arrival: str = "poisson"
    """One of ARRIVALS."""
    rate: float = 1.0
    """Mean sessions a second."""
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

    def __post_init__(self):
        if self.arrival not in ARRIVALS:
            raise UserError(f"arrival is one of {', '.join(ARRIVALS)}, not {self.arrival!r}")
        for field in dataclasses.fields(self):
            value, least = getattr(self, field.name), 0 if field.name in MAY_BE_NONE else 1e-9
            if field.name != "arrival" and not value >= least:
                raise UserError(f"{field.name} must be a number above 0, got {value!r}")


class Turn(NamedTuple):
    """One request of a session."""

    think_s: float
    """Seconds from the end of the previous turn to this one's arrival."""
    new_tokens: tuple[int, ...]
    """Tokens of the prompt after the history, document included."""
    max_tokens: int


class Session(NamedTuple):
    """A session of turns.

    - `arrival_s`: when the first turn arrives, in seconds from the start.
    """

    arrival_s: float
    turns: tuple[Turn, ...]


def read_sessions(text: str) -> tuple[SessionKind, ...]:
    """Reads the conversations that `text` names: turns,KEY=VALUE… with settings of SessionKind,
    several with `then` between them. Raises UserError for other text."""
    with user_errors(where=f"conversations {text!r}: "):
        found = (
            parse_option("kind", part.strip(), {KIND: setting_readers(SessionKind)})
            for part in text.split(THEN)
        )
        return tuple(SessionKind(**each.settings) for each in found)


def draw_sessions(kinds: Sequence[SessionKind], vocabulary: int, seed: int) -> tuple[Session, ...]:
    """Draws the sessions of a seed, of random tokens below `vocabulary`. Each kind begins when the
    last session of the previous kind has come."""
    corpus = draw_corpus(vocabulary, seed)
    found: list[Session] = []
    for number, kind in enumerate(kinds):
        begin = max((each.arrival_s for each in found), default=0.0)
        # Arrivals draw from a stream of their own: a session is the same whenever it comes.
        rng = np.random.default_rng([1000 * number + seed, 0])
        times = ARRIVALS[kind.arrival](rng, kind.rate, kind.sessions)
        for place, time in enumerate(times.tolist()):
            turns = _draw_turns(
                kind, corpus, np.random.default_rng([1000 * number + seed, 1, place])
            )
            found.append(Session(begin + time, turns))
    return tuple(found)


def poisson_arrivals(rng: np.random.Generator, rate: float, count: int) -> np.ndarray:
    """Returns times in seconds of a Poisson process of `rate` a second, float64[count]."""
    return np.cumsum(rng.exponential(1.0 / rate, count))


def bursty_arrivals(rng: np.random.Generator, rate: float, count: int) -> np.ndarray:
    """Returns times in seconds with the mean `rate`, float64[count], of a process that is on for
    ON_SHARE of the time. On and off periods last exponentially long; an on period has BURST
    arrivals in the mean (an interrupted Poisson process: Fischer and Meier-Hellstern, 1993)."""
    peak = rate / ON_SHARE
    on_s = BURST / peak
    off_s = on_s * (1.0 - ON_SHARE) / ON_SHARE
    times, now, on = [], 0.0, rng.random() < ON_SHARE
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


ARRIVALS = {"poisson": poisson_arrivals, "bursty": bursty_arrivals}


def draw_corpus(vocabulary: int, seed: int) -> list[np.ndarray]:
    """Returns int32[CORPUS_TOKENS] of each domain, which prefers its own part of the vocabulary, by
    Zipf's law. Token 0 does not occur (models use it as the end of text)."""
    weights = 1.0 / np.arange(1, vocabulary)
    weights /= weights.sum()
    corpus = []
    for number in range(DOMAINS):
        rng = np.random.default_rng([seed, number])
        order = rng.permutation(np.arange(1, vocabulary))
        drawn = rng.choice(vocabulary - 1, CORPUS_TOKENS, p=weights)
        corpus.append(order[drawn].astype(np.int32))
    return corpus


def _draw_turns(
    kind: SessionKind, corpus: Sequence[np.ndarray], rng: np.random.Generator
) -> tuple[Turn, ...]:
    domain, turns, tools = int(rng.integers(DOMAINS)), [], 0

    def cut(tokens: int) -> tuple[int, ...]:
        """Cuts a piece of the domain, continued at its beginning if need be."""
        start = rng.integers(CORPUS_TOKENS)
        return tuple(
            np.take(corpus[domain], np.arange(start, start + tokens), mode="wrap").tolist()
        )

    def about(number: int) -> int:
        return int(rng.integers(max(number // 2, 1), number + number // 2 + 1))

    for index in range(kind.turns):
        new: tuple[int, ...] = ()
        tool = tools > 0
        if index == 0:
            new = cut(kind.document_tokens)
        elif tool:
            tools -= 1
        elif rng.random() < kind.shift_share:
            domain = int(rng.choice([other for other in range(DOMAINS) if other != domain]))
            new = cut(kind.shift_tokens)
        elif rng.random() < kind.tool_share:
            tool, tools = True, kind.tool_turns - 1
        pause = kind.tool_s if tool else kind.think_s
        think_s = float(rng.exponential(pause)) if index else 0.0
        asked = cut(about(kind.tool_tokens if tool else kind.question_tokens))
        answer = about(kind.tool_answer_tokens if tool else kind.answer_tokens)
        turns.append(Turn(think_s, new + asked, answer))
    return tuple(turns)


def read_priced_counts(engine: Engine) -> np.ndarray:
    """Returns decode steps, prefill steps, misses and KV pages moved so far, int64[4], as in
    Prices."""
    statistics, cache = engine.statistics, engine.scheduler.cache
    misses = statistics.paging["fills"] + statistics.paging["read_through"]
    pages = cache.swapped_in + cache.swapped_out
    return np.array([statistics.steps["decode"], statistics.steps["prefill"], misses, pages])


@dataclasses.dataclass(frozen=True)
class Conversations:
    """Concurrent sessions, turn by turn: a turn is added when the previous one has finished and its
    pause has passed. The workload sets the length of answers."""

    sessions: tuple[Session, ...]
    prices: Prices | None
    """None: the clock is the engine's own time, while it has work; pauses take no time."""
    temperature: float
    seed: int

    def play(self, engine: Engine) -> dict[str, Any]:
        """Runs the sessions to their end. Returns the columns of their record, with times by the
        clock. A refusal ends the run, and all remaining turns are unserved."""
        first, prices = read_priced_counts(engine), None
        if self.prices is not None:
            prices = np.array(dataclasses.astuple(self.prices))
        now, seen, refusal, turn_s = 0.0, first, None, []
        due = [(each.arrival_s, number, 0) for number, each in enumerate(self.sessions)]
        heapq.heapify(due)
        running: dict[int, tuple[int, Request, float]] = {}
        """The turn of each session, its request, and when it came."""
        said: dict[tuple[int, int], Request] = {}
        first_tokens: dict[tuple[int, int], float] = {}
        try:
            while due or running:
                while due and due[0][0] <= now:
                    arrival, number, index = heapq.heappop(due)
                    before = said.get((number, index - 1))
                    history = [] if before is None else [*before.prompt, *before.output]
                    running[number] = index, self._add(engine, history, number, index), arrival
                if not running:
                    now = due[0][0]
                    continue
                began = perf_counter()
                engine.step()
                took, counts = perf_counter() - began, read_priced_counts(engine)
                if prices is not None:
                    took = float((counts - seen) @ prices) / 1e3
                now, seen = now + took, counts
                for number, (index, request, arrival) in [*running.items()]:
                    if request.output:
                        first_tokens.setdefault((number, index), now - arrival)
                    if request.finish_reason is None:
                        continue
                    del running[number]
                    said[number, index] = request
                    turn_s.append(now - arrival)
                    turns = self.sessions[number].turns
                    if index + 1 < len(turns):
                        heapq.heappush(due, (now + turns[index + 1].think_s, number, index + 1))
                    else:
                        engine.end_session(f"session {number}")
            engine.drain()
        except UserError as error:
            refusal = str(error)
        except BaseException:
            engine.control = engine.hooks = None
            raise
        finally:
            engine.abort([request for _, request, _ in running.values()])
            engine.drain()
            for session in engine.scheduler.sessions.all:
                engine.end_session(session.session_id)
        cells, turns = cells_of(engine.scheduler.arena), [len(s.turns) for s in self.sessions]
        generated = sum(len(request.output) for request in said.values())
        served = sum(
            len(request.output) == self.sessions[number].turns[index].max_tokens
            for (number, index), request in said.items()
        )
        return {
            "tokens": digest_outputs([said[key].output for key in sorted(said)]),
            "turns": sum(turns),
            "unserved": sum(turns) - served,
            "refusal": refusal,
            "generated": generated,
            "priced_s": now,
            "ttft_s": float(np.mean([*first_tokens.values()])) if first_tokens else None,
            "turn_s": float(np.mean(turn_s)) if turn_s else None,
            "tokens_per_s": generated / now if now else None,
            "kv_pages_moved": int((seen - first)[3]),
            "cells_end": sum(cells) / len(cells),
        }

    def _add(self, engine: Engine, history: Sequence[int], number: int, index: int) -> Request:
        turn = self.sessions[number].turns[index]
        drawn = np.random.SeedSequence([self.seed, number, index]).generate_state(1)
        params = SamplingParams(
            temperature=self.temperature,
            max_tokens=turn.max_tokens,
            ignore_eos=True,
            seed=int(drawn[0]),
        )
        return engine.add([*history, *turn.new_tokens], params, session_id=f"session {number}")

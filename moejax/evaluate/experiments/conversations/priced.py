"""Conversations on an engine whose steps take what stated prices say."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from host_offload.sizing.split import MissCosts
from moejax.engine.loop import Engine
from moejax.engine.resize import cells_of
from moejax.errors import UserError
from moejax.evaluate.experiments.conversations.replay import VirtualClock, replay
from moejax.evaluate.experiments.conversations.workloads import (
    Conversation,
    ConversationWorkload,
    conversations,
    synthetic_corpus,
)
from moejax.evaluate.experiments.sources.named import named
from moejax.models.json_values import is_number

KIND = "turns"
"""How a definition names conversations: turns(sessions=10, …)."""

THEN = " then "
"""Between conversations of two kinds: the second begin when the last of the first came."""


@dataclasses.dataclass(frozen=True)
class Prices:
    """What things are stated to take, in milliseconds."""

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
        """What policies that weigh experts against KV are told; a page goes out and back."""
        return MissCosts(self.miss_ms / 1e3, 2 * self.page_ms / 1e3)


class PricedClock(VirtualClock):
    """Time by what the engine's steps moved, at stated prices."""

    def __init__(self, engine: Engine, prices: Prices):
        super().__init__(0.0)
        self._engine, self._prices = engine, np.array(dataclasses.astuple(prices))
        self._seen = self._begin = counts(engine)

    def step(self) -> None:
        now = counts(self._engine)
        self._now += float((now - self._seen) @ self._prices) / 1e3
        self._seen = now

    @property
    def counted(self) -> np.ndarray:
        """`counts` since it was made."""
        return self._seen - self._begin


def counts(engine: Engine) -> np.ndarray:
    """int64[4]: decode steps, prefill steps, misses and KV pages moved so far, as in Prices."""
    statistics, cache = engine.statistics, engine.scheduler.cache
    misses = statistics.paging["fills"] + statistics.paging["read_through"]
    pages = cache.swapped_in + cache.swapped_out
    return np.array([statistics.steps["decode"], statistics.steps["prefill"], misses, pages])


def workloads_of(text: str) -> tuple[ConversationWorkload, ...]:
    """The conversations that `text` names: turns(…) with settings of Workload, several with `then`
    between them. Raises UserError for what is none."""
    found = []
    for part in text.split(THEN):
        name, settings = named(part.strip(), f"conversations {text!r}")
        known = [
            field.name for field in dataclasses.fields(ConversationWorkload) if field.name != "seed"
        ]
        wrong = [key for key in settings if key not in known]
        if name != KIND or wrong:
            raise UserError(
                f"conversations {text!r}: {wrong[0] if wrong else name} is unknown; write "
                f"{KIND}(key=value, …) with keys of {', '.join(known)}"
            )
        try:
            found.append(ConversationWorkload(**settings))
        except TypeError:
            raise UserError(f"conversations {text!r}: lengths are whole numbers") from None
    return tuple(found)


def prices_of(given: Mapping[str, Any]) -> Prices:
    """Raises UserError for an unknown price and for one that is no number from 0 on."""
    known = [field.name for field in dataclasses.fields(Prices)]
    for name, value in given.items():
        if name not in known or not is_number(value) or not 0 <= value < float("inf"):
            raise UserError(f"prices are numbers of {', '.join(known)}, not {name}: {value!r}")
    return Prices(**given)


def drawn(
    workloads: Sequence[ConversationWorkload], vocabulary: int, seed: int
) -> tuple[Conversation, ...]:
    """The conversations of a seed, of random tokens, numbered from 0 on."""
    found: list[Conversation] = []
    for number, workload in enumerate(workloads):
        seeded = dataclasses.replace(workload, seed=1000 * number + seed)
        first, begin = len(found), max((each.arrival_s for each in found), default=0.0)
        for each in conversations(seeded, synthetic_corpus(vocabulary, seed)):
            turns = tuple(
                dataclasses.replace(turn, session=first + turn.session) for turn in each.turns
            )
            found.append(Conversation(first + each.number, begin + each.arrival_s, turns))
    return tuple(found)


def played(
    engine: Engine, found: Sequence[Conversation], prices: Prices, temperature: float, seed: int
) -> dict[str, Any]:
    """The columns of one run of conversations. A refusal ends them, and all that were left are
    unserved."""
    clock, lines, why = PricedClock(engine, prices), [], None
    try:
        for line in replay(engine, found, clock, temperature=temperature, seed=seed):
            lines.append(line)
    except UserError as error:
        why = str(error)
        for session in engine.scheduler.sessions.all:
            engine.end_session(session.session_id)
    lines.sort(key=lambda line: (line["session"], line["turn"]))
    wanted = {(turn.session, turn.index): turn.max_tokens for each in found for turn in each.turns}
    served = sum(line["output_tokens"] == wanted[line["session"], line["turn"]] for line in lines)
    said = repr([line["output_token_ids"] for line in lines]).encode()
    generated = sum(line["output_tokens"] for line in lines)
    decode, prefill, misses, pages = clock.counted.tolist()
    cells = cells_of(engine.scheduler.arena)
    return {
        "tokens": hashlib.sha256(said).hexdigest()[:16],
        "turns": len(wanted),
        "unserved": len(wanted) - served,
        "refusal": why,
        "generated": generated,
        "priced_s": clock.now(),
        "tokens_per_s": generated / clock.now() if clock.now() else None,
        "decode_steps": decode,
        "prefill_steps": prefill,
        "misses": misses,
        "kv_pages_moved": pages,
        "cells_end": sum(cells) / len(cells),
    }

"""What the server's page shows: snapshots of the engine as server-sent events, and its budget."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from typing import Any

from moejax.engine.snapshot import RoutingCounts, describe, least_kv_slots, snapshot
from moejax.errors import UserError, shown
from moejax.models.json_values import is_integer
from moejax.serve.async_llm import AsyncLLM
from moejax.serve.engine_thread import EngineDeadError
from moejax.serve.llm import LLM

TICK_S = 0.25
"""Seconds between two snapshots."""

MOST_VIEWERS = 16
"""Most pages that are open at once. Each snapshot delays a step a little."""


class LiveView:
    """Snapshots for open pages. Nothing is counted while none is open."""

    def __init__(self, llm: LLM, served: AsyncLLM, model: str, ending: Callable[[], bool]):
        """- `ending`: whether the server ends, so that open pages must not keep it."""
        self._llm, self._served, self._model, self._ending = llm, served, model, ending
        self._counts: RoutingCounts | None = None
        self._newest: tuple[float, dict[str, Any]] | None = None
        """When the newest snapshot was made, and it; pages share it."""
        self._viewers = 0
        self._moving: asyncio.Task | None = None
        self._wanted: object = None
        """The cells of the newest budget; a move to others does nothing."""

    @property
    def full(self) -> bool:
        return self._viewers >= MOST_VIEWERS

    async def events(self) -> AsyncGenerator[str, None]:
        """Yields server-sent events: first what does not change, then a snapshot every TICK_S,
        until the server or the engine ends."""
        self._viewers += 1
        try:
            tokenizer = self._llm.engine.tokenizer
            about = describe(self._llm.engine) | {
                "model": self._model,
                "versions": self._llm.plan.settings.versions,
                "chat": bool(tokenizer and tokenizer.chat_template),
            }
            yield _event("model", about)
            with suppress(UserError, EngineDeadError):
                while not self._ending():
                    yield _event("snapshot", await self._served.between_steps(self._take))
                    await asyncio.sleep(TICK_S)
        finally:
            self._viewers -= 1
            self._served.tell(self._rest)

    def _rest(self) -> None:
        """On the engine's thread: forgets the counts if no page is open."""
        if not self._viewers:
            self._llm.engine.listener = self._counts = self._newest = None

    def _take(self) -> dict[str, Any]:
        engine = self._llm.engine
        if self._counts is None:
            self._counts = RoutingCounts(engine)
            engine.listener = self._counts.listen
        now = time.monotonic()
        if self._newest is None or now - self._newest[0] > TICK_S / 2:
            self._newest = now, snapshot(engine, self._counts)
        return self._newest[1]

    async def move_budget(self, expert_slots: object) -> None:
        """Begins to move the split so that experts have that many slots and KV the rest; a move
        that has not ended is given up. Raises UserError for a split that cannot be."""
        engine, arena = self._llm.engine, self._llm.engine.scheduler.arena
        most_slots = arena.slots - least_kv_slots(engine)
        if not is_integer(expert_slots) or not 0 <= expert_slots <= most_slots:
            raise UserError(
                f"expert_slots must be an integer from 0 to {most_slots}, got {shown(expert_slots)}"
            )
        layers, most = arena.cell_row.shape
        cells = [
            min(most, expert_slots // layers + (i < expert_slots % layers)) for i in range(layers)
        ]
        kv_slots = arena.slots - sum(cells)
        self._wanted = cells

        def move() -> bool:
            try:
                return self._wanted is not cells or engine.move_budget(cells, kv_slots)
            except ValueError as error:
                raise UserError(f"the budget cannot move: {error}") from error

        if not await self._served.between_steps(move):
            if self._moving is not None:
                self._moving.cancel()
            self._moving = asyncio.create_task(self._go_on(move))

    async def _go_on(self, move: Any) -> None:
        with suppress(UserError, EngineDeadError):
            while not await self._served.between_steps(move):
                await asyncio.sleep(TICK_S)


def _event(name: str, data: dict[str, Any] | Sequence) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"

"""The life of transfers from the list that they are put on: carried out or not, used or not."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from host_offload.control.interface import Transfer
from host_offload.memory.tables import Move, Residency

COUNTS = ("issued", "done", "skipped", "deferred", "cancelled", "used", "unused", "bytes")
"""What is counted of transfers by cause. issued: put on a step's list. done, skipped: as the step
said. deferred: wanted and not put on a list, since that was full or there was no cell or no staging
bytes: once for each list that was made meanwhile. cancelled: left the queue unissued. used,
unused: of those done, found resident by a later step, or evicted first. bytes: of those done."""


class Flight(NamedTuple):
    transfer: Transfer
    index: int
    """The place of its entry in its list."""
    between_layers: bool


class Transfers:
    """Transfers in flight, and those that wait for their first use.

    log: called with a Transfer when it is skipped, first used, or evicted without use.
    """

    def __init__(self, log: Callable[[Transfer], None]):
        self._log = log
        self.paused = False
        self.capacity: int | None = None
        """Experts that there is room for in version 0, where every expert is resident."""
        self.flying: list[Flight] = []
        self._unused: dict[tuple[int, int], Flight] = {}
        self.finished: list[Transfer] = []
        """Settled since the caller last took them; the caller clears it. retired likewise."""
        self.retired: list[Transfer] = []
        self.counts: dict[str, Counter[str]] = {}
        """Cause → COUNTS, see there."""

    @property
    def in_flight(self) -> tuple[Transfer, ...]:
        return tuple(flight.transfer for flight in self.flying)

    def flying_places(self) -> set[tuple[int, int]]:
        """(layer, expert) of those in flight."""
        return {(t.layer, t.expert) for t in self.in_flight}

    def count(self, cause: str, what: str, n: int = 1) -> None:
        self.counts.setdefault(cause, Counter())[what] += n

    def issue(self, transfer: Transfer, index: int, between_layers: bool = False) -> None:
        """The transfer is on a list, as that entry."""
        self.flying.append(Flight(transfer, index, between_layers))
        self.count(transfer.cause, "issued")

    def land(self, flight: Flight, done: bool) -> None:
        """A transfer that is no longer in flight was carried out, or skipped."""
        transfer = flight.transfer
        place = transfer.layer, transfer.expert
        if not done:
            transfer = dataclasses.replace(transfer, skipped=True)
            self.count(transfer.cause, "skipped")
            self._log(transfer)
        else:
            transfer = dataclasses.replace(transfer, published=transfer.issued)
            self.count(transfer.cause, "done")
            self.count(transfer.cause, "bytes", transfer.bytes)
            if place in self._unused:
                self._retire(self._unused.pop(place).transfer)
            self._unused[place] = flight._replace(transfer=transfer)
        self.finished.append(transfer)

    def take_moves(self) -> list[Move]:
        """Cells to move within the arena before the next step, in order; each is handed out once.
        They come before the contents and the list of that step."""
        return []

    def take_contents(self) -> dict[str, np.ndarray]:
        """Contents of tables that changed since the last call."""
        return {}

    def transition_counts(self) -> dict[str, int]:
        """Promotions and demotions carried out and their bytes, how often one had to wait (each for
        each list that was made meanwhile), and those no longer wanted."""
        up, down = (self.counts.get(cause, {}) for cause in ("promotion", "demotion"))
        return {
            "promotions": up.get("done", 0),
            "demotions": down.get("done", 0),
            "deferred": up.get("deferred", 0) + down.get("deferred", 0),
            "cancelled": up.get("cancelled", 0) + down.get("cancelled", 0),
            "promoted_bytes": up.get("bytes", 0),
            "demoted_bytes": down.get("bytes", 0),
        }

    @property
    def watching(self) -> bool:
        """Some transfer waits for its first use."""
        return bool(self._unused)

    def watch(self, step: int, active: np.ndarray, missed: np.ndarray, tables: Residency) -> None:
        """Who was first used by the step, and who was evicted before any use.

        active bool[L, E]: experts that the step needed. missed bool[L, E]: those of them that it
        did not find. tables: after the step.
        """
        for place, flight in list(self._unused.items()):
            transfer, same_step = flight.transfer, flight.transfer.published == step
            # A step's list is carried out behind its experts; between layers, before some of them.
            if transfer.published > step or (same_step and not flight.between_layers):
                continue
            if active[place] and not missed[place]:
                transfer = dataclasses.replace(transfer, first_use=step)
            elif same_step or not (active[place] or tables.address[place] < 0):
                continue
            del self._unused[place]
            self._retire(transfer)

    def finish(self) -> None:
        """The run ends: who was not used by now never will be."""
        for flight in self._unused.values():
            self._retire(flight.transfer)
        self._unused.clear()

    def _retire(self, transfer: Transfer) -> None:
        self.count(transfer.cause, "used" if transfer.first_use >= 0 else "unused")
        self.retired.append(transfer)
        self._log(transfer)

"""What a run's policies saw of the transfers beside compute, as arrays of a trace's chunk."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import Moment
from host_offload.queue.transfer import Flying, Progress, Settled, State, Transfer
from host_offload.traces.schema import TraceError

STATES: tuple[State, ...] = ("done", "failed", "cancelled")

_TRANSFER = {
    "ticket": np.int64,
    "layer": np.int16,
    "expert": np.int16,
    "version": np.int8,
    "cell": np.int64,
    "cause": np.int32,
    "priority": np.int32,
}
_ARRAYS: dict[str, dict[str, Any]] = {
    "observed": {
        "step": np.int64,
        "moment": np.uint8,
        "layer": np.int16,
        "busy_s": np.float64,
        "flying": np.int32,
        "settled": np.int32,
    },
    "flying": {**_TRANSFER, "bytes": np.int64, "bytes_left": np.int64, "begun": np.bool_},
    "settled": {**_TRANSFER, "state": np.uint8},
}
"""Group → array's name → its type."""


class ProgressTrace(NamedTuple):
    """What policies were shown at a moment between two layers."""

    step: int
    moment: Moment
    layer: int
    progress: Progress


def encoded(seen: Sequence[ProgressTrace]) -> tuple[dict[str, np.ndarray], list[str]]:
    """The arrays of a chunk, and the causes that they number."""
    transfers = [t for each in seen for t in (*each.progress.flying, *each.progress.settled)]
    causes = list(dict.fromkeys(each.transfer.cause for each in transfers))
    number = {cause: i for i, cause in enumerate(causes)}

    def fields(of: Flying | Settled) -> tuple[int, ...]:
        t = of.transfer
        place = of.ticket, t.layer, t.expert, t.version, t.cell
        return *place, number[t.cause], t.priority

    rows: dict[str, list[tuple]] = {
        "observed": [
            (step, moment, layer, p.busy_seconds, len(p.flying), len(p.settled))
            for step, moment, layer, p in seen
        ],
        "flying": [
            (*fields(f), f.bytes, f.bytes_left, f.begun) for s in seen for f in s.progress.flying
        ],
        "settled": [
            (*fields(each), STATES.index(each.state)) for s in seen for each in s.progress.settled
        ],
    }
    arrays = {
        f"{group}.{name}": np.array([row[i] for row in rows[group]], dtype)
        for group, types in _ARRAYS.items()
        for i, (name, dtype) in enumerate(types.items())
    }
    return arrays, causes


def decoded(arrays: Mapping[str, np.ndarray], causes: Sequence[str]) -> Iterator[ProgressTrace]:
    """What `encoded` was given."""
    flying, settled = (_rows(arrays, group) for group in ("flying", "settled"))
    for step, moment, layer, busy, in_flight, ended in _rows(arrays, "observed"):
        progress = Progress(
            busy,
            tuple(
                Flying(ticket, _transfer(place, causes), *rest)
                for ticket, place, rest in _cut(itertools.islice(flying, in_flight))
            ),
            tuple(
                Settled(ticket, _transfer(place, causes), STATES[state])
                for ticket, place, (state,) in _cut(itertools.islice(settled, ended))
            ),
        )
        yield ProgressTrace(step, Moment(moment), layer, progress)


def names() -> list[str]:
    """Names of the arrays."""
    return [f"{group}.{name}" for group, types in _ARRAYS.items() for name in types]


class RecordedProgress:
    """What a trace says of transfers beside compute, in its order. what: it, for messages."""

    def __init__(self, seen: Iterable[ProgressTrace], what: str):
        self._seen, self._what = iter(seen), what
        self._settled: list[Settled] = []
        """Since the last one that was asked for."""

    def at(self, step: int, moment: Moment, layer: int) -> Progress:
        """What was seen there; moments are asked for in their order. What settled at those left out
        is told, too. Raises TraceError where nothing was recorded."""
        wanted = step, layer, _ORDER.index(moment)
        for each in self._seen:
            self._settled += each.progress.settled
            place = each.step, each.layer, _ORDER.index(each.moment)
            if place == wanted:
                settled, self._settled = tuple(self._settled), []
                return Progress(each.progress.busy_seconds, each.progress.flying, settled)
            if place > wanted:
                break
        raise TraceError(
            f"a policy needs 'progress', which {self._what} does not have at {moment.name} of "
            f"step {step}, layer {layer}: it is recorded where a policy of the run needs it, and "
            "is that run's; replay the trace of such a run"
        )


_ORDER = (Moment.EMBEDDED, Moment.LAYER_BEGIN, Moment.ROUTED, Moment.EXPERTS_BEGIN)
"""Within a layer."""


def _rows(arrays: Mapping[str, np.ndarray], group: str) -> Iterator[tuple]:
    return zip(*(arrays[f"{group}.{name}"].tolist() for name in _ARRAYS[group]), strict=True)


def _cut(rows: Iterable[tuple]) -> Iterator[tuple[int, tuple, tuple]]:
    """(ticket, fields of the transfer, the others)."""
    width = len(_TRANSFER)
    return ((row[0], row[1:width], row[width:]) for row in rows)


def _transfer(place: tuple, causes: Sequence[str]) -> Transfer:
    layer, expert, version, cell, cause, priority = map(int, place)
    return Transfer(layer, expert, version, cell, causes[cause], priority)

"""What a run's policies saw of the transfers beside compute, as lines of a trace."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from host_offload.control.interface import Moment
from host_offload.queue.transfer import Flying, Progress, Settled, Transfer
from host_offload.traces.schema import TraceError


class ProgressTrace(NamedTuple):
    """What policies were shown at a moment between two layers."""

    step: int
    moment: Moment
    layer: int
    progress: Progress


def progress_line(seen: ProgressTrace) -> list[Any]:
    """Plain data for JSON: [step, moment, layer, busy seconds, [transfers that fly], [settled]]."""
    progress = seen.progress
    flying = [
        (f.ticket, *vars(f.transfer).values(), f.bytes, f.bytes_left, f.begun)
        for f in progress.flying
    ]
    settled = [(s.ticket, *vars(s.transfer).values(), s.state) for s in progress.settled]
    return [*seen[:3], progress.busy_seconds, flying, settled]


def parse_progress(line: list[Any]) -> ProgressTrace:
    """What `progress_line` was given."""
    step, moment, layer, busy, flying, settled = line
    width = 1 + len(Transfer.__dataclass_fields__)
    progress = Progress(
        busy,
        tuple(Flying(f[0], Transfer(*f[1:width]), *f[width:]) for f in flying),
        tuple(Settled(s[0], Transfer(*s[1:width]), *s[width:]) for s in settled),
    )
    return ProgressTrace(step, Moment(moment), layer, progress)


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

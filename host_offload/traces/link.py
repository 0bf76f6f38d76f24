"""What policies saw, between layers, of the queue of transfers beside compute, as a trace records
it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from host_offload.control.interface import Moment
from host_offload.control.step_record import LinkUse
from host_offload.traces.schema import TraceError


class LinkTrace(NamedTuple):
    """What policies saw of the queue at a moment between two layers."""

    step: int
    moment: Moment
    layer: int
    use: LinkUse


class RecordedLink:
    """A trace's records of the queue, in order.

    - `what`: the trace, for messages.
    """

    def __init__(self, seen: Iterable[LinkTrace], what: str):
        self._seen, self._what = iter(seen), what

    def find(self, step: int, moment: Moment, layer: int) -> LinkUse:
        """Returns what policies saw at a moment; ask for moments in order. Raises TraceError if
        nothing was recorded."""
        wanted = step, layer, _ORDER.index(moment)
        for each in self._seen:
            place = each.step, each.layer, _ORDER.index(each.moment)
            if place == wanted:
                return each.use
            if place > wanted:
                break
        raise TraceError(
            f"a policy needs the queue of transfers (link_*) between layers, which {self._what} "
            f"does not have at {moment.name} of step {step}, layer {layer}: it is recorded where a "
            "policy of the run needs it, and is that run's; replay the trace of such a run"
        )


_ORDER = (Moment.EMBEDDED, Moment.LAYER_BEGIN, Moment.ROUTED, Moment.EXPERTS_BEGIN)
"""The order of moments within a layer."""

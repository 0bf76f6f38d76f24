"""FluxMoE's Algorithm 1 on a timeline: layers whose experts all pass through a window of two."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from host_offload.queue.transfer import Transfer
from host_offload.simulate.timeline import LayerCost, Need, Timeline

STREAM = "stream"
"""The cause of loads ahead of need."""


class StreamedLayer(NamedTuple):
    """Seconds of the device for one layer in one pass."""

    cost: LayerCost
    """What does not stream: attention and routing, the products of residents, what follows."""
    streamed: Sequence[tuple[float, float]]
    """Those of gate and up, and of down, of each expert that streams; 0 of one that no token
    chose, which is waited for all the same."""


def stream_passes(
    timeline: Timeline,
    link: str,
    parts: tuple[int, ...],
    passes: Iterable[Sequence[StreamedLayer]],
) -> list[float]:
    """Plays passes over all layers, from an empty window on; returns the seconds of each.

    The cells of the ring are 2 · Z, of Z experts that stream in each layer; the half follows the
    running count of layers. The load of a layer is queued when the one before it begins, which is
    after the one two before it ended (write-after-read), and its products wait for its parts
    (read-after-write). A cell that still has a writer refuses another one: QueueError, which shows
    a ring that collides. parts: bytes of gate, up and down.
    """
    seconds: list[float] = []
    tickets: list[int | None] = []
    """Those of the layer that is next; None: there already."""
    count = 0

    def load(layer: int, streamed: int) -> list[int | None]:
        half = count % 2 * streamed
        return [
            timeline.submit(link, Transfer(layer, expert, 0, half + expert, STREAM), parts)
            for expert in range(streamed)
        ]

    for layers in passes:
        began = timeline.now
        for number, layer in enumerate(layers):
            if not seconds and not number:
                tickets = load(0, len(layer.streamed))
            count += 1
            upcoming = load((number + 1) % len(layers), len(layer.streamed))
            needs, cost = [], layer.cost
            for ticket, (gate_up, down) in zip(tickets, layer.streamed, strict=True):
                if ticket is None or timeline.there(link, ticket):
                    more = {"gate_up": cost.gate_up + gate_up, "down": cost.down + down}
                    cost = dataclasses.replace(cost, **more)
                else:
                    needs.append(Need(ticket, gate_up, down))
            timeline.layer(number, cost, link, needs)
            # What has come is forgotten, of the next layer too.
            tickets = [t if t and not timeline.there(link, t) else None for t in upcoming]
            timeline.forget(link)
        seconds.append(timeline.now - began)
    return seconds

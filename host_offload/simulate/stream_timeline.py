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
    packed: int = 0
    """The first so many of those come out of packed residents."""


def stream_passes(
    timeline: Timeline,
    link: str,
    parts: tuple[int, ...],
    passes: Iterable[Sequence[StreamedLayer]],
    decoder: str | None = None,
) -> list[float]:
    """Plays passes over all layers, from an empty window on; returns the seconds of each.

    The cells of the ring are 2 · Z, of Z experts that stream in each layer; the half follows the
    running count of layers. The load of a layer is queued when the one before it begins, which is
    after the one two before it ended (write-after-read), and its products wait for its parts
    (read-after-write). A cell that still has a writer refuses another one: QueueError, which shows
    a ring that collides. parts: bytes of gate, up and down, dense ones. decoder: the queue that
    brings packed residents, beside the link, and is computed from first.
    """
    seconds: list[float] = []
    tickets: list[tuple[str, int] | None] = []
    """Queue and ticket of those of the layer that is next; None: there already."""
    count = 0
    queues = [name for name in (decoder, link) if name is not None]

    def load(number: int, layer: StreamedLayer) -> list[tuple[str, int] | None]:
        half, submitted = count % 2 * len(layer.streamed), []
        for expert in range(len(layer.streamed)):
            queue = decoder if decoder is not None and expert < layer.packed else link
            transfer = Transfer(number, expert, 0, half + expert, STREAM)
            submitted.append((queue, timeline.submit(queue, transfer, parts)))
        return submitted

    for layers in passes:
        began = timeline.now
        for number, layer in enumerate(layers):
            if not seconds and not number:
                tickets = load(0, layer)
            count += 1
            following = (number + 1) % len(layers)
            upcoming = load(following, layers[following])
            needs: dict[str, list[Need]] = {queue: [] for queue in queues}
            cost = layer.cost
            for ticket, (gate_up, down) in zip(tickets, layer.streamed, strict=True):
                if ticket is None or timeline.there(*ticket):
                    more = {"gate_up": cost.gate_up + gate_up, "down": cost.down + down}
                    cost = dataclasses.replace(cost, **more)
                else:
                    needs[ticket[0]].append(Need(ticket[1], gate_up, down))
            *others, last = queues
            for queue in others:
                timeline.layer(number, dataclasses.replace(cost, after=0.0), queue, needs[queue])
                cost = LayerCost(0.0, 0.0, 0.0, cost.after)
            timeline.layer(number, cost, last, needs[last])
            # What has come is forgotten, of the next layer too.
            tickets = [t if t and not timeline.there(*t) else None for t in upcoming]
            for queue in queues:
                timeline.forget(queue)
        seconds.append(timeline.now - began)
    return seconds

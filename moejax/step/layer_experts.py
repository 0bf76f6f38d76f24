"""How a walk of layers computes a layer's experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import jax
import numpy as np

from host_offload.queue.device import TransferLost
from moejax.step.buffers import Buffers
from moejax.step.copied_stream import CopiedStream
from moejax.step.layer_programs import EXPERT_PARTS, IDLE, READ_THROUGH
from moejax.step.processors.processor import LayerInputs, LayerShare, Parts
from moejax.step.transports.copies import DEMANDS, CopyTransport


class ExpertDispatch(Protocol):
    """Computes the experts of one layer after the other."""

    parts: Sequence[str]
    """Of layer_programs: those that it calls."""

    def compute(self, parts: Parts, inputs: LayerInputs) -> tuple[jax.Array, jax.Array]:
        """Returns (x after a MoE layer's experts, the layer's counts).

        - `parts`: the executables.
        """
        ...


class FilledExperts:
    """ExpertDispatch in one program, whose ops bring what is missing.

    - `stream`: brings a layer's experts before it; None: the ops do.
    """

    parts: Sequence[str] = ("experts",)

    def __init__(self, buffers: Buffers, stream: CopiedStream | None):
        self._buffers, self._stream = buffers, stream

    def compute(self, parts: Parts, inputs: LayerInputs) -> tuple[jax.Array, jax.Array]:
        if self._stream is not None:
            self._stream.materialize(inputs.layer)
        buffers = self._buffers
        memory = buffers.stores, buffers.arena, buffers.tables
        computed_on = inputs.x, inputs.normed, *inputs.routing, buffers.numbers[inputs.layer]
        x, buffers.arena, buffers.tables, counts = parts["experts", None](*memory, *computed_on)
        return x, counts


class CopiedExperts:
    """ExpertDispatch over a CopyTransport: the host brings what a layer misses, beside what the
    device computes.

    `plan` decides on the device and is read by the host, which waits for it, the only time in a
    layer. Then, in this order:

    1. what the plan wants that is not in its cell is queued as demands, and copies begin, demands
       before others; after them, while nothing is enqueued that they would have to wait for,
    2. the experts that are there are computed, beside those copies,
    3. each record that was missing is read into its cell, or computed as it is where it has none,
       by programs that wait for its copy in stream order, and then those experts are computed.
    """

    parts: Sequence[str] = EXPERT_PARTS

    def __init__(self, buffers: Buffers, transport: CopyTransport, waves: int):
        self._buffers, self._transport, self._waves = buffers, transport, waves

    def compute(self, parts: Parts, inputs: LayerInputs) -> tuple[jax.Array, jax.Array]:
        y, counts = self.compute_rows(parts, inputs, None)
        return parts["combine", None](inputs.x, y, inputs.routing.weights), counts

    def compute_rows(
        self, parts: Parts, inputs: LayerInputs, share: LayerShare | None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns (y float32[T·K, D] of a layer's experts, the layer's counts).

        - `share`: the second processor's, whose rows of y stay zero; None: there is none.
        """
        buffers, ids = self._buffers, inputs.routing.ids
        number = buffers.numbers[inputs.layer]
        y, counts = parts["blank", None](buffers.tables, ids)
        plan = parts["plan" if share is None else "plan_beside", None]
        beside = () if share is None else (share.beside,)
        for wave in buffers.numbers[: 1 if inputs.step.kind == "decode" else self._waves]:
            buffers.tables, counts, seen = plan(buffers.tables, counts, ids, number, wave, *beside)
            rows, filled = np.asarray(seen).tolist()
            y = self._compute_wave(parts, inputs, y, rows, filled, share)
        return y, counts

    def _compute_wave(
        self,
        parts: Parts,
        inputs: LayerInputs,
        y: jax.Array,
        rows: Sequence[int],
        filled: Sequence[int],
        share: LayerShare | None,
    ) -> jax.Array:
        """y with the rows of the experts that are due. rows, filled: as of the plan."""
        transport, buffers, layer = self._transport, self._buffers, inputs.layer
        transport.queue_admitted()
        transport.land_arrived()
        due = [(expert, row) for expert, row in enumerate(rows) if row != IDLE]
        for expert, row in due:
            if filled[expert]:  # whatever was on its way there is nobody's
                transport.drop(row)
        missing = [
            (expert, row)
            for expert, row in due
            if filled[expert] or row == READ_THROUGH or transport.is_awaited(row)
        ]
        there = [expert for expert, _ in due if (expert, rows[expert]) not in missing]
        if share is not None:
            missing.sort(key=lambda each: int(share.order[each[0]]))

        def compute(y: jax.Array, experts: Sequence[int]) -> jax.Array:
            if not experts:
                return y
            listed = np.full(len(rows), -1, np.int32)
            listed[: len(experts)] = sorted(experts)
            memory = buffers.arena, buffers.tables, buffers.stores
            index, count = buffers.numbers[layer], np.int32(len(experts))
            seen = inputs.normed, inputs.routing.ids
            return parts["compute", None](y, *memory, *seen, index, listed, count)

        groups = [missing[i : i + DEMANDS] for i in range(0, len(missing), DEMANDS)]
        for number, group in enumerate(groups or [[]]):
            tickets = [transport.demand(layer, expert, row) for expert, row in group]
            transport.device_queue.begin(others=number + 1 >= len(groups))
            if number == 0:
                y = compute(y, there)
            came = []
            for (expert, row), ticket in zip(group, tickets, strict=True):
                try:
                    if row == READ_THROUGH:
                        y = self._compute_through(parts, inputs, y, expert, ticket)
                    else:
                        transport.land(row, ticket)
                        came.append(expert)
                except TransferLost as error:
                    transport.lose(layer, expert, row, str(error))
            y = compute(y, came)
        return y

    def _compute_through(
        self,
        parts: Parts,
        inputs: LayerInputs,
        y: jax.Array,
        expert: int,
        ticket: int,
    ) -> jax.Array:
        """y with the rows of an expert without a cell. Raises TransferLost."""
        computed, buffers = [], self._buffers

        def move(pieces: Sequence[jax.Array]) -> jax.Array:
            seen = inputs.normed, inputs.routing.ids, buffers.numbers[inputs.layer]
            after, mark = parts["through", None](
                y, buffers.stores, *seen, np.int32(expert), tuple(pieces)
            )
            computed.append(after)
            return mark

        self._transport.device_queue.take(ticket, move)
        return computed[0]

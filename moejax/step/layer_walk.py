"""Runs a step layer by layer: Python calls an executable for each part of a layer.

A layer's attend, route and experts are executables of their own, so that hooks see the routing and
can move experts in between. The compiled step has an `optimization_barrier` wherever values pass
from one executable to the next, so the bits are equal (contract 1e).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from host_offload.control.interface import Moment
from moejax.step.buffers import Buffers
from moejax.step.compiler import Compiler
from moejax.step.copied_stream import CopiedStream
from moejax.step.processor import Processor
from moejax.step.programs import STAGES, ProgramKey
from moejax.step.step_parts import LayerTrace, Routing, StepOutput, StepSpec, TraceArrays
from moejax.step.transports.transport import LayerInputs, Parts, Transport
from moejax.step.walk import DeviceMaps, Hooks, LayerTransfers, StepRequest
from pallas_kernels.stage import Entries


class _Layer(NamedTuple):
    run: int
    """The run of equal layers that the layer belongs to."""
    index: jax.Array
    """int32: the layer's index in its run."""
    moe_layer: int
    """The layer's index among MoE layers; −1: a layer without experts."""


class LayerWalk:
    """Runs a step as three executables a layer, with hooks in between. It has the methods of
    CompiledWalk.

    Without hooks the host reads nothing back, so it runs ahead of the device as with one executable
    a step.

    - `runs`: (how many layers, whether they have experts, whether `finish` follows) of each run of
      equal layers.
    - `params`: the model's arrays.
    - `stream`: brings all experts of a layer before it; None: the transport brings missing ones.
    - `processor`: computes some experts beside the device; None without one.
    """

    def __init__(
        self,
        steps: StepSpec,
        runs: Sequence[tuple[int, bool, bool]],
        params: tuple,
        buffers: Buffers,
        compiler: Compiler,
        transport: Transport,
        stream: CopiedStream | None,
        processor: Processor | None,
    ):
        self._steps, self._runs, self._params = steps, runs, params
        self._buffers, self._compiler, self._transport = buffers, compiler, transport
        self._stream, self._processor = stream, processor
        self._experts = processor or transport
        self.transfers: list[LayerTransfers] = []
        self.layer_arrays = TraceArrays()
        self._bound: dict[ProgramKey, Parts] = {}
        moe_layers = itertools.count()
        self._layers = [
            _Layer(run, buffers.numbers[i], next(moe_layers) if is_moe else -1)
            for run, (size, is_moe, _) in enumerate(runs)
            for i in range(size)
        ]
        self._none_done = jax.device_put(np.zeros(STAGES, np.int32), buffers.sharding)

    def delete(self) -> None:
        self._bound.clear()
        self._none_done.delete()

    # ---- executables

    def calls(
        self, step: ProgramKey, *, staged: bool = False, maps: DeviceMaps | None = None
    ) -> list[ProgramKey]:
        parts: list[tuple[str, int | None]] = [("embed", None), ("output", None)]
        parts += self._experts.parts
        for run, (_, is_moe, finishes) in enumerate(self._runs):
            parts += [("attend", run), ("route" if is_moe else "feed_forward", run)]
            if finishes:
                parts.append(("finish", run))
            if is_moe and not self._steps.trace_arrays <= {"embedding"}:
                parts.append(("observe", run))
        if "embedding" in self._steps.trace_arrays:
            parts.append(("embedding", None))
        keys = [self._part(step, *part) for part in parts]
        return [*keys, self._transport.stage_key] if staged else keys

    def _part(self, step: ProgramKey, part: str, run: int | None) -> ProgramKey:
        """Returns the key of a part. All prefill steps share their parts except the output."""
        output = part == "output"
        kind = step.kind if output or step.kind == "decode" else "prefill"
        traced, forced = output and bool(self._steps.trace_arrays), step.forced and part == "route"
        context = step.context if part == "attend" else None
        key = ProgramKey(kind, step.rows, traced=traced, forced=forced, part=part, run=run)
        return key._replace(context=context)

    def _bind(self, step: ProgramKey) -> Parts:
        """Returns the executables of a kind of step. Waits until they are compiled."""
        if step not in self._bound:
            # Ask for all of them first: they compile side by side.
            asked = [(key, self._compiler.start(key)) for key in self.calls(step)]
            self._bound[step] = {(key.part, key.run): future.result() for key, future in asked}
        return self._bound[step]

    # ---- steps

    def run(self, request: StepRequest) -> StepOutput:
        step, args, forced, stages, hooks, _ = request
        if hooks is not None:
            self._compiler.start(self._transport.stage_key)
        if self._processor is not None:
            self._processor.begin_step()
        parts = self._bind(step._replace(forced=forced is not None))
        params, buffers, transport = self._params, self._buffers, self._transport
        # Once for all layers; arrays on the device are not copied.
        batch = jax.device_put(args, buffers.sharding)
        extra = () if forced is None else (jax.device_put(forced, buffers.sharding),)
        due = frozenset() if stages is None else frozenset(np.asarray(stages.layer).tolist())
        staged = None if stages is None else self._none_done
        self.transfers, traces = [], []

        x = parts["embed", None](params, batch)
        embedding = None
        if ("embedding", None) in parts:
            embedding = parts["embedding", None](x)
        if hooks is not None:
            self._carry_out(hooks(Moment.EMBEDDED, -1, embedding), 0)
        for run, index, layer in self._layers:
            before, buffers.arena = parts["attend", run](params, buffers.arena, x, batch, index)
            x = x if self._steps.config.parallel else before
            if layer < 0:
                x = parts["feed_forward", run](params, x, batch, index)
                if ("finish", run) in parts:
                    x = parts["finish", run](params, before, x, batch, index)
                continue
            if hooks is not None:
                self._carry_out(hooks(Moment.LAYER_BEGIN, layer, None), layer)
            attended = x
            residents = (buffers.tables.address,) if self._steps.favours_residents else ()
            x, normed, ids, weights = parts["route", run](
                *(params, x, batch, index), *residents, *extra
            )
            if ("observe", run) in parts:
                self.layer_arrays = parts["observe", run](*(params, normed, attended, batch, index))
            if hooks is not None:
                self._show_routing(hooks, layer, normed, Routing(ids, weights))
            if self._stream is not None:
                self._stream.materialize(layer, ids)
            inputs = LayerInputs(step, layer, x, normed, Routing(ids, weights))
            x, counts = self._experts.compute(parts, inputs)
            if ("finish", run) in parts:
                x = parts["finish", run](params, before, x, batch, index)
            traces.append(LayerTrace(ids, weights, counts, self.layer_arrays))
            if layer in due and stages is not None and staged is not None:
                staged = transport.stage(layer, stages, staged, ahead=False)
        writes = transport.begin_output()
        output = parts["output", None](params, x, batch, tuple(traces), writes)
        arrays, self.layer_arrays = output.arrays._replace(embedding=embedding), TraceArrays()
        placed = None if self._processor is None else self._processor.placed
        hidden = x if self._steps.hidden else None
        return output._replace(staged=staged, arrays=arrays, placed=placed, hidden=hidden)

    def _show_routing(self, hooks: Hooks, layer: int, normed: jax.Array, routing: Routing) -> None:
        """Waits for a layer's routing and calls the hooks before its experts."""
        routing.ids.copy_to_host_async()
        routing.weights.copy_to_host_async()
        if self._processor is not None:
            normed.copy_to_host_async()  # its input, copied while policies decide
        known = np.asarray(routing.ids), np.asarray(routing.weights)
        self._carry_out(hooks(Moment.ROUTED, layer, known), layer)
        self._carry_out(hooks(Moment.EXPERTS_BEGIN, layer, None), layer)

    def _carry_out(self, entries: Entries | None, current: int) -> None:
        """Carries out a hook's entries.

        - `current`: the next layer whose experts are computed.
        """
        if entries is None:
            return
        layers = sorted(set(np.asarray(entries.layer).tolist()))
        given = jax.device_put(entries, self._buffers.sharding)
        done = self._none_done
        for layer in layers:
            if 0 <= layer < len(self._buffers.tables.clock):
                done = self._transport.stage(layer, given, done, ahead=layer >= current)
        self.transfers.append(LayerTransfers(given, done))

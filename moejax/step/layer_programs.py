"""What the host driver compiles: the parts of a step, each a program of its own."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from moejax.models.layers import LayerStack, Tokens
from moejax.step.context import DeviceMemory
from moejax.step.experts import add_experts, counts_size, page_and_compute, stage_layer
from moejax.step.parts import (
    LayerTrace,
    TraceArrays,
    embedding_array,
    layer_arrays,
    route_layer,
    step_output,
    step_tokens,
)
from moejax.step.programs import STEPS, Program, ProgramKey, Programs

OF_RUNS = ("attend", "route", "observe", "feed_forward")
"""Parts that each run of equal layers has."""


def layer_program(programs: Programs, key: ProgramKey) -> Program:
    """The program of a part of a step, or of kind `stage`: one layer's part of a stage list.

    Parts: embed, embedding (the array of that name), experts, output (traced: of steps with trace
    arrays), and for each run of equal layers attend, route (forced: with a routing as the last
    argument), observe (the layer's arrays) and feed_forward. Which layer is an argument, its index
    in the run, for experts and stage over all MoE layers. Raises ValueError for another key.
    """
    parts = _Parts(programs, key)
    if key == ProgramKey("stage"):
        args = programs.arena, programs.tables, programs.stores
        index, entries = programs.array(), programs.entries()
        return Program(parts.stage, (*args, index, index, entries, entries.layer), (0, 1))
    flags = (key.traced and key.part != "output") or (key.forced and key.part != "route")
    bucket, of_run = key.rows is not None and key.kind != "decode", key.run is not None
    if (
        key.kind in STEPS
        and not (flags or bucket or key.staged)
        and of_run == (key.part in OF_RUNS)
    ):
        args, donated = parts.args().get(key.part or "", (None, ()))
        if args is not None:
            return Program(getattr(parts, key.part or ""), args, donated)
    raise ValueError(f"no program {str(key)!r}")


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The parts of one kind of step, each a function by its name."""

    programs: Programs
    key: ProgramKey

    def args(self) -> dict[str, tuple[tuple, tuple[int, ...]]]:
        """Each part's arguments, and which of them are donated."""
        programs, config, key = self.programs, self.programs.steps.config, self.key
        params, batch = programs.params, programs.batch(key)
        dtype = jax.eval_shape(self.embed, params, batch).dtype
        x = programs.array(programs.tokens(key), config.hidden_size, dtype=dtype)
        index, layers = programs.array(), programs.tables.clock.shape[0]
        routing, layer = programs.routing(key), (params, x, batch, index)
        forced = (programs.routing(key, layers),) if key.forced else ()
        memory = programs.stores, programs.arena, programs.tables
        counts = programs.array(counts_size(config.num_experts, len(programs.stores)))
        widths = {"probs": config.num_experts, "gate_input": config.hidden_size}
        seen = TraceArrays()
        for name in widths.keys() & programs.steps.trace_arrays if key.traced else ():
            array = programs.array(x.shape[0], widths[name], dtype=jnp.float16)
            seen = seen._replace(**{name: array})
        traces = (LayerTrace(*routing, counts, seen),) * layers
        return {
            "embed": ((params, batch), ()),
            "embedding": ((x,), ()),
            "attend": ((params, programs.arena, x, batch, index), (1, 2)),
            "route": ((*layer, *forced), (1,)),
            "observe": (layer, ()),
            "feed_forward": (layer, (1,)),
            "experts": ((*memory, x, x, *routing, index), (1, 2, 3)),
            "output": ((params, x, batch, traces, programs.writes), ()),
        }

    def embed(self, params, batch):
        return self.programs.model(params).embed(self._tokens(batch)[0])

    def embedding(self, x):
        return embedding_array(x, self.programs.steps.trace_arrays)

    def attend(self, params, arena, x, batch, i):
        stack, tokens = self._stack(params), self._tokens(batch)[1]
        return stack.attend(i, x, arena, tokens, self.programs.page)

    def route(self, params, x, batch, i, forced=None):
        return route_layer(self._stack(params), i, x, self._tokens(batch)[1], forced)

    def observe(self, params, normed, batch, i):
        wanted = self.programs.steps.trace_arrays
        return layer_arrays(self._stack(params), i, normed, self._tokens(batch)[1], wanted)

    def feed_forward(self, params, x, batch, i):
        return self._stack(params).feed_forward(i, x, self._tokens(batch)[1])

    def experts(self, stores, arena, tables, x, normed, ids, weights, layer):
        context, memory = self.programs.context(self.key, stores), DeviceMemory(arena, tables)
        y, memory, counts = page_and_compute(normed, ids, memory, layer, context)
        return add_experts(x, y, weights, context.ops), *memory, counts

    def output(self, params, x, batch, traces, writes):
        trace = jax.tree.map(lambda *parts: jnp.stack(parts), *traces)
        model, shape = self.programs.model(params), self.programs.results
        return step_output(model, x, batch, trace, None, self.key.kind, shape, writes)

    def stage(self, arena, tables, stores, layer, ahead, entries, done):
        """ahead: 1 before the layer's plan, when what the last step used may go; its clock is then
        read as that of the coming reference. done int32[STAGES]: of other layers."""
        tables = tables._replace(clock=tables.clock.at[layer].add(ahead))
        memory, context = DeviceMemory(arena, tables), self.programs.context(self.key, stores)
        (arena, tables), now = stage_layer(memory, layer, entries, context)
        tables = tables._replace(clock=tables.clock.at[layer].add(-ahead))
        return arena, tables, jnp.maximum(done, now)

    def _stack(self, params) -> LayerStack:
        assert self.key.run is not None
        return self.programs.model(params).runs[self.key.run]

    def _tokens(self, batch) -> tuple[jax.Array, Tokens]:
        batch = self.programs.in_use(self.key, batch)
        return step_tokens(batch, self.programs.context(self.key))

"""What the host driver compiles: the parts of a step, each a program of its own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from moejax.models.decoder import Decoder
from moejax.models.layers import LayerStack, Tokens
from moejax.step.context import DeviceMemory
from moejax.step.experts import counts_size, experts_layer, stage_layer
from moejax.step.parts import (
    LayerTrace,
    decode_output,
    decode_tokens,
    prefill_output,
    prefill_tokens,
    route_layer,
)
from moejax.step.programs import STEPS, Program, ProgramKey, Programs
from moejax.step.trace_arrays import TraceArrays, embedding_array, layer_arrays


def layer_program(programs: Programs, key: ProgramKey) -> Program:
    """The program of a part of a step, or of kind `stage`: one layer's part of a stage list.

    Parts: embed, embedding (the array of that name), experts, output (traced: of steps with trace
    arrays), and for each run of equal layers attend, route (forced: with a routing as the last
    argument), observe (the layer's arrays) and feed_forward. Which layer is an argument, its index
    in the run, for experts and stage over all MoE layers. Raises ValueError for another key.
    """
    if key.kind == "stage":
        return _stage(programs, key)
    flags = (key.traced and key.part != "output") or (key.forced and key.part != "route")
    bucket = key.rows is not None and key.kind != "decode"
    of_run = key.run is not None
    if key.kind not in STEPS or (key.part, of_run) not in _PARTS or flags or bucket or key.staged:
        raise ValueError(f"no program {str(key)!r}")
    return _PARTS[key.part, of_run](_Parts(programs, key))


def _stage(programs: Programs, key: ProgramKey) -> Program:
    def stage(arena, tables, stores, layer, ahead, entries, done):
        """ahead: 1 before the layer's plan, when what the last step used may go; its clock is then
        read as that of the coming reference. done int32[STAGES]: of other layers."""
        tables = tables._replace(clock=tables.clock.at[layer].add(ahead))
        memory = DeviceMemory(arena, tables)
        (arena, tables), now = stage_layer(memory, layer, entries, programs.context(key, stores))
        tables = tables._replace(clock=tables.clock.at[layer].add(-ahead))
        return arena, tables, jnp.maximum(done, now)

    index, entries = programs.array(), programs.entries()
    memory = programs.arena, programs.tables, programs.stores
    return Program(stage, (*memory, index, index, entries, entries.layer), (0, 1))


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The parts of one kind of step."""

    programs: Programs
    key: ProgramKey

    # ---- what functions are made of

    def _model(self, params) -> Decoder:
        state = jax.tree.unflatten(jax.tree.structure(self.programs.state), params)
        return nnx.merge(self.programs.graph, state)

    def _stack(self, params) -> LayerStack:
        assert self.key.run is not None
        return self._model(params).runs[self.key.run]

    def _tokens(self, batch) -> Tokens:
        context = self.programs.context(self.key)
        if self._decodes:
            _, positions, block_table = (values[: self._size] for values in batch)
            return decode_tokens(positions, block_table, context)
        return prefill_tokens(*batch, context)

    def _embedded(self, params, batch) -> jax.Array:
        ids = batch[0][: self._size] if self._decodes else batch[0].tokens.reshape(-1)
        return self._model(params).embed(ids)

    @property
    def _decodes(self) -> bool:
        return self.key.kind == "decode"

    @property
    def _size(self) -> int:
        return self.programs.tokens(self.key)

    # ---- arguments

    @functools.cached_property
    def _params(self) -> tuple:
        return tuple(jax.tree.leaves(self.programs.state))

    @functools.cached_property
    def _batch(self) -> tuple:
        return self.programs.batch(self.key)

    @functools.cached_property
    def _x(self) -> jax.ShapeDtypeStruct:
        dtype = jax.eval_shape(self._embedded, self._params, self._batch).dtype
        return self.programs.array(self._size, self.programs.config.hidden_size, dtype=dtype)

    @property
    def _layer_args(self) -> tuple:
        return self._params, self._x, self._batch, self.programs.array()

    # ---- programs

    def embed(self) -> Program:
        return Program(self._embedded, (self._params, self._batch), ())

    def embedding(self) -> Program:
        arrays = self.programs.trace_arrays
        return Program(lambda x: embedding_array(x, arrays), (self._x,), ())

    def attend(self) -> Program:
        def attend(params, arena, x, batch, i):
            stack, tokens = self._stack(params), self._tokens(batch)
            return stack.attend(i, x, arena, tokens, self.programs.page)

        params, *others = self._layer_args
        return Program(attend, (params, self.programs.arena, *others), (1, 2))

    def route(self) -> Program:
        def route(params, x, batch, i, forced=None):
            return route_layer(self._stack(params), i, x, self._tokens(batch), forced)

        layers = self.programs.tables.clock.shape[0]
        forced = (self.programs.routing(self.key, layers),) if self.key.forced else ()
        return Program(route, (*self._layer_args, *forced), (1,))

    def observe(self) -> Program:
        def observe(params, normed, batch, i):
            stack, tokens = self._stack(params), self._tokens(batch)
            return layer_arrays(stack, i, normed, tokens, self.programs.trace_arrays)

        return Program(observe, self._layer_args, ())

    def feed_forward(self) -> Program:
        def feed_forward(params, x, batch, i):
            return self._stack(params).feed_forward(i, x, self._tokens(batch))

        return Program(feed_forward, self._layer_args, (1,))

    def experts(self) -> Program:
        def experts(stores, arena, tables, x, normed, ids, weights, layer):
            context, memory = self.programs.context(self.key, stores), DeviceMemory(arena, tables)
            x, memory, counts = experts_layer(x, normed, ids, weights, memory, layer, context)
            return x, *memory, counts

        programs, routing = self.programs, self.programs.routing(self.key)
        memory = programs.stores, programs.arena, programs.tables
        args = (*memory, self._x, self._x, *routing, programs.array())
        return Program(experts, args, (1, 2, 3))

    def output(self) -> Program:
        def output(params, x, batch, traces):
            trace = jax.tree.map(lambda *parts: jnp.stack(parts), *traces)
            model, kind = self._model(params), self.key.kind
            if kind in ("prefill", "score", "prompt_logprobs"):
                return prefill_output(model, x, batch[0], trace, None, kind)
            return decode_output(model, x, trace, None)

        programs, config = self.programs, self.programs.config
        counts = programs.array(counts_size(config.num_experts, len(programs.stores)))
        seen = TraceArrays()
        if self.key.traced:
            widths = {"probs": config.num_experts, "gate_input": config.hidden_size}
            wanted = widths.keys() & programs.trace_arrays
            seen = TraceArrays(
                **{n: programs.array(self._size, widths[n], dtype=jnp.float16) for n in wanted}
            )
        trace = LayerTrace(*programs.routing(self.key), counts, seen)
        traces = (trace,) * programs.tables.clock.shape[0]
        return Program(output, (self._params, self._x, self._batch, traces), ())


_PARTS: dict[tuple[str | None, bool], Callable[[_Parts], Program]] = {
    ("embed", False): _Parts.embed,
    ("embedding", False): _Parts.embedding,
    ("experts", False): _Parts.experts,
    ("output", False): _Parts.output,
    ("attend", True): _Parts.attend,
    ("route", True): _Parts.route,
    ("observe", True): _Parts.observe,
    ("feed_forward", True): _Parts.feed_forward,
}
"""By part, and whether it belongs to one run of equal layers."""

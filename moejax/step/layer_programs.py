"""The programs of a walk of layers: each part of a step is a program of its own."""

from __future__ import annotations

import dataclasses
import inspect
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from moejax.step.experts import (
    DeviceMemory,
    Elsewhere,
    StepContext,
    add_experts,
    compute,
    compute_materialized,
    page_and_compute,
    plan_elsewhere,
    plan_wave,
    zero_outputs,
)
from moejax.step.programs import Program, ProgramKey, Programs
from moejax.step.step_parts import (
    LayerTrace,
    Leaf,
    TraceArrays,
    embedding_array,
    favour_residents,
    layer_arrays,
    route_layer,
    step_output,
    step_tokens,
)
from pallas_kernels.expert_ffn import ExpertBatch, ExpertOptions, ExpertPlaces, expert_ffn
from pallas_kernels.plan import plan_counts
from pallas_kernels.plan.record import active_experts, counts_size
from pallas_kernels.records.absent import AbsentRecords

if TYPE_CHECKING:
    from moejax.models.attention.kind import Tokens
    from moejax.models.layers import LayerStack

PUT = {"decode": 64, "prefill": 1024}
"""Rows of y that one program puts into their slots, a compiled shape, by kind of step."""

IDLE, READ_THROUGH = -2, -1
"""Values in a plan's rows: the expert is not due; the expert has no cell."""


def layer_program(programs: Programs, key: ProgramKey) -> Program:
    """Returns the program of a part of a step.

    Parts are embed, embedding (the trace array), experts, output (traced: of steps with trace
    arrays), and for each run of equal layers attend, route (forced: with a routing as the last
    argument), observe (the layer's arrays), finish (LayerStack.finish) and feed_forward. The layer
    is an argument: its index in the run, or for experts its index among all MoE layers. If experts
    are separate arrays, CopyTransport has parts of its own in place of experts. Raises KeyError for
    another part.
    """
    return _StepPart(programs, key).program(key.part or "")


_PARTS: dict[str, tuple[Callable[..., Any], frozenset[str], frozenset[str]]] = {}
"""(method, `donated`, `summed`) of each part, by name; filled by _part."""


def _part(*, donated: str = "", summed: str = "") -> Callable[[Callable], Callable]:
    """Makes a method of _StepPart a part of steps. Parameters are named as `shapes` names them.

    - `donated`: parameters whose memory the results reuse.
    - `summed`: the parameter that `combine` adds to. It is donated too, unless combine is a kernel:
      the kernel's result is an array of its own, which would be copied into a donated one.
    """

    def register(method: Callable) -> Callable:
        _PARTS[method.__name__] = method, frozenset(donated.split()), frozenset(summed.split())
        return method

    return register


@dataclasses.dataclass(frozen=True)
class _StepPart:
    """The parts of one kind of step, each a method on jax arrays."""

    programs: Programs
    key: ProgramKey

    def program(self, name: str) -> Program:
        """Returns the program of a part."""
        method, donated, summed = _PARTS[name]
        if not self.programs.steps.ops.ends_layers:
            donated |= summed
        if name in ("route", "attend"):
            stack = self._stack(self.programs.params)
            again = stack.config.parallel if name == "attend" else stack.finishes
            observed = name == "route" and self.programs.steps.trace_arrays
            if again or observed or stack.second is not None:  # read later, or of another shape
                donated -= {"x", "attended"}
        _, *parameters = inspect.signature(method).parameters  # the first one is self
        shapes = self.shapes()
        args = [shapes[parameter] for parameter in parameters]
        if parameters[-1] == "more":
            args[-1:] = args[-1]
        given = tuple(i for i, parameter in enumerate(parameters) if parameter in donated)
        return Program(types.MethodType(method, self), tuple(args), given)

    def shapes(self) -> dict[str, Any]:
        """Returns the shapes of arguments, by name of the parameter."""
        programs, config, key = self.programs, self.programs.steps.config, self.key
        experts, hidden = config.num_experts, config.expert_hidden
        layers, tokens = programs.tables.clock.shape[0], programs.tokens(key)
        array, batch, routing = programs.array, programs.batch(key), programs.routing(key)
        dtype = jax.eval_shape(self.embed, programs.params, batch).dtype
        x = array(tokens, config.stream_values, dtype=dtype)
        index, flags = array(), array(experts, dtype=bool)
        y = array(routing.ids.size, hidden, dtype=jnp.float32)
        put = min(PUT.get(key.kind, 1), routing.ids.size)
        counts = array(counts_size(experts, len(programs.stores)))
        residents = (programs.tables.address,) if programs.steps.favours_residents else ()
        forced = (programs.routing(key, layers),) if key.forced else ()
        seen, widths = TraceArrays(), {"probs": experts, "gate_input": config.hidden_size}
        for name in widths.keys() & programs.steps.trace_arrays if key.traced else ():
            seen = seen._replace(**{name: array(tokens, widths[name], dtype=jnp.float16)})
        return {
            "params": programs.params,
            "batch": batch,
            "more": (*residents, *forced),
            "stores": programs.stores,
            "arena": programs.arena,
            "tables": programs.tables,
            "x": x,
            "attended": array(tokens, config.stream_values * config.attentions, dtype=dtype),
            **dict.fromkeys(("normed", "added", "out"), array(tokens, hidden, dtype=dtype)),
            "ids": routing.ids,
            "weights": routing.weights,
            **dict.fromkeys(("i", "layer", "wave", "expert", "count"), index),
            "y": y,
            "counts": counts,
            "listed": array(experts),
            "beside": flags,
            "elsewhere": Elsewhere._make([flags, array(experts)]),
            "pieces": programs.pieces(key.run if key.part == "through" else None),
            "rows": array(put, hidden, dtype=y.dtype),
            "deferred": array(tokens, hidden, dtype=y.dtype),
            "slots": array(put),
            "traces": (LayerTrace(*routing, counts, seen),) * layers,
            "writes": programs.writes,
        }

    def context(self, stores: tuple = ()) -> StepContext:
        return self.programs.context(self.key, stores)

    def _stack(self, params) -> LayerStack:
        assert self.key.run is not None
        return self.programs.model(params).runs[self.key.run]

    def _tokens(self, batch) -> tuple[jax.Array, Tokens]:
        return step_tokens(self.programs.in_use(self.key, batch), self.context())

    @_part()
    def embed(self, params, batch):
        return self.programs.model(params).embed(self._tokens(batch)[0])

    @_part()
    def embedding(self, x):
        hidden = self.programs.steps.config.hidden_size
        return embedding_array(x[:, :hidden], self.programs.steps.trace_arrays)

    @_part(donated="arena x")
    def attend(self, params, arena, x, batch, i):
        stack, tokens = self._stack(params), self._tokens(batch)[1]
        x, arena, *_ = stack.attend(i, x, arena, tokens, self.programs.page.block_size)
        return x, arena

    @_part(donated="attended")
    def route(self, params, attended, batch, i, *more):
        """Routes a layer.

        - `more`: addresses [L, E] if routers favour residents, then a routing if it is forced.
        """
        stack, more, favour = self._stack(params), list(more), None
        if self.programs.steps.favours_residents:
            context = self.context()
            favour = favour_residents(more.pop(0), stack.first_moe_layer + i, context)
        forced = more.pop() if self.key.forced else None
        return route_layer(stack, i, attended, self._tokens(batch)[1], forced, favour)

    @_part()
    def observe(self, params, normed, attended, batch, i):
        stack, wanted = self._stack(params), self.programs.steps.trace_arrays
        tokens = self._tokens(batch)[1]
        if stack.config.routes_apart:
            normed = stack.router_input(i, attended, tokens)
        return layer_arrays(stack, i, normed, tokens, wanted)

    @_part(donated="x")
    def feed_forward(self, params, x, batch, i):
        return self._stack(params).feed_forward(i, x, self._tokens(batch)[1])

    @_part(donated="x")
    def finish(self, params, x, out, batch, i):
        return self._stack(params).finish(i, x, out, self._tokens(batch)[1])

    @_part(donated="arena tables", summed="added")
    def experts(self, stores, arena, tables, added, normed, ids, weights, layer):
        context, memory = self.context(stores), DeviceMemory(arena, tables)
        find = compute_materialized if context.window else page_and_compute
        y = zero_outputs(ids.size, normed.shape[1])
        y, memory, counts = find(y, normed, ids, memory, layer, context)
        return add_experts(added, y, weights, context.ops), *memory, counts

    @_part()
    def blank(self, tables, ids):
        y = zero_outputs(ids.size, self.programs.steps.config.expert_hidden)
        versions = len(self.programs.stores)
        return y, jnp.zeros(counts_size(tables.address.shape[1], versions), jnp.int32)

    @_part(donated="tables counts")
    def plan(self, tables, counts, ids, layer, wave):
        """Plans one wave of a layer. Returns (tables, counts, result of _planned)."""
        context = self.context()
        active = active_experts(ids, jnp.ones(tables.address.shape[1], bool))
        due, missing, tables, work = plan_wave(ids, active, tables, layer, wave, context)
        counts += plan_counts(work, missing, tables, layer, len(self.programs.stores))
        return tables, counts, _planned(due, work, tables, layer)

    @_part(donated="tables counts")
    def plan_beside(self, tables, counts, ids, layer, wave, beside):
        """Plans as `plan` does, without a second processor's experts.

        - `beside`: bool[E], those experts, which count as active and as missing.
        """
        experts, context = tables.address.shape[1], self.context()
        active = active_experts(ids, jnp.ones(experts, bool))
        elsewhere = Elsewhere(beside, jnp.zeros(experts, jnp.int32))
        due, missing, tables, work = plan_elsewhere(
            ids, active, tables, layer, wave, context, elsewhere
        )
        versions = len(self.programs.stores)
        counts += plan_counts(work, missing, tables, layer, versions, beside)
        counts = counts.at[0].add(jnp.sum(due & beside, dtype=jnp.int32))
        return tables, counts, _planned(due & ~beside, work, tables, layer)

    @_part(donated="y")
    def put(self, y, rows, slots):
        """Returns y with rows of the second processor in their slots. Rows whose slot is past the
        last one are dropped."""
        return y.at[slots].set(rows, mode="drop", unique_indices=True)

    @_part(donated="y")
    def compute(self, y, arena, tables, stores, normed, ids, layer, listed, count):
        """Returns y with the rows of the first `count` experts of `listed`, which have cells."""
        context = self.context(stores)
        batch = ExpertBatch(listed, count, ids, normed)
        return compute(y, arena, batch, context.places(tables, layer), context)

    @_part(donated="y")
    def through(self, y, stores, normed, ids, layer, expert, pieces):
        """Computes an expert without a cell from its record, used as an arena of one cell. Returns
        (y, a value that is ready once the record was read)."""
        context, record = self.context(stores), jnp.concatenate(pieces)
        # The reference slices an arena of at least the largest version.
        most = max(store.shape[2] for store in stores)
        record = jnp.pad(record, ((0, most - record.shape[0]), (0, 0)))
        first = jnp.zeros(self.programs.tables.address.shape, jnp.int32)
        listed = jnp.full(first.shape[1], -1, jnp.int32).at[0].set(expert)
        batch = ExpertBatch(listed, jnp.int32(1), ids, normed)
        version = jnp.full_like(first, self.key.run or 0)
        places = ExpertPlaces(context.stores, layer, first, version)
        return compute(y, record, batch, places, context), record[0, 0]

    @_part()
    def absent(self, tables, layer):
        """Returns int32[E], the version in which a miss computes each expert of the layer; −1 for
        experts with a cell."""
        wanted = tables.fill_version[layer]
        version = jnp.where(wanted < 0, -1 - wanted, wanted)
        return jnp.where(tables.address[layer] < 0, version, -1)

    @_part(donated="arena tables")
    def accelerate(self, stores, arena, tables, normed, ids, layer, elsewhere):
        """Computes the device's experts. Returns (y, arena, tables, counts)."""
        context, memory = self.context(stores), DeviceMemory(arena, tables)
        y = zero_outputs(ids.size, normed.shape[1])
        y, memory, counts = page_and_compute(y, normed, ids, memory, layer, context, elsewhere)
        return y, *memory, counts

    @_part(summed="added")
    def combine(self, added, y, weights):
        return add_experts(added, y, weights, self.context().ops)

    @_part()
    def defer(self, added, deferred):
        """Returns the residual stream with what the second processor computed of the layer
        before."""
        return (added.astype(deferred.dtype) + deferred).astype(added.dtype)

    @_part()
    def output(self, params, x, batch, traces, writes):
        trace = jax.tree.map(lambda *parts: jnp.stack(parts), *traces)
        model, shape = self.programs.model(params), self.programs.results
        return step_output(model, x, batch, trace, None, self.key.kind, shape, writes)


def _planned(due, work, tables, layer):
    """Returns a plan for the host, int32[3, E]: the arena row of each expert's cell, READ_THROUGH
    without a cell, IDLE if the expert is not due; whether the cell must be filled; the version
    number in the cell, or to be read."""
    address = tables.address[layer]
    row = jnp.where(due, jnp.where(address < 0, READ_THROUGH, address), IDLE)
    filled = jnp.any(work.fill_expert[:, None] == jnp.arange(address.size), axis=0)
    return jnp.stack([row, filled.astype(jnp.int32), tables.version[layer]])


def beside_program(programs: Programs, key: ProgramKey, rows: int, version: int = 0) -> Program:
    """Returns the program by which a second processor computes one expert, on a CPU device.

    It takes x [rows, D], a record uint16[record rows, D] and how many rows of x are in use, and
    returns float32[rows, D].

    - `key`: key of the step.
    - `version`: version number of the record.
    """
    steps, context = programs.steps, programs.context(key)
    assert steps.second is not None
    formats = None
    if steps.formats is not None:  # of a store with this record alone
        formats = (steps.formats[version]._replace(places=None),)
    record = steps.layout.records[0] if formats is None else formats[0].store
    hidden, implementation = steps.layout.hidden, steps.second.implementation
    arithmetic = steps.ops.arithmetic
    options = ExpertOptions(
        context.activation, context.row_tile, formats, implementation, arithmetic=arithmetic
    )

    def beside(x, record, count):
        stores: tuple[Leaf, ...] = (AbsentRecords((1, 1, *record.shape)),)
        ids = (jnp.arange(rows, dtype=jnp.int32) >= count).astype(jnp.int32)[:, None]
        nothing = jnp.zeros((1, 1), jnp.int32)
        batch = ExpertBatch(jnp.zeros(1, jnp.int32), jnp.int32(1), ids, x)
        places = ExpertPlaces(stores, 0, nothing, nothing)
        return expert_ffn(zero_outputs(rows, hidden), record, batch, places, options)

    x = jax.ShapeDtypeStruct((rows, hidden), steps.dtype)
    held = jax.ShapeDtypeStruct((record.rows, hidden), jnp.uint16)
    return Program(beside, (x, held, jax.ShapeDtypeStruct((), jnp.int32)), ())

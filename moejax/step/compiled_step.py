"""The step as a pure function: decode (one token of many sequences) or prefill (many tokens).

Both are compiled once. Arena and tables travel in the carry of a scan over each run of equal layers
and are donated, so nothing of their size is ever allocated or copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from host_offload.control.interface import MapSearch
from host_offload.policies.prefetch.expert_map.map_store import MapStore
from moejax.step.experts import (
    DeviceMemory,
    StepContext,
    add_experts,
    compute,
    compute_materialized,
    compute_planned,
    materialize,
    page_and_compute,
    stage_layer,
    zero_after,
    zero_outputs,
)
from moejax.step.map_search import Foreseen, Lookahead
from moejax.step.results import ResultShape
from moejax.step.step_parts import (
    LayerTrace,
    Routing,
    StepOutput,
    TraceArrays,
    embedding_array,
    favour_residents,
    layer_arrays,
    route_layer,
    step_output,
    step_tokens,
)
from pallas_kernels.combine import combine_and_count, combine_with_squares, row_squares
from pallas_kernels.expert_ffn import Combined, Epilogue, ExpertBatch, counters_size
from pallas_kernels.plan import plan_resident, plan_routed
from pallas_kernels.plan.record import record, record_size
from pallas_kernels.stage import Entries

if TYPE_CHECKING:
    from moejax.models.attention.kind import Tokens
    from moejax.models.layers import Decoder, LayerStack
    from moejax.models.model_config import ModelConfig

LAYERS_A_TURN = 4, 8
"""Most layers in one turn of a loop whose layers carry their index: with plans, without plans.

The loop's condition costs a launch a turn, and more layers in a turn take longer to compile: 4
layers take a quarter longer than one. 8 rather than 4 take another quarter without plans and
another half with them. Each kernel is compiled once."""


class _Carry(NamedTuple):
    """The values that go from layer to layer."""

    x: jax.Array
    memory: DeviceMemory
    y: jax.Array | None = None
    """float32[T·K, D] of page_and_compute; None: each layer has its own."""
    records: jax.Array | None = None
    """int32[L, record_size]: the records of MoE layers; None: each layer returns its own."""
    squares: jax.Array | None = None
    """float32[T, N]: row_squares of x, if the stack takes them; None: the next kernel reads x."""
    foreseen: Foreseen | None = None
    """What a map search foresees; None without a search."""
    index: jax.Array | None = None
    """int32[1]: the layer in its stack, if the layer's last kernel increments it; None: the loop
    counts."""
    counters: jax.Array | None = None
    """int32 zeros, with an index: counters by which the programs of a kernel find out which of them
    ends last."""


def device_step(
    model: Decoder,
    context: StepContext,
    memory: DeviceMemory,
    batch: tuple,
    kind: str,
    results: ResultShape,
    *,
    forced: Routing | None = None,
    stages: Entries | None = None,
    maps: tuple[MapStore, MapSearch] | None = None,
) -> tuple[DeviceMemory, StepOutput]:
    """Runs one step: decode computes one token for every row, prefill all chunks, layer by layer,
    so that an active expert crosses the link once a layer.

    - `batch`: of decode (current tokens of all rows; positions int32[R], −1: an empty row; block
      table int32[R, B], KV rows of the sequences' pages). Of prefill (a PrefillBatch, the block
      table, the current tokens).
    - `kind`: one of programs.STEPS; kinds of prefill differ in what they compute of the targets.
    - `results`: layout of StepOutput.results.
    - `forced`: routing to use instead of the router's, [L, T, K].
    - `stages`: transfers to carry out beside the misses. Those of a layer follow its experts, so
      the next step is the first to see them.
    - `maps`: the store that a decode step searches for experts of its layers to come, and how.
    """
    ids, tokens = step_tokens(batch, context)
    x = model.embed(ids, tokens)
    embedded = x[:, : model.config.hidden_size]
    embedding = embedding_array(embedded, context.arrays)
    look = first = None
    carry = _Carry(x, memory)
    if maps is not None:
        look = Lookahead(*maps, model.config.num_experts_per_tok, tokens.valid, context)
        memory, seen, first = look.begin(embedded, memory)
        carry = _Carry(x, memory, foreseen=seen)
    few, k = kind == "decode", model.config.num_experts_per_tok
    # Stage lists and searches read the index after the layer's last kernel, which increments it.
    ends = context.ops.ends_layers and not any(stack.finishes for stack in model.runs)
    counts = few and ends and not (stages or look or context.arrays)
    most = LAYERS_A_TURN[context.resident] if counts else None
    if few:
        carry = _share_outputs(carry, model.config, context, counts)

    def layer(stack: LayerStack, i: jax.Array, carry: _Carry):
        x, memory, foreseen = carry.x, carry.memory, carry.foreseen
        moe_layer, done, ahead = stack.first_moe_layer + i, None, None
        if context.window and stack.is_moe:
            # The next layer's experts come while this layer computes; the first layer's come while
            # the last one computes.
            upcoming = (moe_layer + 1) % memory.tables.clock.shape[0]
            memory = materialize(memory, upcoming, x, context)
        carry = _attend(stack, i, carry._replace(memory=memory), tokens, context)
        before = carry.x
        # If routing did not wait for attention, fills could come before it reads the arena, and XLA
        # would copy the arena.
        if stack.config.parallel:
            carry = carry._replace(x=jnp.where(zero_after(before) == 0, x, before))
        if stack.second is not None:
            after = zero_after(before[:, -1:])  # of the second attention
            carry = carry._replace(x=jnp.where(after == 0, before, 0))
        if not stack.is_moe:
            out = stack.feed_forward(i, carry.x, tokens)
            out = stack.finish(i, before, out, tokens) if stack.finishes else out
            return carry._replace(x=out), None
        carry, (normed, ids, weights), counts = _sparse(stack, i, carry, tokens, forced, context)
        if stack.finishes:
            carry = carry._replace(x=stack.finish(i, before, carry.x, tokens))
        x, memory = carry.x, carry.memory
        if stack.config.routes_apart and context.arrays:
            # Behind a barrier, so that routing is compiled as without the arrays.
            normed = stack.router_input(i, lax.optimization_barrier((before, x))[0], tokens)
        seen = layer_arrays(stack, i, normed, tokens, context.arrays)
        trace = None if counts is None else LayerTrace(ids, weights, counts, seen)
        if stages is not None:
            # After the layer's experts, so that a transfer changes only what the next step finds.
            after = stages._replace(layer=stages.layer + zero_after(x))
            memory, done = stage_layer(memory, moe_layer, after, context)
        if look is not None and foreseen is not None:
            probs = seen.probs  # the array of the trace, if the step returns one
            if probs is None:
                probs = layer_arrays(stack, i, normed, tokens, frozenset({"probs"})).probs
            memory, foreseen, ahead = look.after_layer(memory, foreseen, moe_layer, probs, x)
        out = seen if few else trace, done, ahead
        return carry._replace(memory=memory, foreseen=foreseen), out

    carry, (trace, done, ahead) = _over_layers(model, layer, carry, most)
    x, memory = carry.x, carry.memory
    if carry.records is not None:
        trace = LayerTrace.unpacked(carry.records, trace, x.shape[0], k)
        if context.resident:  # without plans, make the counts and tables that plans would make
            tables, counts = plan_resident(memory.tables, carry.records[:, : x.shape[0] * k])
            memory, trace = memory._replace(tables=tables), trace._replace(counts=counts)
    trace = trace._replace(arrays=trace.arrays._replace(embedding=embedding))
    staged = None if done is None else jnp.max(done, axis=0)
    writes = (memory.arena.token,) if context.queued else ()
    output = step_output(model, x, batch, trace, staged, kind, results, writes)
    if first is not None:
        ahead = ahead.reshape(-1, *first.shape[1:])
        output = output._replace(ahead=jnp.concatenate([first, ahead]))
    if context.hidden:
        output = output._replace(hidden=x)
    return memory, output


def _attend(
    stack: LayerStack, i: jax.Array, carry: _Carry, tokens: Tokens, context: StepContext
) -> _Carry:
    """Returns the carry after the attention of layer `i` of the stack."""
    x, arena = carry.x, carry.memory.arena
    x, arena, squares, counters = stack.attend(
        *(i, x, arena, tokens, context.page.block_size, carry.squares, carry.counters),
        with_squares=stack.gives_squares(x.shape[0]),
    )
    memory = carry.memory._replace(arena=arena)
    return carry._replace(x=x, memory=memory, squares=squares, counters=counters)


def _share_outputs(
    carry: _Carry, config: ModelConfig, context: StepContext, counts: bool
) -> _Carry:
    """Returns the carry with one y, and one array of records, for all layers of a decode step.

    No layer then zeroes a y of its own, since the same tokens are padding in every layer. A prefill
    step does without: its y would take memory beside all that attention needs, and taking its
    records apart would copy megabytes.

    - `counts`: whether MoE layers carry their index.
    """
    layers, experts = carry.memory.tables.address.shape
    pairs = carry.x.shape[0] * config.num_experts_per_tok
    counted = not context.resident  # resident steps count after the last layer
    size = record_size(pairs, experts, len(context.stores)) if counted else 2 * pairs
    records = jnp.zeros((layers, size), jnp.int32)
    counters = None
    if counts and context.ops.merges_by_counters:
        heads = carry.x.shape[0] * context.page.kv_heads
        counters = jnp.zeros(max(counters_size(*carry.x.shape), heads), jnp.int32)
    y = zero_outputs(pairs, config.expert_hidden)
    return carry._replace(y=y, records=records, counters=counters)


def _sparse(
    stack: LayerStack,
    i: jax.Array,
    carry: _Carry,
    tokens: Tokens,
    forced: Routing | None,
    context: StepContext,
) -> tuple[_Carry, tuple[jax.Array, ...], jax.Array | None]:
    """Routes a layer and computes its experts.

    Returns (carry, (normed, ids, weights), the layer's counts; None if they are in the records).
    """
    x, memory, shared, records = carry.x, carry.memory, carry.y, carry.records
    layer = stack.first_moe_layer + i
    if context.resident and shared is not None and records is not None:
        routed = stack.route_and_list(i, x, tokens, records, carry.squares, carry.counters)
        x, normed, ids, weights, records, active, count, counters = routed
        carry = carry._replace(records=records, counters=counters)
        end, batch = _epilogue(stack, carry, x, weights), ExpertBatch(active, count, ids, normed)
        places = context.places(memory.tables, layer)
        y = compute(shared, memory.arena, batch, places, context, end)
        y = lax.optimization_barrier(y)
        return _add_experts(stack, carry, x, y, weights, context), (normed, ids, weights), None
    favour = favour_residents(memory.tables.address, layer, context)
    # The fused kernel has no place for a forced routing between router and plan, and corrects
    # scores by the model's own bias only. A window has no plan.
    between = forced is not None or favour is not None or context.window or context.in_place
    between |= stack.config.routes_apart
    fused = context.ops.fuses_route_plan and not between
    if fused and shared is not None and records is not None:
        versions = len(context.stores)
        x, normed, ids, weights, tables, records, work = stack.route_and_plan(
            i, x, tokens, memory.tables, records, versions, carry.squares
        )
        memory = memory._replace(tables=tables)
        end = _epilogue(stack, carry, x, weights)
        y, memory = compute_planned(shared, normed, ids, memory, layer, work, context, end)
        carry = carry._replace(memory=memory, records=records)
        return _add_experts(stack, carry, x, y, weights, context), (normed, ids, weights), None
    x, normed, ids, weights = route_layer(stack, i, x, tokens, forced, favour, carry.squares)
    y = zero_outputs(ids.size, x.shape[1]) if shared is None else shared
    counts = None
    if records is not None and not (context.window or context.in_place):
        with jax.named_scope("plan"):
            tables, records, work = plan_routed(
                *(memory.tables, layer, ids, weights, records),
                versions=len(context.stores),
                implementation=context.ops.plan,
            )
        memory = memory._replace(tables=tables)
        y, memory = compute_planned(y, normed, ids, memory, layer, work, context)
    else:
        find = compute_materialized if context.window else page_and_compute
        y, memory, counts = find(y, normed, ids, memory, layer, context)
        if records is not None:
            row = record(ids, weights, counts)
            records, counts = lax.dynamic_update_index_in_dim(records, row, layer, 0), None
    carry = carry._replace(memory=memory, records=records)
    return _add_experts(stack, carry, x, y, weights, context), (normed, ids, weights), counts


def _epilogue(
    stack: LayerStack, carry: _Carry, x: jax.Array, weights: jax.Array
) -> Epilogue | None:
    """Returns the extra work of the last product's kernel; None if there is none.

    - `x`: [T, D], the residual stream that the experts add to.
    """
    if carry.index is None or carry.counters is None:
        return None
    wanted = stack.takes_squares(x.shape[0])
    return Epilogue(x, weights, carry.index, carry.counters, stack.first_moe_layer, wanted)


def _add_experts(
    stack: LayerStack,
    carry: _Carry,
    x: jax.Array,
    y: Any,
    weights: jax.Array,
    context: StepContext,
) -> _Carry:
    """Returns the carry with the experts' outputs added to x.

    - `y`: the experts' outputs, or Combined after an epilogue.
    """
    if isinstance(y, Combined):
        y, x, index, counters, squares = y
        return carry._replace(x=x, y=y, index=index, counters=counters, squares=squares)
    carry = carry._replace(y=None if carry.y is None else y)
    index, with_squares = carry.index, stack.takes_squares(x.shape[0])
    if index is None and not with_squares:
        return carry._replace(x=add_experts(x, y, weights, context.ops), squares=None)
    with jax.named_scope("combine"):
        inputs, squares = (x, y.reshape(*weights.shape, -1), weights), None
        if with_squares:
            made = combine_with_squares(*inputs, index, implementation=context.ops.combine)
            x, squares, index = lax.optimization_barrier(made)
        else:
            assert index is not None
            made = combine_and_count(*inputs, index, implementation=context.ops.combine)
            x, index = lax.optimization_barrier(made)
    return carry._replace(x=x, index=index, squares=squares)


def _over_layers(
    model: Decoder,
    layer: Callable[[LayerStack, jax.Array, _Carry], Any],
    carry: _Carry,
    most: int | None,
) -> tuple[_Carry, Any]:
    """Runs all layers. Returns (the last layer's carry, the outputs of MoE layers, stacked).

    - `layer`: computes one layer, given its index in its stack.
    - `most`: most MoE layers in a turn of the loop; such layers carry their index themselves and
      return nothing else. None: the loop counts.
    """

    def counted(stack, carry):
        after, out = layer(stack, *carry)
        return (carry[0] + 1, after), out

    traces = []
    for stack in model.runs:
        carry = carry._replace(squares=_squares(stack, carry))
        if most is not None and stack.is_moe:
            carry = _counting_itself(stack, layer, carry, most)
            traces.append((TraceArrays(), None, None))
            continue
        # The index is carried: a scan copies it out of an array of indexes in every layer.
        (_, carry), trace = lax.scan(
            lambda carry, _, stack=stack: counted(stack, carry),
            (jnp.int32(0), carry),
            length=stack.size,
        )
        if stack.is_moe:
            traces.append(trace)
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *traces)


def _squares(stack: LayerStack, carry: _Carry) -> jax.Array | None:
    """Returns the row squares that the stack's first layer takes; None if it takes none."""
    if not stack.takes_squares(carry.x.shape[0]):
        return None
    if carry.squares is not None:
        return carry.squares
    return row_squares(carry.x, implementation=stack.ops.rms_norm)


def _counting_itself(
    stack: LayerStack,
    layer: Callable[[LayerStack, jax.Array, _Carry], Any],
    carry: _Carry,
    most: int,
) -> _Carry:
    """Runs a stack whose layers increment the index in their last kernel. Returns the carry.

    - `most`: most layers in a turn of the loop.
    """
    layers = max(n for n in range(1, most + 1) if stack.size % n == 0)

    def index(carry: _Carry) -> jax.Array:
        assert carry.index is not None
        return carry.index[0]

    def turn(carry: _Carry) -> _Carry:
        for _ in range(layers):
            carry = layer(stack, index(carry), carry)[0]
        return carry

    # The comparison must be a launch of its own and not come from the layer's kernel: in a CUDA
    # graph, XLA reads a condition that launches nothing without waiting for the layer.
    after = lax.while_loop(
        lambda carry: index(carry) < stack.size,
        turn,
        carry._replace(index=jnp.zeros(1, jnp.int32)),
    )
    return after._replace(index=None)

"""The two steps as pure functions: decode (one token of many sequences) and prefill (many tokens).

Each is compiled once. Arena and tables travel in the carry of a scan over each run of equal layers
and are donated, so nothing of their size is ever allocated or copied.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from moejax.models.decoder import Decoder
from moejax.models.layers import LayerStack
from moejax.requests.request import PrefillKind
from moejax.step.context import DeviceMemory, StepContext
from moejax.step.experts import experts_layer, stage_layer, zero_after
from moejax.step.parts import (
    LayerTrace,
    PrefillBatch,
    Routing,
    StepOutput,
    decode_output,
    decode_tokens,
    prefill_output,
    prefill_tokens,
    route_layer,
)
from moejax.step.trace_arrays import embedding_array, layer_arrays
from pallas_kernels.stage import Entries


def decode_step(
    model: Decoder,
    context: StepContext,
    memory: DeviceMemory,
    tokens: jax.Array,
    positions: jax.Array,
    block_table: jax.Array,
    *,
    forced: Routing | None = None,
    stages: Entries | None = None,
) -> tuple[DeviceMemory, StepOutput]:
    """One token for every row.

    tokens, positions: int32[R]; position −1: an empty row. block_table int32[R, B]: KV rows of the
    sequences' pages. forced: routing to use instead of the router's. stages: transfers to carry out
    beside the misses; each layer's after its experts were computed, so visible from the next step.
    """
    batch = decode_tokens(positions, block_table, context)
    x = model.embed(tokens)
    x, memory, trace, staged = _layers(model, context, memory, x, batch, forced, stages)
    return memory, decode_output(model, x, trace, staged)


def prefill_step(
    model: Decoder,
    context: StepContext,
    memory: DeviceMemory,
    prefill: PrefillBatch,
    block_table: jax.Array,
    kind: PrefillKind,
    *,
    forced: Routing | None = None,
    stages: Entries | None = None,
) -> tuple[DeviceMemory, StepOutput]:
    """Every layer over all chunks; an active expert crosses the link once a layer.

    block_table int32[R, B]. kind: what to compute of the targets. forced: [L, N·C, K] each.
    stages: as in decode_step.
    """
    batch = prefill_tokens(prefill, block_table, context)
    x = model.embed(prefill.tokens.reshape(-1))
    x, memory, trace, staged = _layers(model, context, memory, x, batch, forced, stages)
    return memory, prefill_output(model, x, prefill, trace, staged, kind)


def _layers(model, context, memory, x, tokens, forced, stages):
    """All layers over x [T, D]; returns (x, memory, LayerTrace of all layers, staged)."""
    embedding = embedding_array(x, context.arrays)

    def layer(stack: LayerStack, carry, i):
        x, (arena, tables) = carry
        x, arena = stack.attend(i, x, arena, tokens, context.page)
        memory = DeviceMemory(arena, tables)
        if not stack.is_moe:
            return (stack.feed_forward(i, x, tokens), memory), None
        x, normed, ids, weights = route_layer(stack, i, x, tokens, forced)
        seen = layer_arrays(stack, i, normed, tokens, context.arrays)
        moe_layer, done = stack.first_moe_layer + i, None
        x, memory, counts = experts_layer(x, normed, ids, weights, memory, moe_layer, context)
        if stages is not None:
            # A transfer comes after the layer's experts, so it changes what the next step finds.
            after = stages._replace(layer=stages.layer + zero_after(x))
            memory, done = stage_layer(memory, moe_layer, after, context)
        return (x, memory), (LayerTrace(ids, weights, counts, seen), done)

    traces = []
    carry: tuple[jax.Array, DeviceMemory] = (x, memory)
    for stack in model.runs:
        carry, trace = lax.scan(
            lambda carry, i, stack=stack: layer(stack, carry, i), carry, jnp.arange(stack.size)
        )
        if stack.is_moe:
            traces.append(trace)
    trace, done = jax.tree.map(lambda *parts: jnp.concatenate(parts), *traces)
    trace = trace._replace(arrays=trace.arrays._replace(embedding=embedding))
    return *carry, trace, None if done is None else jnp.max(done, axis=0)

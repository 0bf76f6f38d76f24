"""The two steps as pure functions: decode (one token of many sequences) and prefill (a prefill
step).

Each is compiled once. Arena and tables travel in the carry of a scan over each run of equal layers
and are donated, so nothing of their size is ever allocated or copied.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from host_offload.memory.tables import Tables
from moejax.models.decoder import Decoder
from moejax.models.layers import LayerStack
from moejax.step.experts import zero_after
from moejax.step.parts import (
    LayerTrace,
    PrefillBatch,
    Routing,
    StepOutput,
    decode_output,
    decode_tokens,
    experts_layer,
    prefill_output,
    prefill_tokens,
    route_layer,
)
from moejax.step.trace_arrays import embedding_array, layer_arrays
from pallas_kernels import Ops
from pallas_kernels.kv_write import KVPage
from pallas_kernels.records.versions import Formats
from pallas_kernels.stage import Entries, stage


def decode_step(
    model: Decoder,
    stores: tuple[jax.Array, ...],
    arena: jax.Array,
    tables: Tables,
    tokens: jax.Array,
    positions: jax.Array,
    block_table: jax.Array,
    *,
    forced: Routing | None = None,
    stages: Entries | None = None,
    page: KVPage,
    ops: Ops,
    formats: Formats | None = None,
    arrays: frozenset[str] = frozenset(),
) -> tuple[jax.Array, Tables, StepOutput]:
    """One token for every row.

    tokens, positions: int32[R]; position −1: an empty row. block_table int32[R, B]: KV rows of the
    sequences' pages. forced: routing to use instead of the router's. stages: transfers to carry out
    beside the misses; each layer's after its experts were computed, so visible from the next step.
    formats: of the stores' versions, see VersionFormats; None: one version, dense. arrays: of
    TRACE_ARRAYS, those that the output has.

    Returns (arena, tables, output).
    """
    batch = decode_tokens(positions, block_table, page=page, ops=ops)
    x = model.embed(tokens)
    x, arena, tables, trace, staged = _layers(
        model, x, arena, tables, stores, batch, forced, stages, page, ops, formats, arrays, waves=1
    )
    return arena, tables, decode_output(model, x, trace, staged)


def prefill_step(
    model: Decoder,
    stores: tuple[jax.Array, ...],
    arena: jax.Array,
    tables: Tables,
    prefill: PrefillBatch,
    block_table: jax.Array,
    *,
    forced: Routing | None = None,
    stages: Entries | None = None,
    page: KVPage,
    ops: Ops,
    formats: Formats | None = None,
    waves: int,
    score: bool,
    prompt_logprobs: bool = False,
    arrays: frozenset[str] = frozenset(),
) -> tuple[jax.Array, Tables, StepOutput]:
    """A prefill step: every layer over all its chunks; an active expert crosses the link once a
    layer.

    block_table int32[R, B]. score: also compute the targets' log-probabilities; prompt_logprobs:
    and their ranks and the likeliest tokens. forced: [L, N·C, K] each. stages, formats, arrays:
    as in decode_step.

    Returns (arena, tables, output).
    """
    batch = prefill_tokens(prefill, block_table, page=page, ops=ops)
    x = model.embed(prefill.tokens.reshape(-1))
    x, arena, tables, trace, staged = _layers(
        model, x, arena, tables, stores, batch, forced, stages, page, ops, formats, arrays, waves
    )
    output = prefill_output(
        model, x, prefill, trace, staged, score=score, prompt_logprobs=prompt_logprobs
    )
    return arena, tables, output


def _layers(
    model, x, arena, tables, stores, tokens, forced, stages, page, ops, formats, arrays, waves
):
    """All layers over x [T, D]; returns (x, arena, tables, LayerTrace of all layers, staged)."""
    config, embedding = model.config, embedding_array(x, arrays)

    def layer(stack: LayerStack, carry, i):
        x, arena, tables = carry
        x, arena = stack.attend(i, x, arena, tokens, page)
        if not stack.is_moe:
            return (stack.feed_forward(i, x, tokens), arena, tables), None
        x, normed, ids, weights = route_layer(stack, i, x, tokens, forced)
        seen = layer_arrays(stack, i, normed, tokens, arrays)
        moe_layer, done = stack.first_moe_layer + i, None
        # A transfer comes after the layer's experts, so it changes what the next step finds.
        x, arena, tables, counts = experts_layer(
            config,
            x,
            normed,
            ids,
            weights,
            arena,
            tables,
            stores,
            moe_layer,
            row_tile=tokens.row_tile,
            waves=waves,
            ops=ops,
            formats=formats,
        )
        if stages is not None:
            after = stages._replace(layer=stages.layer + zero_after(x))
            with jax.named_scope("stage"):
                arena, tables, done = stage(
                    arena,
                    tables,
                    stores,
                    moe_layer,
                    after,
                    formats=formats,
                    implementation=ops.stage,
                )
        return (x, arena, tables), (LayerTrace(ids, weights, counts, seen), done)

    traces = []
    carry = (x, arena, tables)
    for stack in model.runs:
        carry, trace = lax.scan(
            lambda carry, i, stack=stack: layer(stack, carry, i), carry, jnp.arange(stack.size)
        )
        if stack.is_moe:
            traces.append(trace)
    trace, done = jax.tree.map(lambda *parts: jnp.concatenate(parts), *traces)
    trace = trace._replace(arrays=trace.arrays._replace(embedding=embedding))
    x, arena, tables = carry
    return x, arena, tables, trace, None if done is None else jnp.max(done, axis=0)

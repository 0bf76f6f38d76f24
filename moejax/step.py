"""The two steps as pure functions: decode (one token of many sequences) and prefill (a sweep).

Each is compiled once. Arena and tables travel in the carry of a scan over each run of equal layers
and are donated, so nothing of their size is ever allocated or copied.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from host_offload.tables import Tables
from moejax.experts import Paging, add_experts, page_and_compute
from moejax.models.layers import LayerStack
from moejax.models.qwen3_moe import Qwen3Moe
from pallas_kernels import Ops
from pallas_kernels.kv_write import KVPage
from pallas_kernels.paged_attention import decode_attention, prefill_attention

Leaf = Any
"""A jax or numpy array, or a jax.ShapeDtypeStruct while a step is lowered."""


@dataclasses.dataclass(frozen=True)
class StepShapes:
    """The start-up shapes: with the model they decide every bit, and nothing else does."""

    rows: int
    """Decode rows R (`max_num_seqs`), padded."""
    chunk: int
    """Prompt tokens computed at once, C; chunks begin at multiples of C in their sequence."""
    sweep_chunks: int
    """Chunks of the largest sweep, N."""
    blocks: int
    """Pages of the longest sequence, B."""
    waves: int = 1
    """Passes over a layer's experts in prefill."""


class Sweep(NamedTuple):
    """Prompt chunks of one prefill step, int32; a sequence's chunks in ascending order."""

    tokens: Leaf
    """[N, C]."""
    row: Leaf
    """[N]: the sequence's row in the block table."""
    start: Leaf
    """[N]: position of the chunk's first token, a multiple of C."""
    length: Leaf
    """[N]: real tokens in the chunk."""
    count: Leaf
    """Chunks in use."""
    last: Leaf
    """[R]: where in the flat sweep a sequence's last prompt token is; −1: not in this sweep."""
    targets: Leaf
    """[N, C]: tokens whose log-probability scoring asks for; unused otherwise."""


class Routing(NamedTuple):
    """Expert ids (ascending per token, E for padding) and weights of every MoE layer, [L, T, K]:
    out of a step as its trace, into a step to force it."""

    ids: Leaf
    weights: Leaf


class StepOutput(NamedTuple):
    logits: jax.Array
    """float32[R, V]; rows without a sequence (prefill: without a finished prompt) mean nothing."""
    routing: Routing
    paging: Paging
    """int32[L] each."""
    scores: jax.Array | None
    """float32[N, C]: log-probabilities of the targets, when scoring."""


def decode_step(
    model: Qwen3Moe,
    stores: tuple[jax.Array, ...],
    arena: jax.Array,
    tables: Tables,
    tokens: jax.Array,
    positions: jax.Array,
    block_table: jax.Array,
    forced: Routing | None = None,
    *,
    page: KVPage,
    ops: Ops,
) -> tuple[jax.Array, Tables, StepOutput]:
    """One token for every row.

    tokens, positions: int32[R]; position −1: an empty row. block_table int32[R, B]: KV rows of the
    sequences' pages. forced: routing to use instead of the router's.

    Returns (arena, tables, output).
    """
    config = model.config
    valid = positions >= 0
    pages = _pages(block_table, positions, valid, page)

    def attention(q, arena, layer):
        return decode_attention(
            q,
            arena,
            block_table,
            positions + 1,
            layer,
            page=page,
            window=config.sliding_window,
            implementation=ops.paged_attention,
        )

    def layer(stack: LayerStack, carry, i):
        x, arena, tables = carry
        x, arena = stack.attend(i, x, arena, positions, pages, page, attention)
        if not stack.is_moe:
            return (stack.feed_forward(i, x), arena, tables), None
        normed, ids, weights = stack.route(i, x, valid)
        moe_layer = stack.first_moe_layer + i
        if forced is not None:
            ids, weights = _forced(forced, moe_layer, ids, config.num_experts)
        y, arena, tables, paging = page_and_compute(
            normed,
            ids,
            arena,
            tables,
            stores,
            moe_layer,
            activation=config.hidden_act,
            row_tile=tokens.shape[0],
            waves=1,
            ops=ops,
        )
        x = add_experts(x, y, weights, ops)
        return (x, arena, tables), (Routing(ids, weights), paging)

    x = model.embed(tokens)
    (x, arena, tables), traces = _scan_runs(model, layer, (x, arena, tables))
    routing, paging = traces
    return arena, tables, StepOutput(model.logits(x), routing, paging, None)


def prefill_step(
    model: Qwen3Moe,
    stores: tuple[jax.Array, ...],
    arena: jax.Array,
    tables: Tables,
    sweep: Sweep,
    block_table: jax.Array,
    forced: Routing | None = None,
    *,
    page: KVPage,
    ops: Ops,
    waves: int,
    score: bool,
) -> tuple[jax.Array, Tables, StepOutput]:
    """A sweep: every layer over all its chunks; an active expert crosses the link once a layer.

    block_table int32[R, B]. score: also compute the targets' log-probabilities. forced: [L, N·C, K]
    each.

    Returns (arena, tables, output).
    """
    config = model.config
    chunks, size = sweep.tokens.shape
    k = config.num_experts_per_tok
    offset = jnp.arange(size)

    def layer(stack: LayerStack, carry, i):
        x, arena, tables = carry
        normed = jnp.zeros_like(x)
        ids = jnp.full((chunks, size, k), config.num_experts, jnp.int32)
        weights = jnp.zeros((chunks, size, k), jnp.float32)

        def part(c, carry):
            x, arena, normed, ids, weights = carry
            positions, valid = sweep.start[c] + offset, offset < sweep.length[c]
            blocks = block_table[sweep.row[c]]
            pages = _pages(jnp.broadcast_to(blocks, (size, blocks.size)), positions, valid, page)

            def attention(q, arena, layer):
                return prefill_attention(
                    q,
                    arena,
                    blocks,
                    sweep.start[c],
                    sweep.length[c],
                    layer,
                    page=page,
                    window=config.sliding_window,
                    implementation=ops.paged_attention,
                )

            h, arena = stack.attend(i, x[c], arena, positions, pages, page, attention)
            if not stack.is_moe:
                return x.at[c].set(stack.feed_forward(i, h)), arena, normed, ids, weights
            routed = stack.route(i, h, valid)
            normed, ids, weights = (
                whole.at[c].set(new)
                for whole, new in zip((normed, ids, weights), routed, strict=True)
            )
            return x.at[c].set(h), arena, normed, ids, weights

        carry = (x, arena, normed, ids, weights)
        x, arena, normed, ids, weights = lax.fori_loop(0, sweep.count, part, carry)
        if not stack.is_moe:
            return (x, arena, tables), None
        moe_layer = stack.first_moe_layer + i
        flat_ids, flat_weights = ids.reshape(-1, k), weights.reshape(-1, k)
        if forced is not None:
            flat_ids, flat_weights = _forced(forced, moe_layer, flat_ids, config.num_experts)
            weights = flat_weights.reshape(weights.shape)
        y, arena, tables, paging = page_and_compute(
            normed.reshape(-1, x.shape[-1]),
            flat_ids,
            arena,
            tables,
            stores,
            moe_layer,
            activation=config.hidden_act,
            row_tile=size,
            waves=waves,
            ops=ops,
        )
        y = y.reshape(chunks, size, k, -1)
        x = lax.fori_loop(
            0, sweep.count, lambda c, x: x.at[c].set(add_experts(x[c], y[c], weights[c], ops)), x
        )
        return (x, arena, tables), (Routing(flat_ids, flat_weights), paging)

    x = model.embed(sweep.tokens)
    (x, arena, tables), (routing, paging) = _scan_runs(model, layer, (x, arena, tables))
    last = x.reshape(-1, x.shape[-1])[jnp.maximum(sweep.last, 0)]
    scores = _score(model, x, sweep) if score else None
    return arena, tables, StepOutput(model.logits(last), routing, paging, scores)


def _scan_runs(model, layer, carry):
    """Scans `layer(stack, carry, i)` over each run; the traces of the MoE runs are joined."""
    traces = []
    for stack in model.runs:
        carry, trace = lax.scan(
            lambda carry, i, stack=stack: layer(stack, carry, i), carry, jnp.arange(stack.size)
        )
        if stack.is_moe:
            traces.append(trace)
    return carry, jax.tree.map(lambda *parts: jnp.concatenate(parts), *traces)


def _pages(block_table, positions, valid, page):
    """KV row of each token's page; −1 where not valid. block_table [T, B], positions [T]."""
    block = jnp.maximum(positions, 0) // page.block_size
    pages = jnp.take_along_axis(block_table, block[:, None], axis=1, mode="clip")[:, 0]
    return jnp.where(valid, pages, -1)


def _forced(forced, layer, routed, experts):
    """The forced routing of a layer, padded where the router's ids [T, K] are."""
    # The ids must depend on the router's, and so on attention: if plan and fill could run before
    # attention has read the arena, XLA would copy the arena (seen on CPU).
    padding = routed == experts
    ids, weights = forced.ids[layer], forced.weights[layer]
    return jnp.where(padding, experts, ids), jnp.where(padding, 0.0, weights)


def _score(model, x, sweep):
    """log p(target) at every position of the sweep, chunk by chunk."""

    def part(c, scores):
        logp = jax.nn.log_softmax(model.logits(x[c]), axis=-1)
        found = jnp.take_along_axis(logp, sweep.targets[c][:, None], axis=1)[:, 0]
        return scores.at[c].set(found)

    return lax.fori_loop(0, sweep.count, part, jnp.zeros(sweep.tokens.shape, jnp.float32))

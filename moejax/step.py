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
from moejax.experts import Paging, add_experts, page_and_compute, unpack_counts
from moejax.models.layers import LayerStack, Tokens
from moejax.models.qwen3_moe import Qwen3Moe
from pallas_kernels import Ops
from pallas_kernels.kv_write import KVPage
from pallas_kernels.paged_attention import decode_attention, prefill_attention
from pallas_kernels.stage import Entries, stage

DECODE_TILE = 16
"""Rows of one matrix product in decode; more rows are more tiles, so that a row's bits do not
depend on how many there are."""

Leaf = Any
"""A jax or numpy array, or a jax.ShapeDtypeStruct while a step is lowered."""


@dataclasses.dataclass(frozen=True)
class StepShapes:
    """The start-up shapes: with the model they decide every bit, and nothing else does."""

    rows: int
    """Decode rows R: `max_num_seqs`, above DECODE_TILE rounded up to whole tiles."""
    chunk: int
    """Prompt tokens computed at once, C; chunks begin at multiples of C in their sequence."""
    sweep_chunks: int
    """Chunks of the largest sweep, N."""
    blocks: int
    """Pages of the longest sequence, B."""
    waves: int = 1
    """Passes over a layer's experts in prefill."""
    buckets: tuple[int, ...] = ()
    """Row counts that decode is compiled for, ascending, the last one R; empty: R alone."""

    def bucket(self, rows: int) -> int:
        """The smallest row count that decode is compiled for and that holds so many rows."""
        return next((b for b in self.buckets if b >= rows), self.rows)


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
    missed: jax.Array
    """bool[L, E]: active experts that were not resident when their layer began."""
    missed_routes: jax.Array
    """int32[R], in prefill int32[N]: routed (layer, expert) pairs of the row or chunk that missed."""
    scores: jax.Array | None
    """float32[N, C]: log-probabilities of the targets, when scoring."""
    staged: jax.Array | None
    """int32[S]: 1 for each entry of the stage list that was carried out."""


def decode_step(
    model: Qwen3Moe,
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
) -> tuple[jax.Array, Tables, StepOutput]:
    """One token for every row.

    tokens, positions: int32[R]; position −1: an empty row. block_table int32[R, B]: KV rows of the
    sequences' pages. forced: routing to use instead of the router's. stages: transfers to carry out
    beside the misses; each layer's after its experts were computed, so visible from the next step.

    Returns (arena, tables, output).
    """
    valid, lengths = positions >= 0, positions + 1
    row_tile = min(DECODE_TILE, tokens.shape[0])

    def attention(q, arena, layer):
        return decode_attention(
            q,
            arena,
            block_table,
            lengths,
            layer,
            page=page,
            window=model.config.sliding_window,
            implementation=ops.paged_attention,
        )

    batch = Tokens(
        positions=positions,
        valid=valid,
        pages=_pages(block_table, positions, valid, page),
        tiles=_tiles(valid, row_tile),
        row_tile=row_tile,
        attention=attention,
    )
    x, arena, tables, trace = _layers(
        model, model.embed(tokens), arena, tables, stores, batch, forced, stages, page, ops, waves=1
    )
    logits = model.logits(x, row_tile)
    missed_routes = _missed_routes(trace)
    return arena, tables, StepOutput(logits, **trace, missed_routes=missed_routes, scores=None)


def prefill_step(
    model: Qwen3Moe,
    stores: tuple[jax.Array, ...],
    arena: jax.Array,
    tables: Tables,
    sweep: Sweep,
    block_table: jax.Array,
    *,
    forced: Routing | None = None,
    stages: Entries | None = None,
    page: KVPage,
    ops: Ops,
    waves: int,
    score: bool,
) -> tuple[jax.Array, Tables, StepOutput]:
    """A sweep: every layer over all its chunks; an active expert crosses the link once a layer.

    block_table int32[R, B]. score: also compute the targets' log-probabilities. forced: [L, N·C, K]
    each. stages: as in decode_step.

    Returns (arena, tables, output).
    """
    chunks, size = sweep.tokens.shape
    offset = jnp.arange(size)
    positions = (sweep.start[:, None] + offset).reshape(-1)
    in_use = jnp.arange(chunks) < sweep.count
    valid = ((offset < sweep.length[:, None]) & in_use[:, None]).reshape(-1)

    def attention(q, arena, layer):
        return prefill_attention(
            q,
            arena,
            block_table,
            sweep.row,
            sweep.start,
            sweep.length,
            sweep.count,
            layer,
            page=page,
            window=model.config.sliding_window,
            implementation=ops.paged_attention,
        )

    batch = Tokens(
        positions=positions,
        valid=valid,
        pages=_pages(jnp.repeat(block_table[sweep.row], size, axis=0), positions, valid, page),
        tiles=sweep.count,
        row_tile=size,
        attention=attention,
    )
    x = model.embed(sweep.tokens.reshape(-1))
    x, arena, tables, trace = _layers(
        model, x, arena, tables, stores, batch, forced, stages, page, ops, waves
    )
    rows = sweep.last.shape[0]
    logits = model.logits(x[jnp.maximum(sweep.last, 0)], min(DECODE_TILE, rows))
    scores = _score(model, x.reshape(chunks, size, -1), sweep) if score else None
    missed_routes = jnp.sum(_missed_routes(trace).reshape(chunks, size), axis=1)
    return arena, tables, StepOutput(logits, **trace, missed_routes=missed_routes, scores=scores)


def _layers(model, x, arena, tables, stores, tokens, forced, stages, page, ops, waves):
    """All layers over x [T, D]; returns (x, arena, tables, fields of StepOutput): routing, paging,
    missed, staged."""
    config = model.config

    def layer(stack: LayerStack, carry, i):
        x, arena, tables = carry
        x, arena = stack.attend(i, x, arena, tokens, page)
        if not stack.is_moe:
            return (stack.feed_forward(i, x, tokens), arena, tables), None
        normed, ids, weights = stack.route(i, x, tokens)
        moe_layer = stack.first_moe_layer + i
        if forced is not None:
            ids, weights = _forced(forced, moe_layer, ids, config.num_experts)
        y, arena, tables, counts = page_and_compute(
            normed,
            ids,
            arena,
            tables,
            stores,
            moe_layer,
            activation=config.hidden_act,
            row_tile=tokens.row_tile,
            waves=waves,
            ops=ops,
        )
        done = None
        if stages is not None:
            with jax.named_scope("stage"):
                arena, tables, done = stage(
                    arena, tables, stores, moe_layer, stages, implementation=ops.stage
                )
        x = add_experts(x, y, weights, ops)
        return (x, arena, tables), (Routing(ids, weights), counts, done)

    traces = []
    carry = (x, arena, tables)
    for stack in model.runs:
        carry, trace = lax.scan(
            lambda carry, i, stack=stack: layer(stack, carry, i), carry, jnp.arange(stack.size)
        )
        if stack.is_moe:
            traces.append(trace)
    routing, counts, done = jax.tree.map(lambda *parts: jnp.concatenate(parts), *traces)
    paging, missed = unpack_counts(counts, config.num_experts)
    staged = None if done is None else jnp.max(done, axis=0)
    x, arena, tables = carry
    trace = {"routing": routing, "paging": paging, "missed": missed, "staged": staged}
    return x, arena, tables, trace


def _missed_routes(trace):
    """int32[T]: of each token's routed experts, over all layers, how many were missing."""
    ids = trace["routing"].ids
    # Padding has the id E, which is not missing.
    missed = jnp.pad(trace["missed"], ((0, 0), (0, 1))).astype(jnp.int32)
    layer = jnp.arange(ids.shape[0])[:, None, None]
    return jnp.sum(missed[layer, ids], axis=(0, 2))


def _forced(forced, layer, routed, experts):
    """The forced routing of a layer, padded where the router's ids [T, K] are."""
    # The ids must depend on the router's, and so on attention: if plan and fill could run before
    # attention has read the arena, XLA would copy the arena (seen on CPU).
    padding = routed == experts
    ids, weights = forced.ids[layer], forced.weights[layer]
    return jnp.where(padding, experts, ids), jnp.where(padding, 0.0, weights)


def _pages(block_table, positions, valid, page):
    """KV row of each token's page; −1 where not valid. block_table [T, B], positions [T]."""
    block = jnp.maximum(positions, 0) // page.block_size
    pages = jnp.take_along_axis(block_table, block[:, None], axis=1, mode="clip")[:, 0]
    return jnp.where(valid, pages, -1)


def _tiles(valid, row_tile):
    """Row tiles up to the last row in use."""
    last = jnp.max(jnp.where(valid, jnp.arange(valid.shape[0]) + 1, 0))
    return (last + row_tile - 1) // row_tile


def _score(model, x, sweep):
    """log p(target) at every position of the sweep, chunk by chunk."""

    def part(c, scores):
        logp = jax.nn.log_softmax(model.logits(x[c], x.shape[1]), axis=-1)
        found = jnp.take_along_axis(logp, sweep.targets[c][:, None], axis=1)[:, 0]
        return scores.at[c].set(found)

    return lax.fori_loop(0, sweep.count, part, jnp.zeros(sweep.tokens.shape, jnp.float32))

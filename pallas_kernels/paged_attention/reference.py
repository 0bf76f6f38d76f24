import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.paged_attention.span import SPAN


def decode_attention(q, arena, block_table, lengths, layer, options, q_rope, per_layer):
    q = whole(q, q_rope)

    # One sequence at a time: the shapes of its products are those of a lone request, and the work
    # is that of the real tokens. (Batched over rows it was slower on CPU at every length tried.)
    def row(t):
        return block_table[t], (lengths[t] - 1)[None]

    chosen = _choose_all(per_layer.indexer, arena, row, q.shape[0], layer, options, q.dtype)

    def attend(t, out):
        table, positions = row(t)
        own = None if chosen is None else chosen[t][None]
        attended = _attend(q[t][None], arena, table, positions, layer, options, per_layer, own)
        return out.at[t].set(attended[0])

    out = jnp.zeros((q.shape[0], q.shape[1] * options.page.value_dim), q.dtype)
    return lax.fori_loop(0, q.shape[0], attend, out)


def prefill_attention(q, arena, block_table, chunks, layer, options, q_rope, per_layer):
    q, (row, start, length, count) = whole(q, q_rope), chunks
    size = q.shape[0] // row.shape[0]

    def chunk(c):
        # Padding rows repeat the last real position, so they look at no page that is not there.
        return block_table[row[c]], start[c] + jnp.minimum(jnp.arange(size), length[c] - 1)

    chosen = _choose_all(per_layer.indexer, arena, chunk, count, layer, options, q.dtype)

    def attend(c, out):
        table, positions = chunk(c)
        rows = lax.dynamic_slice_in_dim(q, c * size, size)
        own = None if chosen is None else lax.dynamic_slice_in_dim(chosen, c * size, size)
        attended = _attend(rows, arena, table, positions, layer, options, per_layer, own)
        return lax.dynamic_update_slice_in_dim(out, attended, c * size, 0)

    out = jnp.zeros((q.shape[0], q.shape[1] * options.page.value_dim), q.dtype)
    return lax.fori_loop(0, count, attend, out)


def whole(q, q_rope):
    """Joins the parts of queries to the width of keys."""
    return q if q_rope is None else jnp.concatenate([q, q_rope], axis=-1)


def _attend(q, arena, block_table, positions, layer, options, per_layer, chosen):
    """q [C, H, hd] of one sequence, positions [C] ascending (−1: none) -> [C, H·value_dim]. chosen:
    see _choose; None: all tokens."""
    page, scale, (index, sinks, windows, _) = options.page, options.scale, per_layer
    window = None if windows is None else windows[index]
    chunk, heads, head_dim = q.shape
    groups = heads // page.kv_heads
    view = arena.reshape(-1, head_dim * q.dtype.itemsize // 2)
    # [KH, C·G, hd]: all queries that share a KV head are rows of one product.
    by_head = q.reshape(chunk, page.kv_heads, groups, head_dim).transpose(1, 0, 2, 3)
    by_head = by_head.reshape(page.kv_heads, chunk * groups, head_dim)
    row_position = jnp.repeat(positions, groups)[:, None]
    load = functools.partial(_load_span, view, block_table, layer=layer, page=page, dtype=q.dtype)
    spans, kept = positions[-1] // SPAN + 1, None
    if chosen is not None and chunk == 1:
        load = _gather(view, block_table, chosen, layer, page, q.dtype)
        spans = jnp.minimum(spans, -(-chosen.shape[1] // SPAN))
    elif chosen is not None:
        kept = jnp.zeros((chunk, block_table.shape[0] * page.block_size), bool)
        kept = kept.at[jnp.arange(chunk)[:, None], chosen].set(True, mode="drop")
    first = 0 if window is None else jnp.maximum(positions[0] - (window - 1), 0) // SPAN

    def span(s, carry):
        total, top, mass = carry
        keys, values, key_position = load(s)
        # Unseen places of a page may hold anything, also NaN, and 0 · NaN would be NaN.
        written = key_position <= positions[-1]
        if window is not None:
            written = written & (key_position > positions[0] - window)
        values = jnp.where(written[:, None], values, jnp.zeros((), q.dtype))
        scores = (
            lax.dot_general(
                by_head,
                keys,
                (((2,), (2,)), ((0,), (0,))),
                precision=lax.Precision.HIGHEST,
                preferred_element_type=jnp.float32,
            )
            * scale
        )
        seen = key_position <= row_position
        if window is not None:
            seen = seen & (key_position > row_position - window)
        if kept is not None:
            of_span = lax.dynamic_slice_in_dim(kept, s * SPAN, SPAN, axis=1)
            seen = seen & jnp.repeat(of_span, groups, axis=0)
        scores = jnp.where(seen, scores, -jnp.inf)
        new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
        # A row that has seen nothing yet has top −inf; 0 keeps its exponentials at 0, not NaN.
        safe_top = jnp.where(new_top == -jnp.inf, 0.0, new_top)
        shrink = jnp.exp(top - safe_top)
        p = jnp.exp(scores - safe_top[..., None])
        part = lax.dot_general(
            p.astype(q.dtype),
            values,
            (((2,), (1,)), ((0,), (0,))),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        new = total * shrink[..., None] + part, new_top, mass * shrink + jnp.sum(p, axis=-1)
        # A span that a row does not see leaves the row's bits alone, signed zeros included: then
        # it does not matter how far the other rows of the chunk look.
        any_seen = jnp.any(seen, axis=-1)
        return tuple(
            jnp.where(any_seen.reshape(-1, *(1,) * (n.ndim - 2)), n, old)
            for n, old in zip(new, carry, strict=True)
        )

    shape = (page.kv_heads, chunk * groups)
    empty = (
        jnp.zeros((*shape, page.value_dim), jnp.float32),
        jnp.full(shape, -jnp.inf),
        jnp.zeros(shape),
    )
    total, top, mass = lax.fori_loop(first, spans, span, empty)
    if sinks is not None:
        sink = jnp.repeat(
            sinks[index].astype(jnp.float32).reshape(page.kv_heads, 1, groups), chunk, 1
        )
        mass += jnp.exp(sink.reshape(shape) - jnp.where(top == -jnp.inf, 0.0, top))
    out = total / jnp.where(mass == 0.0, 1.0, mass)[..., None]
    out = out.reshape(page.kv_heads, chunk, groups, page.value_dim).transpose(1, 0, 2, 3)
    return out.reshape(chunk, heads * page.value_dim).astype(q.dtype)


def _load_span(view, block_table, span, *, layer, page, dtype):
    """Keys [KH, SPAN, hd], values [KH, SPAN, value_dim] and positions [SPAN] of one span."""
    per_span = SPAN // page.block_size
    blocks = []
    for i in range(per_span):
        row = block_table[span * per_span + i] + layer * page.rows_per_layer
        block = lax.dynamic_slice(view, (row, 0), (page.rows_per_layer, view.shape[1]))
        blocks.append(block.reshape(page.rows_per_token, page.block_size, -1))
    kv = _decode(jnp.concatenate(blocks, axis=1), page, dtype)
    positions = span * SPAN + jnp.arange(SPAN)
    if page.latent:
        return kv, kv[..., : page.latent], positions
    return kv[: page.kv_heads], kv[page.kv_heads :], positions


def _decode(bits, page, dtype):
    """The values of rows of a page."""
    if jnp.dtype(dtype).itemsize == 4:
        bits = bits.reshape(*bits.shape[:-1], page.head_dim, 2)
    return lax.bitcast_convert_type(bits, dtype)


def _choose_all(indexer, arena, rows, count, layer, options, dtype):
    """What _choose returns, of all queries; None without an indexer. A loop of its own: XLA copies
    an arena that two loops within one read.

    - `rows`: (block table of its sequence, positions) of some rows, by their number.
    """
    if indexer is None:
        return None
    page = options.page
    view = arena.reshape(-1, page.head_dim * jnp.dtype(dtype).itemsize // 2)

    def choose(number, chosen):
        table, positions = rows(number)
        first, size = number * len(positions), len(positions)
        q, weights = (lax.dynamic_slice_in_dim(x, first, size) for x in indexer[:2])
        load = functools.partial(_load_span, view, table, layer=layer, page=page, dtype=dtype)
        own = indexer._replace(q=q, weights=weights)
        found = _choose(load, own, most, positions, page)
        return lax.dynamic_update_slice_in_dim(chosen, found, first, 0)

    most = jax.eval_shape(rows, 0)[0].shape[0] * page.block_size
    chosen = jnp.full((len(indexer.q), min(indexer.topk, most)), most, jnp.int32)
    return lax.fori_loop(0, count, choose, chosen)


def _choose(load, indexer, most, positions, page):
    """The positions int32[C, k] of the tokens that each row attends to, ascending; `most` in place
    of those that it does not see."""
    q, weights, topk = indexer
    rows = positions[:, None]

    def span(s, scores):
        keys, _, key_position = load(s)
        products = lax.dot_general(
            q,
            keys[0, :, page.latent :],
            (((2,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        found = jnp.sum(weights[..., None] * jnp.maximum(products, 0), axis=1)
        found = jnp.where(key_position <= rows, found, -jnp.inf)
        return lax.dynamic_update_slice_in_dim(scores, found, s * SPAN, 1)

    scores = jnp.full((len(positions), most), -jnp.inf)
    scores = lax.fori_loop(0, positions[-1] // SPAN + 1, span, scores)
    best, chosen = lax.top_k(scores, min(topk, most))
    return jnp.sort(jnp.where(best == -jnp.inf, most, chosen), axis=1)


def _gather(view, block_table, chosen, layer, page, dtype):
    """Loads spans of the chosen tokens [1, k] alone, in place of _load_span."""
    most = block_table.shape[0] * page.block_size
    tokens = jnp.pad(chosen[0], (0, -chosen.shape[1] % SPAN), constant_values=most)
    held = jnp.minimum(tokens, most - 1)
    row = block_table[held // page.block_size] + layer * page.rows_per_layer
    gathered = _decode(view[row + held % page.block_size], page, dtype)[None]

    def load(s):
        keys = lax.dynamic_slice_in_dim(gathered, s * SPAN, SPAN, axis=1)
        positions = lax.dynamic_slice_in_dim(tokens, s * SPAN, SPAN)
        return keys, keys[..., : page.latent], positions

    return load

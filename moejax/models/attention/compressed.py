"""Attention of DeepSeek-V4: to the tokens of a window, and to entries that each stand for several
tokens (compressed sparse and heavily compressed attention), in one softmax with a sink."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from moejax.models.attention.kind import AttentionLayer, AttentionNumbers, Rows, Tokens
from moejax.models.attention.mamba import unit_rms
from pallas_kernels.head_linear import head_linear
from pallas_kernels.kv_write import KVPage, KVPlaces
from pallas_kernels.kv_write.reference import write_rows
from pallas_kernels.kv_write.rotary import cosine_and_sine
from pallas_kernels.paged_attention import SPAN
from pallas_kernels.rms_norm import rms_norm

ENTRY_ROWS = 16
"""Most rows over which an entry lies: the least tokens of a page. Then an entry is in the page of
its last token, and pages of equal tokens have equal entries."""


@dataclasses.dataclass(frozen=True)
class CompressedAttention:
    """An AttentionKind. A token's row has its key, which is also its value, and what entries are
    made of; the window's are kept. In the far pages, which are kept for good, an entry lies in the
    rows of its last tokens.

    - `window`: tokens that a query sees, itself included.
    - `rate`: tokens of an entry; 0: there are none.
    - `overlaps`: an entry is made of the tokens of the entry before, too, of which each token has
      values of their own.
    - `index_topk`: entries that a query sees, chosen by an indexer with entries of its own.
    """

    q_lora_rank: int
    rotary: int
    groups: int
    o_lora_rank: int
    window: int
    rate: int = 0
    overlaps: bool = False
    index_topk: int = 0
    index_n_heads: int = 0
    index_head_dim: int = 0
    width: int = 0
    """Values of a head."""
    entry_values: int = 0
    """Least values of an entry's row, the same for all layers, so that they share pages."""

    ops = ("kv_write", "head_linear")
    products = ("head_linear",)
    takes_squares = False
    xla_only: ClassVar[Mapping[str, str]] = {
        "paged_attention": "attention to entries of several tokens",
        "kv_write": "rows of which entries are made",
    }

    def for_length(self, max_model_len: int) -> CompressedAttention:
        return self

    @property
    def parts(self) -> tuple[int, ...]:
        """Values of an entry, and of the indexer's."""
        if not self.rate:
            return ()
        return (self.width, self.index_head_dim) if self.index_topk else (self.width,)

    @property
    def columns(self) -> int:
        """Values of a token's row."""
        return self.width + sum(2 * (1 + self.overlaps) * part for part in self.parts)

    @property
    def least_values(self) -> int:
        return -(-sum(self.parts) // self.spread) if self.rate else 0

    @property
    def row_values(self) -> int:
        """Values of an entry's row."""
        return max(self.entry_values, self.least_values)

    @property
    def spread(self) -> int:
        """Rows of an entry."""
        return min(self.rate & -self.rate, ENTRY_ROWS)

    def page(self, config: AttentionNumbers, block_size: int) -> KVPage:
        return KVPage(block_size, 1, self.columns, self.columns)

    def far_page(self, block_size: int) -> KVPage | None:
        return KVPage(block_size, 1, self.row_values, self.row_values) if self.rate else None

    def kernel_shape(self) -> dict[str, Any]:
        return {}

    def rotary_dim(self, config: AttentionNumbers) -> int:
        return self.rotary

    def attend(self, stack, i, x, arena, tokens, page, squares, counters):
        config, dtype = stack.config, x.dtype
        heads, eps, name = config.num_attention_heads, config.rms_norm_eps, stack.ops.rms_norm
        normed = stack.norm(x, "input_norm", i)
        low = stack.norm(stack.linear(normed, "q_a", i, tokens), "q_a_norm", i)
        q = stack.linear(low, "q_b", i, tokens).reshape(len(x), heads, -1)
        q = unit_rms(q.astype(jnp.float32), eps, name).astype(dtype)
        row = stack.linear(normed, "kv", i, tokens)
        key = stack.norm(row[:, : self.width], "kv_norm", i)
        turn = functools.partial(self._turn, stack, i)
        q, key = turn(q, tokens.positions), turn(key[:, None], tokens.positions)[:, 0]
        rows = jnp.concatenate([key, row[:, self.width :]], axis=1)
        places = KVPlaces(tokens.positions, tokens.pages, stack.page_layer(i))
        arena = write_rows(arena, rows[:, None], places, page)
        queries = None
        if self.rate:
            arena = self._compress(stack, i, arena, tokens, page.block_size, dtype)
        if self.index_topk:
            queries = stack.linear(low, "index_q", i, tokens)
            queries = queries.reshape(len(x), self.index_n_heads, -1)
            weights = stack.linear(normed, "index_weights", i, tokens, out_dtype=jnp.float32)
            weights = weights * (self.index_n_heads * self.index_head_dim) ** -0.5
            queries = turn(queries, tokens.positions), weights
        out = self._attend_rows(stack, i, q, queries, arena, tokens, page.block_size)
        out = turn(out, -tokens.positions)
        weights = stack.weight("o_a")
        weights = weights.reshape(len(weights), self.groups, self.o_lora_rank, -1)
        out = head_linear(
            out.reshape(len(x), self.groups, -1),
            weights,
            i,
            row_tile=tokens.row_tile,
            tiles=tokens.tiles,
            implementation=stack.ops.head_linear,
        )
        return out.reshape(len(x), -1), arena, counters

    def _turn(self, stack: AttentionLayer, i, x: jax.Array, positions: jax.Array) -> jax.Array:
        """x [T, H, width] with its last values rotated, in pairs (2n, 2n + 1)."""
        factor = stack.attention_factor
        cos, sin = cosine_and_sine(positions, stack.frequencies(i), factor, jnp.float32)
        rest, last = jnp.split(x, [x.shape[-1] - self.rotary], axis=-1)
        wide = last.astype(jnp.float32).reshape(*last.shape[:-1], -1, 2)
        first, second = wide[..., 0], wide[..., 1]
        turned = jnp.stack([first * cos - second * sin, second * cos + first * sin], axis=-1)
        turned = turned.reshape(last.shape).astype(x.dtype)
        return jnp.concatenate([rest, turned], axis=-1)

    def _compress(self, stack, i, arena, tokens: Tokens, block_size: int, dtype) -> jax.Array:
        """The arena with the entries whose last tokens are new. One loop makes them, each by the
        same program, so that bits depend on the entry's tokens alone."""
        runs, eps = _runs(tokens), stack.config.rms_norm_eps
        near = _Places.of(stack.near_layer(i), runs, block_size)
        far = _Places.of(stack.far_layer(i), runs, block_size)
        size, rate = len(tokens.positions) // len(runs.start), self.rate
        most = -(-size // rate)
        view = _view(arena, self.columns, dtype)
        held = self.spread * self.row_values

        def entry(m, made):
            n, number = m // most, (runs.start + runs.skip)[m // most] // rate + m % most
            count = rate * (1 + self.overlaps)
            position = (number + 1) * rate - count + jnp.arange(count)
            rows = _values(view[near.rows(n, position)], dtype)
            rows, position, number, row = lax.optimization_barrier((rows, position, number, m))
            found = [
                rms_norm(self._pool(rows, position, part, stack, i).astype(dtype), norm, i, eps)
                for part, norm in enumerate(self._norms(stack))
            ]
            at = (number * rate)[None]
            found = [self._turn(stack, i, each[None, None], at).reshape(-1) for each in found]
            values = jnp.concatenate(found)
            values = lax.optimization_barrier(jnp.pad(values, (0, held - len(values))))
            return lax.dynamic_update_index_in_dim(made, values, row, 0)

        total = len(runs.start) * most
        made = lax.fori_loop(0, runs.count * most, entry, jnp.zeros((total, held), dtype))
        n = jnp.arange(total) // most
        number = (runs.start + runs.skip)[n] // rate + jnp.arange(total) % most
        real = (n < runs.count) & ((number + 1) * rate <= (runs.start + runs.length)[n])
        view = _view(arena, self.row_values, dtype)
        rows = (number + 1)[:, None] * rate - self.spread + jnp.arange(self.spread)
        rows = jnp.where(real[:, None], far.rows(n[:, None], rows), view.shape[0])
        bits = lax.bitcast_convert_type(made.reshape(total, self.spread, -1), jnp.uint16)
        bits = bits.reshape(*rows.shape, -1)
        view = view.at[rows].set(bits, mode="drop", unique_indices=True)
        return view.reshape(arena.shape)

    def _norms(self, stack) -> list[jax.Array]:
        return [stack.weight(name) for name in ("entry_norm", "index_norm")[: len(self.parts)]]

    def _pool(self, rows, position, part: int, stack, i) -> jax.Array:
        """The mean of the values of one part of rows [n, columns], float32[width], weighted by the
        softmax of their gates."""
        width, times, rate = self.parts[part], 1 + self.overlaps, self.rate
        first = self.width + 2 * times * sum(self.parts[:part])
        both = rows[:, first : first + 2 * times * width].astype(jnp.float32)
        values, gates = jnp.split(both, 2, axis=1)
        bias = stack.weight(("entry_bias", "index_bias")[part])[i].astype(jnp.float32)
        gates = gates + jnp.tile(bias, (times, 1))
        if self.overlaps:  # of tokens of the entry before, the first half
            before = (jnp.arange(len(rows)) < rate)[:, None]
            values, gates = (jnp.where(before, x[:, :width], x[:, width:]) for x in (values, gates))
        gates = jnp.where(position[:, None] >= 0, gates, -jnp.inf)
        values = jnp.where(position[:, None] >= 0, values, 0.0)
        return jnp.sum(jax.nn.softmax(gates, axis=0) * values, axis=0)

    def _attend_rows(self, stack, i, q, queries, arena, tokens: Tokens, block_size: int):
        """Attention of all queries, run by run: [T, H, width]."""
        runs, dtype = _runs(tokens), q.dtype
        size = len(q) // len(runs.start)
        near = _Places.of(stack.near_layer(i), runs, block_size)
        view = _view(arena, self.columns, dtype)
        sinks = stack.weight("sinks")[i].astype(jnp.float32)
        far, entries, kept = None, 0, None
        if self.rate:
            far = _Places.of(stack.far_layer(i), runs, block_size)
            entries = far.table.shape[1] * block_size // self.rate
            far_view = _view(arena, self.row_values, dtype)

            def load(n, span):
                """The entries [SPAN, ·] of a span, and their numbers."""
                number = span * SPAN + jnp.arange(SPAN)
                rows = (number + 1)[:, None] * self.rate - self.spread + jnp.arange(self.spread)
                found = _values(far_view[far.rows(n, rows)], dtype)
                return found.reshape(SPAN, -1), number

        def positions(n):
            """Rows past the last token repeat its position, so they look at no page more."""
            return runs.start[n] + jnp.minimum(jnp.arange(size), runs.length[n] - 1)

        spans = -(-entries // SPAN)
        if queries is not None and entries > self.index_topk:

            def choose(n, kept):
                own = [lax.dynamic_slice_in_dim(x, n * size, size) for x in queries]
                seen = ((positions(n) + 1) // self.rate)[:, None]

                def span(s, scores):
                    keys, number = load(n, s)
                    keys = keys[:, self.width : self.width + self.index_head_dim]
                    products = _product(own[0], keys, ((2,), (1,)))
                    found = jnp.sum(own[1][..., None] * jnp.maximum(products, 0), axis=1)
                    found = jnp.where(number < seen, found, -jnp.inf)
                    return lax.dynamic_update_slice_in_dim(scores, found, s * SPAN, 1)

                scores = jnp.full((size, spans * SPAN), -jnp.inf)
                scores = lax.fori_loop(0, -(-seen[-1, 0] // SPAN), span, scores)
                best, chosen = lax.top_k(scores, self.index_topk)
                chosen = jnp.where(best == -jnp.inf, spans * SPAN, chosen)
                own = jnp.zeros(scores.shape, bool)
                own = own.at[jnp.arange(size)[:, None], chosen].set(True, mode="drop")
                return lax.dynamic_update_slice_in_dim(kept, own, n * size, 0)

            kept = lax.fori_loop(0, runs.count, choose, jnp.zeros((len(q), spans * SPAN), bool))

        def of_run(n, *arrays):
            return [lax.dynamic_slice_in_dim(x, n * size, size) for x in arrays]

        def put(n, arrays, values):
            return tuple(
                lax.dynamic_update_slice_in_dim(x, v, n * size, 0)
                for x, v in zip(arrays, values, strict=True)
            )

        # A loop for each kind of rows: XLA copies an arena that two loops within one read.
        def near_sums(n, sums):
            (own,), at = of_run(n, q), positions(n)
            number = runs.start[n] - self.window + 1 + jnp.arange(size + self.window - 1)
            keys = _values(view[near.rows(n, number)], dtype)[:, : self.width]
            seen = (number <= at[:, None]) & (number > at[:, None] - self.window) & (number >= 0)
            keys = jnp.where(((number >= 0) & (number <= at[-1]))[:, None], keys, 0)
            return put(n, sums, _add(own, keys, seen, _no_sums(own)))

        def far_sums(n, sums):
            (own,), at = of_run(n, q), positions(n)
            closed = ((at + 1) // self.rate)[:, None]

            def span(s, sums):
                keys, number = load(n, s)
                seen = number < closed
                keys = jnp.where((number < closed[-1])[:, None], keys[:, : self.width], 0)
                if kept is not None:
                    seen = seen & lax.dynamic_slice(kept, (n * size, s * SPAN), (size, SPAN))
                return _add(own, keys, seen, sums)

            first = tuple(of_run(n, *sums))
            return put(n, sums, lax.fori_loop(0, -(-closed[-1, 0] // SPAN), span, first))

        sums = lax.fori_loop(0, runs.count, near_sums, _no_sums(q))
        if far is not None:
            sums = lax.fori_loop(0, runs.count, far_sums, sums)
        total, top, mass = lax.optimization_barrier(sums)
        mass = mass + jnp.exp(sinks - jnp.where(top == -jnp.inf, 0.0, top))
        return (total / mass[..., None]).astype(dtype)


def _runs(tokens: Tokens) -> Rows:
    assert tokens.rows is not None
    return tokens.rows


Layer = tuple[jax.Array | int, jax.Array, int]


class _Places(NamedTuple):
    """Where a layer's rows are."""

    table: jax.Array
    """int32[N, B]: the layer's first row in each page of each run."""
    block_size: int

    @classmethod
    def of(cls, layer: Layer, runs: Rows, block_size: int) -> _Places:
        """layer: near_layer or far_layer of a stack."""
        group, place, factor = layer
        table = runs.table if runs.table.ndim == 2 else runs.table[group]
        return cls(table * factor + place * block_size, block_size)

    def rows(self, n, position):
        """The rows of positions in run n; those outside of the table have any row."""
        position = jnp.clip(position, 0, self.table.shape[1] * self.block_size - 1)
        return self.table[n, position // self.block_size] + position % self.block_size


def _view(arena, values: int, dtype) -> jax.Array:
    return arena.reshape(-1, values * jnp.dtype(dtype).itemsize // 2)


def _values(bits, dtype) -> jax.Array:
    if jnp.dtype(dtype).itemsize == 4:
        bits = bits.reshape(*bits.shape[:-1], -1, 2)
    return lax.bitcast_convert_type(bits, dtype)


def _product(x, keys, axes) -> jax.Array:
    return lax.dot_general(
        x,
        keys,
        (axes, ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )


def _no_sums(q):
    count, heads, width = q.shape
    empty = jnp.zeros((count, heads), jnp.float32)
    return jnp.zeros((count, heads, width), jnp.float32), empty - jnp.inf, empty


def _add(q, keys, seen, sums):
    """Sums of softmax, (values [C, H, width], top and mass [C, H]), with keys [K, width], which are
    values too, where they are seen, bool[C, K]."""
    total, top, mass = sums
    scores = _product(q, keys, ((2,), (1,))) * q.shape[2] ** -0.5
    scores = jnp.where(seen[:, None], scores, -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
    safe = jnp.where(new_top == -jnp.inf, 0.0, new_top)
    shrink, p = jnp.exp(top - safe), jnp.exp(scores - safe[..., None])
    part = _product(p.astype(q.dtype), keys, ((2,), (0,)))
    new = total * shrink[..., None] + part, new_top, mass * shrink + jnp.sum(p, axis=-1)
    # What a row does not see leaves its bits alone, however far other rows look.
    any_seen = jnp.any(seen, axis=1)[:, None]
    return tuple(
        jnp.where(any_seen.reshape(-1, *(1,) * (n.ndim - 1)), n, old)
        for n, old in zip(new, sums, strict=True)
    )

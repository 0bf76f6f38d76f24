"""Sequences' keys and values in an otherwise poisoned arena, and attention over them in float64."""

from __future__ import annotations

import dataclasses

import numpy as np

from pallas_kernels.kv_write import KVPage
from pallas_kernels.paged_attention import NO_WINDOW, PerLayer
from tests.pallas_kernels.contract import POISON, as_rows, draw, wide

COLUMNS = 48
"""Arena row width, which no KV row has, in order to tell the two views apart."""


@dataclasses.dataclass(frozen=True)
class PagedKV:
    arena: np.ndarray
    block_table: np.ndarray
    """[T, B]; past a sequence's last page, addresses that nobody may use."""
    keys: tuple[np.ndarray, ...]
    """Per sequence [length, KV heads, head_dim]."""
    values: tuple[np.ndarray, ...]
    """The same, of a latent page [length, 1, latent]."""


def draw_kv(rng: np.random.Generator, lengths, page: KVPage, dtype: str):
    """Keys and values of sequences of such lengths."""
    shapes = [(n, page.kv_heads, page.head_dim) for n in lengths]
    keys = tuple(draw(rng, shape, dtype) for shape in shapes)
    if page.latent:
        return keys, tuple(k[..., : page.latent] for k in keys)
    return keys, tuple(draw(rng, shape, dtype) for shape in shapes)


def lay_out(
    rng: np.random.Generator,
    keys,
    values,
    page: KVPage,
    *,
    layers: int,
    layer: int,
    max_length: int,
    spare_pages: int = 1,
) -> PagedKV:
    """Writes `layer` of each sequence to pages in a random order, one odd KV row before each."""
    blocks = -(-max_length // page.block_size)
    pool = len(keys) * blocks + spare_pages  # whatever the lengths: one compilation
    used = [-(-len(k) // page.block_size) for k in keys]
    page_rows = layers * page.rows_per_layer + 1
    order = rng.permutation(pool)
    row_elements = page.head_dim * keys[0].itemsize // 2
    # Whole arena rows: COLUMNS KV rows are row_elements arena rows.
    kv_rows = -(-pool * page_rows // COLUMNS) * COLUMNS
    view = np.full((kv_rows, row_elements), POISON, np.uint16)
    table = rng.choice(np.int32([-1, 2**30, 7]), (len(keys), blocks))
    for s, (k, v) in enumerate(zip(keys, values, strict=True)):
        mine, order = order[: used[s]], order[used[s] :]
        table[s, : used[s]] = mine * page_rows + 1
        for position in range(len(k)):
            row = table[s, position // page.block_size] + layer * page.rows_per_layer
            row += position % page.block_size
            both = np.concatenate([k[position], *([] if page.latent else [v[position]])])
            own = view[row :: page.block_size][: page.rows_per_token]
            own[:] = as_rows(both, row_elements)
    return PagedKV(view.reshape(-1, COLUMNS), table, keys, values)


def in_parts(q: np.ndarray, page: KVPage) -> tuple[np.ndarray, np.ndarray | None]:
    """q and q_rope of attention: queries of a latent page are as wide as keys, in two arrays."""
    return (q[..., : page.latent], q[..., page.latent :]) if page.latent else (q, None)


STACK_LAYER = 2


def per_layer(spec) -> PerLayer:
    """Sinks and windows that the spec has, in stacks whose other layers have others."""
    sinks = np.full((3, spec.heads), np.nan, np.dtype(spec.dtype))
    sinks[STACK_LAYER] = np.linspace(-3, 3, spec.heads)
    windows = np.int32([1, NO_WINDOW, spec.window or 0])
    return PerLayer(
        np.int32(STACK_LAYER), sinks if spec.sinks else None, windows if spec.window else None
    )


def attend(spec, q: np.ndarray, keys, values, position: int) -> np.ndarray:
    """softmax(scale·q·Kᵀ)·V of one token at `position`, scale 1/√hd by default. q [H, hd] ->
    float64 [H · the values' width]."""
    window, scale, sinks = spec.window, spec.scale, per_layer(spec).sinks
    low = 0 if window is None else max(position - window + 1, 0)
    heads, head_dim = q.shape
    scale = 1 / np.sqrt(head_dim) if scale is None else scale
    out = np.zeros((heads, values.shape[2]))
    for h in range(heads):
        kv_head = h // (heads // keys.shape[1])
        scores = wide(keys)[low : position + 1, kv_head] @ wide(q[h]) * scale
        p = np.exp(scores - scores.max())
        beside = 0 if sinks is None else np.exp(float(sinks[STACK_LAYER, h]) - scores.max())
        out[h] = p / (p.sum() + beside) @ wide(values)[low : position + 1, kv_head]
    return out.reshape(-1)

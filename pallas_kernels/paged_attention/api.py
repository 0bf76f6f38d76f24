from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
from jaxtyping import Array, Float, Int, UInt16

from pallas_kernels.cards import CLASSES
from pallas_kernels.implementations import implementations, pick
from pallas_kernels.kv_write import KVPage, KVPlaces, ProjectedHeads, WriteOptions, kv_write
from pallas_kernels.kv_write.api import check_operands
from pallas_kernels.paged_attention import writing
from pallas_kernels.paged_attention.per_layer import PLAIN, PerLayer
from pallas_kernels.paged_attention.span import SPAN
from pallas_kernels.triton import check_counters

IMPLEMENTATIONS = ("xla", "pallas", "cpu")
DECODE = implementations("paged_attention", IMPLEMENTATIONS, "decode_attention")
PREFILL = implementations("paged_attention", IMPLEMENTATIONS, "prefill_attention")

WRITES = {"pallas": writing.write_and_attend}
"""Implementation of both kv_write and paged_attention → its write_and_attend in one launch."""


class Chunks(NamedTuple):
    """The N chunks of a prefill step, or a kernel's refs to them."""

    row: Int[Array, " N"]
    """Each chunk's sequence in the block table."""
    start: Int[Array, " N"]
    """Position of its first token."""
    length: Int[Array, " N"]
    """Number of real tokens, 1 or more."""
    count: Int[Array, ""]
    """How many chunks are in use; they come first. int32[1] in kernels."""


@dataclasses.dataclass(frozen=True)
class AttentionOptions:
    """What decides the program of attention over pages, beside shapes."""

    page: KVPage
    scale: float | None = None
    """Factor of the scores; None: head_dim^−½. A latent page needs a value."""
    implementation: str = "xla"
    shared_kib: int = CLASSES[-1]
    """The device's `cards.shared_class`, for the kernels."""


def decode_attention(
    q: Float[Array, "T H hd"],
    arena: UInt16[Array, "rows D"],
    block_table: Int[Array, "T B"],
    lengths: Int[Array, " T"],
    layer: Int[Array, ""] | int,
    options: AttentionOptions,
    q_rope: Float[Array, "T H P"] | None = None,
    per_layer: PerLayer = PLAIN,
) -> Float[Array, "T values"]:
    """Attention of one query per sequence over its pages.

    Tokens are reduced in spans of 64 (32 in the kernels of latent pages), in ascending order, with
    softmax and sums in float32. The order of sums depends on the row's own length only, not on
    block_size, T or other rows. In a latent page a key is a whole row and a value its first
    `latent` values.

    - `q`: for latent pages [T, H, latent], beside `q_rope` [T, H, head_dim − latent]: the two parts
      of a query, as they are computed.
    - `block_table`: KV row of each page of each sequence, in order. Entries past the length are not
      read.
    - `lengths`: tokens to attend to, including the query's own; 0: an empty row, whose result is 0.
    - `per_layer`: sinks, windows, an indexer of latent pages.

    Returns [T, H·hd], for a latent page [T, H·latent]. Raises ValueError for shapes that do not
    fit, an unknown implementation, and pages that kernels refuse (`why_not_pallas`).
    """
    _check(q, q_rope, arena, options.page, per_layer)
    _check_indexer(q, per_layer, options)
    _check_rows(q, block_table, lengths)
    fn = pick("paged_attention", DECODE, options.implementation)
    return fn(q, arena, block_table, lengths, layer, _with_scale(options), q_rope, per_layer)


def write_and_attend(
    heads: ProjectedHeads,
    arena: UInt16[Array, "rows D"],
    places: KVPlaces,
    block_table: Int[Array, "T B"],
    lengths: Int[Array, " T"],
    counters: Int[Array, " C"] | None = None,
    per_layer: PerLayer = PLAIN,
    *,
    write: WriteOptions,
    read: AttentionOptions,
) -> tuple[Float[Array, "T values"], UInt16[Array, "rows D"], Int[Array, " C"] | None]:
    """kv_write, then decode_attention of its queries, with the bits of both; one launch if both are
    kernels.

    - `places`: of each row's new token. An empty row has position and page −1, and its result is 0.
      No two rows may write to one page.
    - `lengths`: positions + 1. An argument, since computing it in a loop over layers would be a
      launch.
    - `counters`: zeros before and after, one for each row and KV head, by which the last program of
      a row finds out that it merges. None: another kernel merges.

    Returns (attended, arena, counters); arena and counters are updated in place when donated.
    Raises ValueError as both ops do, and for counters of another size.
    """
    if write.implementation == read.implementation and read.implementation in WRITES:
        qkv, page = heads.qkv, read.page
        check_operands(heads, page)
        queries = qkv.shape[1] // page.head_dim - 2 * page.kv_heads
        q = jax.ShapeDtypeStruct((qkv.shape[0], queries, page.head_dim), qkv.dtype)
        _check(q, None, arena, page, per_layer)
        if counters is not None:
            of = f"{len(qkv)} rows of {page.kv_heads} heads"
            check_counters(counters, len(qkv) * page.kv_heads, of)
        for of_rows in (lengths, places.positions, places.pages):
            _check_rows(q, block_table, of_rows)
        operands = heads, arena, places, block_table, lengths, counters, per_layer
        as_one = WRITES[read.implementation]
        return as_one(*operands, write=write, read=_with_scale(read))
    q, arena = kv_write(heads, arena, places, write)
    out = decode_attention(q, arena, block_table, lengths, places.layer, read, per_layer=per_layer)
    return out, arena, counters


def prefill_attention(
    q: Float[Array, "NC H hd"],
    arena: UInt16[Array, "rows D"],
    block_table: Int[Array, "R B"],
    chunks: Chunks,
    layer: Int[Array, ""] | int,
    options: AttentionOptions,
    q_rope: Float[Array, "NC H P"] | None = None,
    per_layer: PerLayer = PLAIN,
) -> Float[Array, "NC values"]:
    """Causal attention of a prefill step's chunks, whose keys are already in the pages.

    - `q`: N chunks of C rows. Results of rows past a chunk's real tokens, and of unused chunks, are
      undefined.
    - Other arguments: see decode_attention.
    """
    _check(q, q_rope, arena, options.page, per_layer)
    _check_indexer(q, per_layer, options)
    row, start, length, _ = chunks
    if q.shape[0] % max(row.shape[0], 1) or not row.shape == start.shape == length.shape:
        raise ValueError(
            f"q {q.shape}, row {row.shape}, start {start.shape}, length {length.shape}"
        )
    fn = pick("paged_attention", PREFILL, options.implementation)
    return fn(q, arena, block_table, chunks, layer, _with_scale(options), q_rope, per_layer)


def _with_scale(options: AttentionOptions) -> AttentionOptions:
    """The options with a scale: the one given, or its default."""
    if options.scale is not None:
        return options
    if options.page.latent:
        raise ValueError(
            "a latent page needs a scale: its head_dim is not that of the model's keys"
        )
    return dataclasses.replace(options, scale=options.page.head_dim**-0.5)


def _check(q, q_rope, arena, page, per_layer):
    if page.latent and (page.kv_heads != 1 or page.latent >= page.head_dim):
        raise ValueError(f"{page}: a latent page has 1 KV head and latent within head_dim")
    if page.latent or q_rope is not None:
        _check_latent(q, q_rope, page)
    elif q.ndim != 3 or q.shape[2] != page.head_dim or q.shape[1] % page.kv_heads:
        raise ValueError(f"q is {q.shape} for {page.kv_heads} KV heads of head_dim {page.head_dim}")
    if SPAN % page.block_size:
        raise ValueError(f"block_size {page.block_size} does not divide a span of {SPAN} tokens")
    if arena.size % (page.head_dim * q.dtype.itemsize // 2):
        raise ValueError(f"an arena of {arena.shape} is not whole rows of head_dim {page.head_dim}")
    per_layer.check(q.shape[1])


def _check_indexer(q, per_layer, options):
    if (indexer := per_layer.indexer) is None:
        return
    page, heads = options.page, indexer.q.shape[1]
    if options.implementation != "xla":
        raise ValueError(f"only XLA attends to tokens that an indexer chooses, not {options}")
    if not page.latent or indexer.q.shape[2] != page.head_dim - page.latent:
        raise ValueError(f"an indexer's queries are {indexer.q.shape} for {page}")
    if indexer.q.shape[0] != q.shape[0] or indexer.weights.shape != (q.shape[0], heads):
        raise ValueError(f"{indexer.q.shape} and {indexer.weights.shape} for {q.shape} queries")


def _check_rows(q, block_table, lengths):
    if block_table.shape[0] != q.shape[0] or lengths.shape != q.shape[:1]:
        raise ValueError(f"q {q.shape}, block_table {block_table.shape}, lengths {lengths.shape}")


def _check_latent(q, q_rope, page):
    if q_rope is None or not page.latent:
        raise ValueError("latent pages need q_rope, others take none")
    rope = page.head_dim - page.latent
    if q.shape[2:] != (page.latent,) or q_rope.shape != (*q.shape[:2], rope):
        raise ValueError(
            f"q is {q.shape}, q_rope {q_rope.shape} for rows of {page.latent} + {rope}"
        )
    if q_rope.dtype != q.dtype:
        raise ValueError(f"q is {q.dtype}, q_rope {q_rope.dtype}")

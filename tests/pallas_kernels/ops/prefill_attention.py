"""prefill_attention against float64 over a poisoned arena."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import api
from pallas_kernels.paged_attention.specs import (
    LATENT_PREFILL_SPECS,
    PREFILL_SPECS,
    PrefillSpec,
)
from tests.pallas_kernels import contract
from tests.pallas_kernels.contract import Contract, Mutant, close, compiled, draw, same_bits
from tests.pallas_kernels.paged_kv import attend, draw_kv, in_parts, lay_out, per_layer

LAYER = 1


def case(spec, seed, real=None):
    """Queries [N, C, H, hd], NaN in padding rows, and each chunk's sequence up to the chunk's last
    real token. real: other numbers of real tokens than the spec's, of the same sequences."""
    rng = np.random.default_rng(seed)
    count = len(spec.chunks)
    keys, values = draw_kv(rng, [spec.max_length] * count, spec.page, spec.dtype)
    q = draw(rng, (count, spec.size, spec.heads, spec.head_dim), spec.dtype)
    lengths = [length for _, length in spec.chunks] if real is None else real
    ends = [start + length for (start, _), length in zip(spec.chunks, lengths, strict=True)]
    for queries, length in zip(q, lengths, strict=True):
        queries[length:] = np.nan
    return (
        q,
        [k[:n] for k, n in zip(keys, ends, strict=True)],
        [v[:n] for v, n in zip(values, ends, strict=True)],
    )


def laid_out(spec, keys, values, seed=0, **options):
    rng = np.random.default_rng(seed)
    sizes = dict(layers=spec.layers, layer=LAYER, max_length=spec.max_length)
    return lay_out(rng, keys, values, spec.page, **sizes, **options)


def run(spec, implementation, q, kv, count=None):
    """Real rows of each chunk [C, H·hd]. The chunks' sequences stand in the block table backwards,
    `count` chunks are in use (default: all)."""
    options = api.AttentionOptions(spec.page, spec.scale, implementation)
    op = compiled(api.prefill_attention, options=options)
    chunks = len(spec.chunks)
    starts = np.int32([start for start, _ in spec.chunks])
    ends = np.int32([len(k) for k in kv.keys])
    row = np.arange(chunks, dtype=np.int32)[::-1]
    queries, q_rope = in_parts(q.reshape(-1, spec.heads, spec.head_dim), spec.page)
    number = np.int32(chunks if count is None else count)
    given = api.Chunks(row, starts, ends - starts, number), np.int32(LAYER)
    more = {"q_rope": q_rope, "per_layer": per_layer(spec)}
    got = np.asarray(op(queries, kv.arena, kv.block_table[::-1], *given, **more))
    assert got.dtype == spec.dtype
    chunks = got.reshape(chunks, spec.size, -1)
    return [rows[:n] for rows, n in zip(chunks[:count], ends - starts, strict=False)]


def check(spec, implementation):
    for seed in contract.SEEDS:
        q, keys, values = case(spec, seed)
        got = run(spec, implementation, q, laid_out(spec, keys, values, seed))
        for c, (start, length) in enumerate(spec.chunks):
            want = [attend(spec, q[c, i], keys[c], values[c], start + i) for i in range(length)]
            close("paged_attention", spec.dtype, got[c], np.stack(want))


def same(got, want):
    for a, b in zip(got, want, strict=True):
        same_bits(a, b)


CHUNKS = ((0, 16), (56, 16), (64, 16), (112, 16))


def check_bits(spec, implementation):
    """They depend on no page's size and place, no other chunk, nor on how far each is filled."""
    q, keys, values = case(spec, 0)
    kv = laid_out(spec, keys, values)
    want = run(spec, implementation, q, kv)
    elsewhere = laid_out(spec, keys, values, seed=1, spare_pages=40)
    same(run(spec, implementation, q, elsewhere), want)
    same(run(spec, implementation, q, kv, count=2), want[:2])
    for block_size in (32, 64):
        other = dataclasses.replace(spec, block_size=block_size)
        same(run(other, implementation, q, laid_out(other, keys, values)), want)
    for c in (0, 3):
        lone = dataclasses.replace(spec, chunks=spec.chunks[c : c + 1])
        kv = laid_out(lone, keys[c : c + 1], values[c : c + 1])
        same(run(lone, implementation, q[c : c + 1], kv), want[c : c + 1])
    for real in ((1, 8, 9, 15), (15, 9, 8, 1)):
        q, keys, values = case(spec, 0, real)
        got = run(spec, implementation, q, laid_out(spec, keys, values))
        same(got, [rows[:n] for rows, n in zip(want, real, strict=True)])


def bits(implementation):
    for dtype in contract.dtypes_of_bits(implementation):
        window = None if dtype == "float32" else 20
        check_bits(PrefillSpec(CHUNKS, 16, dtype, window=window), implementation)


LATENT = {"kv_heads": 1, "head_dim": 24, "latent": 16, "scale": 0.3}


def bits_of_latent_pages(implementation):
    for dtype in contract.dtypes_of_bits(implementation):
        check_bits(PrefillSpec(CHUNKS, 16, dtype, window=20, **LATENT), implementation)


PAGE = PrefillSpec((), 1, "float32").page


def refused(q, page, row, arena, options):
    table, two = jnp.zeros((1, 1), jnp.int32), jnp.zeros(2, jnp.int32)
    chunks = api.Chunks(jnp.zeros(row, jnp.int32), two, two, jnp.int32(2))
    operands = jnp.zeros(q), jnp.zeros(arena, jnp.uint16), table, chunks, 0
    return api.prefill_attention(*operands, api.AttentionOptions(page, **options))


CONTRACTS = (
    Contract(
        "prefill_attention",
        api.PREFILL,
        PREFILL_SPECS,
        check,
        facts=(bits,),
        mutant=Mutant.in_record(
            "chunks",
            "start",
            lambda start: start + 1,
            PrefillSpec(((48, 16), (128, 5)), 16, "bfloat16", window=20),
        ),
        refused=refused,
        refusals=(
            ((4, 4, 8), PAGE, 2, (8, 16), {}, r"q is \(4, 4, 8\) for 2 KV heads of head_dim 16"),
            ((4, 4, 16), PAGE._replace(block_size=48), 2, (8, 16), {}, "block_size 48 does not"),
            ((4, 4, 16), PAGE, 2, (3, 8), {}, r"arena of \(3, 8\) is not whole rows of head_dim"),
            ((4, 4, 16), PAGE, 3, (8, 16), {}, r"q \(4, 4, 16\), row \(3,\), start \(2,\), length"),
            ((5, 4, 16), PAGE, 2, (8, 16), {}, r"q \(5, 4, 16\), row \(2,\), start \(2,\), length"),
            ((4, 4, 16), PAGE, 2, (8, 16), {"implementation": "cuda"}, "op 'paged_attention' has"),
        ),
    ),
    Contract(
        "prefill_attention over latent pages",
        api.PREFILL,
        LATENT_PREFILL_SPECS,
        check,
        facts=(bits_of_latent_pages,),
        mutant=Mutant.in_record("options", "scale", lambda s: 0.9 * s, LATENT_PREFILL_SPECS[0]),
    ),
)

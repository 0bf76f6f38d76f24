"""prefill_attention against float64 over a poisoned arena."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import (
    api,
    kernels,
    latent_kernels,
    pallas_triton,
    reference,
)
from pallas_kernels.paged_attention.specs import (
    LATENT_PREFILL_SPECS,
    PREFILL_SPECS,
    PrefillSpec,
)
from tests.pallas_kernels.contract import SEEDS, close, compiled, draw, each, same_bits
from tests.pallas_kernels.paged_kv import attend, draw_kv, in_parts, lay_out

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
    op = compiled(
        api.prefill_attention,
        page=spec.page,
        window=spec.window,
        scale=spec.scale,
        implementation=implementation,
    )
    chunks = len(spec.chunks)
    starts = np.int32([start for start, _ in spec.chunks])
    ends = np.int32([len(k) for k in kv.keys])
    row = np.arange(chunks, dtype=np.int32)[::-1]
    queries, q_rope = in_parts(q.reshape(-1, spec.heads, spec.head_dim), spec.page)
    got = np.asarray(
        op(
            queries,
            kv.arena,
            kv.block_table[::-1],
            row,
            starts,
            ends - starts,
            np.int32(chunks if count is None else count),
            np.int32(LAYER),
            q_rope=q_rope,
        )
    )
    assert got.dtype == spec.dtype
    chunks = got.reshape(chunks, spec.size, -1)
    return [rows[:n] for rows, n in zip(chunks[:count], ends - starts, strict=False)]


def check(spec, implementation):
    for seed in SEEDS:
        q, keys, values = case(spec, seed)
        got = run(spec, implementation, q, laid_out(spec, keys, values, seed))
        for c, (start, length) in enumerate(spec.chunks):
            want = [
                attend(q[c, i], keys[c], values[c], start + i, spec.window, spec.scale)
                for i in range(length)
            ]
            close("paged_attention", spec.dtype, got[c], np.stack(want))


@each(api.PREFILL, PREFILL_SPECS)
def test_contract(spec, implementation):
    check(spec, implementation)


@each(api.PREFILL, LATENT_PREFILL_SPECS)
def test_contract_of_latent_pages(spec, implementation):
    check(spec, implementation)


CHUNKS = ((0, 16), (56, 16), (64, 16), (112, 16))
WINDOWS = {"float32": None, "bfloat16": 20}
BITS = each(api.PREFILL, dtypes=WINDOWS)


def same(got, want) -> None:
    for a, b in zip(got, want, strict=True):
        same_bits(a, b)


@BITS
def test_bits_are_independent_of_page_size_and_place(implementation, dtype):
    spec = PrefillSpec(CHUNKS, 16, dtype, window=WINDOWS[dtype])
    q, keys, values = case(spec, 0)
    want = run(spec, implementation, q, laid_out(spec, keys, values))
    same(run(spec, implementation, q, laid_out(spec, keys, values, seed=1)), want)
    if dtype == "float32":  # one compilation
        larger = laid_out(spec, keys, values, seed=1, spare_pages=40)
        same(run(spec, implementation, q, larger), want)
    for block_size in (32, 64):
        other = dataclasses.replace(spec, block_size=block_size)
        same(run(other, implementation, q, laid_out(other, keys, values)), want)


@BITS
def test_a_row_is_independent_of_the_others(implementation, dtype):
    """How far its chunk is filled and what the other queries are changes nothing."""
    spec = PrefillSpec(CHUNKS, 16, dtype, window=WINDOWS[dtype])
    q, keys, values = case(spec, 0)
    want = run(spec, implementation, q, laid_out(spec, keys, values))
    for real in ((1, 8, 9, 15), (15, 9, 8, 1), (8, 1, 1, 8)):
        q, keys, values = case(spec, 0, real)
        got = run(spec, implementation, q, laid_out(spec, keys, values))
        same(got, [rows[:n] for rows, n in zip(want, real, strict=True)])


@BITS
def test_a_chunk_is_independent_of_the_others_and_of_their_number(implementation, dtype):
    spec = PrefillSpec(CHUNKS, 16, dtype, window=WINDOWS[dtype])
    q, keys, values = case(spec, 0)
    kv = laid_out(spec, keys, values)
    want = run(spec, implementation, q, kv)
    same(run(spec, implementation, q, kv, count=2), want[:2])
    for c in range(len(CHUNKS)):
        lone = dataclasses.replace(spec, chunks=CHUNKS[c : c + 1])
        kv = laid_out(lone, keys[c : c + 1], values[c : c + 1])
        same(run(lone, implementation, q[c : c + 1], kv), want[c : c + 1])


LATENT = {"kv_heads": 1, "head_dim": 24, "latent": 16, "scale": 0.3}


@BITS
def test_bits_over_latent_pages(implementation, dtype):
    """Independent of page size and place, of the other chunks and of how far each is filled."""
    spec = PrefillSpec(CHUNKS, 16, dtype, window=WINDOWS[dtype], **LATENT)
    q, keys, values = case(spec, 0)
    kv = laid_out(spec, keys, values)
    want = run(spec, implementation, q, kv)
    same(run(spec, implementation, q, laid_out(spec, keys, values, seed=1)), want)
    same(run(spec, implementation, q, kv, count=2), want[:2])
    other = dataclasses.replace(spec, block_size=64)
    same(run(other, implementation, q, laid_out(other, keys, values)), want)
    for c in (0, 3):
        lone = dataclasses.replace(spec, chunks=CHUNKS[c : c + 1])
        alone = laid_out(lone, keys[c : c + 1], values[c : c + 1])
        same(run(lone, implementation, q[c : c + 1], alone), want[c : c + 1])
    real = (15, 9, 8, 1)
    q, keys, values = case(spec, 0, real)
    got = run(spec, implementation, q, laid_out(spec, keys, values))
    same(got, [rows[:n] for rows, n in zip(want, real, strict=True)])


@each(api.PREFILL, dtypes=("float32", "bfloat16"))
def test_chunks_of_one_sequence(implementation, dtype):
    """Chunks that follow each other in one sequence see the same pages."""
    spec = PrefillSpec(((0, 16), (16, 16), (32, 5)), 16, dtype)
    q, (*_, keys), (*_, values) = case(spec, 0)
    kv = lay_out(
        np.random.default_rng(0), [keys], [values], spec.page, layers=2, layer=1, max_length=192
    )
    op = compiled(api.prefill_attention, page=spec.page, implementation=implementation)
    flat = q.reshape(-1, spec.heads, spec.head_dim)
    numbers = [np.int32(n) for n in ((0, 0, 0), (0, 16, 32), (16, 16, 5), 3, LAYER)]
    got = np.asarray(op(flat, kv.arena, kv.block_table, *numbers))
    want = [attend(flat[p], keys, values, p, None) for p in range(37)]
    close("paged_attention", dtype, got[:37], np.stack(want))


def mutant(change):
    def prefill_attention(q, arena, block_table, row, start, length, count, layer, **options):
        names = dict(block_table=block_table, row=row, start=start, length=length, count=count)
        changed = {**names, "layer": layer, **options}
        return reference.prefill_attention(q=q, arena=arena, **{**changed, **change(changed)})

    return prefill_attention


MUTANTS = {
    "not causal by one": lambda a: {"start": a["start"] + 1},
    "padding rows look further": lambda a: {"length": 0 * a["length"] + 16},
    "window one too wide": lambda a: {"window": a["window"] + 1},
    "another sequence": lambda a: {"row": a["row"][::-1]},
    "one chunk too few": lambda a: {"count": a["count"] - 1},
    "scale": lambda a: {"scale": a["scale"] * 0.9},
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", MUTANTS)
def test_contract_catches(name, monkeypatch):
    monkeypatch.setitem(api.PREFILL, name, mutant(MUTANTS[name]))
    with pytest.raises(AssertionError):
        check(PrefillSpec(((48, 16), (128, 5)), 16, "bfloat16", window=20), name)


def not_causal(q, keys, values, seen, sums, page, attend=kernels.attend):
    return attend(q, keys, values, seen | True, sums, page)


@pytest.mark.nightly
def test_contract_catches_a_kernel_that_is_not_causal(monkeypatch):
    monkeypatch.setattr(kernels, "attend", not_causal)
    monkeypatch.setitem(api.PREFILL, "not causal", pallas_triton.prefill_attention)
    with pytest.raises(AssertionError):
        check(PrefillSpec(((48, 16), (128, 5)), 16, "bfloat16"), "not causal")


def not_causal_latent(q, keys, seen, sums, scale, attend=latent_kernels._attend):
    return attend(q, keys, seen | True, sums, scale)


def values_without_the_last_part(q, keys, seen, sums, scale, attend=latent_kernels._attend):
    sums = attend(q, keys, seen, sums, scale)
    return (0 * sums[0], *sums[1:])


@pytest.mark.nightly
@pytest.mark.parametrize("change", [not_causal_latent, values_without_the_last_part])
def test_contract_catches_a_change_of_the_latent_kernel(change, monkeypatch):
    monkeypatch.setattr(latent_kernels, "_attend", change)
    monkeypatch.setitem(api.PREFILL, "changed", pallas_triton.prefill_attention)
    with pytest.raises(AssertionError):
        check(PrefillSpec(((48, 16), (128, 5)), 16, "bfloat16", **LATENT), "changed")


PAGE = PrefillSpec((), 1, "float32").page


@pytest.mark.parametrize(
    ("q", "page", "row", "arena", "options", "message"),
    [
        ((4, 4, 8), PAGE, 2, (8, 16), {}, r"q is \(4, 4, 8\) for 2 KV heads of head_dim 16"),
        ((4, 4, 16), PAGE._replace(block_size=48), 2, (8, 16), {}, "block_size 48 does not divide"),
        ((4, 4, 16), PAGE, 2, (3, 8), {}, r"arena of \(3, 8\) is not whole rows of head_dim 16"),
        ((4, 4, 16), PAGE, 3, (8, 16), {}, r"q \(4, 4, 16\), row \(3,\), start \(2,\), length"),
        ((5, 4, 16), PAGE, 2, (8, 16), {}, r"q \(5, 4, 16\), row \(2,\), start \(2,\), length"),
        ((4, 4, 16), PAGE, 2, (8, 16), {"implementation": "cuda"}, "op 'paged_attention' has no"),
    ],
)
def test_refuses(q, page, row, arena, options, message):
    table, two = jnp.zeros((1, 1), jnp.int32), jnp.zeros(2, jnp.int32)
    arguments = jnp.zeros(row, jnp.int32), two, two, jnp.int32(2), 0
    with pytest.raises(ValueError, match=message):
        api.prefill_attention(
            jnp.zeros(q), jnp.zeros(arena, jnp.uint16), table, *arguments, page=page, **options
        )

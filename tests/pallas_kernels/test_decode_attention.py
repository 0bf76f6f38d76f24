"""decode_attention against float64 over a poisoned arena."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import (
    api,
    kernels,
    pallas_triton,
    reference,
    why_not_pallas,
)
from pallas_kernels.paged_attention.specs import (
    DECODE_SPECS,
    EDGES,
    LATENT_DECODE_SPECS,
    LONG,
    DecodeSpec,
)
from tests.pallas_kernels.contract import SEEDS, close, compiled, draw, each, same_bits
from tests.pallas_kernels.paged_kv import attend, draw_kv, lay_out

LAYER = 1


def case(spec, seed):
    rng = np.random.default_rng(seed)
    q = draw(rng, (len(spec.lengths), spec.heads, spec.head_dim), spec.dtype)
    keys, values = draw_kv(rng, spec.lengths, spec.page, spec.dtype)
    return q, keys, values


def laid_out(spec, keys, values, seed=0, **options):
    rng = np.random.default_rng(seed)
    sizes = dict(layers=spec.layers, layer=LAYER, max_length=spec.max_length)
    return lay_out(rng, keys, values, spec.page, **sizes, **options)


def run(spec, implementation, q, kv):
    op = compiled(
        api.decode_attention,
        page=spec.page,
        window=spec.window,
        scale=spec.scale,
        implementation=implementation,
    )
    numbers = (np.int32(spec.lengths), np.int32(LAYER))
    return np.asarray(op(q, kv.arena, kv.block_table, *numbers))


def check(spec, implementation):
    for seed in SEEDS:
        q, keys, values = case(spec, seed)
        got = run(spec, implementation, q, laid_out(spec, keys, values, seed))
        assert got.dtype == spec.dtype
        want = np.zeros((len(q), spec.heads * spec.page.value_dim))
        for t, length in enumerate(spec.lengths):
            if length:
                want[t] = attend(q[t], keys[t], values[t], length - 1, spec.window, spec.scale)
        close("paged_attention", spec.dtype, got, want)
        np.testing.assert_array_equal(np.asarray(got)[np.equal(spec.lengths, 0)], 0)


@each(api.DECODE, DECODE_SPECS)
def test_contract(spec, implementation):
    check(spec, implementation)


@pytest.mark.parametrize("spec", LATENT_DECODE_SPECS, ids=lambda spec: str(spec.head_dim))
def test_contract_of_latent_pages(spec):
    check(spec, "xla")


def test_bits_of_latent_pages_are_independent_of_page_size_and_place():
    spec = LATENT_DECODE_SPECS[0]
    q, keys, values = case(spec, 0)
    want = run(spec, "xla", q, laid_out(spec, keys, values))
    same_bits(run(spec, "xla", q, laid_out(spec, keys, values, seed=1)), want)
    other = dataclasses.replace(spec, block_size=64)
    same_bits(run(other, "xla", q, laid_out(other, keys, values)), want)


WINDOWS = {"float32": None, "bfloat16": 20}


@each(api.DECODE, dtypes=WINDOWS)
def test_bits_are_independent_of_page_size_and_place(implementation, dtype):
    spec = DecodeSpec(EDGES, dtype, window=WINDOWS[dtype])
    q, keys, values = case(spec, 0)
    want = run(spec, implementation, q, laid_out(spec, keys, values))
    same_bits(run(spec, implementation, q, laid_out(spec, keys, values, seed=1)), want)
    if dtype == "float32":  # one compilation
        larger = laid_out(spec, keys, values, seed=1, spare_pages=40)
        same_bits(run(spec, implementation, q, larger), want)
    for block_size in (32, 64):
        other = dataclasses.replace(spec, block_size=block_size)
        same_bits(run(other, implementation, q, laid_out(other, keys, values)), want)


@each(api.DECODE, dtypes=("float32", "bfloat16"))
def test_a_row_is_independent_of_the_others_and_of_their_number(implementation, dtype):
    spec = DecodeSpec(EDGES, dtype)
    q, keys, values = case(spec, 0)
    want = run(spec, implementation, q, laid_out(spec, keys, values))
    reversed_spec = dataclasses.replace(spec, lengths=EDGES[::-1])
    kv = laid_out(reversed_spec, keys[::-1], values[::-1])
    same_bits(np.asarray(run(reversed_spec, implementation, q[::-1], kv))[::-1], want)
    for t in (0, 1, 4, 11, 16):
        lone = dataclasses.replace(spec, lengths=(EDGES[t],))
        kv = laid_out(lone, keys[t : t + 1], values[t : t + 1])
        same_bits(run(lone, implementation, q[t : t + 1], kv)[0], want[t])


@each(api.DECODE, dtypes=("float32", "bfloat16"))
def test_bits_are_independent_of_the_width_of_the_block_table(implementation, dtype):
    spec = DecodeSpec((600, 257, 64), dtype, heads=2, kv_heads=1, max_length=600)
    q, keys, values = case(spec, 0)
    want = run(spec, implementation, q, laid_out(spec, keys, values))
    wider = dataclasses.replace(spec, max_length=1100)
    same_bits(run(wider, implementation, q, laid_out(wider, keys, values)), want)


def mutant(change):
    def decode_attention(q, arena, block_table, lengths, layer, *, page, window, scale):
        changed = dict(q=q, block_table=block_table, lengths=lengths, layer=layer)
        changed |= dict(window=window, scale=scale)
        return reference.decode_attention(arena=arena, page=page, **{**changed, **change(changed)})

    return decode_attention


def heads_interleaved(q):
    tokens, heads, head_dim = q.shape
    return q.reshape(tokens, 2, heads // 2, head_dim).swapaxes(1, 2).reshape(q.shape)


MUTANTS = {
    "one key too many": lambda a: {"lengths": a["lengths"] + (a["lengths"] > 0)},
    "window one too wide": lambda a: {"window": a["window"] + 1},
    "row off by one": lambda a: {"block_table": a["block_table"] + 1},
    "heads interleaved": lambda a: {"q": heads_interleaved(a["q"])},
    "scale": lambda a: {"scale": a["scale"] * 0.9},
}


@pytest.mark.parametrize("name", MUTANTS)
def test_contract_catches(name, monkeypatch):
    monkeypatch.setitem(api.DECODE, name, mutant(MUTANTS[name]))
    with pytest.raises(AssertionError):
        check(DecodeSpec(EDGES, "bfloat16", window=20), name)


def one_key_further(s, low, last, span=kernels._span):
    return span(s, low, last + 1)


def half_of_the_splits(lengths, *refs, window, split, merge=kernels.merge):
    merge(lengths, *refs, window=window, split=2 * split)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("part", "change"), [("_span", one_key_further), ("merge", half_of_the_splits)]
)
def test_contract_catches_a_change_of_the_kernel(part, change, monkeypatch):
    monkeypatch.setattr(kernels, part, change)
    monkeypatch.setitem(api.DECODE, part, pallas_triton.decode_attention)
    with pytest.raises(AssertionError):
        check(DecodeSpec(LONG[1:2], "bfloat16", heads=2, kv_heads=1, max_length=300), part)


def test_bits_catch_another_order_of_sums(monkeypatch):
    """Spans that follow the page size are as accurate as those of 64 tokens but give other bits."""
    spec = DecodeSpec(EDGES, "float32")
    q, keys, values = case(spec, 0)
    want = run(spec, "xla", q, laid_out(spec, keys, values))
    monkeypatch.setattr(reference, "SPAN", spec.block_size)
    monkeypatch.setitem(api.DECODE, "span 16", reference.decode_attention)
    check(spec, "span 16")
    with pytest.raises(AssertionError):
        same_bits(run(spec, "span 16", q, laid_out(spec, keys, values)), want)


def key_that_is_no_value(load_span=reference._load_span):
    def load(*args):
        keys, values = load_span(*args)
        return keys, keys[..., -values.shape[-1] :]

    return load


def test_contract_catches_the_wrong_values_of_a_latent_row(monkeypatch):
    monkeypatch.setattr(reference, "_load_span", key_that_is_no_value())
    monkeypatch.setitem(api.DECODE, "last values", reference.decode_attention)
    with pytest.raises(AssertionError):
        check(LATENT_DECODE_SPECS[0], "last values")


PAGE = DecodeSpec((1,), "float32").page
LATENT = PAGE._replace(kv_heads=1, latent=8)


@pytest.mark.parametrize(
    ("q", "page", "block_table", "lengths", "options", "message"),
    [
        ((2, 4, 8), PAGE, (2, 1), (2,), {}, r"q is \(2, 4, 8\) for 2 KV heads of head_dim 16"),
        ((2, 3, 16), PAGE, (2, 1), (2,), {}, r"q is \(2, 3, 16\) for 2 KV heads"),
        ((2, 4, 16), PAGE._replace(block_size=48), (2, 1), (2,), {}, "48 does not divide a span"),
        ((2, 4, 16), PAGE, (3, 1), (2,), {}, r"q \(2, 4, 16\), block_table \(3, 1\), lengths"),
        ((2, 4, 16), PAGE, (2, 1), (3,), {}, r"block_table \(2, 1\), lengths \(3,\)"),
        ((2, 4, 16), LATENT._replace(latent=17), (2, 1), (2,), {}, "latent=17.* is no page"),
        ((2, 4, 16), LATENT._replace(kv_heads=2), (2, 1), (2,), {}, "kv_heads=2.* is no page"),
        ((2, 4, 16), LATENT, (2, 1), (2,), {}, "a latent page needs a scale"),
        ((2, 4, 16), PAGE, (2, 1), (2,), {"implementation": "cuda"}, "op 'paged_attention' has no"),
    ],
)
def test_refuses(q, page, block_table, lengths, options, message):
    table, lengths = jnp.zeros(block_table, jnp.int32), jnp.zeros(lengths, jnp.int32)
    arena = jnp.zeros((64, 32), jnp.uint16)
    with pytest.raises(ValueError, match=message):
        api.decode_attention(jnp.zeros(q), arena, table, lengths, 0, page=page, **options)


@pytest.mark.parametrize(
    ("page", "dtype", "message"),
    [
        (PAGE, "float32", "takes 16-bit dtypes, not float32; 'xla' takes it"),
        (PAGE._replace(head_dim=512), "float16", "takes head_dim up to 256, not 512; 'xla' takes"),
        (LATENT, "float16", "paged_attention 'pallas' reads no latent pages; 'xla' does"),
    ],
)
def test_the_kernel_refuses(page, dtype, message):
    arena, table = jnp.zeros((2, page.head_dim), jnp.uint16), jnp.zeros((2, 1), jnp.int32)
    options = dict(page=page, scale=1.0, implementation="pallas")
    q, two = jnp.zeros((2, 4, page.head_dim), dtype), jnp.ones(2, jnp.int32)
    with pytest.raises(ValueError, match=message):
        api.decode_attention(q, arena, table, table[:, 0], 0, **options)
    with pytest.raises(ValueError, match=message):
        api.prefill_attention(q, arena, table, two, two, two, jnp.int32(2), 0, **options)


def test_why_not_pallas():
    """What the engine asks at its start is what the op says later."""
    assert why_not_pallas(PAGE) is None and why_not_pallas(PAGE._replace(head_dim=256)) is None
    assert "no latent pages" in str(why_not_pallas(LATENT))
    assert "up to 256, not 258" in str(why_not_pallas(PAGE._replace(head_dim=258)))


def test_refuses_an_arena_of_broken_rows():
    arena, table = jnp.zeros((3, 8), jnp.uint16), jnp.zeros((2, 1), jnp.int32)
    with pytest.raises(ValueError, match=r"arena of \(3, 8\) is not whole rows of head_dim 16"):
        api.decode_attention(jnp.zeros((2, 4, 16)), arena, table, table[:, 0], 0, page=PAGE)

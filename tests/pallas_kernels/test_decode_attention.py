"""decode_attention against float64 over a poisoned arena."""

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
from tests.pallas_kernels.paged_kv import attend, draw_kv, in_parts, lay_out

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
    q, q_rope = in_parts(q, spec.page)
    return np.asarray(op(q, kv.arena, kv.block_table, *numbers, q_rope=q_rope))


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


@each(api.DECODE, LATENT_DECODE_SPECS)
def test_contract_of_latent_pages(spec, implementation):
    check(spec, implementation)


LATENT_BITS = {
    "float32": LATENT_DECODE_SPECS[1],
    "bfloat16": dataclasses.replace(LATENT_DECODE_SPECS[0], block_size=16),
}


@each(api.DECODE, dtypes=LATENT_BITS)
def test_bits_of_latent_pages_are_independent_of_page_size_and_place(implementation, dtype):
    spec = LATENT_BITS[dtype]
    q, keys, values = case(spec, 0)
    want = run(spec, implementation, q, laid_out(spec, keys, values))
    same_bits(run(spec, implementation, q, laid_out(spec, keys, values, seed=1)), want)
    other = dataclasses.replace(spec, block_size=64)
    same_bits(run(other, implementation, q, laid_out(other, keys, values)), want)


@each(api.DECODE, dtypes=LATENT_BITS)
def test_a_row_over_latent_pages_is_independent_of_the_others(implementation, dtype):
    """And of the width of the block table."""
    spec = LATENT_BITS[dtype]
    q, keys, values = case(spec, 0)
    want = run(spec, implementation, q, laid_out(spec, keys, values))
    wider = dataclasses.replace(spec, lengths=EDGES[::-1], max_length=600)
    kv = laid_out(wider, keys[::-1], values[::-1])
    same_bits(np.asarray(run(wider, implementation, q[::-1], kv))[::-1], want)
    for t in (0, 1, 4, 16):
        lone = dataclasses.replace(spec, lengths=(EDGES[t],))
        kv = laid_out(lone, keys[t : t + 1], values[t : t + 1])
        same_bits(run(lone, implementation, q[t : t + 1], kv)[0], want[t])


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
    def decode_attention(q, arena, block_table, lengths, layer, **options):
        changed = dict(q=q, block_table=block_table, lengths=lengths, layer=layer) | options
        return reference.decode_attention(arena=arena, **{**changed, **change(changed)})

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


@pytest.mark.nightly
@pytest.mark.parametrize("name", MUTANTS)
def test_contract_catches(name, monkeypatch):
    monkeypatch.setitem(api.DECODE, name, mutant(MUTANTS[name]))
    with pytest.raises(AssertionError):
        check(DecodeSpec(EDGES, "bfloat16", window=20), name)


def one_key_further(s, low, last, span=kernels.span_of):
    return span(s, low, last + 1)


def half_of_the_splits(lengths, *refs, window, split, merge=kernels.merge):
    merge(lengths, *refs, window=window, split=2 * split)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("part", "change"), [("span_of", one_key_further), ("merge", half_of_the_splits)]
)
def test_contract_catches_a_change_of_the_kernel(part, change, monkeypatch):
    monkeypatch.setattr(kernels, part, change)
    monkeypatch.setitem(api.DECODE, part, pallas_triton.decode_attention)
    with pytest.raises(AssertionError):
        check(DecodeSpec(LONG[1:2], "bfloat16", heads=2, kv_heads=1, max_length=300), part)


def one_latent_key_further(s, low, last, config, span=latent_kernels._span):
    return span(s, low, last + 1, config)


def without_rope(*args, queries=latent_kernels._queries):
    *parts, rope = queries(*args)
    return [*parts, 0 * rope]


def rope_for_latent(*args, load=latent_kernels._load):
    *parts, rope = load(*args)
    return [rope for _ in parts] + [rope]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("part", "change"),
    [
        ("_span", one_latent_key_further),
        ("_queries", without_rope),
        ("_load", rope_for_latent),
    ],
)
def test_contract_catches_a_change_of_the_latent_kernel(part, change, monkeypatch):
    monkeypatch.setattr(latent_kernels, part, change)
    monkeypatch.setitem(api.DECODE, part, pallas_triton.decode_attention)
    spec = dataclasses.replace(LATENT_DECODE_SPECS[0], lengths=(40,), window=None)
    with pytest.raises(AssertionError):
        check(spec, part)


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


@pytest.mark.nightly
def test_contract_catches_the_wrong_values_of_a_latent_row(monkeypatch):
    monkeypatch.setattr(reference, "_load_span", key_that_is_no_value())
    monkeypatch.setitem(api.DECODE, "last values", reference.decode_attention)
    with pytest.raises(AssertionError):
        check(LATENT_DECODE_SPECS[1], "last values")


PAGE = DecodeSpec((1,), "float32").page
LATENT = PAGE._replace(kv_heads=1, latent=8)
ROPE = {"q_rope": (2, 4, 8), "scale": 1.0}


@pytest.mark.parametrize(
    ("q", "page", "block_table", "lengths", "options", "message"),
    [
        ((2, 4, 8), PAGE, (2, 1), (2,), {}, r"q is \(2, 4, 8\) for 2 KV heads of head_dim 16"),
        ((2, 3, 16), PAGE, (2, 1), (2,), {}, r"q is \(2, 3, 16\) for 2 KV heads"),
        ((2, 4, 16), PAGE._replace(block_size=48), (2, 1), (2,), {}, "48 does not divide a span"),
        ((2, 4, 16), PAGE, (3, 1), (2,), {}, r"q \(2, 4, 16\), block_table \(3, 1\), lengths"),
        ((2, 4, 16), PAGE, (2, 1), (3,), {}, r"block_table \(2, 1\), lengths \(3,\)"),
        ((2, 4, 16), LATENT._replace(latent=17), (2, 1), (2,), {}, "latent=17.* is no page"),
        ((2, 4, 16), LATENT._replace(latent=16), (2, 1), (2,), {}, "latent=16.* is no page"),
        ((2, 4, 16), LATENT._replace(kv_heads=2), (2, 1), (2,), {}, "kv_heads=2.* is no page"),
        ((2, 4, 8), LATENT, (2, 1), (2,), {"q_rope": (2, 4, 8)}, "a latent page needs a scale"),
        ((2, 4, 16), LATENT, (2, 1), (2,), {}, "latent pages need q_rope, others take none"),
        ((2, 4, 16), PAGE, (2, 1), (2,), ROPE, "latent pages need q_rope, others take none"),
        ((2, 4, 16), LATENT, (2, 1), (2,), ROPE, r"q is \(2, 4, 16\), q_rope \(2, 4, 8\) for rows"),
        ((2, 3, 8), LATENT, (2, 1), (2,), ROPE, r"q_rope \(2, 4, 8\) for rows of 8 \+ 8"),
        ((2, 4, 8), LATENT, (3, 1), (2,), ROPE, r"q \(2, 4, 8\), block_table \(3, 1\), lengths"),
        ((2, 4, 16), PAGE, (2, 1), (2,), {"implementation": "cuda"}, "op 'paged_attention' has no"),
    ],
)
def test_refuses(q, page, block_table, lengths, options, message):
    table, lengths = jnp.zeros(block_table, jnp.int32), jnp.zeros(lengths, jnp.int32)
    arena = jnp.zeros((64, 32), jnp.uint16)
    if "q_rope" in options:
        options = options | {"q_rope": jnp.zeros(options["q_rope"])}
    with pytest.raises(ValueError, match=message):
        api.decode_attention(jnp.zeros(q), arena, table, lengths, 0, page=page, **options)


def test_refuses_queries_of_two_dtypes():
    arena, table = jnp.zeros((64, 32), jnp.uint16), jnp.zeros((2, 1), jnp.int32)
    q, options = jnp.zeros((2, 4, 8)), {"page": LATENT, "scale": 1.0}
    rope = jnp.zeros(q.shape, jnp.bfloat16)
    with pytest.raises(ValueError, match="q is float32, q_rope bfloat16"):
        api.decode_attention(q, arena, table, table[:, 0], 0, q_rope=rope, **options)


@pytest.mark.parametrize(
    ("page", "dtype", "message"),
    [
        (PAGE, "float32", "takes 16-bit dtypes, not float32; 'xla' takes it"),
        (PAGE._replace(head_dim=512), "float16", "takes head_dim up to 256, not 512; 'xla' takes"),
        (LATENT, "float32", "takes 16-bit dtypes, not float32; 'xla' takes it"),
        (LATENT._replace(head_dim=600, latent=514), "float16", "not 514 \\+ 86; 'xla' takes them"),
    ],
)
def test_the_kernel_refuses(page, dtype, message):
    arena, table = jnp.zeros((2, page.head_dim), jnp.uint16), jnp.zeros((2, 1), jnp.int32)
    options: dict = dict(page=page, scale=1.0, implementation="pallas")
    q, two = jnp.zeros((2, 4, page.head_dim), dtype), jnp.ones(2, jnp.int32)
    if page.latent:
        q, options["q_rope"] = q[..., : page.latent], q[..., page.latent :]
    with pytest.raises(ValueError, match=message):
        api.decode_attention(q, arena, table, table[:, 0], 0, **options)
    with pytest.raises(ValueError, match=message):
        api.prefill_attention(q, arena, table, two, two, two, jnp.int32(2), 0, **options)


def test_why_not_pallas():
    """What the engine asks at its start is what the op says later."""
    assert why_not_pallas(PAGE) is None and why_not_pallas(PAGE._replace(head_dim=256)) is None
    assert "up to 256, not 258" in str(why_not_pallas(PAGE._replace(head_dim=258)))
    assert why_not_pallas(LATENT) is None
    assert why_not_pallas(LATENT._replace(head_dim=576, latent=512)) is None
    for latent, head_dim in ((513, 576), (512, 578)):
        refusal = str(why_not_pallas(LATENT._replace(head_dim=head_dim, latent=latent)))
        assert f"up to 512 + 64 values, not {latent} + {head_dim - latent}" in refusal


def test_refuses_an_arena_of_broken_rows():
    arena, table = jnp.zeros((3, 8), jnp.uint16), jnp.zeros((2, 1), jnp.int32)
    with pytest.raises(ValueError, match=r"arena of \(3, 8\) is not whole rows of head_dim 16"):
        api.decode_attention(jnp.zeros((2, 4, 16)), arena, table, table[:, 0], 0, page=PAGE)

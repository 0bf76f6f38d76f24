"""decode_attention against float64 over a poisoned arena."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import Indexer, api
from pallas_kernels.paged_attention.specs import (
    DECODE_SPECS,
    EDGES,
    LATENT_DECODE_SPECS,
    DecodeSpec,
)
from tests.pallas_kernels import contract
from tests.pallas_kernels.contract import Contract, Mutant, close, compiled, draw, same_bits
from tests.pallas_kernels.paged_kv import attend, draw_kv, in_parts, lay_out, per_layer

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
    options = api.AttentionOptions(spec.page, spec.scale, implementation)
    op = compiled(api.decode_attention, options=options)
    numbers = (np.int32(spec.lengths), np.int32(LAYER))
    q, q_rope = in_parts(q, spec.page)
    more = {"q_rope": q_rope, "per_layer": per_layer(spec)}
    return np.asarray(op(q, kv.arena, kv.block_table, *numbers, **more))


def check(spec, implementation):
    for seed in contract.SEEDS:
        q, keys, values = case(spec, seed)
        got = run(spec, implementation, q, laid_out(spec, keys, values, seed))
        assert got.dtype == spec.dtype
        want = np.zeros((len(q), spec.heads * spec.page.value_dim))
        for t, length in enumerate(spec.lengths):
            if length:
                want[t] = attend(spec, q[t], keys[t], values[t], length - 1)
        close("paged_attention", spec.dtype, got, want)
        np.testing.assert_array_equal(np.asarray(got)[np.equal(spec.lengths, 0)], 0)


def check_bits(spec, implementation):
    """They depend on no page's size and place, no other row and no width of the block table."""
    q, keys, values = case(spec, 0)
    want = run(spec, implementation, q, laid_out(spec, keys, values))
    elsewhere = laid_out(spec, keys, values, seed=1, spare_pages=40)
    same_bits(run(spec, implementation, q, elsewhere), want)
    for block_size in (32, 64):
        other = dataclasses.replace(spec, block_size=block_size)
        same_bits(run(other, implementation, q, laid_out(other, keys, values)), want)
    wider = dataclasses.replace(spec, lengths=spec.lengths[::-1], max_length=600)
    turned = run(wider, implementation, q[::-1], laid_out(wider, keys[::-1], values[::-1]))
    same_bits(np.ascontiguousarray(turned[::-1]), want)
    for t in (0, 1, 4, 16):
        lone = dataclasses.replace(spec, lengths=spec.lengths[t : t + 1])
        kv = laid_out(lone, keys[t : t + 1], values[t : t + 1])
        same_bits(run(lone, implementation, q[t : t + 1], kv)[0], want[t])


def bits(implementation):
    for dtype in contract.dtypes_of_bits(implementation):
        window = None if dtype == "float32" else 20
        check_bits(DecodeSpec(EDGES, dtype, window=window), implementation)


def bits_of_latent_pages(implementation):
    spec = dataclasses.replace(LATENT_DECODE_SPECS[0], block_size=16)
    for dtype in contract.dtypes_of_bits(implementation):
        check_bits(dataclasses.replace(spec, dtype=dtype), implementation)


def bits_of_longer_tables(implementation):
    """Rows of several splits, of which a wider table has room for more."""
    for dtype in contract.dtypes_of_bits(implementation):
        spec = DecodeSpec((1100, 257, 64), dtype, heads=2, kv_heads=1, max_length=1100)
        q, keys, values = case(spec, 0)
        want = run(spec, implementation, q, laid_out(spec, keys, values))
        wider = dataclasses.replace(spec, max_length=1700)
        same_bits(run(wider, implementation, q, laid_out(wider, keys, values)), want)


PAGE = DecodeSpec((1,), "float32").page
LATENT = PAGE._replace(kv_heads=1, latent=8)
ROPE = {"q_rope": jnp.zeros((2, 4, 8)), "scale": 1.0}
INDEXER = {"indexer": Indexer(np.zeros((2, 3, 8)), np.ones((2, 3)), 2)}


def refused(q, page=PAGE, options=None, table=(2, 1), lengths=2, arena=(64, 32), dtype="float32"):
    numbers = jnp.zeros(table, jnp.int32), jnp.zeros(lengths, jnp.int32), 0
    arena = jnp.zeros(arena, jnp.uint16)
    options = dict(options or {})
    operands = jnp.zeros(q, dtype), arena, *numbers
    q_rope = options.pop("q_rope", None)
    beside = api.PerLayer(0, *(options.pop(name, None) for name in ("sinks", "windows", "indexer")))
    return api.decode_attention(*operands, api.AttentionOptions(page, **options), q_rope, beside)


def refused_by_kernels(decodes, page, dtype):
    arena, table = jnp.zeros((2, page.head_dim), jnp.uint16), jnp.zeros((2, 1), jnp.int32)
    options = api.AttentionOptions(page, scale=1.0, implementation="pallas")
    q, two = jnp.zeros((2, 4, page.head_dim), dtype), jnp.ones(2, jnp.int32)
    q, q_rope = (q[..., : page.latent], q[..., page.latent :]) if page.latent else (q, None)
    if decodes:
        return api.decode_attention(q, arena, table, two, 0, options, q_rope)
    chunks = api.Chunks(two, two, two, jnp.int32(2))
    return api.prefill_attention(q, arena, table, chunks, 0, options, q_rope)


CONTRACTS = (
    Contract(
        "decode_attention",
        api.DECODE,
        DECODE_SPECS,
        check,
        facts=(bits, bits_of_longer_tables),
        mutant=Mutant(
            lambda a: {"lengths": a["lengths"] + (a["lengths"] > 0)},
            DecodeSpec(EDGES, "bfloat16", window=20),
        ),
        refused=refused,
        refusals=(
            ((2, 4, 8), r"q is \(2, 4, 8\) for 2 KV heads of head_dim 16"),
            ((2, 3, 16), r"q is \(2, 3, 16\) for 2 KV heads"),
            ((2, 4, 16), PAGE._replace(block_size=48), "48 does not divide a span"),
            ((2, 4, 16), PAGE, {}, (3, 1), r"q \(2, 4, 16\), block_table \(3, 1\), lengths"),
            ((2, 4, 16), PAGE, {}, (2, 1), 3, r"block_table \(2, 1\), lengths \(3,\)"),
            ((2, 4, 16), PAGE, {}, (2, 1), 2, (3, 8), r"\(3, 8\) is not whole rows of head_dim"),
            ((2, 4, 16), PAGE, {"implementation": "cuda"}, "op 'paged_attention' has no"),
            ((2, 4, 16), PAGE, {"sinks": np.zeros((1, 3))}, r"\[L, 4\] for 4 .* not \(1, 3\)"),
            ((2, 4, 16), PAGE, {"windows": np.zeros(2)}, r"int32\[L\], not float64\[2\]"),
        ),
    ),
    Contract(
        "decode_attention over latent pages",
        api.DECODE,
        LATENT_DECODE_SPECS,
        check,
        facts=(bits_of_latent_pages,),
        mutant=Mutant(
            lambda a: {"q_rope": 0 * a["q_rope"]},
            dataclasses.replace(LATENT_DECODE_SPECS[0], lengths=(40,)),
        ),
        refused=refused,
        refusals=(
            ((2, 4, 16), LATENT._replace(latent=17), "latent=17.* a latent page has 1 KV head"),
            ((2, 4, 16), LATENT._replace(latent=16), "latent=16.* a latent page has 1 KV head"),
            ((2, 4, 16), LATENT._replace(kv_heads=2), "kv_heads=2.* a latent page has 1 KV head"),
            ((2, 4, 8), LATENT, ROPE | {"scale": None}, "a latent page needs a scale"),
            ((2, 4, 16), LATENT, "latent pages need q_rope, others take none"),
            ((2, 4, 16), PAGE, ROPE, "latent pages need q_rope, others take none"),
            ((2, 4, 16), LATENT, ROPE, r"q is \(2, 4, 16\), q_rope \(2, 4, 8\) for rows"),
            ((2, 3, 8), LATENT, ROPE, r"q_rope \(2, 4, 8\) for rows of 8 \+ 8"),
            ((2, 4, 8), LATENT, ROPE, (3, 1), r"q \(2, 4, 8\), block_table \(3, 1\), lengths"),
            (
                *((2, 4, 8), LATENT, ROPE, (2, 1), 2, (64, 32), "bfloat16"),
                "q is bfloat16, q_rope float32",
            ),
            ((2, 4, 8), LATENT, ROPE | INDEXER | {"implementation": "cpu"}, "only XLA attends to"),
            ((2, 4, 16), PAGE, INDEXER, r"queries are \(2, 3, 8\) for KVPage"),
            (
                *(
                    (2, 4, 8),
                    LATENT,
                    ROPE | {"indexer": Indexer(np.zeros((2, 3, 8)), np.ones(1), 2)},
                ),
                r"\(2, 3, 8\) and \(1,\) for \(2, 4, 8\) queries",
            ),
        ),
    ),
    Contract(
        "paged_attention's kernels",
        {},
        (),
        check,
        refused=refused_by_kernels,
        refusals=[
            (decodes, *rest)
            for decodes in (True, False)
            for rest in (
                (PAGE, "float32", "takes 16-bit dtypes, not float32; 'xla' takes it"),
                (PAGE._replace(head_dim=512), "float16", "head_dim up to 256, not 512; 'xla'"),
                (LATENT, "float32", "takes 16-bit dtypes, not float32; 'xla' takes it"),
                (LATENT._replace(head_dim=600, latent=514), "float16", "not 514 \\+ 86; 'xla'"),
            )
        ],
    ),
)

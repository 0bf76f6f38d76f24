"""write_and_attend has the bits of kv_write followed by decode_attention, and writes no more."""

import dataclasses

import numpy as np

from pallas_kernels.kv_write import WriteOptions, kv_write
from pallas_kernels.paged_attention import api
from pallas_kernels.paged_attention.specs import EDGES, LONG, DecodeSpec
from tests.pallas_kernels.contract import Contract, compiled, draw, same_bits
from tests.pallas_kernels.ops.page_writes import operands
from tests.pallas_kernels.paged_kv import draw_kv, lay_out, per_layer

LAYER, STACK_LAYER = 1, 2

SPLITS = (2047, 257, 0, 1024, 255, 256, 511)
"""Lengths around the ends of splits, of which there are eight or four."""

READING = "block_table", "lengths", "counters"
"""Arguments beside kv_write's."""

WRITING_SPECS = (
    DecodeSpec(EDGES, "bfloat16", block_size=32),
    DecodeSpec(EDGES[:9], "bfloat16", window=20, scale=0.4),
    DecodeSpec(EDGES, "float16", block_size=64, head_dim=24, heads=3, kv_heads=1),
    DecodeSpec(EDGES[:7], "bfloat16", heads=20, kv_heads=1, head_dim=6),
    DecodeSpec(LONG, "bfloat16", sinks=True, heads=2, kv_heads=1, max_length=2400),
    DecodeSpec(SPLITS, "float16", window=300, heads=2, kv_heads=1, max_length=2048),
    DecodeSpec(SPLITS[1:], "bfloat16", sinks=True, heads=6, kv_heads=2, max_length=1024),
)
"""The last two merge several splits in the program that comes last; LONG has too many."""


def case(spec, seed, counts=True) -> dict:
    """Arguments of the op: pages hold all tokens but each row's last one. Norms but with LONG.
    counts: with counters."""
    norms = spec.lengths != LONG
    rng = np.random.default_rng(seed)
    columns = (spec.heads + 2 * spec.kv_heads) * spec.head_dim
    qkv = draw(rng, (len(spec.lengths), columns), spec.dtype)
    keys, values = draw_kv(rng, spec.lengths, spec.page, spec.dtype)
    sizes = dict(layers=spec.layers, layer=LAYER, max_length=spec.max_length)
    for of_row in (*keys, *values):  # what no kernel may read
        of_row[-1:] = np.nan
    kv = lay_out(rng, keys, values, spec.page, **sizes)
    weights = np.full((2, 3, spec.head_dim), np.nan, qkv.dtype)
    weights[:, STACK_LAYER] = 1 + draw(rng, (2, spec.head_dim), "float32", 0.2)
    positions = np.int32(spec.lengths) - 1
    block = np.maximum(positions, 0) // spec.block_size
    pages = np.where(positions < 0, -1, kv.block_table[np.arange(len(block)), block])
    return dict(
        qkv=qkv,
        q_norm=weights[0] if norms else None,
        k_norm=weights[1] if norms else None,
        stack_layer=np.int32(STACK_LAYER),
        positions=positions,
        inverse_frequencies=(1e4 ** -np.linspace(0, 1, spec.head_dim // 2)).astype(np.float32),
        arena=kv.arena,
        pages=pages,
        layer=np.int32(LAYER),
        block_table=kv.block_table,
        lengths=np.int32(spec.lengths),
        counters=np.zeros(len(positions) * spec.kv_heads + 1, np.int32) if counts else None,
    )


def options(spec, name):
    write = WriteOptions(spec.page, attention_factor=1.25, eps=1e-6, implementation=name)
    return write, api.AttentionOptions(spec.page, spec.scale, name)


def run(spec, implementation, inputs):
    write, read = options(spec, implementation)
    op = compiled(api.write_and_attend, write=write, read=read)
    given = *operands(inputs), *(inputs[name] for name in READING)
    *made, counters = op(*given, per_layer=per_layer(spec))
    assert counters is None or not np.any(counters)
    return [np.asarray(x) for x in made]


def check(spec, implementation):
    """The bits of the two ops' kernels, which have contracts."""
    want = two_kernels(spec, case(spec, 0))
    for counts in (True, False):
        got = run(spec, implementation, case(spec, 0, counts))
        for x, y in zip(got, want, strict=True):
            same_bits(x, y)


def two_kernels(spec, inputs):
    write, read = options(spec, "pallas")
    q, arena = compiled(kv_write, options=write)(*operands(inputs))
    numbers = inputs["block_table"], inputs["lengths"], inputs["layer"]
    attend = compiled(api.decode_attention, options=read)
    return [np.asarray(attend(q, arena, *numbers, per_layer=per_layer(spec))), np.asarray(arena)]


def a_row_without_a_page_writes_nothing(implementation):
    spec = WRITING_SPECS[1]
    inputs = case(spec, 0)
    one = int(np.flatnonzero(inputs["pages"] >= 0)[-1])
    pages = np.where(np.arange(len(inputs["pages"])) == one, -1, inputs["pages"])
    all_rows, fewer = (run(spec, implementation, x)[1] for x in (inputs, inputs | {"pages": pages}))
    changed, still = (x != inputs["arena"] for x in (all_rows, fewer))
    assert (still <= changed).all() and 0 < still.sum() < changed.sum()


def refused(changed, dtype="bfloat16"):
    spec = dataclasses.replace(WRITING_SPECS[1], dtype=dtype)
    arrays = {name: shape and np.zeros(shape, np.int32) for name, shape in changed.items()}
    inputs = case(spec, 0) | arrays
    write, read = options(spec, "pallas")
    given = *operands(inputs), *(inputs[name] for name in READING)
    return api.write_and_attend(*given, write=write, read=read)


KERNEL = {"pallas": api.DECODE["pallas"]}
"""Of others it is the two ops, which have contracts."""

CONTRACTS = (
    Contract(
        "write_and_attend",
        KERNEL,
        WRITING_SPECS,
        check,
        facts=(a_row_without_a_page_writes_nothing,),
        refused=refused,
        refusals=(
            ({"qkv": (9, 16)}, "qkv has 16 columns for"),
            ({"inverse_frequencies": (9,)}, "9 frequencies for head_dim"),
            ({"k_norm": None}, "give both q_norm and k_norm, or neither"),
            ({"arena": (3, 5)}, r"arena of \(3, 5\) is not whole rows"),
            ({"block_table": (8, 2)}, r"block_table \(8, 2\)"),
            ({"positions": (8,)}, r"lengths \(8,\)"),
            ({"pages": (10,)}, r"lengths \(10,\)"),
            ({"counters": (17,)}, r"counters \(17,\) are fewer than the 18 of 9 rows of 2 heads"),
            ({}, "float32", "takes 16-bit dtypes, not float32"),
        ),
    ),
)

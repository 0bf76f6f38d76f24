"""expert_ffn against float64, from cells and straight from the store."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_ffn import api, many_tokens, pallas_triton
from pallas_kernels.expert_ffn.pallas_triton import Config
from pallas_kernels.expert_ffn.specs import SPECS, Spec
from pallas_kernels.expert_ffn.tile import Tile, fit
from pallas_kernels.records.absent import AbsentRecords
from tests.pallas_kernels.contract import (
    POISON,
    SEEDS,
    as_rows,
    close,
    compiled,
    draw,
    each,
    same_bits,
    stored,
    wide,
)

LAYER = 1
ACTIVATIONS = {
    "silu": lambda x: x / (1 + np.exp(-x)),
    "swish": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2,
    "gelu_new": lambda x: x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "relu": lambda x: np.maximum(x, 0),
}
ACTIVATIONS["gelu_pytorch_tanh"] = ACTIVATIONS["gelu_new"]


@dataclasses.dataclass(frozen=True)
class Case:
    x: np.ndarray
    ids: np.ndarray
    y: np.ndarray
    """What y holds before: nothing that a product gives."""
    weights: np.ndarray
    """[E, 3·I, D]: gate, up, down^T."""

    @property
    def active(self) -> np.ndarray:
        return np.unique(self.ids[self.ids < len(self.weights)])


def case(spec, seed) -> Case:
    rng = np.random.default_rng(seed)
    busy = spec.experts - (spec.experts // 4 if spec.routing == "some" else 0)
    ids = np.stack([np.sort(rng.permutation(busy)[: spec.top_k]) for _ in range(spec.tokens)])
    ids = np.int32(ids)
    if spec.routing == "one":
        ids[:, -1] = spec.experts - 1
        others = [rng.permutation(spec.experts - 1)[: spec.top_k - 1] for _ in ids]
        ids[:, :-1] = np.sort(np.reshape(others, (spec.tokens, -1)), axis=1)
    if spec.routing == "padded":
        ids[spec.tokens * 2 // 3 :] = spec.experts
    if spec.routing == "none":
        ids[:] = spec.experts
    scale = np.repeat([spec.hidden**-0.5, spec.hidden**-0.5, spec.width**-0.5], spec.width)
    weights = rng.standard_normal((spec.experts, 3 * spec.width, spec.hidden)) * scale[:, None]
    x = draw(rng, (spec.tokens, spec.hidden), spec.dtype)
    y = rng.uniform(50, 60, (spec.tokens * spec.top_k, spec.hidden)).astype(np.float32)
    return Case(x, ids, y, weights.astype(x.dtype))


def memory(spec, c, resident, spare_rows=0):
    """Arena, store and addresses: each expert lies in the one place where it must be read from,
    everything else is poison, idle experts included."""
    rows = 3 * spec.width * c.x.itemsize // 2
    step = rows + 2
    arena = np.full((step * spec.experts + 2 + spare_rows, spec.hidden), POISON, np.uint16)
    store = np.full((spec.layers, spec.experts, rows, spec.hidden), POISON, np.uint16)
    address = np.full((spec.layers, spec.experts), 1, np.int32)  # nothing lies at row 1
    address[LAYER] = -1
    for e in range(spec.experts):
        record = as_rows(c.weights[e], spec.hidden)
        if e in resident:
            row = len(arena) - (e + 1) * step  # descending, unlike the ids
            address[LAYER, e] = row
            if e in c.active:
                arena[row : row + rows] = record
        elif e in c.active:
            store[LAYER, e] = record
    return arena, store, address


def run(spec, implementation, c, memory, active=None, y=None, activation="silu", pairs=None):
    arena, store, address = memory
    active = c.active if active is None else active
    version = np.full((spec.layers, spec.experts), 7, np.int32)
    version[LAYER] = 0
    listed = np.full(spec.experts, -1, np.int32)
    listed[: len(active)] = active
    op = compiled(
        api.expert_ffn,
        activation=activation,
        row_tile=spec.row_tile,
        implementation=implementation,
    )
    return op(
        c.y if y is None else y,
        c.x,
        c.ids,
        arena,
        (store if isinstance(store, AbsentRecords) else stored(store, implementation),),
        np.int32(LAYER),
        address,
        version,
        listed,
        np.int32(len(active)),
        pairs=pairs,
    )


def check(spec, implementation, activation="silu"):
    for seed in SEEDS:
        c = case(spec, seed)
        half = np.random.default_rng(seed).permutation(spec.experts)[: spec.experts // 2]
        got = run(spec, implementation, c, memory(spec, c, set(half)), activation=activation)
        assert got.dtype == jnp.float32
        flat = c.ids.reshape(-1)
        x = wide(c.x)[np.arange(len(flat)) // spec.top_k]
        want = wide(c.y)
        for e in c.active:
            gate, up, down = np.split(wide(c.weights[e]), 3)
            mine = flat == e
            hidden = ACTIVATIONS[activation](x[mine] @ gate.T) * (x[mine] @ up.T)
            want[mine] = wide(hidden.astype(c.x.dtype)) @ down
        close("expert_ffn", spec.dtype, got, want)
        same_bits(np.asarray(got)[flat == spec.experts], c.y[flat == spec.experts])


@each(api.IMPLEMENTATIONS, SPECS)
def test_contract(spec, implementation):
    check(spec, implementation)


@each(api.IMPLEMENTATIONS, dtypes=("float32", "float16"))
@pytest.mark.parametrize("activation", api.ACTIVATIONS)
def test_activation(implementation, dtype, activation):
    check(Spec(3, dtype), implementation, activation)


def test_error_function():
    x = np.linspace(-6, 6, 4801, dtype=np.float32)
    want = np.vectorize(math.erf)(wide(x))
    np.testing.assert_allclose(pallas_triton._erf(jnp.asarray(x)), want, rtol=0, atol=3e-7)


def on_bits(test):
    """Cases of the tests that compare bits: few tokens (tiles of 16 rows) and many (of 64)."""
    each_dtype = each(api.IMPLEMENTATIONS, dtypes=("float32", "bfloat16"))
    return each_dtype(pytest.mark.parametrize("row_tile", [16, 64])(test))


@on_bits
def test_bits_are_independent_of_where_an_expert_lies(implementation, dtype, row_tile):
    """Cell, another cell of a larger arena, or the store."""
    spec = Spec(17, dtype, "one", row_tile=row_tile)
    c = case(spec, 0)
    want = run(spec, implementation, c, memory(spec, c, ()))
    everything = set(range(spec.experts))
    same_bits(run(spec, implementation, c, memory(spec, c, everything)), want)
    same_bits(run(spec, implementation, c, memory(spec, c, {0, 3, 7}, spare_rows=34)), want)


@each(api.IMPLEMENTATIONS, dtypes=("float32",))
def test_experts_with_an_address_need_no_store(implementation, dtype):
    """Among many in an arena, or alone in one of their record."""
    spec = Spec(17, dtype, "one", row_tile=16)
    c = case(spec, 0)
    arena, store, address = memory(spec, c, set(range(spec.experts)))
    want, absent = run(spec, implementation, c, (arena, store, address)), AbsentRecords(store.shape)
    same_bits(run(spec, implementation, c, (arena, absent, address)), want)
    y, begin = c.y, np.zeros_like(address)
    for e in c.active:
        record = arena[address[LAYER, e] :][: store.shape[2]]
        y = run(spec, implementation, c, (record, absent, begin), active=[e], y=y)
    same_bits(y, want)


@on_bits
def test_bits_are_independent_of_waves(implementation, dtype, row_tile):
    spec = Spec(17, dtype, "one", row_tile=row_tile)
    c = case(spec, 0)
    placed = memory(spec, c, {1, 2, 6})
    want = run(spec, implementation, c, placed)
    y = c.y
    for part in (c.active[:1], c.active[1:1], c.active[1:5], c.active[5:]):
        y = run(spec, implementation, c, placed, active=part, y=y)
    same_bits(y, want)


@pytest.mark.slow
def test_waves_share_the_sort_of_their_pairs():
    spec = Spec(17, "bfloat16", "padded", row_tile=many_tokens.ROWS)
    c = case(spec, 0)
    placed = memory(spec, c, {1, 2, 6})
    pairs = api.sorted_pairs(c.ids, spec.experts, row_tile=spec.row_tile, implementation="pallas")
    y = c.y
    for part in (c.active[:2], c.active[2:]):
        y = run(spec, "pallas", c, placed, active=part, y=y, pairs=pairs)
    same_bits(y, run(spec, "pallas", c, placed))
    for row_tile, implementation in ((16, "pallas"), (64, "xla"), (1, "cpu")):
        options = {"row_tile": row_tile, "implementation": implementation}
        assert api.sorted_pairs(c.ids, spec.experts, **options) is None


@pytest.mark.parametrize(
    ("tokens", "k", "experts"), [(1, 1, 1), (40, 6, 64), (128, 2, 8), (200, 8, 128)]
)
def test_pairs_are_sorted_as_by_a_stable_sort(tokens, k, experts):
    rng = np.random.default_rng(tokens)
    ids = np.stack([np.sort(rng.permutation(experts)[:k]) for _ in range(tokens)]).astype(np.int32)
    ids[rng.random(tokens) < 0.3] = experts
    for some in (ids, np.full_like(ids, experts), np.full_like(ids, experts - 1)):
        flat = some.reshape(-1)
        order, first = many_tokens.sort_pairs(jnp.asarray(some), experts)
        np.testing.assert_array_equal(order, np.argsort(flat, kind="stable"))
        np.testing.assert_array_equal(first, np.searchsorted(np.sort(flat), range(experts + 1)))


@on_bits
def test_rows_of_other_experts_keep_what_they_hold(implementation, dtype, row_tile):
    spec = Spec(17, dtype, "padded", row_tile=row_tile)
    c = case(spec, 0)
    part = c.active[::2]
    got = run(spec, implementation, c, memory(spec, c, {0, 1}), active=part)
    untouched = ~np.isin(c.ids.reshape(-1), part)
    same_bits(np.asarray(got)[untouched], c.y[untouched])


@on_bits
def test_a_row_is_independent_of_the_others_and_of_their_number(implementation, dtype, row_tile):
    spec = Spec(17, dtype, "one", row_tile=row_tile)
    c = case(spec, 0)
    placed = memory(spec, c, {1, 2, 6})
    want = np.asarray(run(spec, implementation, c, placed)).reshape(17, spec.top_k, -1)
    y = np.zeros_like(c.y)
    for t in (0, 9, 16):
        # The others hold NaN and go elsewhere.
        ids = np.full_like(c.ids, 0) + np.arange(spec.top_k, dtype=np.int32)
        x = np.full_like(c.x, np.nan)
        ids[t], x[t] = c.ids[t], c.x[t]
        others = dataclasses.replace(c, x=x, ids=ids)
        got = run(spec, implementation, others, placed, active=c.active, y=y)
        same_bits(np.asarray(got).reshape(17, spec.top_k, -1)[t], want[t])
        for tokens in (1, 65):
            lone = dataclasses.replace(spec, tokens=tokens)
            many = Case(
                np.repeat(c.x[t : t + 1], tokens, axis=0),
                np.repeat(c.ids[t : t + 1], tokens, axis=0),
                np.zeros((tokens * spec.top_k, spec.hidden), np.float32),
                c.weights,
            )
            got = np.asarray(run(lone, implementation, many, placed))
            for row in got.reshape(tokens, spec.top_k, -1)[[0, -1]]:
                same_bits(row, want[t])


def test_the_row_tile_and_the_sizes_decide_the_configuration():
    """As the docstring says; T is no parameter."""
    decode = pallas_triton.configuration(2048, 768, "bfloat16", 16)
    assert decode == Config(16, Tile(64, 128, 4, 4), Tile(64, 128, 4, 3))
    assert decode == pallas_triton.configuration(4096, 14336, "float16", 8)
    prefill = pallas_triton.configuration(2048, 768, "bfloat16", 64)
    assert prefill == pallas_triton.configuration(4096, 14336, "float16", 128)
    assert prefill.rows == 64
    assert [fit(size, 64) for size in (768, 2880, 96, 80, 24, 40, 10)] == [
        64,
        64,
        32,
        16,
        32,
        64,
        16,
    ]


@pytest.mark.parametrize(
    ("y", "arena", "options", "message"),
    [
        ((5, 8), (9, 8), {}, r"x \(3, 8\), ids \(3, 2\) and y \(5, 8\) do not fit together"),
        ((6, 7), (9, 8), {}, r"x \(3, 8\), ids \(3, 2\) and y \(6, 7\) do not fit together"),
        ((6, 8), (9, 7), {}, "arena rows have 7 elements, x has 8 columns"),
        ((6, 8), (9, 8), {"activation": "tanh"}, "unknown activation 'tanh'; known: silu"),
        ((6, 8), (9, 8), {"implementation": "cuda"}, "op 'expert_ffn' has no implementation"),
        ((6, 8), (9, 8), {"implementation": "pallas"}, "bfloat16 and float16, not float32 "),
    ],
)
def test_refuses(y, arena, options, message):
    table = jnp.zeros((1, 4), jnp.int32)
    with pytest.raises(ValueError, match=message):
        api.expert_ffn(
            jnp.zeros(y),
            jnp.zeros((3, 8), jnp.float32),
            jnp.zeros((3, 2), jnp.int32),
            jnp.zeros(arena, jnp.uint16),
            (jnp.zeros((1, 4, 6, 8), jnp.uint16),),
            0,
            table,
            table,
            table[0],
            jnp.int32(0),
            **{"activation": "silu", "row_tile": 16, **options},
        )

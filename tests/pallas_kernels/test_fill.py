"""fill: the right bytes at the right rows, nothing else."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels.records.reference
import pallas_kernels.records.tile
from pallas_kernels.fill import api, pallas_triton
from pallas_kernels.fill.specs import SPECS, TRANSIT_SPECS, Spec, TransitSpec
from tests.pallas_kernels.contract import NATIVE, POISON, SEEDS, compiled, each, stored
from tests.pallas_kernels.encoded import formats, recode, records

GAP = 2
"""Rows of the arena between two cells, which nobody may touch."""


def case(spec, seed, count):
    """Arena, stores, and a list of `spec.experts` moves of which `count` are real; the others are
    as plausible, so carrying one out shows."""
    rng = np.random.default_rng(seed)
    stores = [
        rng.integers(0, POISON, (spec.layers, spec.experts, rows, spec.hidden), np.uint16)
        for rows in spec.record_rows
    ]
    cell = max(spec.record_rows) + GAP
    arena = np.full((2 * spec.experts * cell + GAP, spec.hidden), POISON, np.uint16)
    expert = np.int32(rng.permutation(spec.experts))
    row = np.int32(rng.permutation(2 * spec.experts)[: spec.experts] * cell + GAP)
    version = np.int32(rng.integers(0, len(stores), spec.experts))
    return arena, stores, expert, row, version, np.int32(count)


def run(implementation, arena, stores, layer, *moves):
    op = compiled(api.fill, donate=("arena",), implementation=implementation)
    stores = tuple(stored(store, implementation) for store in stores)
    return op(jnp.array(arena), stores, np.int32(layer), *moves)


def check(spec, implementation):
    for seed in SEEDS:
        for count in {0, 1, spec.experts // 2, spec.experts}:
            arena, stores, *moves = case(spec, seed, count)
            layer = seed % spec.layers
            got = run(implementation, arena, stores, layer, *moves)
            for e, row, v in zip(*(m[:count] for m in moves[:3]), strict=True):
                arena[row : row + stores[v].shape[2]] = stores[v][layer, e]
            np.testing.assert_array_equal(got, arena, strict=True)


@each(api.IMPLEMENTATIONS, SPECS)
def test_contract(spec, implementation):
    check(spec, implementation)


def check_in_transit(spec, implementation, places=None):
    """Every expert once, in turns of three versions: lossless12 in the store and dense in its cell,
    int4, dense. places: of the versions' layers in their stores."""
    versions = (("dense", "lossless12"), "int4", "dense")
    of_versions = formats(versions, spec.hidden, spec.width, "bfloat16", places)
    rng, layer = np.random.default_rng(0), spec.layers - 1
    cell = max(f.cell.rows for f in of_versions) + GAP
    arena = np.full((spec.experts * cell + GAP, spec.hidden), POISON, np.uint16)
    want, stores = arena.copy(), []
    for f in of_versions:
        held = range(spec.layers) if f.places is None else [p for p in f.places if p >= 0]
        shape = len(held), spec.experts, f.store.rows, spec.hidden
        stores.append(np.full(shape, POISON, np.uint16))
    expert = np.int32(rng.permutation(spec.experts))
    version = expert % 3
    row = np.int32(rng.permutation(spec.experts) * cell + GAP)
    for e, r, v in zip(expert, row, version, strict=True):
        f = of_versions[v]
        stores[v][int(f.place(layer)), e] = record = records(rng, 1, f.store)[0]
        want[r : r + f.cell.rows] = recode(record[None], f)[0]
    op = compiled(api.fill, donate=("arena",), formats=of_versions, implementation=implementation)
    stores = tuple(stored(store, implementation) for store in stores)
    moves = expert, row, version, np.int32(spec.experts)
    got = op(jnp.array(arena), stores, np.int32(layer), *moves)
    np.testing.assert_array_equal(got, want, strict=True)


@pytest.mark.parametrize(
    "implementation",
    [
        "xla",
        pytest.param("cpu", marks=NATIVE),
        # Interpreted, it takes 20 s to compile.
        pytest.param("pallas", marks=pytest.mark.nightly),
    ],
)
def test_in_transit(implementation):
    check_in_transit(TRANSIT_SPECS[0], implementation)


@pytest.mark.slow
@pytest.mark.nightly
@each(api.IMPLEMENTATIONS, TRANSIT_SPECS[1:])
def test_other_shapes_in_transit(spec, implementation):
    check_in_transit(spec, implementation)


PLACES = ((1, -1, 0), (0, 1, 2), (-1, -1, 0))
"""Where three layers lie in the stores of three versions, one of which has every layer."""


@pytest.mark.slow
@pytest.mark.nightly
@each(api.IMPLEMENTATIONS)
def test_stores_that_lack_layers(implementation):
    check_in_transit(TransitSpec(40, 10, layers=3), implementation, PLACES)


@each(api.IMPLEMENTATIONS)
def test_updates_a_donated_arena_in_place(implementation):
    arena, stores, *moves = case(SPECS[0], 0, 3)
    op = compiled(api.fill, donate=("arena",), implementation=implementation)
    before = jnp.array(arena)
    address = before.unsafe_buffer_pointer()
    after = op(before, tuple(stored(s, implementation) for s in stores), np.int32(1), *moves)
    assert before.is_deleted() and after.unsafe_buffer_pointer() == address


def test_programs_take_the_chunks_in_turns(monkeypatch):
    """More chunks than programs."""
    small = pallas_triton.Config(rows=5, columns=16, programs=3, num_warps=1, num_stages=1)

    def fill(*args, formats):
        with mock.patch.object(pallas_triton, "configuration", return_value=small):
            return pallas_triton.fill(*args, formats=formats)

    monkeypatch.setitem(api.IMPLEMENTATIONS, "pallas_small", fill)
    check(Spec((12, 4)), "pallas_small")


def test_the_width_decides_the_configuration():
    """Whole chunks of the largest power of two that divides D."""
    sizes = {d: pallas_triton.configuration(d) for d in (16, 100, 2048, 2880, 4096, 7)}
    assert {d: c.columns for d, c in sizes.items()} == {
        16: 16, 100: 4, 2048: 2048, 2880: 64, 4096: 4096, 7: 1
    }  # fmt: skip
    assert {c.rows * c.columns for c in sizes.values()} == {pallas_triton.CHUNK}


def row_off_by_one(fill, arena, stores, layer, expert, row, version, count, formats):
    return fill(arena, stores, layer, expert, row + 1, version, count, formats=formats)


def one_too_few(fill, arena, stores, layer, expert, row, version, count, formats):
    return fill(
        arena, stores, layer, expert, row, version, jnp.maximum(count - 1, 0), formats=formats
    )


def one_too_many(fill, arena, stores, layer, expert, row, version, count, formats):
    return fill(
        arena,
        stores,
        layer,
        expert,
        row,
        version,
        jnp.minimum(count + 1, expert.size),
        formats=formats,
    )


def always_layer_0(fill, arena, stores, layer, expert, row, version, count, formats):
    return fill(arena, stores, 0, expert, row, version, count, formats=formats)


def always_version_0(fill, arena, stores, layer, expert, row, version, count, formats):
    return fill(arena, stores, layer, expert, row, version * 0, count, formats=formats)


def last_row_left_out(fill, arena, stores, layer, expert, row, version, count, formats):
    stores = tuple(store[:, :, :-1] for store in stores)
    return fill(arena, stores, layer, expert, row, version, count, formats=formats)


@pytest.mark.nightly
@each(api.IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "mutant",
    [
        row_off_by_one,
        one_too_few,
        one_too_many,
        always_layer_0,
        always_version_0,
        last_row_left_out,
    ],
)
def test_contract_catches(mutant, implementation, monkeypatch):
    name = f"{implementation}_{mutant.__name__}"
    broken = functools.partial(mutant, api.IMPLEMENTATIONS[implementation])
    monkeypatch.setitem(api.IMPLEMENTATIONS, name, broken)
    with pytest.raises(AssertionError):
        check(Spec((12, 4)), name)


@pytest.mark.slow
@pytest.mark.nightly
@each(api.IMPLEMENTATIONS)
@pytest.mark.parametrize("mistake", [{"BLOCK": 16}, {"ESCAPE": 14}])
def test_contract_in_transit_catches(mistake, implementation, monkeypatch):
    """Another row block, and another code for escapes."""
    broken = api.IMPLEMENTATIONS[implementation]
    monkeypatch.setitem(api.IMPLEMENTATIONS, f"{implementation}_broken", broken)
    for module in (pallas_kernels.records.reference, pallas_kernels.records.tile):
        for name, value in mistake.items():
            monkeypatch.setattr(module, name, value)
    compiled.cache_clear()
    with pytest.raises(AssertionError):
        check_in_transit(TRANSIT_SPECS[0], f"{implementation}_broken")


def test_the_kernel_refuses_an_arena_beyond_its_addresses():
    """D odd: every element is a row, and int32 counts no 2^31 of them."""
    stores = (jax.ShapeDtypeStruct((1, 1, 3, 7), jnp.uint16),)
    arena = jax.ShapeDtypeStruct((2**29, 7), jnp.uint16)
    moves = [jax.ShapeDtypeStruct((1,), jnp.int32)] * 3
    fill = functools.partial(api.fill, implementation="pallas")
    one = jax.ShapeDtypeStruct((), jnp.int32)
    with pytest.raises(ValueError, match=r"rows of 1 elements.*'xla' takes it"):
        jax.eval_shape(fill, arena, stores, one, *moves, one)


@pytest.mark.parametrize(
    ("stores", "options", "message"),
    [
        ([], {}, "fill needs at least one store"),
        ([(2, 3, 4)], {}, r"a store is \[L, E, rows, 8\], not \(2, 3, 4\)"),
        ([(1, 2, 3, 8), (1, 2, 3, 9)], {}, r"a store is \[L, E, rows, 8\], not \(1, 2, 3, 9\)"),
        ([(1, 2, 3, 8)], {"implementation": "cuda"}, "op 'fill' has no implementation 'cuda'"),
    ],
)
def test_refuses(stores, options, message):
    stores = tuple(jnp.zeros(shape, jnp.uint16) for shape in stores)
    moves = [jnp.zeros(2, jnp.int32)] * 3
    with pytest.raises(ValueError, match=message):
        api.fill(jnp.zeros((9, 8), jnp.uint16), stores, 0, *moves, jnp.int32(0), **options)

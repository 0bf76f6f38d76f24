"""fill: the right bytes at the right rows, nothing else."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.fill import Fills, api
from pallas_kernels.fill.specs import SPECS, TRANSIT_SPECS, Spec, TransitSpec
from tests.pallas_kernels import contract
from tests.pallas_kernels.contract import Contract, Mutant, compiled
from tests.pallas_kernels.encoded import formats, recode, records

GAP = 2
"""Rows of the arena between two cells, which nobody may touch."""


def case(spec, seed, count):
    """Arena, stores, and a list of `spec.experts` moves of which `count` are real; the others are
    as plausible, so carrying one out shows."""
    rng = np.random.default_rng(seed)
    stores = [
        rng.integers(0, contract.POISON, (spec.layers, spec.experts, rows, spec.hidden), np.uint16)
        for rows in spec.record_rows
    ]
    cell = max(spec.record_rows) + GAP
    arena = np.full((2 * spec.experts * cell + GAP, spec.hidden), contract.POISON, np.uint16)
    expert = np.int32(rng.permutation(spec.experts))
    row = np.int32(rng.permutation(2 * spec.experts)[: spec.experts] * cell + GAP)
    version = np.int32(rng.integers(0, len(stores), spec.experts))
    return arena, stores, Fills(expert, row, version, np.int32(count))


def run(implementation, arena, stores, layer, fills):
    op = compiled(api.fill, donate=("arena",), implementation=implementation)
    stores = tuple(contract.stored(store, implementation) for store in stores)
    return op(jnp.array(arena), stores, np.int32(layer), fills)


def check(spec, implementation):
    for seed in contract.SEEDS:
        for count in {0, 1, spec.experts // 2, spec.experts}:
            arena, stores, fills = case(spec, seed, count)
            layer = seed % spec.layers
            got = run(implementation, arena, stores, layer, fills)
            for e, row, v in zip(*(field[:count] for field in fills[:3]), strict=True):
                arena[row : row + stores[v].shape[2]] = stores[v][layer, e]
            np.testing.assert_array_equal(got, arena, strict=True)


def check_in_transit(spec, implementation, places=None):
    """Every expert once, in turns of three versions: lossless12 in the store and dense in its cell,
    int4, dense. places: of the versions' layers in their stores."""
    versions = (("dense", "lossless12"), "int4", "dense")
    more = {"biases": spec.biases, "gated": spec.gated}
    of_versions = formats(versions, spec.hidden, spec.width, "bfloat16", places, **more)
    rng, layer = np.random.default_rng(0), spec.layers - 1
    cell = max(f.cell.rows for f in of_versions) + GAP
    arena = np.full((spec.experts * cell + GAP, spec.hidden), contract.POISON, np.uint16)
    want, stores = arena.copy(), []
    for f in of_versions:
        held = range(spec.layers) if f.places is None else [p for p in f.places if p >= 0]
        shape = len(held), spec.experts, f.store.rows, spec.hidden
        stores.append(np.full(shape, contract.POISON, np.uint16))
    expert = np.int32(rng.permutation(spec.experts))
    version = expert % 3
    row = np.int32(rng.permutation(spec.experts) * cell + GAP)
    for e, r, v in zip(expert, row, version, strict=True):
        f = of_versions[v]
        stores[v][int(f.place(layer)), e] = record = records(rng, 1, f.store)[0]
        want[r : r + f.cell.rows] = recode(record[None], f)[0]
    op = compiled(api.fill, donate=("arena",), formats=of_versions, implementation=implementation)
    stores = tuple(contract.stored(store, implementation) for store in stores)
    fills = Fills(expert, row, version, np.int32(spec.experts))
    got = op(jnp.array(arena), stores, np.int32(layer), fills)
    np.testing.assert_array_equal(got, want, strict=True)


PLACES = ((1, -1, 0), (0, 1, 2), (-1, -1, 0))
"""Where three layers lie in the stores of three versions, one of which has every layer."""


def stores_that_lack_layers(implementation):
    check_in_transit(TransitSpec(40, 10, layers=3), implementation, PLACES)


def refused(stores, options):
    stores = tuple(jnp.zeros(shape, jnp.uint16) for shape in stores)
    fills = Fills(*[jnp.zeros(2, jnp.int32)] * 3, jnp.int32(0))
    return api.fill(jnp.zeros((9, 8), jnp.uint16), stores, 0, fills, **options)


def refused_by_kernels(rows, hidden):
    """D odd: every element is a row, and int32 counts no 2^31 of them."""
    stores = (jax.ShapeDtypeStruct((1, 1, 3, hidden), jnp.uint16),)
    arena = jax.ShapeDtypeStruct((rows, hidden), jnp.uint16)
    moves = [jax.ShapeDtypeStruct((1,), jnp.int32)] * 3
    fill = functools.partial(api.fill, implementation="pallas")
    one = jax.ShapeDtypeStruct((), jnp.int32)
    return jax.eval_shape(fill, arena, stores, one, Fills(*moves, one))


CONTRACTS = (
    Contract(
        "fill",
        api.IMPLEMENTATIONS,
        SPECS,
        check,
        mutant=Mutant.in_record("fills", "row", lambda r: r + 1, Spec((12, 4))),
        refused=refused,
        refusals=(
            ([], {}, "fill needs at least one store"),
            ([(2, 3, 4)], {}, r"a store is \[L, E, rows, 8\], not \(2, 3, 4\)"),
            ([(1, 2, 3, 8), (1, 2, 3, 9)], {}, r"is \[L, E, rows, 8\], not \(1, 2, 3, 9\)"),
            ([(1, 2, 3, 8)], {"implementation": "cuda"}, "op 'fill' has no implementation 'cuda'"),
        ),
    ),
    Contract(
        "fill in transit",
        api.IMPLEMENTATIONS,
        TRANSIT_SPECS,
        check_in_transit,
        facts=(stores_that_lack_layers,),
        mutant=Mutant.in_record("fills", "expert", lambda e: e[::-1], TRANSIT_SPECS[0]),
        refused=refused_by_kernels,
        refusals=((2**29, 7, r"rows of 1 elements.*'xla' takes it"),),
    ),
)

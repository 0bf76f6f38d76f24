"""fill_ffn: the arena of fill, and the rows of expert_ffn, to the bit those of the two kernels."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.expert_ffn import expert_ffn
from pallas_kernels.fill import fill
from pallas_kernels.fill_ffn import api, pallas_triton, why_not_pallas
from pallas_kernels.fill_ffn.specs import SPECS, Spec
from tests.host_offload.versions.numpy_decoder import decode
from tests.pallas_kernels.contract import (
    SEEDS,
    close,
    compiled,
    draw,
    each,
    same_bits,
    stored,
    wide,
)
from tests.pallas_kernels.encoded import formats, records

GAP = 2
"""Rows of the arena between two cells, which nobody may touch."""

ROW_TILE = 16

HUGE = 0x7BFF
"""uint16 of memory where nothing valid lies: the largest number of float16, 2.7·10³⁶ in bfloat16.
No NaN, since XLA's CPU may change which one it is where a program handles bfloat16."""


@dataclasses.dataclass(frozen=True)
class Case:
    spec: Spec
    y: np.ndarray
    x: np.ndarray
    ids: np.ndarray
    arena: np.ndarray
    """The cells of hits hold their records, all others huge numbers: also those that missing
    experts are moved into."""
    stores: tuple[np.ndarray, ...]
    """Poison but for active experts that have no cell."""
    address: np.ndarray
    version: np.ndarray
    active: np.ndarray
    fills: tuple[np.ndarray, ...]
    """Experts, rows and versions; those behind the last one would show if they were copied."""
    count: int
    weights: np.ndarray
    filled: np.ndarray
    """The arena after the fills."""

    @property
    def formats(self):
        return _formats(self.spec) if self.spec.versions else None

    @property
    def arguments(self):
        """Of the op, behind stores."""
        listed = np.full(self.spec.experts, -1, np.int32)
        listed[: len(self.active)] = self.active
        layer = np.int32(self.spec.layers - 1)
        of = layer, self.address, self.version, listed, np.int32(len(self.active))
        return *of, *self.fills, np.int32(self.count)


def _formats(spec):
    return formats(spec.versions or ("dense",), spec.hidden, spec.width, spec.dtype)


def case(spec, seed) -> Case:
    rng, of_versions = np.random.default_rng(seed), _formats(spec)
    experts, layer, tokens = spec.experts, spec.layers - 1, spec.tokens or 2
    ids = [np.sort(rng.permutation(experts)[: spec.top_k]) for _ in range(tokens)]
    ids = np.int32(ids)
    ids[len(ids) - len(ids) // 8 if spec.tokens else 0 :] = experts
    active = np.unique(ids[ids < experts]).astype(np.int32)
    mixed = rng.permutation(active)
    hits, missing = mixed[: spec.hits], mixed[spec.hits :]
    moved = np.sort(missing[: spec.fills])
    of = np.arange(experts) % len(of_versions)
    made = [records(rng, 1, of_versions[v].cell)[0] for v in of]
    step = max(f.cell.rows for f in of_versions) + GAP
    rows = np.int32(rng.permutation(experts) * step + GAP)
    arena = np.full((step * experts + GAP, spec.hidden), HUGE, np.uint16)
    shape = spec.layers, experts
    stores = [np.full((*shape, f.store.rows, spec.hidden), HUGE, np.uint16) for f in of_versions]
    address, version = np.full(shape, 1, np.int32), np.zeros(shape, np.int32)
    version[layer], address[layer] = of, rows
    for e in hits:
        arena[rows[e] : rows[e] + len(made[e])] = made[e]
    for e in missing:
        stores[of[e]][layer, e] = made[e]
    address[layer, missing[spec.fills :]] = -1
    filled = arena.copy()
    for e in moved:
        filled[rows[e] : rows[e] + len(made[e])] = made[e]
    others = np.setdiff1d(np.arange(experts), moved)
    listed = np.int32([*moved, *rng.permutation(others)])
    return Case(
        spec,
        rng.uniform(50, 60, (ids.size, spec.hidden)).astype(np.float32),
        draw(rng, (tokens, spec.hidden), spec.dtype),
        ids,
        arena,
        tuple(stores),
        address,
        version,
        active,
        (listed, rows[listed], np.int32(of[listed])),
        len(moved),
        np.stack([decode(m[None], of_versions[v].cell)[0] for m, v in zip(made, of, strict=True)]),
        filled,
    )


def apart(
    y,
    x,
    ids,
    arena,
    stores,
    layer,
    address,
    version,
    active,
    active_count,
    fill_expert,
    fill_row,
    fill_version,
    fill_count,
    *,
    activation,
    row_tile,
    formats,
    implementation,
    shared_kib=227,
):
    """The two ops' kernels, one after the other."""
    moves = fill_expert, fill_row, fill_version, fill_count
    arena = fill(arena, stores, layer, *moves, formats=formats, implementation=implementation)
    options = {"activation": activation, "row_tile": row_tile, "formats": formats}
    options |= {"implementation": implementation, "shared_kib": shared_kib}
    of = layer, address, version, active, active_count
    return arena, expert_ffn(y, x, ids, arena, stores, *of, **options)


def run(c, implementation, two=False):
    """(arena, y). two: of the kernels of the two ops."""
    static = {"activation": "silu", "row_tile": ROW_TILE, "implementation": implementation}
    op = apart if two else api.fill_ffn
    op = compiled(op, donate=("arena", "y"), formats=c.formats, **static)
    stores = tuple(stored(store, implementation) for store in c.stores)
    y, arena = jnp.array(c.y), jnp.array(c.arena)
    return op(y, c.x, c.ids, arena, stores, *c.arguments)


def check(spec, implementation):
    for seed in SEEDS:
        c = case(spec, seed)
        arena, y = run(c, implementation)
        np.testing.assert_array_equal(arena, c.filled, strict=True)
        flat, x = c.ids.reshape(-1), wide(c.x)[np.arange(c.ids.size) // spec.top_k]
        want = wide(c.y)
        for e in c.active:
            gate, up, down = np.split(wide(c.weights[e].astype(c.x.dtype)), 3)
            mine, products = flat == e, (x[flat == e] @ gate.T, x[flat == e] @ up.T)
            hidden = products[0] / (1 + np.exp(-products[0])) * products[1]
            want[mine] = wide(hidden.astype(c.x.dtype)) @ down
        close("expert_ffn", spec.dtype, y, want)
        same_bits(np.asarray(y)[flat == spec.experts], c.y[flat == spec.experts])


def check_bits(spec, implementation="pallas"):
    """Where others are hits, fills or read through: the bits of the two kernels."""
    c = case(spec, 0)
    arena, want = run(c, implementation, two=True)
    got_arena, got = run(c, implementation)
    np.testing.assert_array_equal(got_arena, arena, strict=True)
    same_bits(np.asarray(got), np.asarray(want))


@each(api.IMPLEMENTATIONS, SPECS)
def test_contract(spec, implementation):
    check(spec, implementation)


@pytest.mark.nightly  # test_contract compares both with float64, tests/ptx their bits
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_bits_of_the_two_kernels(spec):
    check_bits(spec)


@each(api.IMPLEMENTATIONS)
def test_updates_a_donated_arena_and_y_in_place(implementation):
    c = case(SPECS[0], 0)
    static = {"activation": "silu", "row_tile": ROW_TILE, "implementation": implementation}
    op = compiled(api.fill_ffn, donate=("arena", "y"), formats=None, **static)
    before = jnp.array(c.arena), jnp.array(c.y)
    addresses = [array.unsafe_buffer_pointer() for array in before]
    stores = tuple(stored(store, implementation) for store in c.stores)
    after = op(before[1], c.x, c.ids, before[0], stores, *c.arguments)
    assert [array.unsafe_buffer_pointer() for array in after] == addresses


def test_a_store_that_lacks_layers():
    """The place of the layer in each store, as fill and expert_ffn have it."""
    c = case(SPECS[0], 0)
    (version,) = formats(("dense",), SPECS[0].hidden, SPECS[0].width, "bfloat16", ((-1, 0),))
    held = dataclasses.replace(c, stores=tuple(store[-1:] for store in c.stores))
    static = {"activation": "silu", "row_tile": ROW_TILE, "implementation": "xla"}
    op = compiled(api.fill_ffn, donate=("arena",), formats=(version,), **static)
    stores = tuple(stored(store, "xla") for store in held.stores)
    arena, y = op(c.y, c.x, c.ids, jnp.array(c.arena), stores, *c.arguments)
    want = run(c, "xla")
    np.testing.assert_array_equal(arena, want[0], strict=True)
    same_bits(np.asarray(y), np.asarray(want[1]))


@pytest.mark.parametrize(
    ("versions", "why"),
    [
        ([("dense", "dense")], None),
        ([("int8", "int8"), ("int4", "int4")], None),
        ([("lossless12", "lossless12")], None),
        ([("dense", "dense"), ("int4", "int4")], "one view of the arena, dense or coded"),
        ([("dense", "lossless12")], "decoded on their way into a cell"),
    ],
)
def test_which_versions_kernels_take(versions, why):
    reason = why_not_pallas(versions)
    assert reason is None if why is None else why in reason
    names = [cell if cell == held else (cell, held) for cell, held in versions]
    of_versions = formats(names, 64, 32, "bfloat16")
    x = jnp.zeros((3, 64), jnp.bfloat16)
    if why is None:
        config = pallas_triton.configuration(x, of_versions, 16, 227)
        assert (config.copies, config.late) == (32, 32)
        return
    with pytest.raises(ValueError, match=f"fill_ffn 'pallas': .*{why}.*; 'xla' takes it"):
        pallas_triton.configuration(x, of_versions, 16, 227)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": (5, 32)}, "do not fit together"),
        ({"arena": (19, 16)}, "arena rows have 16 elements, x has 32 columns"),
        ({"store": (2, 8, 72, 16)}, r"a store is \[L, E, rows, 32\], not \(2, 8, 72, 16\)"),
        ({"activation": "tanh"}, "unknown activation 'tanh'; known: silu"),
        ({"implementation": "cpu"}, "op 'fill_ffn' has no implementation 'cpu'; it has xla"),
        ({"implementation": "pallas", "row_tile": 64}, "products of 16 rows, not 64; 'xla' has"),
    ],
)
def test_refuses(change, message):
    of = {"y": (6, 32), "arena": (900, 32), "store": (2, 8, 72, 32), **change}
    table, listed = jnp.zeros((2, 8), jnp.int32), jnp.zeros(8, jnp.int32)
    options = {"activation": "silu", "row_tile": 16}
    options |= {
        name: value for name, value in change.items() if name in (*options, "implementation")
    }
    with pytest.raises(ValueError, match=message):
        api.fill_ffn(
            jnp.zeros(of["y"]),
            jnp.zeros((3, 32), jnp.bfloat16),
            jnp.zeros((3, 2), jnp.int32),
            jnp.zeros(of["arena"], jnp.uint16),
            (jnp.zeros(of["store"], jnp.uint16),),
            0,
            *(table, table, listed, jnp.int32(0), listed, listed, listed, jnp.int32(0)),
            **options,
        )

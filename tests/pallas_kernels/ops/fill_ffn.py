"""fill_ffn: the arena of fill, and the rows of expert_ffn, to the bit those of the two kernels."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels.expert_ffn import ExpertBatch, ExpertOptions, ExpertPlaces, expert_ffn
from pallas_kernels.fill import Fills, fill
from pallas_kernels.fill_ffn import api
from pallas_kernels.fill_ffn.specs import SPECS, Spec
from tests.pallas_kernels import contract
from tests.pallas_kernels.contract import Contract, Mutant, close, compiled, draw, same_bits, wide
from tests.pallas_kernels.encoded import formats, records
from tests.pallas_kernels.ops.expert_ffn import decoded, ffn

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
    fills: Fills
    """Entries behind the last one would show if they were copied."""
    weights: np.ndarray
    filled: np.ndarray
    """The arena after the fills."""

    @property
    def formats(self):
        return _formats(self.spec) if self.spec.versions else None

    @property
    def batch(self):
        listed = np.full(self.spec.experts, -1, np.int32)
        listed[: len(self.active)] = self.active
        return ExpertBatch(listed, np.int32(len(self.active)), self.ids, self.x)

    def places(self, implementation):
        stores = tuple(contract.stored(store, implementation) for store in self.stores)
        return ExpertPlaces(stores, np.int32(self.spec.layers - 1), self.address, self.version)

    def options(self, implementation):
        return ExpertOptions("silu", ROW_TILE, self.formats, implementation)


def _formats(spec):
    more = {"biases": spec.biases, "gated": spec.gated}
    return formats(spec.versions or ("dense",), spec.hidden, spec.width, spec.dtype, **more)


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
        Fills(listed, rows[listed], np.int32(of[listed]), np.int32(len(moved))),
        np.stack([decoded(m[None], of_versions[v].cell) for m, v in zip(made, of, strict=True)]),
        filled,
    )


def run(c, implementation):
    """(arena, y)."""
    op = compiled(api.fill_ffn, donate=("arena", "y"), options=c.options(implementation))
    given = c.batch, c.places(implementation), c.fills
    return op(jnp.array(c.y), jnp.array(c.arena), *given)


def run_both(c, implementation):
    """The same of the two ops' kernels, one after the other."""
    places, static = c.places(implementation), {"implementation": implementation}
    filled = compiled(fill, donate=("arena",), formats=c.formats, **static)
    arena = filled(jnp.array(c.arena), places.stores, places.layer, c.fills)
    op = compiled(expert_ffn, donate=("y",), options=c.options(implementation))
    return arena, op(jnp.array(c.y), arena, c.batch, places)


def check(spec, implementation):
    for seed in contract.SEEDS:
        c = case(spec, seed)
        arena, y = run(c, implementation)
        np.testing.assert_array_equal(arena, c.filled, strict=True)
        flat, x = c.ids.reshape(-1), wide(c.x)[np.arange(c.ids.size) // spec.top_k]
        want = wide(c.y)
        for e in c.active:
            mine = flat == e
            want[mine] = ffn(spec, c.weights[e].astype(c.x.dtype), x[mine], c.x.dtype, "silu")
        close("expert_ffn", spec.dtype, y, want)
        same_bits(np.asarray(y)[flat == spec.experts], c.y[flat == spec.experts])


def check_bits(spec, implementation="pallas"):
    """Where others are hits, fills or read through: the bits of the two kernels."""
    c = case(spec, 0)
    arena, want = run_both(c, implementation)
    got_arena, got = run(c, implementation)
    np.testing.assert_array_equal(got_arena, arena, strict=True)
    same_bits(np.asarray(got), np.asarray(want))


def a_store_that_lacks_layers(implementation):
    """The place of the layer in each store, as fill and expert_ffn have it."""
    c = case(SPECS[0], 0)
    (version,) = formats(("dense",), SPECS[0].hidden, SPECS[0].width, "bfloat16", ((-1, 0),))
    options = ExpertOptions("silu", ROW_TILE, (version,), implementation)
    op = compiled(api.fill_ffn, donate=("arena",), options=options)
    stores = tuple(contract.stored(store[-1:], implementation) for store in c.stores)
    places = c.places(implementation)._replace(stores=stores)
    arena, y = op(c.y, jnp.array(c.arena), c.batch, places, c.fills)
    want = run(c, implementation)
    np.testing.assert_array_equal(arena, want[0], strict=True)
    same_bits(np.asarray(y), np.asarray(want[1]))


def refused(change):
    of = {"y": (6, 32), "arena": (900, 32), "store": (2, 8, 72, 32), **change}
    table, listed = jnp.zeros((2, 8), jnp.int32), jnp.zeros(8, jnp.int32)
    options = {"activation": "silu", "row_tile": 16}
    options |= {name: of[name] for name in (*options, "implementation") if name in of}
    rows = jnp.zeros((3, 2), jnp.int32), jnp.zeros((3, 32), jnp.bfloat16)
    batch, arena = ExpertBatch(listed, 0, *rows), jnp.zeros(of["arena"], jnp.uint16)
    places = ExpertPlaces((jnp.zeros(of["store"], jnp.uint16),), 0, table, table)
    fills = Fills(listed, listed, listed, 0)
    return api.fill_ffn(jnp.zeros(of["y"]), arena, batch, places, fills, ExpertOptions(**options))


CONTRACTS = (
    Contract(
        "fill_ffn",
        api.IMPLEMENTATIONS,
        SPECS,
        check,
        facts=(a_store_that_lacks_layers,),
        mutant=Mutant.in_record("places", "version", lambda v: 0 * v, SPECS[9]),
        refused=refused,
        refusals=(
            ({"y": (5, 32)}, "do not fit together"),
            ({"arena": (19, 16)}, "arena rows have 16 elements, x has 32 columns"),
            ({"store": (2, 8, 72, 16)}, r"is \[L, E, rows, 32\], not \(2, 8, 72, 16\)"),
            ({"activation": "tanh"}, "unknown activation 'tanh'; known: silu"),
            ({"implementation": "cpu"}, "op 'fill_ffn' has no implementation 'cpu'; it has xla"),
            ({"implementation": "pallas", "row_tile": 64}, "products of 16 rows, not 64; use"),
        ),
    ),
    Contract(
        "fill_ffn beside fill and expert_ffn",
        {"pallas": api.IMPLEMENTATIONS["pallas"]},
        SPECS,
        check_bits,
    ),
)

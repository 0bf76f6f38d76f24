"""expert_ffn and fill_ffn with an epilogue: the bits of combine_and_count behind them."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.combine import combine_with_squares
from pallas_kernels.expert_ffn import Epilogue, api, counters_size, expert_ffn
from pallas_kernels.fill_ffn import api as fill_api
from pallas_kernels.fill_ffn import fill_ffn
from pallas_kernels.fill_ffn.specs import SPECS, Spec
from tests.pallas_kernels.contract import Contract, compiled, draw, same_bits, stored
from tests.pallas_kernels.ops.fill_ffn import ROW_TILE, case

COMBINED_SPECS = (
    *SPECS,
    Spec(32, hits=8, fills=0, top_k=4),
    Spec(17, hits=2, fills=4, hidden=64, width=32, versions=("int4",)),
    Spec(33, hits=5, fills=1, top_k=3, hidden=72, experts=6),
)
"""Beside those of fill_ffn a block with more than 16 rows of an expert, hits alone, one version of
codes, and several tiles of columns, the last one masked."""


def combined(
    y,
    index,
    counters,
    residual,
    weights,
    x,
    ids,
    arena,
    stores,
    experts,
    moves,
    *,
    first_layer,
    within,
    formats,
    implementation,
):
    """Combined, of one op or of two. experts, moves: what experts there are, what fill_ffn moves;
    without moves of expert_ffn."""
    options = {"activation": "silu", "row_tile": ROW_TILE, "formats": formats}
    options |= {"implementation": implementation}
    epilogue = Epilogue(residual, weights, index, counters, first_layer, with_squares=True)
    if within:
        options["epilogue"] = epilogue
    operands = y, x, ids, arena, stores, index[0] + first_layer, *experts
    if moves is not None:
        _, y = fill_ffn(*operands, *moves, **options)
    else:
        y = expert_ffn(*operands, **options)
    if within:
        return y
    rows = y.reshape(*weights.shape, -1)
    made = combine_with_squares(residual, rows, weights, index, implementation=implementation)
    out, squares, index = made
    return y, out, index, counters, squares


def check(spec, implementation, fills=False):
    c, rng = case(spec, 0), np.random.default_rng(1)
    residual = draw(rng, c.x.shape, spec.dtype)
    weights = rng.dirichlet(np.ones(spec.top_k), len(c.ids)).astype(np.float32)
    counters = np.zeros(counters_size(*c.x.shape), np.int32)
    layer, *rest = c.arguments
    experts, moves = rest[:4], rest[4:] if fills else None
    stores = tuple(stored(store, implementation) for store in c.stores)
    arena = c.arena if fills else c.filled
    found = []
    for within in (False, True):
        donate = ("y", "index", "counters")
        static = {"first_layer": 1, "within": within, "formats": c.formats}
        op = compiled(combined, donate=donate, **static, implementation=implementation)
        counts = jnp.array([layer - 1], jnp.int32), jnp.array(counters)
        operands = jnp.array(c.y), *counts, residual, weights, c.x, c.ids, jnp.array(arena)
        found.append([np.asarray(a) for a in op(*operands, stores, experts, moves)])
    for want, got in zip(*found, strict=True):
        same_bits(got, want)
    np.testing.assert_array_equal(found[1][2], [layer])
    np.testing.assert_array_equal(found[1][3], counters)


def check_filled(spec, implementation):
    check(spec, implementation, fills=True)


def refused(op, change):
    shapes = {"residual": (3, 32), "weights": (3, 2), "index": (1,), "counters": (7,)} | change
    c = case(SPECS[0], 0)
    made = (jnp.zeros(shape, jnp.int32) for shape in shapes.values())
    epilogue = Epilogue(*made, first_layer=0)
    arguments = c.arguments if op is fill_ffn else c.arguments[:5]
    options = {"activation": "silu", "row_tile": ROW_TILE, "epilogue": epilogue}
    return op(c.y, c.x, c.ids, c.arena, c.stores, *arguments, **options)


REFUSALS = (
    ({"residual": (3, 16)}, r"residual \(3, 16\), weights \(3, 2\) and index \(1,\) do not"),
    ({"weights": (3, 1)}, r"weights \(3, 1\)"),
    ({"index": ()}, r"index \(\)"),
    ({"counters": (6,)}, r"counters \(6,\) are fewer than the 7 of 3 tokens of 32"),
)

CONTRACTS = (
    Contract(
        "expert_ffn that combines",
        api.IMPLEMENTATIONS,
        COMBINED_SPECS,
        check,
        refused=refused,
        refusals=[(expert_ffn, *rest) for rest in REFUSALS],
    ),
    Contract(
        "fill_ffn that combines",
        fill_api.IMPLEMENTATIONS,
        COMBINED_SPECS,
        check_filled,
        refused=refused,
        refusals=[(fill_ffn, *rest) for rest in REFUSALS],
    ),
)

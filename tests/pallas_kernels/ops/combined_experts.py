"""expert_ffn and fill_ffn with an epilogue: the bits of combine_and_count behind them."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.combine import combine_with_squares
from pallas_kernels.expert_ffn import Epilogue, api, counters_size, expert_ffn
from pallas_kernels.fill_ffn import api as fill_api
from pallas_kernels.fill_ffn import fill_ffn
from pallas_kernels.fill_ffn.specs import SPECS, Spec
from tests.pallas_kernels.contract import Contract, compiled, draw, same_bits
from tests.pallas_kernels.ops.fill_ffn import case

COMBINED_SPECS = (
    *SPECS,
    Spec(32, hits=8, fills=0, top_k=4),
    Spec(17, hits=2, fills=4, hidden=64, width=32, versions=("int4",)),
    Spec(33, hits=5, fills=1, top_k=3, hidden=72, experts=6),
)
"""Beside those of fill_ffn a block with more than 16 rows of an expert, hits alone, one version of
codes, and several tiles of columns, the last one masked."""


def combined(
    y, arena, index, counters, residual, batch, places, fills, *, first_layer, within, options
):
    """Combined, of one op or of two. residual: and weights. fills: what fill_ffn moves; without, it
    is expert_ffn."""
    residual, weights = residual
    epilogue = Epilogue(residual, weights, index, counters, first_layer, with_squares=True)
    operands = batch, places._replace(layer=index[0] + first_layer)
    given = (options, epilogue) if within else (options,)
    if fills is not None:
        _, y = fill_ffn(y, arena, *operands, fills, *given)
    else:
        y = expert_ffn(y, arena, *operands, *given)
    if within:
        return y
    rows, name = y.reshape(*weights.shape, -1), options.implementation
    out, squares, index = combine_with_squares(residual, rows, weights, index, implementation=name)
    return y, out, index, counters, squares


def check(spec, implementation, fills=False):
    c, rng = case(spec, 0), np.random.default_rng(1)
    residual = draw(rng, c.x.shape, spec.dtype)
    weights = rng.dirichlet(np.ones(spec.top_k), len(c.ids)).astype(np.float32)
    counters = np.zeros(counters_size(*c.x.shape), np.int32)
    places, arena = c.places(implementation), c.arena if fills else c.filled
    layer = places.layer
    found = []
    for within in (False, True):
        donate = ("y", "index", "counters")
        static = {"first_layer": 1, "within": within, "options": c.options(implementation)}
        op = compiled(combined, donate=donate, **static)
        counts = jnp.array([layer - 1], jnp.int32), jnp.array(counters)
        operands = jnp.array(c.y), jnp.array(arena), *counts, (residual, weights)
        given = c.batch, places._replace(layer=None), c.fills if fills else None
        found.append([np.asarray(a) for a in op(*operands, *given)])
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
    fills = (c.fills,) if op is fill_ffn else ()
    return op(c.y, c.arena, c.batch, c.places("xla"), *fills, c.options("xla"), epilogue)


REFUSALS = (
    ({"residual": (3, 16)}, r"residual \(3, 16\), weights \(3, 2\) and index \(1,\) do not"),
    ({"weights": (3, 1)}, r"weights \(3, 1\)"),
    ({"index": ()}, r"index \(\)"),
    ({"counters": (6,)}, r"counters \(6,\) are fewer than the 7 of 3 tokens of 32"),
)

CONTRACTS = (
    Contract(
        "expert_ffn that combines",
        {name: api.IMPLEMENTATIONS[name] for name in ("xla", "pallas", "cpu")},
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

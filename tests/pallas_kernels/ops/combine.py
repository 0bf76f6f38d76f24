"""combine against float64, and its order of additions."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.combine import api, pallas_triton
from pallas_kernels.combine.specs import SPECS, Spec
from pallas_kernels.rms_norm import tile_squares
from tests.pallas_kernels import contract
from tests.pallas_kernels.contract import Contract, Mutant, close, compiled, draw, same_bits, wide


def case(spec, seed):
    rng = np.random.default_rng(seed)
    residual = draw(rng, (spec.tokens, spec.hidden), spec.dtype)
    y = draw(rng, (spec.tokens, spec.top_k, spec.hidden), "float32")
    return residual, y, rng.dirichlet(np.ones(spec.top_k), spec.tokens).astype(np.float32)


def run(implementation, *arrays):
    return compiled(api.combine, implementation=implementation)(*arrays)


def check(spec, implementation):
    for seed in contract.SEEDS:
        residual, y, weights = case(spec, seed)
        got = run(implementation, residual, y, weights)
        assert got.dtype == spec.dtype
        want = wide(residual) + np.sum(wide(weights)[:, :, None] * wide(y), axis=1)
        close("combine", spec.dtype, got, want)


def check_order(implementation):
    """((1e8 − 1e8) + 1) + … is 1 in this order of k only; the residual comes last."""
    y = np.broadcast_to(np.float32([1e8, -1e8, 1, 0])[None, :, None], (2, 4, 3))
    weights = np.ones((2, 4), np.float32)
    got = run(implementation, np.full((2, 3), -1, jnp.bfloat16), y, weights)
    np.testing.assert_array_equal(got, 0)
    y = np.broadcast_to(np.float32([1e8, 1, 1, -1e8])[None, :, None], (2, 4, 3))
    got = run(implementation, np.full((2, 3), 1, jnp.bfloat16), y, weights)
    np.testing.assert_array_equal(got, 1)


def check_count(spec, implementation):
    """The sum has combine's bits, the index grows by one whatever it is."""
    counting = compiled(api.combine_and_count, donate=("index",), implementation=implementation)
    arrays = case(spec, 0)
    want = run(implementation, *arrays)
    for index in (0, 46):
        out, after = counting(*arrays, np.int32([index]))
        same_bits(np.asarray(out), np.asarray(want))
        np.testing.assert_array_equal(after, [index + 1])


def check_squares(spec, implementation):
    """The sum has combine's bits, and its squares those of the one tree over what is stored, by
    whoever makes them."""
    op = compiled(api.combine_with_squares, donate=("index",), implementation=implementation)
    arrays = case(spec, 0)
    want = np.asarray(run(implementation, *arrays))
    squares = np.asarray(compiled(tile_squares, tile=pallas_triton.SQUARES_TILE)(want))
    for index in (None, np.int32([46])):
        out, got, after = op(*arrays, index)
        same_bits(np.asarray(out), want)
        same_bits(np.asarray(got), squares)
        assert (None if after is None else after.tolist()) == (None if index is None else [47])
    maker = "pallas" if implementation == "pallas" else "xla"
    before = compiled(api.row_squares, implementation=maker)(want)
    same_bits(np.asarray(before), squares)


COUNTED = (Spec(1, "bfloat16"), Spec(17, "bfloat16", top_k=8, hidden=600))


def bits_of_a_row(implementation):
    """They depend on no other row."""
    for dtype in contract.dtypes_of_bits(implementation):
        arrays = case(Spec(17, dtype), 0)
        want = run(implementation, *arrays)
        for rows in zip(*map(contract.alone, arrays), strict=True):
            same_bits(
                run(implementation, *(array for _, array in rows))[rows[0][0]], want[rows[0][0]]
            )


def refused(residual, y, weights, **options):
    return api.combine(jnp.zeros(residual), jnp.zeros(y), jnp.zeros(weights), **options)


CONTRACTS = (
    Contract(
        "combine",
        api.IMPLEMENTATIONS,
        SPECS,
        check,
        facts=(check_order, bits_of_a_row),
        mutant=Mutant(lambda a: {"y": a["y"][:, :-1], "weights": a["weights"][:, :-1]}, SPECS[0]),
        refused=refused,
        refusals=(
            ((3, 5), (3, 2, 4), (3, 2), r"residual \(3, 5\), y \(3, 2, 4\), weights \(3, 2\)"),
            ((3, 4), (3, 2, 4), (3, 1), r"residual \(3, 4\), y \(3, 2, 4\), weights \(3, 1\)"),
        ),
    ),
    Contract("combine_and_count", api.IMPLEMENTATIONS, COUNTED, check_count),
    Contract("combine_with_squares", api.IMPLEMENTATIONS, COUNTED, check_squares),
)

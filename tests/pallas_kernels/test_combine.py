"""combine against float64, and its order of additions."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.combine import api, pallas_triton
from pallas_kernels.combine.specs import SPECS, Spec
from pallas_kernels.rms_norm import tile_squares
from tests.pallas_kernels.contract import SEEDS, close, compiled, draw, each, same_bits, wide


def case(spec, seed):
    rng = np.random.default_rng(seed)
    residual = draw(rng, (spec.tokens, spec.hidden), spec.dtype)
    y = draw(rng, (spec.tokens, spec.top_k, spec.hidden), "float32")
    return residual, y, rng.dirichlet(np.ones(spec.top_k), spec.tokens).astype(np.float32)


def run(implementation, *arrays):
    return compiled(api.combine, implementation=implementation)(*arrays)


def check(spec, implementation):
    for seed in SEEDS:
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
    squares = np.asarray(tile_squares(jnp.asarray(want), pallas_triton.SQUARES_TILE))
    for index in (None, np.int32([46])):
        out, got, after = op(*arrays, index)
        same_bits(np.asarray(out), want)
        same_bits(np.asarray(got), squares)
        assert (None if after is None else after.tolist()) == (None if index is None else [47])
    maker = "pallas" if implementation == "pallas" else "xla"
    before = compiled(api.row_squares, implementation=maker)(want)
    same_bits(np.asarray(before), squares)


COUNTED = (Spec(1, "bfloat16"), Spec(17, "bfloat16", top_k=8, hidden=600))


@each(api.IMPLEMENTATIONS, SPECS)
def test_contract(spec, implementation):
    check(spec, implementation)


@each(api.IMPLEMENTATIONS, COUNTED)
def test_the_last_kernel_of_a_layer_counts(spec, implementation):
    check_count(spec, implementation)


@each(api.IMPLEMENTATIONS, COUNTED)
def test_squares_are_of_what_is_stored(spec, implementation):
    check_squares(spec, implementation)


def every_program(residual, y, weights, _, out, index, *, config):
    pallas_triton._kernel(residual, y, weights, out, config=config)
    index[0] = index[0] + 1


@pytest.mark.nightly
def test_count_catches_programs_that_all_count(monkeypatch):
    monkeypatch.setattr(pallas_triton, "_counting_kernel", every_program)
    with pytest.raises(AssertionError):
        check_count(Spec(5, "bfloat16"), "pallas")  # a size that no other test has compiled


@each(api.IMPLEMENTATIONS)
def test_order_of_additions(implementation):
    check_order(implementation)


@each(api.IMPLEMENTATIONS, dtypes=("float32", "bfloat16"))
def test_a_row_is_independent_of_the_others(implementation, dtype):
    arrays = case(Spec(17, dtype), 0)
    want = run(implementation, *arrays)
    for t in (0, 8, 16):
        others = [np.full_like(array, np.nan) for array in arrays]
        for array, values in zip(others, arrays, strict=True):
            array[t] = values[t]
        same_bits(run(implementation, *others)[t], want[t])


def descending(combine, residual, y, weights):
    return combine(residual, y[:, ::-1], weights[:, ::-1])


def residual_first(combine, residual, y, weights):
    y = jnp.concatenate([residual[:, None].astype(y.dtype), y], axis=1)
    weights = jnp.concatenate([jnp.ones_like(weights[:, :1]), weights], axis=1)
    return combine(jnp.zeros_like(residual), y, weights)


def dropped_slot(combine, residual, y, weights):
    return combine(residual, y[:, :-1], weights[:, :-1])


def rounded_twice(combine, residual, y, weights):
    return residual + combine(jnp.zeros_like(residual), y, weights)


@pytest.mark.nightly
@each(api.IMPLEMENTATIONS)
@pytest.mark.parametrize(
    ("mutant", "checked"),
    [
        (dropped_slot, functools.partial(check, Spec(64, "bfloat16"))),
        (rounded_twice, functools.partial(check, Spec(64, "bfloat16"))),
        (descending, check_order),
        (residual_first, check_order),
    ],
)
def test_contract_catches(mutant, checked, implementation, monkeypatch):
    name = f"{implementation}_{mutant.__name__}"
    broken = functools.partial(mutant, api.IMPLEMENTATIONS[implementation])
    monkeypatch.setitem(api.IMPLEMENTATIONS, name, broken)
    with pytest.raises(AssertionError):
        checked(name)


@pytest.mark.parametrize(
    ("residual", "y", "weights", "options", "message"),
    [
        ((3, 5), (3, 2, 4), (3, 2), {}, r"residual \(3, 5\), y \(3, 2, 4\), weights \(3, 2\)"),
        ((3, 4), (3, 2, 4), (3, 1), {}, r"residual \(3, 4\), y \(3, 2, 4\), weights \(3, 1\)"),
        ((3, 4), (3, 2, 4), (3, 2), {"implementation": "cuda"}, "op 'combine' has no impl"),
        ((3, 4), (3, 2, 4), (3, 2), {"implementation": "pallas"}, "not float32; 'xla' takes it"),
    ],
)
def test_refuses(residual, y, weights, options, message):
    with pytest.raises(ValueError, match=message):
        api.combine(jnp.zeros(residual), jnp.zeros(y), jnp.zeros(weights), **options)

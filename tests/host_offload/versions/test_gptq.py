"""GPTQ: the outputs that a matrix gives are kept better than by rounding its weights."""

import numpy as np
import pytest

from host_offload.versions.encoders import decode, pack_quantized
from host_offload.versions.gptq import gptq, gptq_expert
from host_offload.versions.quantizers import UnquantizableError, mse, quantize, rtn
from pallas_kernels.records import RecordFormat
from tests.host_offload.versions.numpy_decoder import dequantize


def inputs_of(n, columns, seed=0):
    """Correlated, as those of a network are: most of their variance is in few directions."""
    rng = np.random.default_rng(seed)
    mixed = rng.standard_normal((n, columns)) * 2.0 ** -np.linspace(0, 6, columns)
    return (mixed @ rng.standard_normal((columns, columns))).astype(np.float32)


def weights_of(rows, columns, seed=1):
    return (np.random.default_rng(seed).standard_normal((rows, columns)) * 0.03).astype(np.float32)


def output_error(found, weights, inputs):
    return np.linalg.norm(inputs @ (found - weights).T) / np.linalg.norm(inputs @ weights.T)


@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize(("columns", "group"), [(192, 64), (320, 64), (40, 32)])
def test_outputs_are_nearer_than_those_of_rounded_weights(bits, columns, group):
    weights, inputs = weights_of(24, columns), inputs_of(500, columns)
    codes, scales = gptq(weights, inputs.T @ inputs, group, bits)
    assert codes.dtype == np.uint8 and codes.shape == weights.shape
    assert scales.dtype == np.float16 and scales.shape == (24, -(-columns // group))
    assert codes.max() < 2**bits and codes.min() >= (bits != 2)
    found = dequantize(codes, scales, 1, group, bits)
    rounded = dequantize(*quantize(weights, 1, group, bits, mse), 1, group, bits)
    error, rival = (output_error(w, weights, inputs) for w in (found, rounded))
    assert error < 0.7 * rival
    # A mistake in what errors do to later columns shows as weights that run away.
    assert np.linalg.norm(found - weights) < 4 * np.linalg.norm(rounded - weights)


@pytest.mark.parametrize("rule", [rtn, mse])
def test_without_inputs_weights_are_rounded(rule):
    weights = weights_of(16, 96)
    codes, scales = gptq(weights, np.zeros((96, 96)), 32, 4, rule)
    expected = quantize(weights, 1, 32, 4, rule)
    np.testing.assert_array_equal(codes, expected[0])
    np.testing.assert_array_equal(scales, expected[1])


def test_inputs_that_are_always_zero_do_no_harm():
    weights, inputs = weights_of(16, 64), inputs_of(200, 64)
    inputs[:, ::3] = 0
    codes, scales = gptq(weights, inputs.T @ inputs, 32, 4)
    found = dequantize(codes, scales, 1, 32, 4)
    rounded = dequantize(*quantize(weights, 1, 32, 4, mse), 1, 32, 4)
    assert output_error(found, weights, inputs) < output_error(rounded, weights, inputs)
    np.testing.assert_array_equal(np.abs(found - weights) < 0.1, True)


def test_fewer_inputs_than_columns():
    weights, inputs = weights_of(16, 64), inputs_of(5, 64)
    codes, scales = gptq(weights, inputs.T @ inputs, 64, 4)
    found = dequantize(codes, scales, 1, 64, 4)
    rounded = dequantize(*quantize(weights, 1, 64, 4, mse), 1, 64, 4)
    assert output_error(found, weights, inputs) < 0.5 * output_error(rounded, weights, inputs)


def test_weights_that_no_scale_holds():
    with pytest.raises(UnquantizableError, match="too large for float16 scales"):
        gptq(np.full((4, 32), 3e38, np.float32), np.eye(32), 32, 4)


@pytest.mark.parametrize("version", ["int8", "int4", "int2"])
def test_an_expert(version):
    """Its parts land where the format has them: each matrix's outputs are near the dense ones."""
    fmt = RecordFormat(version, 64, 40, "float32")
    matrices = weights_of(120, 64).reshape(3, 40, 64)
    inputs, hidden = inputs_of(300, 64), inputs_of(300, 40, seed=3)
    record = np.empty((fmt.rows, 64), np.uint16)
    pack_quantized(gptq_expert(matrices, inputs, hidden, fmt), fmt, record)
    gate, up, down = decode(record[None], fmt)[0].reshape(3, 40, 64)
    most = {"int8": 0.005, "int4": 0.08, "int2": 0.4}[version]
    assert output_error(gate, matrices[0], inputs) < most
    assert output_error(up, matrices[1], inputs) < most
    assert output_error(down.T, matrices[2].T, hidden) < most

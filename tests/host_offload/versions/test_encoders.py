"""Encoders: what they write means what the formats say, as near to the weights as it can be."""

import dataclasses
import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.versions import encoders
from host_offload.versions.encoders import (
    NUMPY_DTYPES,
    EncodingError,
    encode,
    reduced_axis,
)
from host_offload.versions.packing import part
from host_offload.versions.quantizers import (
    QUANTIZERS,
    UnquantizableError,
    quantize,
)
from pallas_kernels import records
from pallas_kernels.records import VERSIONS, RecordFormat
from pallas_kernels.records.format import ESCAPE, LOSSY, MATRICES
from pallas_kernels.records.reference import split_weights
from tests.host_offload.versions.numpy_decoder import decode, dequantize, unpack

SHAPES = ((40, 10), (64, 33), (96, 70), (128, 64))
"""(D, I)"""

shapes = st.sampled_from(SHAPES)
seeds = st.integers(0, 2**32 - 1)


def normal(fmt, n=2, seed=0, spread=0.03):
    rng = np.random.default_rng(seed)
    rows = len(fmt.matrices) * fmt.width
    values = rng.standard_normal((n, rows, fmt.hidden), np.float32) * spread
    return values.astype(NUMPY_DTYPES[fmt.dtype])


def bits_of(weights):
    return weights.view(np.dtype(f"uint{8 * weights.dtype.itemsize}"))


def from_bits(bits, fmt):
    """bfloat16 experts [n, 3·I, D] of n·3·I·D patterns."""
    return bits.astype(np.uint16).reshape(-1, 3 * fmt.width, fmt.hidden).view(ml_dtypes.bfloat16)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", NUMPY_DTYPES)
def test_both_decoders_agree_bit_for_bit(version, dtype):
    if version == "lossless12" and dtype != "bfloat16":
        return
    for (hidden, width), spread in itertools.product(SHAPES[:3], (1e-6, 0.03, 10)):
        if dtype != "bfloat16" and (hidden, spread) != (40, 0.03):
            continue
        fmt = RecordFormat(version, hidden, width, dtype)
        encoded = encode(normal(fmt, spread=spread), fmt)
        assert encoded.shape == (2, fmt.rows, hidden) and encoded.dtype == np.uint16
        expected = encoders.decode(encoded, fmt)
        np.testing.assert_array_equal(bits_of(decode(encoded, fmt)), bits_of(expected))


@pytest.mark.slow
@settings(max_examples=40)
@given(
    shape=shapes,
    version=st.sampled_from(LOSSY),
    dtype=st.sampled_from(list(NUMPY_DTYPES)),
    quantizer=st.sampled_from(list(QUANTIZERS)),
    exponent=st.integers(-20, 3),
    seed=seeds,
)
def test_each_weight_gets_its_nearest_code(shape, version, dtype, quantizer, exponent, seed):
    """|error| ≤ half a step inside of the clip; beyond it, the outermost level. rtn clips nothing
    with 8 and 4 bits."""
    fmt = RecordFormat(version, *shape, dtype)
    weights = normal(fmt, 1, seed, 2.0**exponent)[0].reshape(3, fmt.width, fmt.hidden)
    most = 1.5 if fmt.bits == 2 else 2 ** (fmt.bits - 1) - 1
    for matrix, values in zip(MATRICES, weights, strict=True):
        axis, group = reduced_axis(fmt, matrix)
        codes, scales = quantize(values, axis, group, fmt.encoding, QUANTIZERS[quantizer])
        assert codes.max() <= 2**fmt.bits - 1 and codes.min() >= (0 if fmt.bits == 2 else 1)
        exact = values.astype(np.float64)
        found = dequantize(codes, scales, axis, group, fmt.bits).astype(np.float64)
        step = np.repeat(scales.astype(np.float64), group, axis=axis)
        step = step[: fmt.width] if axis == 0 else step[:, : fmt.hidden]
        inside = np.abs(exact) <= (most + 0.5) * step
        assert (np.abs(found - exact)[inside] <= 0.5000001 * step[inside]).all()
        outermost = np.copysign(most * step, exact)
        np.testing.assert_array_equal(found[~inside], outermost[~inside])
        if quantizer == "rtn" and fmt.bits > 2:
            assert inside.all()


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("dtype", "hidden", "width", "gated"),
    [("bfloat16", 40, 33, True), ("float32", 64, 150, False)],
)
def test_every_version_keeps_biases_as_they_are(version, dtype, hidden, width, gated):
    if version == "lossless12" and dtype == "float32":
        return
    fmt = RecordFormat(version, hidden, width, dtype, biases=True, gated=gated)
    plain = dataclasses.replace(fmt, biases=False)
    weights = normal(plain)
    count, rng = fmt.weight_rows - plain.weight_rows, np.random.default_rng(1)
    rows = rng.standard_normal((2, count, hidden))
    biases = rows.astype(NUMPY_DTYPES[dtype])
    made = np.full((2, fmt.rows, hidden), 0x7FC1, np.uint16)
    encode(np.concatenate([weights, biases], 1), fmt, out=made)
    decoded, numpys = encoders.decode(made, fmt), decode(made, fmt)
    assert np.array_equal(bits_of(decoded), bits_of(numpys))
    alone = decode(encode(weights, plain), plain)
    assert np.array_equal(bits_of(decoded), bits_of(np.concatenate([alone, biases], 1)))
    assert sum(fmt.waited) == fmt.nbytes and not (made[:, sum_of_parts(fmt) :]).any()
    matrices, found = split_weights(decoded[0], fmt)
    assert [m.shape for m in matrices] == [(width, hidden)] * 3
    assert [b.size for b in found] == [width, width, hidden]
    one = fmt.bias_rows("up")
    for bias, begin in zip(found, (0, one, 2 * one) if gated else (0, 0, one), strict=True):
        assert np.array_equal(bias, biases[0, begin:].reshape(-1)[: bias.size])


def sum_of_parts(fmt):
    return sum(rows for _, rows in fmt.parts.values())


@pytest.mark.parametrize("version", [v for v in VERSIONS if v != "dense"])
def test_every_element_of_a_record_is_written(version):
    """So that files and checksums of them do not depend on what memory held before."""
    fmt = RecordFormat(version, 40, 33, "bfloat16")
    weights = normal(fmt, n=1)
    one, other = (np.full((1, fmt.rows, 40), fill, np.uint16) for fill in (0, 0xFFFF))
    assert encode(weights, fmt, out=one) is one
    encode(weights, fmt, out=other)
    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("version", LOSSY)
@pytest.mark.parametrize(
    ("value", "reason"),
    [(np.nan, "NaN or infinite"), (-np.inf, "NaN or infinite"), (3e38, "too large for float16")],
)
def test_what_no_scale_holds_is_refused(version, value, reason):
    fmt = RecordFormat(version, 64, 40, "bfloat16")
    weights = normal(fmt, n=3)
    weights[1, 100, 3] = value
    with pytest.raises(EncodingError, match=f"experts 1: weights are {reason}") as refused:
        encode(weights, fmt)
    assert refused.value.experts == (1,)
    with pytest.raises(UnquantizableError):
        quantize(weights[1, 80:].astype(np.float32), 0, 32, fmt.encoding)


def test_other_shapes_and_dtypes_are_refused():
    fmt = RecordFormat("int4", 64, 10, "bfloat16")
    with pytest.raises(ValueError, match=r"weights must be bfloat16\[n, 30, 64\], not float32\[1"):
        encode(np.zeros((1, 30, 64), np.float32), fmt)
    with pytest.raises(ValueError, match=r"weights must be bfloat16\[n, 30, 64\], not bfloat16\[1"):
        encode(np.zeros((1, 30, 32), ml_dtypes.bfloat16), fmt)
    with pytest.raises(ValueError, match=r"records of int4 are uint16\[n, 12, 64\], not uint16\[1"):
        encoders.decode(np.zeros((1, 30, 64), np.uint16), fmt)


@settings(max_examples=60)
@given(data=st.data())
def test_lossless_is_the_same_bits_or_refused(data):
    """Any bits: either the same again, or the encoder says that they do not fit, and then some
    block indeed has no window that leaves few enough values outside."""
    fmt = RecordFormat("lossless12", 32, data.draw(st.integers(1, 40)), "bfloat16")
    rng = np.random.default_rng(data.draw(seeds))
    size = 3 * fmt.width * fmt.hidden
    lowest, span = data.draw(st.integers(0, 255)), data.draw(st.integers(1, 40))
    exponents = np.minimum(rng.integers(lowest, lowest + span, size), 255)
    mantissas = rng.integers(0, data.draw(st.sampled_from([1, 2, 128])), size)
    weights = from_bits(exponents << 7 | mantissas | rng.choice([0, 0x8000], size), fmt)
    if fits(bits_of(weights[0]), fmt):
        encoded = encode(weights, fmt)
        np.testing.assert_array_equal(bits_of(decode(encoded, fmt)), bits_of(weights))
    else:
        with pytest.raises(EncodingError, match="15 consecutive exponents"):
            encode(weights, fmt)


def fits(bits, fmt):
    """Whether some base leaves no block more distinct values than its table has entries."""
    for matrix in bits.reshape(3, fmt.width, fmt.hidden):
        for first in range(0, fmt.width, records.format.BLOCK):
            values = np.unique(matrix[first : first + records.format.BLOCK])
            exponents = values >> 7 & 255
            outside = [((exponents > b) | (exponents < b - 14)).sum() for b in range(256)]
            if min(outside) > fmt.escapes:
                return False
    return True


def count_escapes(record: np.ndarray, fmt: RecordFormat) -> int:
    """How many weights of a record uint16[rows, D] are looked up in tables."""
    parts = ((part(record, fmt, f"{matrix}_codes"), matrix == "down") for matrix in MATRICES)
    shape = fmt.width, fmt.hidden
    return sum(
        int(np.count_nonzero(unpack(codes, 4, down, shape) == ESCAPE)) for codes, down in parts
    )


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize("name", ["demo", "tri"])
def test_lossless_holds_the_trained_checkpoints(name, shared):
    """Every expert of them: the same bits in less than 77% of the bytes, few escapes."""
    from host_offload.versions.store_versions import dense_weights
    from moejax.checkpoints.load import load_checkpoint

    loaded = load_checkpoint(shared / "models" / name)
    fmt = RecordFormat("lossless12", loaded.layout.hidden, loaded.layout.width, loaded.dtype)
    assert fmt.nbytes < 0.77 * loaded.layout.nbytes
    escapes, size = 0, 0
    for _, _, weights in dense_weights(loaded.store, loaded.dtype):
        encoded = encode(weights, fmt)
        np.testing.assert_array_equal(bits_of(decode(encoded, fmt)), bits_of(weights))
        escapes += sum(count_escapes(record, fmt) for record in encoded)
        size += weights.size
    assert 0 < escapes / size < 5e-4

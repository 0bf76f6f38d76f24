"""Encoders: what they write means what the formats say, as near to the weights as it can be."""

import itertools

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.versions import encoders
from host_offload.versions.encoders import NUMPY_DTYPES, EncodingError, encode, reduced_axis
from host_offload.versions.packing import pack, part
from host_offload.versions.quantizers import (
    QUANTIZERS,
    UnquantizableError,
    mse,
    quantize,
    rtn,
)
from pallas_kernels import records
from pallas_kernels.records import VERSIONS, RecordFormat
from pallas_kernels.records.format import BITS, ESCAPE, MATRICES
from tests.host_offload.versions.numpy_decoder import decode, dequantize, unpack

LOSSY = tuple(BITS)
SHAPES = ((40, 10), (64, 33), (96, 70), (128, 64))
"""(D, I)"""

shapes = st.sampled_from(SHAPES)
seeds = st.integers(0, 2**32 - 1)


def normal(fmt, n=2, seed=0, spread=0.03):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((n, 3 * fmt.width, fmt.hidden), np.float32) * spread
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
    rows=st.integers(1, 90),
    columns=st.integers(1, 12).map(lambda n: 8 * n),
    bits=st.sampled_from([2, 4, 8]),
    down=st.booleans(),
    seed=seeds,
)
def test_unpack_undoes_pack(rows, columns, bits, down, seed):
    codes = np.random.default_rng(seed).integers(0, 1 << bits, (rows, columns), np.uint8)
    into = np.full(-(-rows * bits // 16) * columns + 5, 0xFFFF, np.uint16)
    pack(codes, bits, down, into)
    np.testing.assert_array_equal(unpack(into, bits, down, codes.shape), codes)
    assert not into[-5:].any()


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
        codes, scales = quantize(values, axis, group, fmt.bits, QUANTIZERS[quantizer])
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


@pytest.mark.parametrize("version", LOSSY)
def test_mse_is_never_worse_than_rtn(version):
    fmt = RecordFormat(version, 64, 70, "float32")
    rng = np.random.default_rng(1)
    weights = rng.standard_t(3, (70, 64)).astype(np.float32)
    for axis, group in ((0, 32), (1, 64)):
        errors = []
        for rule in (rtn, mse):
            codes, scales = quantize(weights, axis, group, fmt.bits, rule)
            error = np.square(dequantize(codes, scales, axis, group, fmt.bits) - weights)
            errors.append(np.add.reduceat(error, range(0, error.shape[axis], group), axis))
        assert (errors[1] <= errors[0] * (1 + 1e-6)).all()
        if version != "int8":
            assert errors[1].sum() < 0.99 * errors[0].sum()


@pytest.mark.parametrize(("version", "largest"), [("int8", 0.008), ("int4", 0.13), ("int2", 0.36)])
def test_relative_error_of_normal_weights(version, largest):
    fmt = RecordFormat(version, 256, 128, "bfloat16")
    weights = normal(fmt)
    error = decode(encode(weights, fmt), fmt).astype(np.float64) - weights.astype(np.float64)
    assert 0 < np.linalg.norm(error) / np.linalg.norm(weights.astype(np.float64)) < largest


@pytest.mark.parametrize("version", LOSSY)
def test_zero_stays_zero(version):
    fmt = RecordFormat(version, 64, 33, "bfloat16")
    weights = normal(fmt)
    weights[0] = 0
    weights[1, :20, :32] = 0
    decoded = decode(encode(weights, fmt), fmt)
    assert not decoded[0].any()
    if version != "int2":  # which has no level at zero
        assert not decoded[1, :20, :32].any()


@pytest.mark.parametrize("version", VERSIONS)
def test_experts_do_not_depend_on_each_other_or_on_threads(version):
    fmt = RecordFormat(version, 64, 70, "bfloat16")
    weights = normal(fmt, n=5)
    together = encode(weights, fmt, workers=4)
    for expert in range(5):
        alone = encode(weights[expert : expert + 1], fmt, workers=1)
        np.testing.assert_array_equal(alone[0], together[expert])


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
        quantize(weights[1, 80:].astype(np.float32), 0, 32, fmt.bits)


@pytest.mark.slow
@pytest.mark.parametrize("version", LOSSY)
@pytest.mark.parametrize("quantizer", QUANTIZERS)
def test_the_largest_float16_weights_stay_finite(version, quantizer):
    """The nearest scale would make the outermost code infinite."""
    fmt = RecordFormat(version, 128, 32, "float16")
    rng = np.random.default_rng(0)
    weights = rng.uniform(-65504, 65504, (3, 96, 128)).astype(np.float16)
    weights[1] = np.copysign(65504, weights[1])
    weights[2] = 0
    weights[2, ::7, ::9] = -65504
    decoded = decode(encode(weights, fmt, QUANTIZERS[quantizer]), fmt)
    assert np.isfinite(decoded).all()
    np.testing.assert_array_equal(
        bits_of(decoded), bits_of(encoders.decode(encode(weights, fmt, QUANTIZERS[quantizer]), fmt))
    )
    wide = [values[1].astype(np.float64) for values in (weights, decoded)]
    assert np.abs(wide[0] - wide[1]).max() <= 65504 / {"int8": 254, "int4": 14, "int2": 3}[version]


@pytest.mark.parametrize("version", LOSSY)
def test_what_rtn_holds_mse_holds(version):
    """Also where some of the steps that it looks at are beyond float16."""
    fmt = RecordFormat(version, 64, 32, "bfloat16")
    weights = normal(fmt, n=1)
    most = {"int8": 8.2e6, "int4": 4.5e5, "int2": 6e4}[version]
    weights[0, :, ::2], weights[0, :, 1::2] = most, -most
    errors = []
    for rule in (rtn, mse):
        decoded = decode(encode(weights, fmt, rule), fmt).astype(np.float64)
        errors.append(np.square(decoded - weights.astype(np.float64)).sum())
    assert errors[1] <= errors[0]


def test_other_shapes_and_dtypes_are_refused():
    fmt = RecordFormat("int4", 64, 10, "bfloat16")
    with pytest.raises(ValueError, match=r"weights must be bfloat16\[n, 30, 64\], not float32\[1"):
        encode(np.zeros((1, 30, 64), np.float32), fmt)
    with pytest.raises(ValueError, match=r"weights must be bfloat16\[n, 30, 64\], not bfloat16\[1"):
        encode(np.zeros((1, 30, 32), ml_dtypes.bfloat16), fmt)
    with pytest.raises(ValueError, match=r"records of int4 are uint16\[n, 12, 64\], not uint16\[1"):
        encoders.decode(np.zeros((1, 30, 64), np.uint16), fmt)


FMT = RecordFormat("lossless12", 64, 40, "bfloat16")


def adversarial():
    """Name → bits of weights that hardly look like a model's, and fit."""
    rng = np.random.default_rng(0)
    size = 3 * FMT.width * FMT.hidden
    ordinary = bits_of(normal(FMT, 1)).reshape(-1)

    def sprinkled(values, count=20):
        bits = ordinary.copy()
        bits[rng.choice(size, count, replace=False)] = rng.choice(values, count)
        return bits

    return {
        "NaN payloads": sprinkled([0x7F81, 0xFFC1, 0x7FFF, 0xFF80 | 0x55]),
        "infinities": sprinkled([0x7F80, 0xFF80]),
        "only NaN": np.full(size, 0x7FC0),
        "subnormals": rng.integers(0, 128, size) | rng.choice([0, 0x8000], size),
        "subnormals and ordinary": sprinkled([1, 2, 0x8001]),
        "zeros of both signs": rng.choice([0, 0x8000], size),
        "half of them zero": np.where(rng.random(size) < 0.5, 0, ordinary),
        "all equal": np.full(size, 0x3C17),
        "one large weight": sprinkled([0x7F7F], 1),
        "fifteen exponents": (rng.integers(100, 115, size) << 7) | rng.integers(0, 128, size),
        "ordinary": ordinary,
    }


@pytest.mark.parametrize("name", adversarial())
def test_lossless_is_the_same_bits(name):
    weights = from_bits(adversarial()[name], FMT)
    encoded = encode(weights, FMT)
    np.testing.assert_array_equal(bits_of(decode(encoded, FMT)), bits_of(weights))
    np.testing.assert_array_equal(bits_of(encoders.decode(encoded, FMT)), bits_of(weights))


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


def test_uniform_bits_overflow():
    bits = np.random.default_rng(0).integers(0, 1 << 16, 3 * 3 * FMT.width * FMT.hidden)
    weights = from_bits(bits, FMT)
    weights[1] = normal(FMT, 1)[0]
    with pytest.raises(EncodingError, match="15 consecutive exponents for lossless12") as refused:
        encode(weights, FMT)
    assert refused.value.experts == (0, 2)


def count_escapes(record: np.ndarray, fmt: RecordFormat) -> int:
    """How many weights of a record uint16[rows, D] are looked up in tables."""
    parts = ((part(record, fmt, f"{matrix}_codes"), matrix == "down") for matrix in MATRICES)
    shape = fmt.width, fmt.hidden
    return sum(
        int(np.count_nonzero(unpack(codes, 4, down, shape) == ESCAPE)) for codes, down in parts
    )


def test_escapes_are_counted():
    weights = from_bits(np.full(3 * FMT.width * FMT.hidden, 0x3C00), FMT)
    bits_of(weights)[0, 5, :7] = 0x1000
    bits_of(weights)[0, 100, 9] = 0x8000
    (record,) = encode(weights, FMT)
    assert count_escapes(record, FMT) == 8
    tables = part(record, FMT, "tables")[: 3 * FMT.blocks * (1 + FMT.escapes)]
    first, *values = tables.reshape(3, FMT.blocks, -1)[0, 0]
    assert first == 0x3C00 >> 7 and values == [0x1000] + [0] * (FMT.escapes - 1)


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

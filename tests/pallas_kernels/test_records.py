"""Record formats: sizes, refusals, and the reference decoder against the format's text."""

import pickle

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.records import VERSIONS, RecordFormat, decode
from pallas_kernels.records.format import BITS, BLOCK, MATRICES

DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
SHAPES = ((40, 10), (64, 33), (8, 70))
"""(D, I): odd numbers of rows, several row blocks, groups that do and do not divide."""


def formats():
    for version in VERSIONS:
        for hidden, width in SHAPES:
            yield RecordFormat(version, hidden, width, "bfloat16")
        if version != "lossless12":
            yield from (RecordFormat(version, 40, 10, dtype) for dtype in ("float16", "float32"))


def some_record(fmt, seed=0):
    """Random bits, with scales that are ordinary numbers."""
    rng = np.random.default_rng(seed)
    record = rng.integers(0, 1 << 16, (fmt.rows, fmt.hidden), np.uint16)
    for name, (first, rows) in fmt.parts.items():
        if name.endswith("scales"):
            scales = rng.uniform(0, 0.1, (rows, fmt.hidden)).astype(np.float16)
            scales[0, :3] = 2.0**-24, 0, 60000  # the smallest, none, a large one
            record[first : first + rows] = scales.view(np.uint16)
    return record


def weight(record, fmt, matrix, row, column):
    """One weight of a matrix [I, D], as its bits, straight from the text of format.py."""

    def element(name, index):
        first, rows = fmt.parts[name]
        assert index < rows * fmt.hidden
        return int(record[first + index // fmt.hidden, index % fmt.hidden])

    def code(name, bits):
        planes = 16 // bits
        if matrix == "down":
            height = -(-fmt.width // planes)
            packed = element(name, row % height * fmt.hidden + column)
            plane = row // height
        else:
            across = fmt.hidden // planes
            packed = element(name, row * across + column % across)
            plane = column // across
        return packed >> (bits * plane) & ((1 << bits) - 1)

    if fmt.version == "lossless12":
        byte, exponent = code(f"{matrix}_bytes", 8), code(f"{matrix}_codes", 4)
        block = MATRICES.index(matrix) * fmt.blocks + row // BLOCK
        table = block * (1 + fmt.escapes)
        if exponent == 15:
            return element("tables", table + 1 + min(byte, fmt.escapes - 1))
        base = element("tables", table)
        return (byte >> 7 << 15 | base - exponent << 7 | byte & 127) & 0xFFFF
    if matrix == "down":
        scale = element("down_scales", row // fmt.group_out * fmt.hidden + column)
    else:
        scale = element(f"{matrix}_scales", row * fmt.groups_in + column // fmt.group_in)
    scale = np.uint16(scale).view(np.float16).astype(np.float64)
    zero = 1.5 if fmt.version == "int2" else 2 ** (BITS[fmt.version] - 1)
    value = (code(f"{matrix}_codes", BITS[fmt.version]) - zero) * scale
    exact = np.float32(value)
    assert exact == value
    rounded = exact.astype(DTYPES[fmt.dtype])
    return int(rounded.view(np.dtype(f"uint{8 * rounded.itemsize}")))


def bits_of(weights):
    return np.asarray(weights).view(np.dtype(f"uint{8 * weights.dtype.itemsize}"))


@pytest.mark.parametrize("fmt", list(formats()), ids=str)
def test_decode_is_what_the_text_says(fmt):
    record = some_record(fmt)
    decoded = jax.jit(decode, static_argnums=1)(record, fmt)
    assert decoded.shape == (3 * fmt.width, fmt.hidden)
    assert decoded.dtype == DTYPES[fmt.dtype]
    if fmt.version == "dense":
        np.testing.assert_array_equal(
            bits_of(decoded).reshape(-1).view(np.uint16), record.reshape(-1)
        )
        return
    with np.errstate(over="ignore"):
        expected = [
            [weight(record, fmt, matrix, row, column) for column in range(fmt.hidden)]
            for matrix in MATRICES
            for row in range(fmt.width)
        ]
    np.testing.assert_array_equal(bits_of(decoded), np.array(expected))


@given(
    version=st.sampled_from(VERSIONS),
    hidden=st.integers(1, 600).map(lambda n: 8 * n),
    width=st.integers(1, 3000),
    dtype=st.sampled_from(list(DTYPES)),
)
def test_parts_follow_one_another_and_hold_what_they_must(version, hidden, width, dtype):
    if version == "lossless12":
        dtype = "bfloat16"
    fmt = RecordFormat(version, hidden, width, dtype)
    row = 0
    for first, rows in fmt.parts.values():
        assert first == row and rows > 0
        row += rows
    assert fmt.rows - row in (0, 1) and fmt.nbytes == fmt.rows * hidden * 2
    if version == "dense":
        assert fmt.nbytes == 3 * width * hidden * fmt.itemsize
        return
    assert fmt.rows % 2 == 0
    assert fmt.group_in * fmt.groups_in >= hidden > fmt.group_in * (fmt.groups_in - 1)
    assert fmt.group_out * fmt.groups_out >= width > fmt.group_out * (fmt.groups_out - 1)
    capacity = {name: rows * hidden for name, (_, rows) in fmt.parts.items()}
    for matrix in MATRICES:
        assert capacity[f"{matrix}_codes"] * fmt.planes >= width * hidden
        if fmt.lossy:
            groups = fmt.groups_out * hidden if matrix == "down" else width * fmt.groups_in
            assert capacity[f"{matrix}_scales"] >= groups
        else:
            assert capacity[f"{matrix}_bytes"] * 2 >= width * hidden
    if version == "lossless12":
        assert capacity["tables"] >= 3 * fmt.blocks * (1 + fmt.escapes)
        assert fmt.escapes < 256


@pytest.mark.parametrize(
    ("axis", "group", "groups"),
    [(2048, 128, 16), (768, 128, 6), (320, 64, 5), (96, 32, 3), (2880, 64, 45), (40, 32, 2)],
)
def test_groups(axis, group, groups):
    fmt = RecordFormat("int4", axis, axis, "bfloat16")
    assert (fmt.group_in, fmt.groups_in) == (fmt.group_out, fmt.groups_out) == (group, groups)


def test_bytes_at_the_size_of_a_large_model():
    """Qwen3-30B-A3B's expert: the sizes that DESIGN counts with."""
    dense = RecordFormat("dense", 2048, 768, "bfloat16").nbytes
    share = {v: RecordFormat(v, 2048, 768, "bfloat16").nbytes / dense for v in VERSIONS}
    expected = {"dense": 1, "int8": 0.508, "int4": 0.258, "int2": 0.133, "lossless12": 0.754}
    assert {v: round(s, 3) for v, s in share.items()} == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("int3", 64, 8, "bfloat16"), "unknown expert version 'int3'; known: dense, int8"),
        (("int4", 64, 8, "float64"), "dtype must be one of"),
        (("int4", 64, 0, "bfloat16"), "needs D and I ≥ 1, not 64 and 0"),
        (("lossless12", 64, 8, "float16"), "lossless12 holds bfloat16 weights, not float16; run"),
        (("lossless12", 66, 8, "bfloat16"), "a multiple of 4, not 66"),
        (("int8", 65, 8, "bfloat16"), "int8 needs a hidden size D that is a multiple of 2"),
        (("int2", 36, 8, "bfloat16"), "a multiple of 8, not 36; use another version"),
    ],
)
def test_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RecordFormat(*fields)


def test_decode_refuses_another_record():
    fmt = RecordFormat("int4", 64, 8, "bfloat16")
    with pytest.raises(ValueError, match=r"a record of int4 is \[\d+, 64\], not \[3, 64\]"):
        decode(jnp.zeros((3, 64), jnp.uint16), fmt)


def test_a_format_is_a_static_argument():
    fmt = RecordFormat("lossless12", 64, 8, "bfloat16")
    assert fmt == RecordFormat("lossless12", 64, 8, "bfloat16") and hash(fmt)
    assert pickle.loads(pickle.dumps(fmt)) == fmt


@settings(max_examples=5)
@given(seed=st.integers(0, 2**32 - 1), version=st.sampled_from(["int8", "int4", "int2"]))
def test_the_run_s_dtype_only_rounds(seed, version):
    """The same record decodes to the same numbers, rounded once to the run's dtype."""
    fmt = {dtype: RecordFormat(version, 64, 33, dtype) for dtype in DTYPES}
    record = some_record(fmt["float32"], seed)
    exact = np.asarray(decode(record, fmt["float32"]))
    for dtype in ("bfloat16", "float16"):
        with np.errstate(over="ignore"):
            expected = exact.astype(DTYPES[dtype])
        np.testing.assert_array_equal(bits_of(decode(record, fmt[dtype])), bits_of(expected))

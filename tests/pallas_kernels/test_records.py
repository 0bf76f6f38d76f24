"""Record formats: sizes, refusals, and the reference decoder against the format's text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.records import VERSIONS, RecordFormat, decode


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
        (("int3", 64, 8, "bfloat16"), "unknown expert version 'int3'; known: dense, lossless12"),
        (("int4", 64, 8, "float64"), "dtype must be one of"),
        (("int4", 64, 0, "bfloat16"), "needs D and I ≥ 1, not 64 and 0"),
        (("lossless12", 64, 8, "float16"), "lossless12 holds bfloat16 weights, not float16; run"),
        (("lossless12", 66, 8, "bfloat16"), "a multiple of 4, not 66"),
        (("int8", 65, 8, "bfloat16"), "int8 needs a hidden size D that is a multiple of 2"),
        (("int2", 36, 8, "bfloat16"), "a multiple of 8, not 36; use another version"),
        (("dense+int4", 64, 8, "bfloat16"), "must be one format, or those of gate, up and down"),
        (("dense+int3+int4", 64, 8, "bfloat16"), "unknown expert version 'int3'"),
        (("dense+dense+int2", 36, 8, "bfloat16"), "a multiple of 8, not 36; use another version"),
    ],
)
def test_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RecordFormat(*fields)


def test_decode_refuses_another_record():
    fmt = RecordFormat("int4", 64, 8, "bfloat16")
    with pytest.raises(ValueError, match=r"a record of int4 is \[\d+, 64\], not \[3, 64\]"):
        decode(jnp.zeros((3, 64), jnp.uint16), fmt)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "version",
    ["int4-32-bf16+fp8-8x16-f32+int8-channel-f16", "dense+int4+dense", "int2+dense+fp4-32-e8m0"],
)
def test_matrices_of_one_record_may_be_in_different_formats(version, dtype):
    decode_all = jax.jit(decode, static_argnums=1)
    fmt, names = RecordFormat(version, 64, 9, dtype), version.split("+")
    record = np.random.default_rng(0).integers(0x3000, 0x3C00, (fmt.rows, 64), np.uint16)
    found = np.asarray(decode_all(record, fmt), np.float32).reshape(3, 9, 64)
    ends = [first + rows for first, rows in fmt.parts.values()]
    assert [0, *ends[:-1]] == [first for first, _ in fmt.parts.values()]
    assert fmt.rows - ends[-1] in (0, 1) and fmt.rows % 2 == 0 and len(fmt.waited) == 1
    for matrix, name, weights in zip(("gate", "up", "down"), names, found, strict=True):
        alone = RecordFormat(name, 64, 9, dtype)
        other = np.zeros((alone.rows, 64), np.uint16)
        for part, (first, rows) in alone.parts.items():
            if part.startswith(matrix):
                begin, count = fmt.parts[part]
                assert count == rows
                other[first : first + rows] = record[begin : begin + rows]
        wanted = np.asarray(decode_all(other, alone), np.float32).reshape(3, 9, 64)
        np.testing.assert_array_equal(weights, wanted[("gate", "up", "down").index(matrix)])

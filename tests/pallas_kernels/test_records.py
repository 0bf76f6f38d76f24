"""Record formats: sizes, refusals, and the reference decoder against the format's text."""

import jax.numpy as jnp
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
    ],
)
def test_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RecordFormat(*fields)


def test_decode_refuses_another_record():
    fmt = RecordFormat("int4", 64, 8, "bfloat16")
    with pytest.raises(ValueError, match=r"a record of int4 is \[\d+, 64\], not \[3, 64\]"):
        decode(jnp.zeros((3, 64), jnp.uint16), fmt)

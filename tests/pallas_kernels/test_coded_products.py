"""Products with weights in the codes of files: the bits of the decoded weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear import CodedWeights, LinearOptions, lay_out, linear
from tests.pallas_kernels.contract import same_bits
from tests.pallas_kernels.encoded import records

INPUTS = 512
FORMATS = (
    *("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "q4_k", "q5_k", "q6_k", "fp4-32-e8m0"),
    *("fp8-128x128-f32", "int8-channel-bf16", "int4-128-f16-zero", "fp4-16-e4m3xf32"),
)
"""Formats of rows; every test has rows of another one, and plain ones, beside them."""


def weights(version: str, dtype: str) -> CodedWeights:
    """Two layers of 70 rows in three parts, which differ between the layers."""
    layers = [
        [(version, 48), ("q6_k", 10), ("dense", 12)],
        [("q4_k", 48), (version, 10), (version, 12)],
    ]
    placed, count = lay_out(layers, INPUTS, dtype)
    random, elements = np.random.default_rng(0), np.zeros(count, np.uint16)
    for part in (part for layer in placed for part in layer):
        made = records(random, 1, part.format).reshape(-1)
        elements[part.first : part.first + made.size] = made
    return CodedWeights(jnp.asarray(elements), placed)


@pytest.mark.parametrize("version", FORMATS)
def test_codes_give_the_bits_of_decoded_weights(version):
    coded = weights(version, "bfloat16")
    assert coded.shape == (2, 70, INPUTS) and coded.dtype == jnp.bfloat16
    plain, options = jax.jit(CodedWeights.decode)(coded), LinearOptions(implementation="cpu")
    bias = jax.random.normal(jax.random.key(1), (2, 70), jnp.bfloat16)
    run = jax.jit(lambda *given: linear(*given, options, out_dtype=jnp.float32))
    for tokens in (1, 2, 4, 5, 8, 17, 130):
        x = jax.random.normal(jax.random.key(tokens), (tokens, INPUTS), jnp.bfloat16)
        for layer in range(2):
            found, wanted = (run(x, each, layer, bias) for each in (coded, plain))
            same_bits(found, wanted)


def test_only_the_native_op_reads_codes_and_others_decode_them():
    coded = weights("q8_0", "float32")
    x = jax.random.normal(jax.random.key(0), (3, INPUTS))
    found = [linear(x, coded, 1, options=LinearOptions(implementation=n)) for n in ("xla", "cpu")]
    assert np.array_equal(found[0], linear(x, coded.decode(), 1))
    np.testing.assert_allclose(*found, atol=1e-4)
    half = dict(tokens=LinearOptions(row_tile=1, tiles=2, implementation="cpu"))
    assert np.array_equal(linear(x, coded, 1, options=half["tokens"])[:2], found[1][:2])

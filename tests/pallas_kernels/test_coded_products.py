"""Products with weights in the codes of files: the bits of the decoded weights."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.linear import CodedWeights, LinearOptions, lay_out, linear
from tests.pallas_kernels import contract
from tests.pallas_kernels.contract import same_bits
from tests.pallas_kernels.encoded import records

INPUTS = 512
FORMATS = (
    *("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "iq4_nl", "q4_k", "q5_k", "q6_k", "fp4-32-e8m0"),
    *("fp8-128x128-f32", "int8-channel-bf16", "int4-128-f16-zero", "fp4-16-e4m3xf32"),
)
"""Formats of rows; every test has rows of another one, and plain ones, beside them."""

TOKENS = {"q8_0": (1, 2, 4, 5, 8, 17, 130), "q4_k": (1, 4, 17, 130)}
"""Others: one, a tile that is not full, several calls."""


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


SLOW = ("q6_k", "q4_k", "q4_1", "q5_0")
"""q6_k and q4_k are beside each other one, and q5_1 has the parts of the last two."""


@pytest.mark.parametrize(
    ("version", "dtype"),
    [
        *(pytest.param(v, "bfloat16", marks=[pytest.mark.slow] * (v in SLOW)) for v in FORMATS),
        *(pytest.param(v, "float32", marks=[pytest.mark.nightly] * (v != "q5_k")) for v in FORMATS),
    ],
)
def test_codes_give_the_bits_of_decoded_weights(version, dtype):
    coded = weights(version, dtype)
    assert coded.shape == (2, 70, INPUTS) and coded.dtype == dtype
    decode = jax.jit(CodedWeights.decode, compiler_options=contract.QUICKLY)
    plain, options = decode(coded), LinearOptions(implementation="cpu")
    random = np.random.default_rng(1)
    bias, x = (random.standard_normal(shape).astype(dtype) for shape in ((2, 70), (130, INPUTS)))
    run = jax.jit(lambda *given: linear(*given, options, out_dtype=jnp.float32))
    for layer in range(2):
        wanted = np.asarray(run(x, plain, layer, bias))
        for tokens in TOKENS.get(version, (1, 5, 130)):
            same_bits(run(x[:tokens], coded, layer, bias), wanted[:tokens])


def test_only_the_native_op_reads_codes_and_others_decode_them():
    coded = weights("q8_0", "float32")
    x = jax.random.normal(jax.random.key(0), (3, INPUTS))

    def run(weights, **options):
        options = LinearOptions(**options)
        return jax.jit(lambda weights: linear(x, weights, 1, options=options))(weights)

    found = [run(coded, implementation=name) for name in ("xla", "cpu")]
    assert np.array_equal(found[0], run(jax.jit(CodedWeights.decode)(coded)))
    np.testing.assert_allclose(*found, atol=1e-4)
    assert np.array_equal(run(coded, row_tile=1, tiles=2, implementation="cpu")[:2], found[1][:2])

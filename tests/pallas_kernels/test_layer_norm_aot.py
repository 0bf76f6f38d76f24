"""layer_norm's kernel compiled for an H200 at the size of Phi-3.5-MoE."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.layer_norm import layer_norm
from tests.aot.models import DECODE_ROWS, PREFILL_ROWS
from tests.aot.ptxas import compile_kernels

pytestmark = pytest.mark.aot

Array = jax.ShapeDtypeStruct


@pytest.mark.parametrize("rows", [DECODE_ROWS[0], PREFILL_ROWS])
def test_kernel(rows):
    program, kernels = compile_kernels(
        lambda x, weights, biases, i: layer_norm(
            x, weights, biases, i, 1e-5, implementation="pallas"
        ),
        Array((rows, 4096), jnp.bfloat16),
        Array((32, 4096), jnp.bfloat16),
        Array((32, 4096), jnp.bfloat16),
        Array((), jnp.int32),
    )
    assert program.kernels() == ["layer_norm"] and program.copies() == []
    assert kernels["layer_norm"].spill_bytes == 0 and kernels["layer_norm"].registers <= 64
    # 16 values each of x, weights and biases.
    assert kernels["layer_norm"].load_bits() == {128: 6, 32: 1}

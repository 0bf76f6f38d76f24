"""rms_norm's kernel compiled for an H200 at the sizes of real models."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.rms_norm import rms_norm
from tests.aot.models import DECODE_ROWS, MODELS, PREFILL_ROWS
from tests.aot.ptxas import compile_kernels

pytestmark = pytest.mark.aot

Array = jax.ShapeDtypeStruct


@pytest.mark.parametrize("rows", [*DECODE_ROWS, PREFILL_ROWS])
@pytest.mark.parametrize("hidden", sorted({model.hidden for model in MODELS.values()}))
def test_kernel(hidden, rows):
    program, kernels = compile_kernels(
        lambda x, weights, i: rms_norm(x, weights, i, 1e-6, implementation="pallas"),
        Array((rows, hidden), jnp.bfloat16),
        Array((48, hidden), jnp.bfloat16),
        Array((), jnp.int32),
    )
    assert program.kernels() == ["rms_norm"] and program.copies() == []
    assert kernels["rms_norm"].spill_bytes == 0
    assert kernels["rms_norm"].load_bits() == {128: 4, 32: 1}  # 16 values each of x and weights

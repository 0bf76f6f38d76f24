"""combine's kernel compiled for an H200 at the sizes of real models."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.combine import combine
from tests.aot.models import DECODE_ROWS, MODELS, PREFILL_ROWS
from tests.aot.ptxas import compile_kernels

pytestmark = pytest.mark.aot

Array = jax.ShapeDtypeStruct


@pytest.mark.parametrize("rows", [*DECODE_ROWS, PREFILL_ROWS])
@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "Mixtral-8x7B"])
def test_kernel(name, rows):
    model = MODELS[name]
    program, kernels = compile_kernels(
        lambda residual, y, weights: combine(residual, y, weights, implementation="pallas"),
        Array((rows, model.hidden), jnp.bfloat16),
        Array((rows, model.top_k, model.hidden), jnp.float32),
        Array((rows, model.top_k), jnp.float32),
    )
    assert program.kernels() == ["combine"] and program.copies() == []
    assert kernels["combine"].spill_bytes == 0
    # y, its weight, and the residual's four values
    assert kernels["combine"].load_bits() == {128: model.top_k, 32: model.top_k, 64: 1}

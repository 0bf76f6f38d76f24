"""route's kernel compiled for an H200 at the sizes of real models."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.route import route
from tests.aot.models import DECODE_ROWS, MODELS, SWEEP_ROWS
from tests.aot.ptxas import compile_kernels

pytestmark = pytest.mark.aot

Array = jax.ShapeDtypeStruct


def compile_route(rows, experts, top_k):
    return compile_kernels(
        lambda logits, valid: route(
            logits, valid, top_k=top_k, normalize=True, implementation="pallas"
        ),
        Array((rows, experts), jnp.float32),
        Array((rows,), bool),
    )


@pytest.mark.parametrize("name", MODELS)
def test_real_sizes(name):
    model, instructions = MODELS[name], set()
    for rows in (*DECODE_ROWS, SWEEP_ROWS):
        program, kernels = compile_route(rows, model.experts, model.top_k)
        assert program.kernels() == ["route"]
        check(kernels["route"], 40)
        instructions.add(kernels["route"].ptx.count("\n"))
    # The number of rows is a bound in the code and the grid, nothing else.
    assert max(instructions) - min(instructions) <= 4


@pytest.mark.parametrize(("experts", "top_k"), [(60, 4), (512, 10)])
def test_other_numbers_of_experts(experts, top_k):
    """Qwen1.5-MoE and Qwen3-Next."""
    check(compile_route(16, experts, top_k)[1]["route"], 128)


def check(kernel, registers):
    assert kernel.spill_bytes == 0
    assert kernel.registers <= registers and kernel.shared_bytes <= 8 * 1024

"""The reader of ptxas's reports finds what is there."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from tests.aot.ptxas import compile_kernels
from tests.aot.test_aot_h200 import SQUARE, matmul

pytestmark = pytest.mark.aot


def test_kernels_of_a_program():
    program, kernels = compile_kernels(lambda a, b: jnp.sum(matmul(a, b), axis=0), SQUARE, SQUARE)
    assert {"tiled_matmul"} < set(kernels)  # and XLA's own sum
    kernel = kernels["tiled_matmul"]
    assert program.kernels().count(kernel.name) == 1
    assert 16 < kernel.registers < 256 and kernel.spill_bytes == 0
    assert kernel.shared_bytes >= (64 * 32 + 32 * 64) * 2
    assert kernel.load_bits().keys() == {128}
    assert "mma" in kernel.ptx and ".entry tiled_matmul(" in kernel.ptx


def copy(step, num_warps=1, rows=256):
    """A kernel that copies every `step`-th value of x with one warp."""

    def kernel(x, y):
        y[...] = jnp.exp(x[pl.ds(0, rows, step)])

    return pl.pallas_call(
        kernel,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        out_specs=pl.BlockSpec(memory_space=pl.ANY),
        out_shape=jax.ShapeDtypeStruct((rows,), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=num_warps, num_stages=1),
        name="copy",
    )


@pytest.mark.parametrize(("step", "bits"), [(1, 128), (2, 32)])
def test_width_of_loads(step, bits):
    x = jax.ShapeDtypeStruct((512,), jnp.float32)
    _, kernels = compile_kernels(copy(step), x)
    assert kernels["copy"].load_bits().keys() == {bits}


def test_spills_are_found():
    def kernel(a, b, out):
        zero = jnp.zeros((128, 256), jnp.float32)

        def body(k, total):
            return total + plgpu.dot(a[:, pl.ds(k * 64, 64)], b[pl.ds(k * 64, 64), :])

        out[...] = jax.lax.fori_loop(0, 4, body, zero)

    whole = pl.BlockSpec(memory_space=pl.ANY)
    call = pl.pallas_call(
        kernel,
        in_specs=[whole, whole],
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct((128, 256), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        name="crowded",
    )
    a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((128, 256), (256, 256)))
    _, kernels = compile_kernels(call, a, b)
    assert kernels["crowded"].spill_bytes > 0

"""truncate's kernels compiled for an H200 at the sizes of real models."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.truncate import truncate
from tests.aot.ptxas import compile_kernels

pytestmark = pytest.mark.aot

Array = jax.ShapeDtypeStruct


@pytest.mark.parametrize("vocabulary", [151936, pytest.param(32000, marks=pytest.mark.nightly)])
def test_kernels(vocabulary):
    program, kernels = compile_kernels(
        lambda *given: truncate(*given, implementation="pallas"),
        Array((4, vocabulary), jnp.float32),
        Array((4,), jnp.int32),
        *(Array((4,), jnp.float32),) * 2,
    )
    launched = [name for name in program.kernels() if name.startswith("truncate")]
    assert launched == ["truncate_by_count"] * 8 + ["truncate_by_mass"] * 8
    assert len(program.kernels()) == 16 + 2 and program.copies() == []  # distances, zeros
    for name, kernel in kernels.items():
        assert kernel.spill_bytes == 0 and kernel.registers <= 128
        if name.startswith("truncate"):  # of a tile, beside the tiles' sums
            assert kernel.load_bits()[128] >= 4

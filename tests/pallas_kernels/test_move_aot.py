"""move's kernel compiled for an H200: an arena of 40 GiB and the cells of Qwen3-30B-A3B."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.move import Moves, move
from tests.aot.ptxas import compile_kernels
from tests.pallas_kernels.test_fill_aot import arena_of
from tests.pallas_kernels.test_plan_aot import nbytes, tables_of

pytestmark = pytest.mark.aot


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_real_sizes(implementation):
    """Dense cells and int4 ones, in place."""
    arena, tables = arena_of(2048), tables_of(48, 128, 132)
    op = functools.partial(move, record_rows=(2304, 594), implementation=implementation)
    moves = Moves(*[jax.ShapeDtypeStruct((16,), jnp.int32)] * 3)
    program, kernels = compile_kernels(op, arena, tables, moves, donate_argnums=(0, 1))
    # The reference has one record at hand.
    most = 0 if implementation == "pallas" else 2 * 2304 * 2048
    assert [size for _, size in program.copies() if size > most] == []
    # Tables that stay the same are no results.
    assert program.memory.alias_bytes >= 2 * arena.size
    assert program.memory.temp_bytes <= 4 * nbytes(tables) + 2 * most
    if implementation == "pallas":
        kernel = kernels["move"]
        assert kernel.spill_bytes == kernel.shared_bytes == 0
        assert kernel.load_bits()[128] == 8

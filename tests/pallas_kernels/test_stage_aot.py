"""stage's kernels compiled for an H200: an arena of 40 GiB and the stores of real models."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.stage import Entries, stage
from tests.aot.ptxas import compile_kernels
from tests.pallas_kernels.test_fill_aot import RECORDS, arena_of, check_copy, stores_of
from tests.pallas_kernels.test_plan_aot import nbytes, stores_follow_loads, tables_of

pytestmark = pytest.mark.aot

Array = jax.ShapeDtypeStruct


@pytest.mark.parametrize("entries", [16, 7])
@pytest.mark.parametrize("name", RECORDS)
def test_real_sizes(name, entries):
    """Inside a scan over the layers, as in a step."""
    layers, experts, hidden, records = RECORDS[name]

    def steps(stores, arena, tables, entries):
        def layer(carry, i):
            arena, tables, done = carry
            arena, tables, now = stage(arena, tables, stores, i, entries, implementation="pallas")
            return (arena, tables, done + now), None

        carry = arena, tables, jnp.zeros_like(entries.layer)
        return jax.lax.scan(layer, carry, jnp.arange(layers))[0]

    arena, tables = arena_of(hidden), tables_of(layers, experts, experts)
    program, kernels = compile_kernels(
        steps,
        stores_of(layers, experts, hidden, records),
        arena,
        tables,
        Entries(*[Array((entries,), jnp.int32)] * 4),
        donate_argnums=(1, 2),
        host_argnums=0,
    )
    check_copy(program, kernels, arena, len(records))
    assert program.memory.alias_bytes == 2 * arena.size + nbytes(tables)
    kernel = kernels["stage"]
    assert program.kernels().count("stage") == 1
    assert kernel.spill_bytes == 0
    assert kernel.registers <= 64 and kernel.shared_bytes <= 1024
    assert stores_follow_loads(kernel)

"""fill's kernel compiled for an H200: an arena of 40 GiB and the stores of real models."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.fill import fill
from tests.aot.models import MODELS
from tests.aot.ptxas import compile_kernels
from tests.pallas_kernels.encoded import formats

pytestmark = pytest.mark.aot

Array = jax.ShapeDtypeStruct
ARENA_BYTES = 40 << 30

RECORDS = {  # layers, experts, hidden, arena rows of a record per version
    **{
        name: (model.layers, model.experts, model.hidden, (3 * model.width,))
        for name, model in MODELS.items()
    },
    "two versions": (48, 128, 2048, (2304, 612)),
    "hidden 2880": (36, 32, 2880, (3 * 2880,)),
}


def arena_of(hidden):
    return Array((ARENA_BYTES // 2 // hidden, hidden), jnp.uint16)


def stores_of(layers, experts, hidden, records):
    return tuple(Array((layers, experts, rows, hidden), jnp.uint16) for rows in records)


@pytest.mark.parametrize("name", RECORDS)
def test_real_sizes(name):
    """Inside a scan over the layers, as in a step."""
    layers, experts, hidden, records = RECORDS[name]

    def steps(stores, arena, moves, count):
        def layer(arena, i):
            return fill(arena, stores, i, *moves, count, implementation="pallas"), None

        return jax.lax.scan(layer, arena, jnp.arange(layers))[0]

    arena = arena_of(hidden)
    program, kernels = compile_kernels(
        steps,
        stores_of(layers, experts, hidden, records),
        arena,
        [Array((experts,), jnp.int32)] * 3,
        Array((), jnp.int32),
        donate_argnums=1,
        host_argnums=0,
    )
    check_copy(program, kernels, arena, len(records))


@pytest.mark.nightly
def test_in_transit():
    """lossless12 to dense beside int4: codes and bytes cross the link 128 bits at a time, each
    once; 16-bit loads are of tables."""
    layers, experts, hidden, _ = RECORDS["Qwen3-30B-A3B"]
    of_versions = formats((("dense", "lossless12"), "int4"), hidden, 768, "bfloat16")

    def steps(stores, arena, moves, count):
        def layer(arena, i):
            options = {"formats": of_versions, "implementation": "pallas"}
            return fill(arena, stores, i, *moves, count, **options), None

        return jax.lax.scan(layer, arena, jnp.arange(layers))[0]

    arena = arena_of(hidden)
    program, kernels = compile_kernels(
        steps,
        stores_of(layers, experts, hidden, [f.store.rows for f in of_versions]),
        arena,
        [Array((experts,), jnp.int32)] * 3,
        Array((), jnp.int32),
        donate_argnums=1,
        host_argnums=0,
    )
    assert program.copies() == program.host_copies(1) == []
    assert program.memory.alias_bytes >= 2 * arena.size
    kernel = kernels["fill"]
    assert kernel.spill_bytes == 0
    # Of a tile of each matrix: codes and two of bytes; and 8 of the copy of int4.
    assert kernel.load_bits()[128] == 8 + 3 * 3
    assert "st.global.b16" not in kernel.ptx


def check_copy(program, kernels, arena, versions):
    """The kernel reads the store in host memory and writes the arena in place, 128 bits at a time,
    with all its loads of a chunk under way at once."""
    assert program.kernels().count("fill") == 1
    assert program.copies() == program.host_copies(1) == []
    assert program.memory.alias_bytes >= 2 * arena.size
    kernel = kernels["fill"]
    assert kernel.spill_bytes == kernel.shared_bytes == 0
    assert 32 < kernel.registers <= 64  # of which 32 hold the 8 loads
    loads = kernel.load_bits()
    assert loads[128] == 8 * versions and loads.keys() == {128, 32}  # 32: layer, lists, count

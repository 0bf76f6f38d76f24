"""expert_ffn's kernels compiled for an H200 at the sizes of real models."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.expert_ffn import expert_ffn
from tests.aot.models import DECODE_ROWS, MODELS, NAMES, PREFILL_ROWS
from tests.aot.ptxas import compile_kernels

pytestmark = pytest.mark.aot

Array = jax.ShapeDtypeStruct
MiB, GiB = 1 << 20, 1 << 30
ARENA_BYTES = 40 * GiB


def layers(y, arena, x, store, ids, address, active, *, row_tile, activation="silu"):
    """Every layer's experts on the same routing, inside a scan as in a step."""

    def layer(carry, i):
        y, arena = carry
        y = expert_ffn(
            y,
            x,
            ids,
            arena,
            (store,),
            i,
            address,
            jnp.zeros_like(address),
            active[i],
            jnp.sum(active[i] >= 0),
            activation=activation,
            row_tile=row_tile,
            implementation="pallas",
        )
        return (y, arena), None

    return jax.lax.scan(layer, (y, arena), jnp.arange(address.shape[0]))[0]


def compile_layers(rows, row_tile, dtype=jnp.bfloat16, *, model, **options):
    pairs, table = rows * model.top_k, Array((model.layers, model.experts), jnp.int32)
    return compile_kernels(
        functools.partial(layers, row_tile=row_tile, **options),
        Array((pairs, model.hidden), jnp.float32),
        Array((ARENA_BYTES // (2 * model.hidden), model.hidden), jnp.uint16),
        Array((rows, model.hidden), dtype),
        Array((model.layers, model.experts, 3 * model.width, model.hidden), jnp.uint16),
        Array((rows, model.top_k), jnp.int32),
        table,
        table,
        donate_argnums=(0, 1),
        host_argnums=3,
    )


@pytest.mark.parametrize(
    "rows",
    [
        DECODE_ROWS[0],
        # test_kernel_steps has the decode step of as many rows, with the same kernels.
        *(pytest.param(rows, marks=pytest.mark.nightly) for rows in DECODE_ROWS[1:]),
        PREFILL_ROWS,
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_layers_of_a_model(name, rows):
    model = MODELS[name]
    few = rows < PREFILL_ROWS
    program, kernels = compile_layers(rows, 16 if few else 64, model=model)
    names = (
        ["expert_gate_up", "expert_down"]
        if few
        else ["expert_gate_up_sorted", "expert_down_sorted"]
    )
    assert [name for name in program.kernels() if name.startswith("expert")] == names
    check_memory(program, model, rows, few)
    for kernel in (kernels[name] for name in names):
        check(kernel, few)


def check_memory(program, model, rows, few):
    """Nothing is copied; the scratch is h alone (and the sort's indices)."""
    assert program.copies() == program.host_copies() == []
    y = 4 * rows * model.top_k * model.hidden
    assert program.memory.alias_bytes == ARENA_BYTES + y
    assert program.memory.host_temp_bytes == 0
    pairs = rows * model.top_k
    h_rows = rows * min(model.experts, pairs) if few else pairs + 64 * min(model.experts, pairs)
    assert program.memory.temp_bytes <= 2 * h_rows * model.width + 2 * MiB


def check(kernel, few):
    """Narrow loads are of indices; everything else is read 128 bits at a time."""
    loads = kernel.load_bits()
    assert kernel.spill_bytes == 0
    assert kernel.shared_bytes <= 227 * 1024
    assert loads.keys() <= {32, 128} and loads[32] <= 32
    assert "cp.async" in kernel.ptx
    assert ("wgmma.mma_async" in kernel.ptx) is not few
    assert ("mma.sync" in kernel.ptx) is few


@pytest.mark.nightly
def test_a_rows_products_are_the_same_for_any_number_of_tokens():
    """For 64 tokens there is code for one row tile and code for four, each for cell and store:
    as many matrix instructions per row tile as for 16 tokens, and sums nowhere else."""
    model = MODELS["OLMoE-1B-7B"]
    few, many = (compile_layers(rows, 16, model=model)[1] for rows in DECODE_ROWS)
    for name in ("expert_gate_up", "expert_down"):
        instructions = few[name].ptx.count("mma.sync")
        assert many[name].ptx.count("mma.sync") == (1 + 4) * instructions
    for kernels in (few, many):
        assert re.findall(r"\badd(?:\.\w+)*\.f32\b", kernels["expert_down"].ptx) == []


@pytest.mark.nightly
@pytest.mark.parametrize("row_tile", [16, 64])
@pytest.mark.parametrize("activation", ["gelu", "gelu_new", "relu"])
def test_activations(activation, row_tile):
    _, kernels = compile_layers(
        16, row_tile, jnp.float16, model=MODELS["OLMoE-1B-7B"], activation=activation
    )
    for name, kernel in kernels.items():
        if name.startswith("expert"):
            check(kernel, row_tile == 16)

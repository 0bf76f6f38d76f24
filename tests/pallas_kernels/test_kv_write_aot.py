"""kv_write's kernel compiled for an H200 at the sizes of real models."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.kv_write import KVPage, kv_write
from tests.aot.models import DECODE_ROWS, MODELS, NAMES, PREFILL_ROWS
from tests.aot.ptxas import compile_kernels

pytestmark = pytest.mark.aot

Array, GiB = jax.ShapeDtypeStruct, 1 << 30


def compiled(model, rows, dtype=jnp.bfloat16, *, norms=True):
    page = KVPage(16, model.kv_heads, model.head_dim)
    columns = (model.heads + 2 * model.kv_heads) * model.head_dim
    norm, number = Array((model.layers, model.head_dim), dtype), Array((), jnp.int32)
    norm = norm if norms else None
    arena_rows = 40 * GiB // (2 * model.hidden)

    def write(qkv, q_norm, k_norm, layer, positions, frequencies, arena, pages):
        places = layer, positions, frequencies, arena, pages, layer
        options = dict(page=page, attention_factor=1.0, eps=1e-6, implementation="pallas")
        return kv_write(qkv, q_norm, k_norm, *places, **options)

    return compile_kernels(
        write,
        Array((rows, columns), dtype),
        norm,
        norm,
        number,
        Array((rows,), jnp.int32),
        Array((model.head_dim // 2,), jnp.float32),
        Array((arena_rows, model.hidden), jnp.uint16),
        Array((rows,), jnp.int32),
        donate_argnums=6,
    )


@pytest.mark.parametrize("rows", [*DECODE_ROWS, PREFILL_ROWS])
@pytest.mark.parametrize("name", NAMES)
def test_kernel(name, rows):
    program, kernels = compiled(MODELS[name], rows)
    assert program.kernels() == ["kv_write"] and program.copies() == []
    assert program.memory.alias_bytes == 40 * GiB and program.memory.temp_bytes < 1024
    kernel = kernels["kv_write"]
    assert kernel.spill_bytes == 0
    assert kernel.load_bits()[128] == 2  # the halves of the heads
    stores = [line for line in kernel.ptx.splitlines() if "st.global" in line]
    assert len(stores) == 4 and all(".v4.b32" in line for line in stores)
    # The approximate instruction is wrong for angles of many turns.
    assert "cos.approx" not in kernel.ptx and "sin.approx" not in kernel.ptx
    # Each of 16 values is rounded where the reference rounds: norm, weight, two products, and a sum
    # (which the compiler may do in bfloat16 itself, to the same bits).
    roundings = ("cvt.rn.bf16.f32", "add.rn.bf16", "sub.rn.bf16")
    assert sum(kernel.ptx.count(instruction) for instruction in roundings) >= 5 * 16
    assert "fma.rn.bf16" not in kernel.ptx


def test_kernel_without_norms():
    program, kernels = compiled(MODELS["Mixtral-8x7B"], 16, norms=False)
    assert program.kernels() == ["kv_write"] and program.copies() == []
    assert program.memory.alias_bytes == 40 * GiB and program.memory.temp_bytes < 1024
    kernel = kernels["kv_write"]
    assert kernel.spill_bytes == 0 and kernel.load_bits()[128] == 2
    assert "rsqrt" not in kernel.ptx and "fma.rn.bf16" not in kernel.ptx

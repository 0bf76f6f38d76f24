"""latent_write's kernel compiled at the sizes of DeepSeek-V2-Lite, Moonlight and DeepSeek-V3."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.kv_write import KVPage
from pallas_kernels.latent_write import latent_write
from tests.aot.aot_h200 import CARDS
from tests.aot.models import DECODE_ROWS, PREFILL_ROWS
from tests.aot.ptxas import compile_kernels

pytestmark = pytest.mark.aot

Array, GiB = jax.ShapeDtypeStruct, 1 << 30
PAGE = KVPage(16, 1, 576, 512)


def compiled(heads, rows, card="h200", *, dtype=jnp.bfloat16, interleave=True):
    number, rope = Array((), jnp.int32), PAGE.head_dim - PAGE.latent

    def write(kv, norm, layer, q, positions, frequencies, arena, pages):
        places = positions, frequencies, arena, pages, layer
        options = dict(page=PAGE, attention_factor=1.1, eps=1e-6, interleave=interleave)
        return latent_write(kv, norm, layer, q, *places, implementation="pallas", **options)

    return compile_kernels(
        write,
        Array((rows, PAGE.head_dim), dtype),
        Array((27, PAGE.latent), dtype),
        number,
        Array((rows, heads, rope), dtype),
        Array((rows,), jnp.int32),
        Array((rope // 2,), jnp.float32),
        Array((8 * GiB // (2 * 2048) // 36 * 36, 2048), jnp.uint16),
        Array((rows,), jnp.int32),
        donate_argnums=6,
        card=card,
    )


@pytest.mark.parametrize("rows", [*DECODE_ROWS, PREFILL_ROWS])
@pytest.mark.parametrize("heads", [16, pytest.param(128, marks=pytest.mark.nightly)])
def test_kernel(heads, rows):
    program, kernels = compiled(heads, rows)
    assert program.kernels() == ["latent_write"] and program.copies() == []
    assert program.memory.alias_bytes > 7 * GiB and program.memory.temp_bytes < 1024
    kernel = kernels["latent_write"]
    assert kernel.spill_bytes == 0 and kernel.shared_bytes < 1024
    # The approximate instruction is wrong for angles of many turns.
    assert "cos.approx" not in kernel.ptx and "sin.approx" not in kernel.ptx
    assert "fma.rn.bf16" not in kernel.ptx


@pytest.mark.parametrize("card", CARDS)
def test_other_cards(card):
    """float16 and halves, too."""
    _, kernels = compiled(16, 16, card, dtype=jnp.float16, interleave=False)
    assert kernels["latent_write"].spill_bytes == 0

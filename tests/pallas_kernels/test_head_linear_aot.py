"""head_linear's kernel compiled at the sizes of DeepSeek-V2-Lite, Moonlight and DeepSeek-V3."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.head_linear import head_linear
from tests.aot.aot_h200 import CARDS
from tests.aot.models import DECODE_ROWS, PREFILL_ROWS
from tests.aot.ptxas import compile_kernels

pytestmark = pytest.mark.aot

Array = jax.ShapeDtypeStruct
LATENT, KEYS, VALUES = 512, 128, 128


def compiled(heads, rows, card="h200", dtype=jnp.bfloat16):
    """Both products of a layer, inside a scan over the layers, as in a step."""
    row_tile = 64 if rows == PREFILL_ROWS else 16

    def layers(x, weights, tiles):
        options = dict(row_tile=row_tile, tiles=tiles, implementation="pallas")

        def layer(x, i):
            part = (0, KEYS)
            q = head_linear(x, weights, i, part=part, transposed=True, **options)
            part = (KEYS, KEYS + VALUES)
            return head_linear(jnp.tanh(q), weights, i, part=part, **options), None

        return jax.lax.scan(layer, x, jnp.arange(27))[0]

    return compile_kernels(
        layers,
        Array((rows, heads, KEYS), dtype),
        Array((27, heads, KEYS + VALUES, LATENT), dtype),
        Array((), jnp.int32),
        donate_argnums=0,
        card=card,
    )


def check(kernels, instruction):
    kernels = [kernel for name, kernel in kernels.items() if name.startswith("head_linear")]
    assert len(kernels) == 2
    for kernel in kernels:
        loads = kernel.load_bits()
        assert kernel.spill_bytes == 0
        assert kernel.shared_bytes <= 99 * 1024  # of every card
        assert loads.keys() == {32, 128} and loads[32] <= 2  # the layer, the tiles in use
        assert instruction in kernel.ptx


@pytest.mark.parametrize("rows", [*DECODE_ROWS, PREFILL_ROWS])
@pytest.mark.parametrize("heads", [16, pytest.param(128, marks=pytest.mark.nightly)])
def test_products_of_a_layer(heads, rows):
    program, kernels = compiled(heads, rows)
    assert program.kernels().count("head_linear") == 2
    assert program.copies() == []
    check(kernels, "wgmma.mma_async" if rows == PREFILL_ROWS else "mma.sync")


@pytest.mark.parametrize(
    ("card", "rows"),
    [
        pytest.param(card, rows, marks=[pytest.mark.nightly] * (card != CARDS[1]))
        for card in CARDS
        for rows in (16, PREFILL_ROWS)
    ],
)
def test_other_cards(card, rows):
    _, kernels = compiled(16, rows, card, jnp.float16)
    check(kernels, "mma")

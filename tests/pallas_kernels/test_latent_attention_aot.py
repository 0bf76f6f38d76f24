"""Attention over latent pages compiled at the sizes of DeepSeek-V2-Lite, Moonlight and DeepSeek-V3,
for every card: its kernels fit into the 99 KiB of shared memory that each has."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.kv_write import KVPage
from pallas_kernels.paged_attention import decode_attention, prefill_attention
from tests.aot.aot_h200 import CARDS
from tests.aot.models import DECODE_ROWS, PREFILL_ROWS
from tests.aot.ptxas import compile_kernels

pytestmark = pytest.mark.aot

Array, GiB, MiB = jax.ShapeDtypeStruct, 1 << 30, 1 << 20
MAX_LENGTH, CHUNK = 4096, 64
PAGE = KVPage(16, 1, 576, 512)


def arena_of(page):
    """Whole rows of the page, more than 4 GiB."""
    return Array((8 * GiB // (2 * 2048) // page.head_dim * page.head_dim, 2048), jnp.uint16)


def integers(*shape):
    return Array(shape, jnp.int32)


def queries(rows, heads, page, dtype):
    sizes = page.latent, page.head_dim - page.latent
    return (Array((rows, heads, size), dtype) for size in sizes)


def compile_decode(heads, rows, card="h200", *, page=PAGE, window=None, dtype=jnp.bfloat16):
    def attend(q, q_rope, arena, *numbers):
        options = dict(page=page, window=window, scale=0.1, implementation="pallas")
        return decode_attention(q, arena, *numbers, q_rope=q_rope, **options)

    numbers = integers(rows, MAX_LENGTH // page.block_size), integers(rows), integers()
    return compile_kernels(
        attend, *queries(rows, heads, page, dtype), arena_of(page), *numbers, card=card
    )


def compile_prefill(heads, card="h200", *, page=PAGE, window=None, dtype=jnp.bfloat16):
    def attend(q, q_rope, arena, *numbers):
        options = dict(page=page, window=window, scale=0.1, implementation="pallas")
        return prefill_attention(q, arena, *numbers, q_rope=q_rope, **options)

    chunks = integers(PREFILL_ROWS // CHUNK)
    numbers = integers(16, MAX_LENGTH // page.block_size), chunks, chunks, chunks, integers()
    q = queries(PREFILL_ROWS, heads, page, dtype)
    return compile_kernels(attend, *q, arena_of(page), *numbers, integers(), card=card)


def check(kernel):
    assert kernel.spill_bytes == 0
    assert kernel.shared_bytes <= 99 * 1024  # of every card
    assert "mma.sync" in kernel.ptx
    # Rows of pages: 16 bytes at once, without a way through registers.
    copies = [line for line in kernel.ptx.splitlines() if "cp.async.cg" in line]
    assert len(copies) >= 8
    assert not {8, 16} & kernel.load_bits().keys()


HEADS = (16, pytest.param(128, marks=pytest.mark.nightly))


@pytest.mark.parametrize("window", [None, pytest.param(1024, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("heads", HEADS)
def test_decode(heads, window):
    instructions = set()
    for rows in DECODE_ROWS:
        program, kernels = compile_decode(heads, rows, window=window)
        names = ["decode_attention_latent_split", "decode_attention_latent_merge"]
        assert program.kernels() == names and program.copies() == []
        # The splits' sums, float32.
        assert program.memory.temp_bytes < rows * heads * 16 * (PAGE.latent + 8) * 4
        split, merge = (kernels[n] for n in names)
        check(split)
        assert merge.spill_bytes == 0 and merge.load_bits().keys() == {32, 128}
        instructions.add((split.ptx.count("mma.sync"), merge.ptx.count("ex2")))
    assert len(instructions) == 1  # the number of rows changes the grid only


@pytest.mark.parametrize("window", [None, pytest.param(1024, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("heads", HEADS)
def test_prefill(heads, window):
    program, kernels = compile_prefill(heads, window=window)
    assert program.kernels() == ["prefill_attention_latent"] and program.copies() == []
    assert program.memory.temp_bytes < MiB
    check(kernels["prefill_attention_latent"])


@pytest.mark.parametrize(
    "card",
    [pytest.param(card, marks=[pytest.mark.nightly] * (card != "rtx4090")) for card in CARDS],
)
def test_other_cards(card):
    """float16 and pages of 64 tokens, too."""
    options = dict(page=PAGE._replace(block_size=64), dtype=jnp.float16)
    check(compile_decode(16, 16, card, **options)[1]["decode_attention_latent_split"])
    check(compile_prefill(16, card, **options)[1]["prefill_attention_latent"])


@pytest.mark.nightly
@pytest.mark.parametrize(("latent", "rope"), [(16, 2), (200, 6), (320, 32)])
def test_odd_rows(latent, rope):
    """Masked tiles."""
    page = KVPage(16, 1, latent + rope, latent)
    _, decode = compile_decode(20, 16, page=page)
    _, prefill = compile_prefill(5, page=page)
    kernels = [k for n, k in {**decode, **prefill}.items() if "attention" in n]
    assert len(kernels) == 3 and all(kernel.spill_bytes == 0 for kernel in kernels)

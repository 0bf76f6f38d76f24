"""Attention's kernels compiled for an H200 at the sizes of real models."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.kv_write import KVPage, kv_write
from pallas_kernels.paged_attention import decode_attention, prefill_attention
from tests.aot.models import DECODE_ROWS, MODELS, NAMES, PREFILL_ROWS, Model
from tests.aot.ptxas import compile_kernels

pytestmark = pytest.mark.aot

Array, GiB, MiB = jax.ShapeDtypeStruct, 1 << 30, 1 << 20
MAX_LENGTH, CHUNK = 4096, 64
SHAPES = {
    **MODELS,
    "head_dim 64": Model(36, 2880, 2880, 32, 4, 64, 8, 201088, head_dim=64),  # GPT-OSS-20B
    "head_dim 256": dataclasses.replace(MODELS["Qwen3-30B-A3B"], heads=16, head_dim=256),
    "one head of 20": dataclasses.replace(MODELS["Qwen3-30B-A3B"], heads=20, kv_heads=1),
}

of_shape_and_window = pytest.mark.parametrize(
    ("name", "window"),
    [
        pytest.param(
            name,
            window,
            marks=[pytest.mark.nightly] * (i > 0),
        )
        for i, name in enumerate(SHAPES)
        for window in (None, 1024)
    ],
)


def arena_of(model):
    return Array((40 * GiB // (2 * model.hidden), model.hidden), jnp.uint16)


def integers(*shape):
    return Array(shape, jnp.int32)


def compile_decode(model, rows, page, window=None, dtype=jnp.bfloat16):
    def attend(q, arena, table, lengths, layer):
        options = dict(page=page, window=window, implementation="pallas")
        return decode_attention(q, arena, table, lengths, layer, **options)

    q = Array((rows, model.heads, model.head_dim), dtype)
    table = integers(rows, MAX_LENGTH // page.block_size)
    return compile_kernels(attend, q, arena_of(model), table, integers(rows), integers())


def compile_prefill(model, page, window=None, dtype=jnp.bfloat16):
    def attend(q, arena, *numbers):
        options = dict(page=page, window=window, implementation="pallas")
        return prefill_attention(q, arena, *numbers, **options)

    chunks = integers(PREFILL_ROWS // CHUNK)
    numbers = integers(16, MAX_LENGTH // page.block_size), chunks, chunks, chunks, integers()
    q = Array((PREFILL_ROWS, model.heads, model.head_dim), dtype)
    return compile_kernels(attend, q, arena_of(model), *numbers, integers())


def page_of(model, block_size=16):
    return KVPage(block_size, model.kv_heads, model.head_dim)


def check(kernel, shared):
    assert kernel.spill_bytes == 0
    assert kernel.shared_bytes <= shared
    # Keys and values: 16 bytes at once, without a way through registers, two spans ahead.
    copies = [line for line in kernel.ptx.splitlines() if "cp.async.cg" in line]
    assert len(copies) >= 8
    assert not {8, 16} & kernel.load_bits().keys()


@of_shape_and_window
def test_decode(name, window):
    model = SHAPES[name]
    instructions = set()
    for rows in DECODE_ROWS:
        program, kernels = compile_decode(model, rows, page_of(model), window)
        names = ["decode_attention_split", "decode_attention_merge"]
        assert program.kernels() == names and program.copies() == []
        assert program.memory.temp_bytes < 34 * MiB  # the splits' sums, float32
        split, merge = (kernels[n] for n in names)
        check(split, 113 * 1024)  # two programs on a multiprocessor
        assert "mma.sync" in split.ptx
        assert merge.spill_bytes == 0
        assert merge.load_bits().keys() == {32, 64 if model.head_dim == 64 else 128}
        instructions.add((split.ptx.count("mma.sync"), merge.ptx.count("ex2")))
    assert len(instructions) == 1  # the number of rows changes the grid only


@of_shape_and_window
def test_prefill(name, window):
    program, kernels = compile_prefill(SHAPES[name], page_of(SHAPES[name]), window)
    assert program.kernels() == ["prefill_attention"] and program.copies() == []
    assert program.memory.temp_bytes < MiB
    kernel = kernels["prefill_attention"]
    check(kernel, 227 * 1024)
    assert "wgmma.mma_async" in kernel.ptx


@pytest.mark.parametrize("block_size", [32, 64])
def test_larger_pages(block_size):
    """float16, too. The products are those of pages of 16."""
    model = MODELS["Qwen3-30B-A3B"]
    page = page_of(model, block_size)
    _, kernels = compile_decode(model, 16, page, dtype=jnp.float16)
    check(kernels["decode_attention_split"], 113 * 1024)
    _, kernels = compile_prefill(model, page, dtype=jnp.float16)
    check(kernels["prefill_attention"], 227 * 1024)


@pytest.mark.nightly
@pytest.mark.parametrize("head_dim", [6, 40, 96])
def test_odd_heads(head_dim):
    """Masked tiles."""
    model = Model(36, 2880, 2880, 32, 4, 24, 8, 201088, head_dim=head_dim)
    _, decode = compile_decode(model, 16, page_of(model))
    _, prefill = compile_prefill(model, page_of(model))
    kernels = [k for n, k in {**decode, **prefill}.items() if "attention" in n]
    assert len(kernels) == 3 and all(kernel.spill_bytes == 0 for kernel in kernels)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [16, PREFILL_ROWS])
def test_layers_update_the_arena_in_place(rows, name):
    """Write, then attend, in a scan over the layers with the arena in its carry, as in a step."""
    model = MODELS[name]
    page, chunks = page_of(model), rows // CHUNK

    def layers(qkv, norms, positions, frequencies, arena, pages, table, chunk):
        def layer(carry, i):
            qkv, arena = carry
            inputs = qkv, *norms, i, positions, frequencies, arena, pages, i
            options = dict(attention_factor=1.0, eps=1e-6)
            q, arena = kv_write(*inputs, page=page, implementation="pallas", **options)
            options = dict(page=page, implementation="pallas")
            if chunks:
                numbers = table, chunk, positions[::CHUNK], chunk, chunk[0], i
                out = prefill_attention(q, arena, *numbers, **options)
            else:
                out = decode_attention(q, arena, table, positions, i, **options)
            return (qkv.at[:, : out.shape[1]].add(out), arena), None

        return jax.lax.scan(layer, (qkv, arena), jnp.arange(model.layers))[0]

    norm = Array((model.layers, model.head_dim), jnp.bfloat16)
    columns = (model.heads + 2 * model.kv_heads) * model.head_dim
    program, _ = compile_kernels(
        layers,
        Array((rows, columns), jnp.bfloat16),
        (norm, norm),
        integers(rows),
        Array((model.head_dim // 2,), jnp.float32),
        arena_of(model),
        integers(rows),
        integers(16, MAX_LENGTH // page.block_size),
        integers(max(chunks, 1)),
        donate_argnums=(0, 4),
    )
    assert program.copies() == []
    assert program.memory.alias_bytes >= 40 * GiB
    assert program.memory.temp_bytes < GiB
    assert program.kernels().count("kv_write") == 1

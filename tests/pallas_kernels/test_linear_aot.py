"""linear's kernel compiled for an H200 at the sizes of real models."""

import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.linear import linear, linear_parts, norm_linear_parts
from tests.aot.models import DECODE_ROWS, MODELS, NAMES, PREFILL_ROWS
from tests.aot.ptxas import compile_kernels

pytestmark = pytest.mark.aot

Array = jax.ShapeDtypeStruct
EPS = 1e-6


def product(x, weights, layer, tiles, row_tile, **options):
    return linear(
        x, weights, layer, row_tile=row_tile, tiles=tiles, implementation="pallas", **options
    )


def weights_of(model, dtype):
    attended, hidden = model.heads * model.head_dim, model.hidden
    qkv = attended + 2 * model.kv_heads * model.head_dim
    shapes = dict(qkv=(qkv, hidden), o=(hidden, attended), router=(model.experts, hidden))
    return {name: Array((model.layers, *shape), dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(rows, marks=[pytest.mark.nightly] * (rows == DECODE_ROWS[-1]))
        for rows in (*DECODE_ROWS, PREFILL_ROWS)
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_products_of_a_layer(name, rows):
    """Inside a scan over the layers, as in a step."""
    model, dtype = MODELS[name], jnp.bfloat16
    row_tile = 64 if rows == PREFILL_ROWS else 16

    def layers(x, weights, tiles):
        def layer(x, i):
            qkv = product(x, weights["qkv"], i, tiles, row_tile)
            attended = jnp.tanh(qkv[:, : weights["o"].shape[-1]])  # arithmetic, not a copy
            x = product(attended, weights["o"], i, tiles, row_tile, residual=x)
            x = jnp.tanh(x)  # into the memory of the carry, as combine does
            options = {"row_tile": row_tile, "tiles": tiles, "implementation": "pallas"}
            return x, linear_parts(x, weights["router"], i, **options)

        return jax.lax.scan(layer, x, jnp.arange(model.layers))

    x = Array((rows, model.hidden), dtype)
    program, kernels = compile_kernels(
        layers, x, weights_of(model, dtype), Array((), jnp.int32), donate_argnums=0
    )
    in_parts = row_tile == 16
    assert program.kernels().count("linear") == 3 - in_parts
    assert program.kernels().count("linear_parts") == in_parts
    assert program.copies() == []
    if in_parts:
        parts = next(kernel for name, kernel in kernels.items() if name.startswith("linear_parts"))
        assert parts.spill_bytes == 0 and "mma.sync" in parts.ptx
        assert parts.load_bits()[128] >= 4
    check(kernels, "wgmma.mma_async" if row_tile == 64 else "mma.sync", scalars=3)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("rows", [4, 16, 32])
@pytest.mark.parametrize("tile", [None, 16])
def test_a_routers_product_of_rows_that_it_normalises(name, rows, tile):
    """One kernel; four rows make another one than a tile. tile: of squares that it is given."""
    model, dtype = MODELS[name], jnp.bfloat16
    names = dict.fromkeys(("implementation", "norm_implementation"), "pallas")
    program, kernels = compile_kernels(
        lambda x, norm, weights, i, tiles, squares: norm_linear_parts(
            *(x, norm, EPS, weights, i),
            row_tile=min(rows, 16),
            tiles=tiles,
            squares=squares,
            **names,
        ),
        Array((rows, model.hidden), dtype),
        Array((model.layers, model.hidden), dtype),
        weights_of(model, dtype)["router"],
        *[Array((), jnp.int32)] * 2,
        None if tile is None else Array((rows, -(-model.hidden // tile)), jnp.float32),
    )
    assert program.kernels() == ["norm_linear_parts"] and program.copies() == []
    kernel = kernels["norm_linear_parts"]
    assert kernel.spill_bytes == 0 and "mma.sync" in kernel.ptx
    assert kernel.shared_bytes <= 99 * 1024
    assert kernel.load_bits()[128] >= (4 if tile is None else 3)  # no rows for their sums


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_lm_head(name):
    model = MODELS[name]
    head = Array((1, model.vocabulary, model.hidden), jnp.bfloat16)
    instructions = set()
    for rows in DECODE_ROWS:
        program, kernels = compile_kernels(
            lambda x, w, tiles: product(x, w, 0, tiles, 16, out_dtype=jnp.float32),
            Array((rows, model.hidden), jnp.bfloat16),
            head,
            Array((), jnp.int32),
        )
        assert program.kernels() == ["linear"] and program.copies() == []
        check(kernels, "mma.sync")
        instructions.add(kernels["linear"].ptx.count("mma.sync"))
    assert len(instructions) == 1  # the number of rows changes the grid only


def test_a_class_of_gpu_changes_no_product():
    """Other stages, the same matrix instructions: a sum's order is that of every card."""
    head = Array((1, 128 * 128, 2048), jnp.bfloat16)
    found = {}
    for kib in (99, 227):
        _, kernels = compile_kernels(
            lambda x, w, tiles, kib=kib: product(x, w, 0, tiles, 16, shared_kib=kib),
            Array((16, 2048), jnp.bfloat16),
            head,
            Array((), jnp.int32),
        )
        kernel = kernels["linear"]
        found[kib] = re.findall(r"\bmma\.sync[\w.]*", kernel.ptx)
        assert kernel.shared_bytes == {99: 73728, 227: 110592}[kib]
    assert found[99] == found[227] != []


@pytest.mark.nightly
@pytest.mark.parametrize("row_tile", [16, 64])
def test_odd_widths(row_tile):
    """GPT-OSS's hidden size is no multiple of a tile's depth; a bias; float16."""
    _, kernels = compile_kernels(
        lambda x, w, b, i, tiles: linear(
            x, w, i, b, row_tile=row_tile, tiles=tiles, implementation="pallas"
        ),
        Array((64, 2880), jnp.float16),
        Array((36, 5120, 2880), jnp.float16),
        Array((36, 5120), jnp.float16),
        Array((), jnp.int32),
        Array((), jnp.int32),
    )
    check(kernels, "wgmma.mma_async" if row_tile == 64 else "mma.sync", scalars=6)


def check(kernels, instruction, scalars=2):
    """scalars: narrow loads, of the layer, the tiles in use, bias and residual."""
    kernels = [kernel for name, kernel in kernels.items() if re.fullmatch(r"linear(__\d+)?", name)]
    assert kernels
    for kernel in kernels:
        loads = kernel.load_bits()
        assert kernel.spill_bytes == 0
        assert kernel.shared_bytes <= 113 * 1024  # two programs on a multiprocessor
        assert loads[128] >= 16 and loads.total() - loads[128] <= scalars
        assert instruction in kernel.ptx

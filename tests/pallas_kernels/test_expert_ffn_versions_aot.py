"""expert_ffn over versions compiled for an H200 at the size of Qwen3-30B-A3B."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.cards import shared_class
from pallas_kernels.expert_ffn import expert_ffn
from pallas_kernels.expert_ffn.pallas_triton import configuration
from pallas_kernels.expert_ffn.tile import code_depth
from pallas_kernels.records.tile import DOWN, GATE, UP
from tests.aot.aot_h200 import device_of
from tests.aot.models import MODELS
from tests.aot.ptxas import compile_kernels
from tests.pallas_kernels.encoded import formats
from tests.pallas_kernels.test_expert_ffn_aot import ARENA_BYTES, check_memory

pytestmark = pytest.mark.aot

Array = jax.ShapeDtypeStruct
MODEL = MODELS["Qwen3-30B-A3B"]


def layers(
    y, arena, x, stores, ids, address, version, active, *, of_versions, row_tile, shared_kib
):
    """Every layer's experts on the same routing, inside a scan as in a step."""

    def layer(carry, i):
        y, arena = carry
        y = expert_ffn(
            y,
            x,
            ids,
            arena,
            stores,
            i,
            address,
            version,
            active[i],
            jnp.sum(active[i] >= 0),
            activation="silu",
            row_tile=row_tile,
            formats=of_versions,
            implementation="pallas",
            shared_kib=shared_kib,
        )
        return (y, arena), None

    return jax.lax.scan(layer, (y, arena), jnp.arange(address.shape[0]))[0]


def compile_layers(versions, rows, row_tile, dtype="bfloat16", model=MODEL, card="h200"):
    of_versions = formats(versions, model.hidden, model.width, dtype)
    pairs, table = rows * model.top_k, Array((model.layers, model.experts), jnp.int32)
    return compile_kernels(
        functools.partial(
            layers,
            of_versions=of_versions,
            row_tile=row_tile,
            shared_kib=shared_class(device_of(card)),
        ),
        Array((pairs, model.hidden), jnp.float32),
        Array((ARENA_BYTES // (2 * model.hidden), model.hidden), jnp.uint16),
        Array((rows, model.hidden), jnp.dtype(dtype)),
        tuple(
            Array((model.layers, model.experts, f.store.rows, model.hidden), jnp.uint16)
            for f in of_versions
        ),
        Array((rows, model.top_k), jnp.int32),
        *(table, table, table),
        card=card,
        donate_argnums=(0, 1),
        host_argnums=3,
    )


def check(versions, rows, row_tile, spill_bytes=0):
    """Compiles with nothing copied, and reads nearly everything but scales 128 bits at a time."""
    program, kernels = compile_layers(versions, rows, row_tile)
    few = row_tile == 16
    names = ["expert_gate_up", "expert_down"]
    names = names if few else [f"{name}_sorted" for name in names]
    assert [name for name in program.kernels() if name.startswith("expert")] == names
    check_memory(program, MODEL, rows, few)
    for kernel in (kernels[name] for name in names):
        assert kernel.spill_bytes <= spill_bytes
        assert kernel.shared_bytes <= 227 * 1024
        assert kernel.load_bits()[128] > 0
        assert ("wgmma.mma_async" in kernel.ptx) is not few
        assert ("mma.sync" in kernel.ptx) is few


INSTRUCTIONS = {"dense": 2.2, "int8": 4, "int4": 4, "int2": 4.5, "lossless12": 33}
"""Most PTX instructions a weight, of a loop over the weights of few tokens: loads of x, addresses
and products included."""


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("version", INSTRUCTIONS)
@pytest.mark.parametrize("card", ["h200", "a100", "rtx4090"])  # one of each class
def test_instructions_a_weight(version, card, capsys):
    (of_version,) = formats((version,), MODEL.hidden, MODEL.width, "bfloat16")
    encoded = {version} - {"dense"}
    config = configuration(MODEL.hidden, MODEL.width, "bfloat16", 16, encoded)
    _, kernels = compile_layers((version,), 16, 16, card=card)
    found = {}
    for name, tile, matrices in (
        ("expert_gate_up", config.gate_up, (GATE, UP)),
        ("expert_down", config.down, (DOWN,)),
    ):
        planes = of_version.cell.planes if of_version.cell.lossy else 1
        depth = tile.depth
        if planes > 1:
            depth = code_depth(of_version.cell, matrices[0], depth)
        weights = tile.columns * depth * planes * len(matrices) / (32 * tile.num_warps)
        found[name] = kernels[name].loops()[0] / weights
        if of_version.cell.lossy:
            assert not kernels[name].spill_bytes
    with capsys.disabled():
        size = of_version.store.nbytes / (3 * MODEL.width * MODEL.hidden)
        print(f"\n{card}, {version}: {size:.3f} bytes a weight, PTX instructions {found}")
    assert max(found.values()) <= INSTRUCTIONS[version]


@pytest.mark.slow
def test_tiers_in_one_call():
    check(("dense", "int4"), 16, 16)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(("rows", "row_tile"), [(16, 16), (64, 16), (8192, 64)])
@pytest.mark.parametrize(
    "versions",
    [
        *((version,) for version in ("int8", "int4", "int2", "lossless12")),
        *(("dense", lo) for lo in ("int8", "int4", "int2")),
        *(("int8", "int4"), ("int4", "int2"), ("lossless12", "int4")),
        (("dense", "lossless12"), "int4"),
    ],
    ids=str,
)
def test_versions(versions, rows, row_tile):
    # Where bodies for records of different kinds share a kernel, a few values do not fit.
    mixed = len(versions) > 1 or "lossless12" in versions
    check(versions, rows, row_tile, spill_bytes=512 if mixed else 0)

"""The ahead-of-time checks find what they are meant to find. Needs no GPU."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from moejax.step.compiler import compiler_options
from tests.aot import aot_h200
from tests.aot.aot_h200 import AotUnavailable, compile_for, compile_for_h200

pytestmark = pytest.mark.aot

MiB, GiB = 1 << 20, 1 << 30
Array = jax.ShapeDtypeStruct


def fill(buffer, block):
    """Writes block times 0, 1, 2, ... into buffer, 1024 rows (4 MiB) at a time."""

    def body(buffer, i):
        return jax.lax.dynamic_update_slice(buffer, block * i, (i * 1024, 0)), None

    return jax.lax.scan(body, buffer, jnp.arange(16))[0]


BUFFER, BLOCK = Array((1 << 18, 1024), jnp.float32), Array((1024, 1024), jnp.float32)


def matmul(a, b, tile=64, k_tile=32, stages=2):
    """Tiled matrix product as a Pallas-Triton kernel."""

    def kernel(a, b, out):
        def body(i, total):
            k = pl.ds(i * k_tile, k_tile)
            return total + plgpu.dot(a[:, k], b[k, :])

        zero = jnp.zeros(out.shape, jnp.float32)
        out[...] = jax.lax.fori_loop(0, a.shape[1] // k_tile, body, zero).astype(out.dtype)

    (m, k), n = a.shape, b.shape[1]
    return pl.pallas_call(
        kernel,
        out_shape=Array((m, n), a.dtype),
        grid=(m // tile, n // tile),
        in_specs=[
            pl.BlockSpec((tile, k), lambda i, j: (i, 0)),
            pl.BlockSpec((k, tile), lambda i, j: (0, j)),
        ],
        out_specs=pl.BlockSpec((tile, tile), lambda i, j: (i, j)),
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=stages),
        name="tiled_matmul",
    )(a, b)


SQUARE = Array((1024, 1024), jnp.bfloat16)


def test_missing_donation_is_found():
    compiled = compile_for_h200(fill, BUFFER, BLOCK)
    assert GiB in [size for _, size in compiled.copies()]
    assert compiled.memory.alias_bytes == 0


def test_pallas_kernel_with_too_much_shared_memory_does_not_compile():
    with pytest.raises(jax.errors.JaxRuntimeError, match="Shared memory size limit exceeded"):
        compile_for_h200(lambda a, b: matmul(a, b, tile=256, k_tile=128, stages=4), SQUARE, SQUARE)


def test_slice_of_pinned_host_memory_put_on_device_is_a_host_copy():
    def read(table, i):
        assert jax.typeof(table).memory_space == jax.memory.Space.Host
        rows = jax.lax.dynamic_slice(table, (i, 0), (1024, 1024))
        return jax.device_put(rows, jax.memory.Space.Device) + 1

    compiled = compile_for_h200(read, BUFFER, Array((), jnp.int32), host_argnums=0)
    assert [size for _, size in compiled.host_copies()] == [4 * MiB]
    assert compiled.host_copies(to_host=True) == compiled.copies() == []
    assert compiled.memory.host_argument_bytes == GiB


def test_no_search_for_values_to_compute_twice(capfd):
    """XLA warns of it for any program that holds most of the memory, as an arena does."""
    arena = Array((1 << 25, 2048), jnp.uint16)  # 128 GiB, and a copy

    def said(**options) -> bool:
        compile_for("h200", lambda arena: arena.at[0].set(1), arena, **options)
        return "by rematerialization" in capfd.readouterr().err

    assert said()
    assert not said(compiler_options=compiler_options("gpu"))


def test_missing_plugin_says_what_to_install(monkeypatch):
    def missing(**_):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr("jax.experimental.topologies.get_topology_desc", missing)
    aot_h200.device_of.cache_clear()
    with pytest.raises(AotUnavailable, match=f"pip install .*jax-cuda13-plugin=={jax.__version__}"):
        compile_for_h200(jnp.exp, Array((8,), jnp.float32))

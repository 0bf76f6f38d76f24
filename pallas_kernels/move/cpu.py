import jax.numpy as jnp

from pallas_kernels.cpu.arena import move_rows


def copy(arena, source, target, version, wanted, record_rows):
    rows = jnp.asarray(record_rows, jnp.int32)[version] * wanted
    return move_rows(arena, source, target, rows, width=arena.shape[1])

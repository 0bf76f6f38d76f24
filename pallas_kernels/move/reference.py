import jax.numpy as jnp
from jax import lax


def copy(arena, source, target, version, wanted, record_rows):
    """Copies the records of wanted entries from row source to row target. Returns the arena."""

    def move(i, arena):
        for number, rows in enumerate(record_rows):

            def one(_, arena, rows=rows):
                record = lax.dynamic_slice(arena, (source[i], 0), (rows, arena.shape[1]))
                return lax.dynamic_update_slice(arena, record, (target[i], 0))

            # Zero or one trip, as in fill.
            trips = wanted[i] * (version[i] == number).astype(jnp.int32)
            arena = lax.fori_loop(0, trips, one, arena)
        return arena

    return lax.fori_loop(0, source.shape[0], move, arena)

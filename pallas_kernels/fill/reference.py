import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.records.reference import decode


def fill(arena, stores, layer, fills, *, formats):
    expert, row, version, count = fills

    def move(i, arena):
        for v, store in enumerate(stores):

            def copy(_, arena, v=v, store=store):
                place = layer if formats is None else formats[v].place(layer)
                start = (place, expert[i], 0, 0)
                record = lax.dynamic_slice(store, start, (1, 1, *store.shape[2:]))
                record = jax.device_put(record, jax.memory.Space.Device)[0, 0]
                if formats is not None and formats[v].in_transit:
                    weights = decode(record, formats[v].store)
                    record = lax.bitcast_convert_type(weights, jnp.uint16)
                return lax.dynamic_update_slice(arena, record, (row[i], 0))

            # Zero or one trip instead of lax.cond, which copies the arena on jax 0.10.2.
            trips = 1 if len(stores) == 1 else (version[i] == v).astype(jnp.int32)
            arena = lax.fori_loop(0, trips, copy, arena)
        return arena

    return lax.fori_loop(0, count, move, arena)

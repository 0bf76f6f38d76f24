import jax
import jax.numpy as jnp

from pallas_kernels.cpu.library import call, int32

CHANGED = ("owner", "last_used", "address", "version", "frequency", "clock")


def plan(tables, layer, active):
    """plan of the api. Tables change in place; an owner that is not an expert is an error."""
    experts = tables.address.shape[1]
    listed = [jax.ShapeDtypeStruct((experts,), jnp.int32)] * 4
    counts = [jax.ShapeDtypeStruct((), jnp.int32)] * 4
    changed = [getattr(tables, name) for name in CHANGED]
    results = call(
        "plan",
        [*changed, *listed, *counts],
        *(*tables, int32(layer), active),
        aliases={tables._fields.index(name): i for i, name in enumerate(CHANGED)},
    )
    tables = tables._replace(**dict(zip(CHANGED, results, strict=False)))
    listed, counts = results[len(CHANGED) : -4], results[-4:]
    active_list, fill_expert, fill_row, fill_version = listed
    active_count, fill_count, hits, read_through = counts
    return tables, (
        *(active_list, active_count, fill_expert, fill_row, fill_version, fill_count),
        *(hits, read_through),
    )

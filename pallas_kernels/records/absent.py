"""Records that no program reads: what programs carry in a store's place where every expert that
they compute has been brought to them before, or is brought by the queue of an owned arena."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class AbsentRecords:
    """The shape of a store uint16[L, E, rows, D] of which a program gets no byte: each expert that
    it computes has an address in the arena that it is given, or is brought by native threads, which
    know where it lies (cpu/sources.py)."""

    shape: tuple[int, ...]
    pieces: tuple[int, ...] = ()
    """Rows of the arrays uint16[·, D] in which a record is brought, one after the other."""

    dtype = np.dtype(np.uint16)
    ndim = 4
    nbytes = 0
    """Bytes of host memory, and those that the program gets."""

    def delete(self) -> None:
        """There is nothing to free."""

    def stand_in(self, arena: jax.Array, implementation: str) -> jax.Array:
        """What an op gets in the store's place, of which it reads nothing: a free view of the
        arena, or the sizes, as native ops know stores without bytes."""
        if implementation == "cpu":
            return jnp.array(self.shape, jnp.int32)
        return arena[None, None]


def stood_in(stores: tuple, arena: jax.Array, implementation: str) -> tuple:
    """Stores as an op gets them."""
    return tuple(
        store.stand_in(arena, implementation) if isinstance(store, AbsentRecords) else store
        for store in stores
    )

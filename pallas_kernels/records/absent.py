"""A stand-in for a store that no program reads: every expert that programs compute was copied into
the arena before, or is copied by the queue of an owned arena."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class AbsentRecords:
    """The shape of a store uint16[L, E, rows, D] without its bytes. Each expert that a program
    computes has an address in the program's arena, or native threads copy it from its source
    (cpu/sources.py)."""

    shape: tuple[int, ...]
    pieces: tuple[int, ...] = ()
    """Rows of the arrays uint16[·, D] in which a record is copied, in order."""

    dtype = np.dtype(np.uint16)
    ndim = 4
    nbytes = 0
    """Bytes in host memory, and bytes that a program gets."""

    def delete(self) -> None:
        """There is nothing to free."""

    def stand_in(self, arena: jax.Array, implementation: str) -> jax.Array:
        """The operand that an op gets in place of the store and never reads: a free view of the
        arena, or, for native ops, the sizes."""
        if implementation == "cpu":
            return jnp.array(self.shape, jnp.int32)
        return arena[None, None]


def stood_in(stores: tuple, arena: jax.Array, implementation: str) -> tuple:
    """Replaces absent stores by what the op gets for them."""
    return tuple(
        store.stand_in(arena, implementation) if isinstance(store, AbsentRecords) else store
        for store in stores
    )

"""Residents under several evictions after a step, on the calling thread, by the native library."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pallas_kernels.cpu.library import address_of, bind


def follow_shadows(
    ids: np.ndarray,
    known: Sequence[np.ndarray],
    other: np.ndarray | None,
    filled_here: np.ndarray | None,
    clock: int,
    ages: int,
    changed: Sequence[np.ndarray],
) -> tuple[list[np.ndarray], np.ndarray] | None:
    """Shadows.follow of host_offload: each arm's cells take the experts that a step misses and give
    up the first ones in its order of eviction. None without the library.

    - `ids`: int[N, L, k], experts that the step routes to.
    - `known`: the weights int64[K, 2] of each eviction, the arms' evictions int64[A] and cells
      int64[A, L].
    - `other`: int64[A], the place of an arm's other version; None: no arm has two.
    - `filled_here`: bool[A, L, E], experts that a miss brings in; None: all.
    - `clock`, `ages`: after the step, and references after which a last use does not count.
    - `changed`: residents bool[A, L, E], how many they are int64[A, L], and of all experts the last
      use and the frequency int64[L, E].

    Returns `changed` after the step, and the misses int64[A] of each arm. Raises IndexError for ids
    that name no expert, ValueError for those of other layers.
    """
    function = bind("moejax_follow_shadows", "asssssaaaaassaaaaaa")
    if function is None:
        return None
    after = [array.copy() for array in changed]
    arms, layers, experts = after[0].shape
    if ids.dtype != np.int16:
        if ids.size and not 0 <= ids.min() <= ids.max() < experts:  # 65536 would become 0
            raise IndexError(f"an id is not of the {experts} experts")
        ids = ids.astype(np.int16)
    ids = np.ascontiguousarray(ids)
    if ids.shape[1] != layers:
        raise ValueError(f"ids of {ids.shape[1]} layers; there are {layers}")
    misses = np.empty(arms, np.int64)
    refused = function(
        *(address_of(ids), len(ids), ids.shape[2], arms, layers, experts),
        *map(address_of, known),
        *(None if each is None else address_of(each) for each in (other, filled_here)),
        *(clock, ages, address_of(changed[0]), *map(address_of, after), address_of(misses)),
    )
    if refused:
        raise IndexError(f"an id is not of the {experts} experts")
    return after, misses

"""Residents under several evictions after a step, on the calling thread, by the native library."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from pallas_kernels.cpu.library import address_of, library, why_not_cpu


@functools.cache
def _function() -> Any:
    if why_not_cpu():
        return None
    size, address = ctypes.c_int64, ctypes.c_void_p
    found = library().moejax_follow_shadows
    letters = {"a": address, "s": size}
    found.argtypes = [letters[each] for each in "asssssaaaaassaaaaaa"]
    found.restype = None
    return found


def follow_shadows(
    ids: np.ndarray,
    known: Sequence[np.ndarray],
    other: np.ndarray | None,
    filled_here: np.ndarray | None,
    clock: int,
    ages: int,
    changed: Sequence[np.ndarray],
) -> tuple[list[np.ndarray], np.ndarray] | None:
    """Host_offload's Shadows.follow; None without the library.

    - `ids`: int[N, L, k].
    - `known`: its weights, eviction and cells.
    - `clock`, `ages`: after the step, and references after which a last use does not count.
    - `changed`: its residents, how many they are, last_used and frequency. Returns them after the
      step.
    """
    function = _function()
    if function is None:
        return None
    ids = np.ascontiguousarray(ids, np.int16)
    after = [array.copy() for array in changed]
    misses = np.empty(len(after[0]), np.int64)
    function(
        *(address_of(ids), len(ids), ids.shape[2], *after[0].shape),
        *map(address_of, known),
        *(None if each is None else address_of(each) for each in (other, filled_here)),
        *(clock, ages, address_of(changed[0]), *map(address_of, after), address_of(misses)),
    )
    return after, misses

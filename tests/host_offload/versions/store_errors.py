"""How far the versions of a store are from its dense one."""

from __future__ import annotations

import numpy as np

from host_offload.memory.record_source import read_records
from host_offload.memory.store import ExpertStore
from host_offload.versions.encoders import decode
from host_offload.versions.store_versions import dense_weights, relative_error


def relative_errors(store: ExpertStore, version: str, dtype: str) -> np.ndarray:
    """float64[L, E]: relative_error of each expert in that version."""
    array, fmt = store.arrays[version], store.layouts[version]
    errors = np.zeros(array.shape[:2])
    for layer, first, weights in dense_weights(store, dtype):
        place = slice(first, first + len(weights))
        decoded = decode(read_records(array, layer, first, len(weights)), fmt)
        errors[layer, place] = relative_error(weights, decoded)
    return errors

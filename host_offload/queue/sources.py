"""Where a queue finds the records of experts that are all in memory."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from pallas_kernels.cpu.sources import MEMORY, NOWHERE, SOURCE, Sources
from pallas_kernels.records.format import MATRICES, RecordFormat
from pallas_kernels.records.versions import Formats


def record_parts(record: RecordFormat) -> tuple[int, ...]:
    """The bytes that are waited for one by one: the matrices of a dense record; the others have
    what belongs together in several places."""
    if record.version != "dense":
        return (record.nbytes,)
    return tuple(record.parts[matrix][1] * record.hidden * 2 for matrix in MATRICES)


def memory_sources(
    stores: Sequence[jax.Array],
    records: Sequence[RecordFormat],
    layers: int,
    formats: Formats | None,
) -> Sources:
    """Sources in the stores themselves, by version uint16[L, E, rows, D] in memory of this process.
    records: what they hold. layers: of the model. formats: see VersionFormats."""
    experts = stores[0].shape[1]
    table = np.zeros((len(stores), layers, experts), SOURCE)
    table["file"] = NOWHERE
    for number, store in enumerate(stores):
        first, size = store.unsafe_buffer_pointer(), int(np.prod(store.shape[2:])) * 2
        places = None if formats is None else formats[number].places
        for layer in range(layers):
            place = layer if places is None else places[layer]
            if place >= 0:
                mine = table[number, layer]
                mine["place"] = first + (place * experts + np.arange(experts)) * size
                mine["file"] = MEMORY
    return Sources(table, tuple(map(record_parts, records)), tuple(stores))

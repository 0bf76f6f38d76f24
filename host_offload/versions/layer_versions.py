"""Translates version numbers between policies and the device, where stores lack layers.

Layers that overflow lossless12 stay dense, in a store of their own, and layers of a checkpoint may
differ in format. Policies and the host's copies of the tables know one version, or a high and a low
one. On the device, a version's number is that of the store that has the layer
(VersionFormats.places). A layer that the low store lacks has its high version as the low one too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from host_offload.memory.layout import SlotLayout
from host_offload.memory.store import ExpertStore
from host_offload.memory.tables import Copy, Entry
from pallas_kernels.records import RecordFormat
from pallas_kernels.records.versions import Formats

_Listed = TypeVar("_Listed", Entry, Copy)

ABOUT_VERSIONS = ("cell_version", "version", "fill_version")
"""The tables that have version numbers."""


@dataclasses.dataclass(frozen=True)
class LayerVersions:
    """The version numbers of each layer.

    numbers: [L][V], the device's number of each version that policies know.
    """

    numbers: tuple[tuple[int, ...], ...]

    def of(self, versions: np.ndarray) -> np.ndarray:
        """Translates numbers that policies know, [L, ·], to the device's, int32[L, ·]. The number
        −1 − v, for an expert that is read through and not filled, becomes −1 − the device's number
        of v."""
        return _looked_up(np.array(self.numbers, np.int32), versions)

    def contents(self, tables: Mapping[str, Any]) -> dict[str, Any]:
        """Translates tables of shape [L, ·] from policies' numbers to the device's."""
        found = dict(tables)
        for name in tables.keys() & set(ABOUT_VERSIONS):
            found[name] = self.of(np.asarray(tables[name], np.int32))
        return found

    def seen(self, tables: Any) -> Any:
        """Translates the device's tables, a Residency or Tables, to policies' numbers."""
        known = np.zeros((len(self.numbers), 1 + max(map(max, self.numbers))), np.int32)
        for layer, numbers in enumerate(self.numbers):
            for version, number in enumerate(numbers):  # one number for both is the low one
                known[layer, number] = version
        found = {n: _looked_up(known, np.asarray(getattr(tables, n))) for n in ABOUT_VERSIONS}
        return tables._replace(**found)

    def entries(self, entries: Sequence[_Listed]) -> list[_Listed]:
        """Translates entries or copies from policies' numbers to the device's."""
        return [
            entry._replace(version=self.numbers[entry.layer][entry.version]) for entry in entries
        ]


def _looked_up(numbers: np.ndarray, versions: np.ndarray) -> np.ndarray:
    """Looks up version numbers: numbers[l, v] for v ≥ 0, and −1 − numbers[l, v] for −1 − v.

    - `numbers`: int32[L, ·].
    - `versions`: [L, ·].
    """
    found = np.take_along_axis(numbers, np.where(versions >= 0, versions, -1 - versions), axis=1)
    return np.where(versions >= 0, found, -1 - found).astype(np.int32)


def layer_versions(formats: Formats | None) -> LayerVersions | None:
    """The version numbers of each layer, or None if every store has all layers. Raises ValueError
    for a layer that is not in exactly one of the stores that lack layers; the last version's store,
    the low one, may have it too."""
    if formats is None or all(version.places is None for version in formats):
        return None
    in_part = [v for v, version in enumerate(formats) if version.places is not None]
    whole = [v for v, version in enumerate(formats) if version.places is None]
    low, found = len(formats) - 1, list[list[int]]()
    for layer, places in enumerate(zip(*(formats[v].places or () for v in in_part), strict=True)):
        held = [v for v, place in zip(in_part, places, strict=True) if place >= 0]
        if len(held) != 1 and (len(held) != 2 or low not in held):
            raise ValueError(f"layer {layer} is in {len(held)} stores; each is in one of them")
        found.append(sorted([*held, *whole]))
    most = max(map(len, found))
    return LayerVersions(tuple((*held, *held[-1:] * (most - len(held))) for held in found))


def layers_above(store: ExpertStore, low: RecordFormat) -> tuple[int, ...]:
    """The layers whose experts take more bytes than in a second version, of a store in which they
    differ in format; all if none does. The others have nothing to gain from the version."""
    sizes = {layer: held.layout.nbytes for held in store.versions.values() for layer in held.layers}
    return tuple(sorted(i for i, size in sizes.items() if size > low.nbytes) or sorted(sizes))


def record_bytes(
    layout: SlotLayout, formats: Formats | None, *, moved: bool = False
) -> tuple[int, ...]:
    """Bytes of an expert by version number.

    - `moved`: bytes that cross the link, which are fewer than those of a cell for a version that is
      decoded in transit; else the bytes of a cell.
    """
    if formats is None:
        return tuple(record.nbytes for record in layout.records)
    return tuple((version.store if moved else version.cell).nbytes for version in formats)


def version_bytes(
    layout: SlotLayout, formats: Formats | None, layers: int, *, moved: bool = False
) -> dict[str, np.ndarray]:
    """record_bytes for policies: name of each version that they know → int64[L]."""
    sizes = record_bytes(layout, formats, moved=moved)
    if (versions := layer_versions(formats)) is not None:
        of_layers = np.array(sizes, np.int64)[np.array(versions.numbers)].T
        return {record.version: n for record, n in zip(layout.records, of_layers, strict=False)}
    names = [record.version for record in layout.records]
    return {name: np.full(layers, n, np.int64) for name, n in zip(names, sizes, strict=True)}

"""Runs in which each layer has one version of its own, the same for all of its experts.

Policies and the host's copies of the tables know one version, number 0; on the device a layer's
number is that of the store that has the layer (VersionFormats.places). This is the border.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from host_offload.layout import SlotLayout
from host_offload.staging import Entry, Residency
from pallas_kernels.records.versions import Formats

ABOUT_VERSIONS = ("cell_version", "version", "fill_version")
"""Tables with version numbers."""


@dataclasses.dataclass(frozen=True)
class LayerVersions:
    """numbers: the version's number of each layer."""

    numbers: tuple[int, ...]

    def contents(self, tables: Mapping[str, Any]) -> dict[str, Any]:
        """Tables of shape [L, ·] as the device has them, of those that know one version.

        A fill_version of −1 (read through, not filled) says which version it is that is read:
        −1 − number.
        """
        found = dict(tables)
        for name in tables.keys() & set(ABOUT_VERSIONS):
            column = np.asarray(self.numbers, np.int32)[:, None]
            values = np.asarray(tables[name], np.int32)
            found[name] = np.where(values >= 0, column, -1 - column).astype(np.int32)
        return found

    def seen(self, tables: Residency) -> Residency:
        """The device's tables as policies know them."""
        one = {n: np.where(getattr(tables, n) >= 0, 0, -1).astype(np.int32) for n in ABOUT_VERSIONS}
        return tables._replace(**one)

    def entries(self, entries: Sequence[Entry]) -> list[Entry]:
        """A stage list as the device takes it."""
        return [entry._replace(version=self.numbers[entry.layer]) for entry in entries]


def layer_versions(formats: Formats | None) -> LayerVersions | None:
    """The layers' versions where stores lack layers, None where every version has all of them.
    Raises ValueError for a layer that is not in exactly one store."""
    if formats is None or all(version.places is None for version in formats):
        return None
    columns = zip(*(version.places or () for version in formats), strict=True)
    held = [[number for number, place in enumerate(each) if place >= 0] for each in columns]
    for layer, numbers in enumerate(held):
        if len(numbers) != 1:
            raise ValueError(f"layer {layer} is in {len(numbers)} stores; each is in one of them")
    return LayerVersions(tuple(number for (number,) in held))


def cell_bytes(layout: SlotLayout, formats: Formats | None) -> tuple[int, ...]:
    """Bytes of an expert in a cell, by version number."""
    if formats is None:
        return tuple(record.nbytes for record in layout.records)
    return tuple(version.cell.nbytes for version in formats)


def version_bytes(
    layout: SlotLayout, formats: Formats | None, layers: int
) -> dict[str, np.ndarray]:
    """What policies are told: of each version that they know, int64[L], the bytes of an expert."""
    if (versions := layer_versions(formats)) is not None:
        sizes = np.array(cell_bytes(layout, formats), np.int64)
        return {layout.records[0].version: sizes[list(versions.numbers)]}
    return {record.version: np.full(layers, record.nbytes) for record in layout.records}

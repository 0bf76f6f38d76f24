"""Paged experts in two versions: each layer has some cells of the high and some of the low one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from host_offload.control.interface import Policy
from host_offload.control.rules import refuse_writes
from host_offload.memory.budget import cells_of_versions
from host_offload.memory.layout import SlotLayout

HI_SHARE = 0.5
"""Default share of the experts' slots that is cut into high cells."""


@dataclasses.dataclass(frozen=True)
class PagedSpec:
    """The cells of each layer, and the version in which each expert is computed when it is missed.

    A miss fills a cell of its fill version, or is read through in that version if the layer has no
    such cell to give. So the tables alone decide in which version a step computes an expert.
    """

    cells: np.ndarray
    """int64[L, V]: cells of each version, which never change."""
    fill_version: np.ndarray
    """int8[L, E]: each expert's fill version at the start."""

    @property
    def capacity(self) -> tuple[int, ...]:
        """Cells of all layers together, by version number."""
        return tuple(self.cells.sum(axis=0).tolist())

    @property
    def cell_bound(self) -> int:
        """C of the tables."""
        return max(int(self.cells.sum(axis=1).max()), 1)

    @property
    def said(self) -> dict[str, Any]:
        """The spec as JSON for a trace's header; read_paged reads it."""
        return {name: array.tolist() for name, array in vars(self).items()}


def read_paged(said: Mapping[str, Any] | None) -> PagedSpec | None:
    """Reads PagedSpec.said back from JSON. Raises KeyError, TypeError or ValueError for anything
    else."""
    if said is None:
        return None
    cells = np.array(said["cells"], np.int64)
    return PagedSpec(cells, np.array(said["fill_version"], np.int8))


def version_cells(
    layout: SlotLayout,
    slots: int,
    layers: int,
    experts: int,
    hi_share: float | None = None,
    has_all_versions: Sequence[bool] | None = None,
) -> np.ndarray:
    """Shares slots evenly among the layers as high and low cells.

    No layer has more cells of a version than experts; the other version gets what is left.

    - `hi_share`: share of the slots that is cut into high cells (default HI_SHARE).
    - `has_all_versions`: the layers with two versions; the others get low cells alone. None: all.

    Returns int64[L, 2]. Raises ValueError for other than two versions.
    """
    if len(layout.records) != 2:
        raise ValueError(f"pages mix two versions, not {len(layout.records)}")
    has_all_versions = [True] * layers if has_all_versions is None else has_all_versions
    most, (per_hi, per_lo) = layers * experts, layout.cells_per_slot
    hi_slots = round((HI_SHARE if hi_share is None else hi_share) * slots)
    hi_slots = max(hi_slots, slots - -(-most // per_lo))
    hi_slots = min(hi_slots, -(-sum(has_all_versions) * experts // per_hi))
    counts = hi_slots * per_hi, (slots - hi_slots) * per_lo
    return np.array(cells_of_versions(*counts, has_all_versions, experts), np.int64).T


def check_paged(policies: Sequence[Policy]) -> None:
    """Raises PolicyError for policies that cannot run beside cells of two versions."""
    refuse_writes(
        policies,
        ("cells", "kv_pages"),
        "cells of two versions stay where they are; leave the policy out, or take one version",
    )

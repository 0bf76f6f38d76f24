"""Which versions of experts the kernels of fill_ffn take."""

from __future__ import annotations

from collections.abc import Iterable


def why_not_pallas(versions: Iterable[tuple[str, str]]) -> str | None:
    """Why the kernels cannot run with these versions, (in a cell, in the store) each; None: they
    can.

    Such a kernel writes and reads the arena through one view, in the dtype of the weights or in
    uint16. A second view of an array that it changes would be a copy of the arena
    (docs/explanation/kernels.md).
    """
    versions = tuple(versions)
    if any(cell != held for cell, held in versions):
        return "records that are decoded on their way into a cell are filled by a kernel alone"
    if len({cell == "dense" for cell, _ in versions}) > 1:
        return "a kernel that fills and computes has one view of the arena, dense or coded"
    return None

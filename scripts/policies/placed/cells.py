"""The named cells of two processors' grid."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from moejax.errors import UserError
from moejax.models.json_values import parse_yaml

MOST = 60
"""Cells that are measured, at most (issue 25)."""


@dataclasses.dataclass(frozen=True)
class Group:
    """Arms at batches, all else alike."""

    name: str
    rows: tuple[int, ...]
    arms: tuple[str, ...]
    input: int
    output: int
    link_rate: str | None = None
    store: str = "memory"

    @property
    def cells(self) -> int:
        return len(self.rows) * len(self.arms)


def read_groups(path: str, known: Sequence[str]) -> dict[str, Group]:
    """Name → group. known: the arms that there are. Raises UserError for what is no definition, an
    arm that there is not, and more than MOST cells."""
    try:
        content = parse_yaml(Path(path).read_text())
        found = [
            Group(**{**group, "rows": tuple(group["rows"]), "arms": tuple(group["arms"])})
            for group in content["groups"]
        ]
    except (OSError, TypeError, KeyError, ValueError) as error:
        raise UserError(f"{path} is no definition of cells: {error}") from None
    if unknown := [arm for group in found for arm in group.arms if arm not in known]:
        raise UserError(f"{path}: there is no arm {unknown[0]!r}; there are {', '.join(known)}")
    if (cells := sum(group.cells for group in found)) > MOST:
        raise UserError(f"{path} names {cells} cells, and at most {MOST} are measured")
    if len({group.name for group in found}) < len(found):
        raise UserError(f"{path}: two groups have a name")
    return {group.name: group for group in found}

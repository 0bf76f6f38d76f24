"""Texts that prompts are cut from."""

from __future__ import annotations

import importlib.resources
from collections.abc import Sequence
from pathlib import Path

from moejax.errors import UserError

TEXTS = ("story", "math", "code")
"""Texts in the package; moejax/evaluate/experiments/texts/README.md says whose they are."""

Part = tuple[float, float]

TRAIN: Part = (0.0, 0.6)
VALIDATION: Part = (0.6, 0.8)
TEST: Part = (0.8, 1.0)
"""Contiguous parts of a text: what learns sees the first, what is chosen is chosen on the second,
figures are of the last (docs/ablation.md, "A fair comparison")."""

PARTS = {"test": TEST, "validation": VALIDATION}
"""Parts whose quality can be asked for."""


def text_path(name: str, home: Path) -> Path:
    """The file of a text: one of TEXTS, or a path, from `home` on unless it is absolute. Raises
    UserError where there is none."""
    if name in TEXTS:
        package = importlib.resources.files("moejax.evaluate.experiments")
        return Path(str(package / "texts" / f"{name}.txt"))
    path = (home / name).resolve()
    if not path.is_file():
        raise UserError(
            f"there is no text {name!r}: write one of {', '.join(TEXTS)}, or the path of a file "
            f"(looked for {path})"
        )
    return path


def windows(
    ids: Sequence[int], count: int, length: int, name: str, part: Part = TEST
) -> list[list[int]]:
    """`count` windows of `length` tokens, spread evenly over a part of a text; they overlap where
    it is shorter than all of them. Raises UserError for one that has no room for a window."""
    begin, end = (int(share * len(ids)) for share in part)
    if end - begin < length:
        which = "last fifth" if part == TEST else "first three fifths"
        raise UserError(
            f"the {which} of text {name!r} has {end - begin} tokens, which is no prompt of "
            f"{length}; give a longer text or fewer prompt_tokens"
        )
    last = end - length
    starts = [begin + (last - begin) * i // max(count - 1, 1) for i in range(count)]
    return [list(ids[start : start + length]) for start in starts]

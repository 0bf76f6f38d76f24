"""Finds the parameters in an Orbax checkpoint: which step of a run, and which item of a step.

Orbax does not write what a directory is, so three kinds are told apart by their content:

- an *item* holds one tree: ``_METADATA``;
- a *step* holds items by name (``default``, ``params``, ``state`` …);
- a *root* holds steps by number (``100``, ``step_00000100``), as CheckpointManager and v1's
  Checkpointer write them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import re
from typing import Any

from moejax.errors import UserError
from moejax.models.directory import read_json
from moejax.models.json_values import is_number

Step = int | str | None
"""Which step of a root: its number, "latest", "best:METRIC:min" or "best:METRIC:max". None means
"latest"."""

TREE, CHECKPOINT = "_METADATA", "_CHECKPOINT_METADATA"
_STEP = re.compile(r"(?:.+_)?(\d{1,18})")
_UNFINISHED = ".orbax-checkpoint-tmp"


@dataclasses.dataclass(frozen=True)
class Items:
    """The trees of one step.

    - `step`: its number; None where no directory says it.
    - `directories`: where config.json may be, the innermost first.
    - `items`: name → directory of each tree; the name is "" where the path itself is the tree.
    """

    step: int | None
    directories: tuple[pathlib.Path, ...]
    items: dict[str, pathlib.Path]


def is_orbax(directory: pathlib.Path) -> bool:
    """Whether the directory is an item, a step or a root of an Orbax checkpoint."""
    return bool(_items(directory)) or bool(_steps(directory))


def find_items(directory: pathlib.Path, step: Step = None) -> Items:
    """Finds the trees of a step.

    - `directory`: a root, a step or an item.
    - `step`: which step of a root; None for a step or item.

    Raises UserError for a step that does not exist, and lists the steps; also for an unfinished
    checkpoint, and for a directory without one.
    """
    _check_step(step)
    if _UNFINISHED in directory.resolve().name:
        raise UserError(f"{directory}: an unfinished checkpoint (Orbax's temporary name)")
    items = _items(directory)
    if items:
        if step is not None:
            raise UserError(
                f"{directory}: is one checkpoint, so there is no step to choose; leave step out, "
                "or give the directory that holds the steps"
            )
        found, around = None, [directory]
        if "" in items and (directory.parent / CHECKPOINT).is_file():
            around.append(directory.parent)
        match = _STEP.fullmatch(around[-1].resolve().name)
        if match:
            found = int(match[1])
            around.append(around[-1].parent)
        _check_finished(around[: 2 if "" in items else 1])
        return Items(found, tuple(around), items)
    steps = _steps(directory)
    if not steps:
        raise UserError(
            f"{directory}: no Orbax checkpoint: neither {TREE} nor steps with one (what an Orbax "
            "from before that file wrote must be restored and saved again)"
        )
    number = _choose_step(directory, steps, step)
    _check_finished([steps[number]])
    return Items(number, (steps[number], directory), _items(steps[number]))


def finished_steps(directory: pathlib.Path) -> list[int]:
    """The numbers of the steps of a root that Orbax has finished writing, ascending. Raises
    UserError for a directory that does not exist, or that is a checkpoint itself."""
    if not directory.is_dir():
        raise UserError(f"{directory}: no such directory; a root is made before its first step")
    if _items(directory):
        raise UserError(
            f"{directory}: is one checkpoint, not a root with steps; give the directory around it"
        )
    finished = []
    for number, path in _steps(directory).items():
        with contextlib.suppress(UserError):  # not finished, or deleted since
            _check_finished([path])
            finished.append(number)
    return finished


def _check_step(step: Step) -> None:
    if step is None or (type(step) is int and step >= 0) or step == "latest":
        return
    if isinstance(step, str) and re.fullmatch(r"best:[^:]+:(min|max)", step):
        return
    raise UserError(
        f"step {step!r} is unknown; give a number, latest, best:METRIC:min or best:METRIC:max, "
        "such as best:loss:min"
    )


def _items(directory: pathlib.Path) -> dict[str, pathlib.Path]:
    if (directory / TREE).is_file():
        return {"": directory}
    return {
        child.name: child
        for child in _children(directory)
        if not _STEP.fullmatch(child.name) and (child / TREE).is_file()
    }


def _steps(directory: pathlib.Path) -> dict[int, pathlib.Path]:
    steps: dict[int, pathlib.Path] = {}
    for child in _children(directory):
        match = _STEP.fullmatch(child.name)
        if match and _items(child):
            number = int(match[1])
            if number in steps:
                raise UserError(
                    f"{directory}: step {number} is there twice, as {steps[number].name} and as "
                    f"{child.name}; give one of the two directories"
                )
            steps[number] = child
    return dict(sorted(steps.items()))


def _children(directory: pathlib.Path) -> list[pathlib.Path]:
    try:
        return sorted(
            child
            for child in directory.iterdir()
            if _UNFINISHED not in child.name and child.is_dir()
        )
    except OSError:
        return []


def _check_finished(directories: list[pathlib.Path]) -> None:
    """Raises UserError for a directory whose metadata has no time of commit, which Orbax writes
    last."""
    for directory in directories:
        path = directory / CHECKPOINT
        if path.is_file() and not read_json(path).get("commit_timestamp_nsecs"):
            raise UserError(
                f"{path}: names no time of commit, so the checkpoint was not written to its end; "
                "use another step"
            )


def _choose_step(directory: pathlib.Path, steps: dict[int, pathlib.Path], step: Step) -> int:
    if step is None or step == "latest":
        return max(steps)
    if isinstance(step, str):
        return _best(directory, steps, step)
    if step not in steps:
        numbers = [str(number) for number in steps]
        shown = numbers if len(numbers) <= 12 else [*numbers[:6], "…", *numbers[-6:]]
        raise UserError(f"{directory}: has no step {step}; steps: {', '.join(shown)}")
    return step


def _best(directory: pathlib.Path, steps: dict[int, pathlib.Path], step: str) -> int:
    """The step with the smallest or largest value of a recorded metric; of equal ones the last.
    Raises UserError for a metric that no step records."""
    _, name, direction = step.split(":")
    recorded = {number: _metrics(path) for number, path in steps.items()}
    values = {number: found[name] for number, found in recorded.items() if name in found}
    if not values:
        names = sorted({key for found in recorded.values() for key in found})
        raise UserError(
            f"{directory}: no step records {name!r}; recorded: {', '.join(names) or 'nothing'} "
            "(CheckpointManager records save(…, metrics={'loss': …}) if its options have a best_fn)"
        )
    sign = 1 if direction == "max" else -1
    return max(values, key=lambda number: (sign * values[number], number))


def _metrics(step: pathlib.Path) -> dict[str, float]:
    """The metrics that CheckpointManager recorded for a step, without NaN and infinities."""
    path = step / "metrics" / "metrics"
    # The metrics of a step that diverged may be NaN.
    found: dict[str, Any] = read_json(path, nan=True) if path.is_file() else {}
    return {
        name: float(value)
        for name, value in found.items()
        if is_number(value) and math.isfinite(value)
    }

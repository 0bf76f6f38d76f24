"""Compares two runs over the same texts or documents, with intervals."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from moejax.errors import UserError

Z95 = 1.959964
"""Standard errors from the mean of a normal variable to the ends of its 95% interval."""

FEW = 30
"""Pairs below which the normal interval is rough."""


@dataclasses.dataclass(frozen=True)
class Units:
    """The windows or documents of a run's figure, which is sum(sums) / sum(weights)."""

    name: str
    """Name of a text or a task."""
    figure: str
    """The figure's name, such as bits/token or acc."""
    keys: list[str]
    """Key of each window or document, by which two runs' units are matched."""
    sums: list[float]
    weights: list[float]


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A figure of two runs, and B − A with its 95% interval, in the figure's unit."""

    step_a: int | None
    step_b: int | None
    name: str
    figure: str
    pairs: int
    a: float
    b: float
    difference: float
    low: float | None
    """Lower end; None with fewer than two pairs."""
    high: float | None


def over_seeds(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the mean and its 95% interval by Student's t; of one value no interval, NaN."""
    from scipy.special import stdtrit

    mean, count = float(np.mean(values)), len(values)
    if count < 2:
        return mean, float("nan"), float("nan")
    half = stdtrit(count - 1, 0.975) * float(np.std(values, ddof=1)) / count**0.5
    return mean, mean - half, mean + half


def compare_units(
    a: Units, b: Units, steps: tuple[int | None, int | None] = (None, None)
) -> Comparison:
    """Returns b's figure minus a's, from the differences of their pairs.

    The interval is normal: difference ± Z95 · s / W, where W is the pairs' weight and s² is n / (n
    − 1) · Σ (d − difference · w)², the variance of a ratio whose units, windows or documents, are
    drawn together. It says how much another choice of such units would have changed, and nothing
    about another training run. Raises UserError for units that do not match.
    """
    places = {key: place for place, key in enumerate(b.keys)}
    if sorted(a.keys) != sorted(b.keys):
        raise UserError(f"{a.name}: the two runs did not score the same windows or documents")
    order = [places[key] for key in a.keys]
    weights, others = np.asarray(a.weights, float), np.asarray(b.weights, float)[order]
    if (weights != others).any():
        raise UserError(f"{a.name}: the two runs weigh the same windows or documents differently")
    first, second = np.asarray(a.sums, float), np.asarray(b.sums, float)[order]
    total, n = weights.sum(), len(weights)
    difference = (second - first).sum() / total
    low = high = None
    if n > 1:
        spread = np.square(second - first - difference * weights).sum() * n / (n - 1)
        half = Z95 * np.sqrt(spread) / total
        low, high = float(difference - half), float(difference + half)
    figures = float(first.sum() / total), float(second.sum() / total)
    return Comparison(*steps, a.name, a.figure, n, *figures, float(difference), low, high)


def compare_lines(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]
) -> list[Comparison]:
    """Compares every figure that both runs have, in lines as `results_file` has them: of equal
    steps, or of the only line of each. Several texts are compared together too ("all"), and so are
    several steps, without a step.

    Raises UserError if there is no pair of lines, or of units.
    """
    found, pooled = [], {}
    for left, right in _lines(a, b):
        for one, other in _match_units(left, right):
            found.append(compare_units(one, other, (left.get("step"), right.get("step"))))
            pooled.setdefault((one.name, one.figure, frozenset(one.keys)), []).append((one, other))
    found += [
        compare_units(_over_steps([one for one, _ in pairs]), _over_steps([o for _, o in pairs]))
        for pairs in pooled.values()
        if len(pairs) > 1
    ]
    if not found:
        raise UserError(
            "the two files have no windows or documents in common; compare runs over the same "
            "--data (or tasks) with the same --window, --stride and --limit"
        )
    return found


def _lines(
    a: Sequence[Mapping[str, Any]], b: Sequence[Mapping[str, Any]]
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    if len(a) == len(b) == 1:
        return [(a[0], b[0])]
    others = {line.get("step"): line for line in b}
    pairs = [(line, others[line.get("step")]) for line in a if line.get("step") in others]
    if not pairs:
        raise UserError(
            f"the two files have no step in common: {_steps(a)} beside {_steps(b)}; two runs are "
            "compared at equal steps, or by files of one line each"
        )
    return pairs


def _steps(lines: Sequence[Mapping[str, Any]]) -> str:
    return ", ".join(str(line.get("step")) for line in lines[:12]) or "none"


def _match_units(
    left: Mapping[str, Any], right: Mapping[str, Any]
) -> Iterator[tuple[Units, Units]]:
    """Yields units of both lines with the same figure and keys, even if their files have other
    names."""
    ours, theirs = ([Units(**one) for one in line["units"]] for line in (left, right))
    known = {(one.figure, frozenset(one.keys)): one for one in theirs}
    pairs = [
        (one, known[one.figure, frozenset(one.keys)])
        for one in ours
        if (one.figure, frozenset(one.keys)) in known
    ]
    yield from pairs
    whole = [pair for pair in pairs if pair[0].figure == "bits/token"]
    if len(whole) > 1:
        yield _together([one for one, _ in whole]), _together([one for _, one in whole])


def _over_steps(units: Sequence[Units]) -> Units:
    """Joins the units of several steps: each window or document once, with the sums of all steps,
    which are not independent."""
    first = units[0]
    sums, weights = dict.fromkeys(first.keys, 0.0), dict.fromkeys(first.keys, 0.0)
    for one in units:
        for key, value, weight in zip(one.keys, one.sums, one.weights, strict=True):
            sums[key] += value
            weights[key] += weight
    return Units(first.name, first.figure, first.keys, [*sums.values()], [*weights.values()])


def _together(units: Sequence[Units]) -> Units:
    """Joins the units of several texts."""
    return Units(
        "all",
        units[0].figure,
        [key for one in units for key in one.keys],
        [value for one in units for value in one.sums],
        [value for one in units for value in one.weights],
    )

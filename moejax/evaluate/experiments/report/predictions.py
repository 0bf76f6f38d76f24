"""The report's table of predictions: how far predicted times are from those of the engine."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moejax.evaluate.experiments.records import PLACE
from moejax.evaluate.experiments.report.content import Line

PREDICTED = "Predicted beside measured: mean error (worst), Kendall's τ of the mean steps' order"
_TIMES = ("step", "p50", "p99", "first token", "run")
PREDICTED_HEADINGS = (
    *("link", "batch", "places", "step, median", *_TIMES),
    *("τ", "τ, told apart", "stall", "bound"),
)
"""Errors are (predicted − measured) / measured, mean and median of their sizes. step: the mean
decode step; p50, p99: of decode steps; τ: of policies, budgets and links in one batch, prompt
and text; told apart: pairs whose 95% intervals of the measured step do not overlap; stall: the
predicted time that moving experts adds; bound: what of it no overlap of link and computing could
hide."""

_ORDERED = ("precision", "batch", "prompt_tokens", "text")
"""What two cells must agree in so that their order is asked for."""


class Pair(NamedTuple):
    """A cell that was both measured and predicted."""

    measured: Line
    predicted: Line


def prediction_rows(lines: Sequence[Line]) -> list[list[str]]:
    """A row under PREDICTED_HEADINGS for each link rate and batch, then for all; none where nothing
    was both measured and predicted. lines: of the summary."""
    found: dict[tuple[str, ...], dict[str, Line]] = {}
    for line in lines:
        if line["runs"] and line.get("decode_s") is not None:
            place = tuple(str(line[name]) for name in PLACE if name not in ("mode", "seed"))
            found.setdefault(place, {})[line["mode"]] = line
    pairs = [Pair(x["measured"], x["predicted"]) for x in found.values() if len(x) == 2]
    places: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        where = pair.measured["link_rate"], str(pair.measured["batch"])
        places.setdefault(where, []).append(pair)
    rows = [[*where, *_figures(chosen)] for where, chosen in places.items()]
    return [*rows, ["all", "all", *_figures(pairs)]] if len(rows) > 1 else rows


def _figures(pairs: Sequence[Pair]) -> list[str]:
    row = [str(len(pairs)), f"{np.median(np.abs(errors(pairs, 'step'))):.1%}"]
    for name in _TIMES:
        off = errors(pairs, name)
        row.append(f"{np.mean(np.abs(off)):.1%} ({off[np.argmax(np.abs(off))]:+.1%})")
    row += [_order(pairs, apart=False), _order(pairs, apart=True)]
    for name in ("stall_share", "stall_bound_share"):
        row.append(f"{np.mean([pair.predicted[name] for pair in pairs]):.0%}")
    return row


def _order(pairs: Sequence[Pair], *, apart: bool) -> str:
    tau, count = kendall(pairs, apart=apart)
    return f"{tau:.2f} of {count}" if count else "–"


def errors(pairs: Sequence[Pair], name: str) -> np.ndarray:
    """float64[len(pairs)]: (predicted − measured) / measured of one of _TIMES."""
    times = np.array([[_time(line, name) for line in pair] for pair in pairs])
    return times[:, 1] / times[:, 0] - 1


def _time(line: Line, name: str) -> float:
    if name == "step":
        return line["decode_s"] / line["decode_steps"]
    if name == "run":
        return line["prefill_s"] + line["decode_s"]
    return line["ttft_s" if name == "first token" else f"tpot_{name}_s"]


def kendall(pairs: Sequence[Pair], *, apart: bool) -> tuple[float, int]:
    """(Kendall's tau-a of mean decode steps, pairs of cells) within each batch, prompt and text.
    apart: only those whose measured intervals do not overlap. nan without any."""
    score = count = 0
    for one, other in itertools.combinations(pairs, 2):
        if any(one.measured[name] != other.measured[name] for name in _ORDERED):
            continue
        if apart and not _told_apart(one.measured, other.measured):
            continue
        measured = _time(one.measured, "step") - _time(other.measured, "step")
        predicted = _time(one.predicted, "step") - _time(other.predicted, "step")
        score, count = score + int(np.sign(measured) * np.sign(predicted)), count + 1
    return (score / count if count else float("nan")), count


def _told_apart(one: Line, other: Line) -> bool:
    """Whether their 95% intervals are apart; without intervals nothing is."""
    if one.get("decode_s_low") is None or other.get("decode_s_low") is None:
        return False
    return bool(
        one["decode_s_high"] < other["decode_s_low"] or other["decode_s_high"] < one["decode_s_low"]
    )

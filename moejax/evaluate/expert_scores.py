"""Who is used most in a trace, as files for --precision."""

from __future__ import annotations

import dataclasses
import os
import pathlib

import numpy as np

from host_offload.control.interface import routed_counts
from host_offload.control.rules import parse_interval
from host_offload.policies.precision.dynaexq import DynaExq
from host_offload.policies.precision.maps import top_map
from host_offload.traces.reader import Trace
from moejax.errors import UserError, user_errors


@dataclasses.dataclass(frozen=True)
class ExpertScores:
    """L MoE layers, E experts."""

    counts: np.ndarray
    """int64[L, E]: selections in the whole trace."""
    scores: np.ndarray
    """float64[L, E]: DynaExq's S after the last interval that ended, from S = 0."""
    intervals: int
    """That ended."""


def expert_scores(trace: Trace, alpha: float, interval: str) -> ExpertScores:
    """What DynaExq with these settings counted in a run with this routing.

    alpha, interval: as of host_offload.policies.precision.dynaexq. Raises UserError for settings
    that are out of range and where no interval ended.
    """
    with user_errors():
        DynaExq(alpha)  # which refuses what it cannot have
        every, unit = parse_interval(interval, DynaExq.__name__)
    if unit == "seconds" and {"step.start_s", "step.read_s"} & {*trace.header.absent}:
        raise UserError("the trace has no times; give --interval in tokens or steps")
    counts = since = np.zeros((trace.header.layers, trace.header.experts), np.int64)
    scores, ended, whole = np.zeros(counts.shape), 0, 0
    passed, origin = 0.0, None
    for step in trace.step_traces():
        if unit == "seconds":
            origin = step.start_s if origin is None else origin
            passed = step.read_s - origin
        else:
            passed += len(step.ids) if unit == "tokens" else 1
        found = routed_counts(step.ids, trace.header.experts)
        counts, since = counts + found, since + found
        # A step of several intervals counts as one, as in the engine.
        if passed // every > whole:
            whole, ended = int(passed // every), ended + 1
            scores = alpha * scores + (1 - alpha) * since
            since = np.zeros_like(counts)
    if not ended:
        raise UserError(
            f"the trace has {passed:g} {unit}, less than an interval of {interval}; give a shorter "
            "--interval, the same as for the run to come"
        )
    return ExpertScores(counts, scores, ended)


def write_scores(
    directory: str | os.PathLike[str], found: ExpertScores, hi_share: float
) -> list[pathlib.Path]:
    """Writes what --precision reads (docs/how-to/precision.md), returns the files.

    map.npy: that share of the experts high, in each layer those that were selected most.
    scores.npy: S. Raises UserError for a share that is none, for files that are there already, and
    where it cannot write.
    """
    if not 0 <= hi_share <= 1:
        raise UserError(f"hi_share is a share of the experts, from 0 to 1, not {hi_share}")
    capacity = round(hi_share * found.counts.size)
    arrays = {"map": top_map(found.counts, capacity), "scores": found.scores}
    files = [pathlib.Path(directory) / f"{name}.npy" for name in arrays]
    for file in files:
        if file.exists():
            raise UserError(f"{file} is there already; give another directory")
    try:
        pathlib.Path(directory).mkdir(parents=True, exist_ok=True)
        for file, array in zip(files, arrays.values(), strict=True):
            np.save(file, array)
    except OSError as error:
        raise UserError(f"cannot write to {directory} ({error})") from error
    return files

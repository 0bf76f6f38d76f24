"""The experts that a trace's steps need: a set for each step and layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from host_offload.control.interface import Spec, routed_counts
from host_offload.control.step_record import StepRecord
from host_offload.traces.reader import Trace
from host_offload.traces.schema import TraceError


class StepSet(NamedTuple):
    """The experts that one step needs."""

    number: int
    kind: str | None
    """One of KINDS; None if the trace does not know."""
    waves: int
    """Passes over a layer's experts."""
    tokens: int
    active: np.ndarray
    """bool[L, E]"""


def read_step_sets(trace: Trace, *, user: int | None = None) -> Iterator[StepSet]:
    """Yields the sets of all steps of a trace in order.

    - `user`: take only what this user's tokens (token.user) were routed to; other steps are empty.

    Raises TraceError for a chunk that cannot be read or names experts that the model does not have.
    """
    experts = trace.header.experts
    for step in trace.step_traces():
        active, waves = step_set(step, experts)
        if user is not None:
            active = routed_counts(step.ids[step.user == user], experts) > 0
        yield StepSet(step.number, step.kind, waves, len(step.ids), active)


def needed_experts(trace: Trace) -> np.ndarray:
    """Returns bool[T, L, E]: the experts that each step of a whole run needs. Raises ValueError for
    a trace that lacks steps, and like read_step_sets."""
    steps = list(read_step_sets(trace))
    if any(step.number != place for place, step in enumerate(steps)):
        raise ValueError(
            f"{trace.directory} lacks steps of its run (one failed, or it began later), so what "
            "knows the run would be out of step"
        )
    needed = np.array([step.active for step in steps], bool)
    return needed.reshape(-1, trace.header.layers, trace.header.experts)


def check_future(needed: np.ndarray, spec: Spec) -> None:
    """Raises ValueError if the experts that a run needs, bool[T, L, E], are of another model."""
    _, layers, experts = needed.shape
    if (spec.layers, spec.experts) != (layers, experts):
        raise ValueError(
            f"the future is of a model with {layers} layers of {experts} experts, "
            f"this one has {spec.layers} of {spec.experts}"
        )


def step_set(step: StepRecord, experts: int) -> tuple[np.ndarray, int]:
    """Returns (the set bool[L, E], waves) of one step; waves are 1 if the trace does not know.
    Raises TraceError like read_step_sets."""
    waves = np.ones(1, np.int16) if step.waves is None else step.waves
    ids = step.ids
    if ids.size and not (ids.min() >= 0 and ids.max() < experts):
        raise TraceError(
            f"step {step.number} names experts {ids.min()}…{ids.max()}, the model has {experts}; "
            "trace.json is of another model, or the trace is damaged"
        )
    if (waves != waves[0]).any() or waves[0] < 1:
        raise TraceError(
            f"step {step.number}: the layers of a step must have the same waves, at least one"
        )
    return step_counts(step, experts) > 0, int(waves[0])


def step_counts(step: StepRecord, experts: int) -> np.ndarray:
    """Returns int[L, E], how many tokens of a step chose each expert. One that rejected drafts
    alone chose counts once: the trace does not say how many of their rows did."""
    counts = routed_counts(step.ids, experts)
    return counts if step.rejected is None else np.maximum(counts, step.rejected)


def in_waves(active: np.ndarray, waves: int) -> Iterator[np.ndarray]:
    """Yields the sets bool[M, E] of a step, wave by wave: ranges of ids, as a prefill step makes
    them."""
    if waves == 1:
        yield active
        return
    experts = active.shape[1]
    wave = np.arange(experts) * waves // experts
    for i in range(waves):
        yield active & (wave == i)

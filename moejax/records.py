"""What a step did, read back by the host: the input of controllers and trace writers."""

from __future__ import annotations

import dataclasses

import numpy as np

from moejax.experts import Paging


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """A step whose results were read, one step late. N real tokens (no padding), L MoE layers,
    k experts a token, E experts a layer."""

    number: int
    kind: str
    """`prefill` or `decode`."""
    dispatched_s: float
    """Of time.perf_counter."""
    read_s: float
    rows: int
    """Token rows of the executable, padding included: the bucket in decode, the sweep's in
    prefill."""
    compiled: bool
    """The step was the first to run its executable."""
    request: np.ndarray
    """int32[N]: number of the token's request."""
    user: np.ndarray
    """int32[N]: number of its session, −1 without one."""
    position: np.ndarray
    """int32[N]: place in its sequence."""
    phase: np.ndarray
    """uint8[N]: 0 prompt, 1 generated."""
    ids: np.ndarray
    """int16[N, L, k]: routed experts, ascending."""
    weights: np.ndarray
    """float32[N, L, k]."""
    paging: Paging
    """int32[L] each."""
    missed: np.ndarray
    """bool[L, E]: active experts that were not resident."""
    staged: np.ndarray | None
    """int32[S]: 1 for each entry of the step's stage list that was carried out; None without."""
    finished: tuple[int, ...]
    """Numbers of requests that ended with this step's results."""

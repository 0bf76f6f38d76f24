"""Fixed maps of versions: which experts are in the high version, decided before the run.

A map is int8[L, E] of version numbers: 0, the high one, and 1, the low one. A file of a map, or of
scores, is an array as numpy.save writes it. Both can also come from the routing of a trace.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from host_offload.control.interface import Spec, routed_counts
from host_offload.control.rules import parse_interval
from host_offload.memory.budget import cells_of_layers
from host_offload.traces.reader import Trace

HI, LO = 0, 1
"""Numbers of the two versions; their place in Spec.version_bytes."""


def top_map(
    values: np.ndarray, capacity: int, has_all_versions: Sequence[bool] | None = None
) -> np.ndarray:
    """The map int8[L, E] with the experts of largest value in the high version; ties: the lower id.

    - `values`: [L, E], such as counts of selections.
    - `capacity`: high experts of all layers together, shared evenly (cells_of_layers).
    - `has_all_versions`: the layers with two versions; None: all.
    """
    has_all_versions = [True] * len(values) if has_all_versions is None else has_all_versions
    counts = np.array(cells_of_layers(capacity, has_all_versions, values.shape[1]))[:, None]
    rank = np.argsort(np.argsort(-values, axis=1, kind="stable"), axis=1)
    return np.where(rank < counts, HI, LO).astype(np.int8)


def random_map(
    layers: int,
    experts: int,
    capacity: int,
    seed: int,
    has_all_versions: Sequence[bool] | None = None,
) -> np.ndarray:
    """A map int8[L, E] with as many high experts in each layer as top_map has, drawn at random."""
    return top_map(
        np.random.default_rng(seed).random((layers, experts)), capacity, has_all_versions
    )


def count_selections(trace: Trace) -> np.ndarray:
    """int64[L, E]: how many tokens of a trace were routed to each expert."""
    return routed_counts(trace.array("token.ids"), trace.header.experts)


def mean_selections(trace: Trace, interval: str) -> np.ndarray:
    """float64[L, E]: the mean selections of an interval, such as "4096 tokens", over a trace.
    DynaExq's scores approach them if routing does not change. Raises ValueError for an interval of
    seconds if the trace has no times."""
    count, unit = parse_interval(interval, "dynaexq")
    if unit == "seconds":
        length = float(trace.array("step.read_s")[-1] - trace.array("step.start_s")[0])
    else:
        length = trace.tokens if unit == "tokens" else trace.steps
    return count_selections(trace) * (count / length)


def read_array(path: str | os.PathLike[str], what: str) -> np.ndarray:
    """An array [L, E] of real numbers from a .npy file.

    - `what`: its name in messages, such as "map".

    Raises ValueError, which names the file, for anything else.
    """
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(
            f"{path}: cannot be read as a {what} ({error}); give an array [layers, experts] that "
            f"numpy.save wrote"
        ) from error
    if not isinstance(array, np.ndarray) or array.ndim != 2 or array.dtype.kind not in "iuf":
        raise ValueError(f"{path}: a {what} is an array [layers, experts] of numbers")
    if not np.all(np.isfinite(array)) or np.any(array < 0):
        raise ValueError(f"{path}: a {what} has only finite numbers from 0 up")
    return array


def check_shape(array: np.ndarray, shape: Sequence[int], what: str) -> None:
    """Raises ValueError for an array that belongs to another model."""
    if array.shape != tuple(shape):
        raise ValueError(
            f"the {what} is of {array.shape[0]} layers × {array.shape[1]} experts, this model has "
            f"{shape[0]} × {shape[1]}; make one for this model"
        )


def check_map(array: np.ndarray, versions: int) -> np.ndarray:
    """The map as int8[L, E]. Raises ValueError for values that are not version numbers."""
    if array.dtype.kind not in "iu" or np.any(array >= versions):
        raise ValueError(
            f"a map has version numbers from 0 to {versions - 1} (0 is the high version), as "
            f"integers"
        )
    return array.astype(np.int8)


def hi_capacity(spec: Spec) -> int:
    """The number of high experts that fit. Raises ValueError unless there are a high and a low
    version, in that order, and cells that layers share."""
    sizes = [int(np.sum(size)) for size in spec.version_bytes.values()]
    if len(sizes) != 2 or sizes[HI] <= sizes[LO]:
        raise ValueError(
            f"precision needs a high and a low version, the larger first, not "
            f"{', '.join(spec.version_bytes)}; give hi and lo, such as hi=dense, lo=int4"
        )
    if not spec.capacity:
        raise ValueError("this engine says no capacity by version; start it with precision=…")
    return spec.capacity[HI]

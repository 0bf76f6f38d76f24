"""Who is used most in a trace, and who loses most by a low version, as files for --precision."""

from __future__ import annotations

import dataclasses
import os
import pathlib

import numpy as np

from host_offload.control.interface import routed_counts
from host_offload.control.rules import parse_interval
from host_offload.memory.record_source import read_records
from host_offload.policies.precision.dynaexq import DynaExq
from host_offload.policies.precision.maps import top_map
from host_offload.policies.precision.precision_names import precision_of
from host_offload.traces.reader import Trace
from host_offload.versions.encoders import decode
from host_offload.versions.quantizers import to_float32
from host_offload.versions.store_versions import as_weights
from moejax.checkpoints.load import checkpoint_format, load_checkpoint
from moejax.checkpoints.loaded_model import LoadedModel
from moejax.checkpoints.orbax.manifest import MANIFEST, read_manifest
from moejax.checkpoints.versions import with_versions
from moejax.errors import UserError, user_errors
from moejax.evaluate.quantization import inside, layer_inputs
from moejax.models.directory import checkpoint_directory
from pallas_kernels.records.format import LOSSY

TOKENS = 48
"""The most tokens whose outputs an expert's error is measured with."""


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


@dataclasses.dataclass(frozen=True)
class ErrorWeights:
    """weights: float64[L, E], how much more error an expert's low version makes when it is selected
    than its high one. of: what was compared, `outputs` or `weights`."""

    weights: np.ndarray
    of: str


def error_weights(
    model: str | os.PathLike[str],
    trace: Trace,
    hi: str,
    lo: str,
    quantizer: str = "rtn",
    *,
    step: int | str | None = None,
    name_map: str | os.PathLike[str] | None = None,
) -> ErrorWeights:
    """The mean square error of what an expert adds to its layer's output, over up to TOKENS of the
    trace's tokens that were routed to it, where the trace has the routers' inputs (gate_input):
    those of the low version less those of the high one, at least 0. An expert that no token was
    routed to gets the mean of its layer. Else the squares of the relative errors of the weights in
    moejax.json.

    model: a checkpoint; versions that it lacks are made by `quantizer` (rtn or mse). step,
    name_map: see load_checkpoint. Raises UserError for what is no pair of versions with a lossy low
    one, for a model without what is needed, and as load_checkpoint and with_versions do.
    """
    with user_errors():
        precision_of(f"dynaexq,hi={hi},lo={lo}")
    if lo not in LOSSY:
        raise UserError(f"{lo} has the bits of dense, so it makes no errors; leave --model out")
    if not trace.header.gate_input:
        return ErrorWeights(_of_weights(checkpoint_directory(model), hi, lo), "weights")
    dtype = trace.header.spec.get("dtype", "auto")
    versions = ("dense", *(version for version in (hi, lo) if version in LOSSY))
    loaded = load_checkpoint(model, dtype, step=step, name_map=name_map, versions=versions)
    loaded = with_versions(loaded, versions, quantizer=quantizer)
    errors = _of_outputs(loaded, trace)
    return ErrorWeights(np.maximum(errors[lo] - errors.get(hi, 0.0), 0.0), "outputs")


def _of_weights(directory: pathlib.Path, hi: str, lo: str) -> np.ndarray:
    ours = checkpoint_format(directory) == "moejax-orbax"
    errors = read_manifest(directory / MANIFEST).errors if ours else {}
    if missing := [v for v in (lo, hi) if v in LOSSY and v not in errors]:
        raise UserError(
            f"{directory} does not say the errors of {missing[0]}, and the trace has no gate_input "
            "to measure them with: record one with --trace DIR,arrays=gate_input, or give --model "
            "a checkpoint of moejax quantize"
        )
    squares = {
        version: np.square([layers[layer] for layer in sorted(layers)])
        for version, layers in errors.items()
        if version in LOSSY
    }
    return np.maximum(squares[lo] - squares.get(hi, 0.0), 0.0)


def _of_outputs(loaded: LoadedModel, trace: Trace) -> dict[str, np.ndarray]:
    """Lossy version → float64[L, E]."""
    store, config = loaded.store, loaded.config
    count, experts = store.arrays["dense"].shape[:2]
    formats = {v: store.layouts[v] for v in store.arrays if v in LOSSY}
    errors = {version: np.full((count, experts), np.nan) for version in formats}
    for layer in range(count):
        inputs, ids, shares = layer_inputs(trace, layer, "record a trace without gate_input")
        for expert in np.unique(ids).tolist():
            row, place = np.nonzero(ids == expert)
            chosen = np.unique(np.linspace(0, len(row) - 1, TOKENS).astype(int))
            seen = inputs[row[chosen]].astype(np.float32)
            share = shares[row[chosen], place[chosen]].astype(np.float64)[:, None]
            records = read_records(store.arrays["dense"], layer, expert, 1)
            weights = as_weights(records, store.layouts["dense"], loaded.dtype)
            exact = _output(seen, weights, config.hidden_act)
            for version, fmt in formats.items():
                coarse = decode(read_records(store.arrays[version], layer, expert, 1), fmt)
                apart = share * (_output(seen, coarse, config.hidden_act) - exact)
                errors[version][layer, expert] = np.mean(np.square(apart))
    return {version: _filled(found) for version, found in errors.items()}


def _output(inputs: np.ndarray, weights: np.ndarray, hidden_act: str) -> np.ndarray:
    """float32[n, D]: what an expert makes of inputs [n, D]. weights: [1, 3·I, D]."""
    gate, up, down = np.split(to_float32(weights[0]), 3)
    return inside(inputs, gate, up, hidden_act) @ down


def _filled(errors: np.ndarray) -> np.ndarray:
    """Errors with the mean of its layer for each NaN."""
    known = ~np.isnan(errors)
    total = np.sum(errors, axis=1, where=known, keepdims=True)
    mean = total / np.maximum(known.sum(axis=1, keepdims=True), 1)
    return np.where(known, errors, mean)


def write_scores(
    directory: str | os.PathLike[str],
    found: ExpertScores,
    hi_share: float,
    errors: ErrorWeights | None = None,
) -> list[pathlib.Path]:
    """Writes what --precision reads (docs/precision.md), returns the files.

    map.npy: that share of the experts high, in each layer those that were selected most.
    scores.npy: S. With errors also weights.npy, and weighted-map.npy: the same share, over all
    layers those of the largest selections × weights. Raises UserError for a share that is none,
    for files that are there already, and where it cannot write.
    """
    if not 0 <= hi_share <= 1:
        raise UserError(f"hi_share is a share of the experts, from 0 to 1, not {hi_share}")
    capacity = round(hi_share * found.counts.size)
    arrays = {"map": top_map(found.counts, capacity), "scores": found.scores}
    if errors is not None:
        values = found.counts * errors.weights
        arrays["weights"] = errors.weights
        arrays["weighted-map"] = top_map(values, capacity, per_layer=False)
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

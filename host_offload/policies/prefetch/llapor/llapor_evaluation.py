"""What a learned predictor knows of text that it has not seen, beside reusing gates."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from host_offload.policies.prefetch.llapor.llapor_network import of_layer, scores
from host_offload.policies.prefetch.llapor.llapor_policy import Learned
from host_offload.policies.prefetch.llapor.llapor_training import LayerSamples, samples
from host_offload.policies.prefetch.llapor.metrics import Quality, quality
from host_offload.policies.prefetch.next_layers import gate_scores
from host_offload.traces.reader import Trace

CALLS = 50
"""Calls whose median is a call's time."""

Predicts = Callable[[LayerSamples, np.ndarray], np.ndarray]
"""(samples of N rows, int[N] their places in the trace) → float32[N, E]"""


class LayerReport(NamedTuple):
    """The prediction of one layer."""

    layer: int
    """Whose experts are predicted."""
    group: str
    """The group of its layer; of forests how many layers they look ahead."""
    learned: Quality
    gate: Quality | None
    """What that layer's router says of the gate input of the layer that predicts (Fate); None: no
    routers were given."""
    cosine: float
    """Mean cosine of both layers' gate inputs."""
    call_us: float
    """Median time of a prediction for one step's rows."""
    call_rows: int
    nbytes: int


def evaluated(
    policy: Learned, trace: Trace, rows: np.ndarray, router: np.ndarray | None = None
) -> list[LayerReport]:
    """A report of each layer that has a prediction, over the rows bool[tokens] of a trace with gate
    inputs. router: float32[L, D, E]. Raises ValueError for a trace of another shape."""
    header, stride = trace.header, int(policy.fitted.setting("stride"))
    found = header.layers, header.experts, header.top_k
    if policy.fitted.model[:3] != found or not header.gate_input:
        raise ValueError(
            f"{trace.directory} has layers, experts and top-k {found} and gate inputs of "
            f"{header.gate_input}; give a trace with gate inputs of the model that was learned from"
        )
    reports = []
    kinds = str(policy.fitted.setting("groups")).split()
    for layer, group in enumerate(kinds):
        own = of_layer(policy.fitted.arrays, layer)

        def call(
            some: LayerSamples, token: np.ndarray, own: dict[str, np.ndarray] = own
        ) -> np.ndarray:
            return scores(own, some.gate_input, some.ids, some.weights)

        size = sum(array.nbytes for array in own.values())
        found = layer_report(trace, rows, layer, stride, call, router)
        reports.append(found._replace(group=group, nbytes=size))
    return reports


def layer_report(
    trace: Trace,
    rows: np.ndarray,
    layer: int,
    stride: int,
    call: Predicts,
    router: np.ndarray | None,
) -> LayerReport:
    """What `call` says of rows bool[tokens] at a layer as a prediction of the layer `stride` on;
    without a group and bytes."""
    some, token = samples(trace, layer, stride).of(rows), np.flatnonzero(rows)
    after = samples(trace, layer + stride, 0).of(rows).gate_input
    gate = None
    if router is not None:
        said = gate_scores(some.gate_input, router[layer + stride])
        gate = quality(said, some.later, some.step)
    last = some.step == some.step[-1]
    return LayerReport(
        layer + stride,
        "",
        quality(call(some, token), some.later, some.step),
        gate,
        _cosine(some.gate_input, after),
        _call_us(call, some.of(last), token[last]),
        int(last.sum()),
        0,
    )


def _cosine(one: np.ndarray, other: np.ndarray) -> float:
    sizes = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    return float(np.mean((one * other).sum(axis=1) / np.maximum(sizes, 1e-9)))


def _call_us(call: Predicts, some: LayerSamples, token: np.ndarray) -> float:
    times = []
    for _ in range(CALLS):
        began = time.perf_counter()
        call(some, token)
        times.append(time.perf_counter() - began)
    return float(np.median(times)) * 1e6

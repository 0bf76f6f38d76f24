"""What ExpertFlow's forests know of text that they have not seen, beside reusing gates."""

from __future__ import annotations

import numpy as np

from host_offload.policies.prefetch.expertflow.expertflow_policy import ExpertFlow
from host_offload.policies.prefetch.expertflow.expertflow_training import seen_of
from host_offload.policies.prefetch.expertflow.forest import forest_of, scores
from host_offload.policies.prefetch.llapor.llapor_evaluation import LayerReport, layer_report
from host_offload.policies.prefetch.llapor.llapor_training import LayerSamples
from host_offload.policies.prefetch.next_layers import gate_scores
from host_offload.traces.reader import Trace


def predicted_rows(
    policy: ExpertFlow,
    some: LayerSamples,
    ids: np.ndarray,
    layer: int,
    ahead: int,
    router: np.ndarray,
) -> np.ndarray:
    """float32[N, E]: what the policy, at the routing of `layer`, says of the layer `ahead` on, for
    rows of a trace. some: those rows of `layer`. ids: int[N, L, k] of the same rows, of which the
    layers before are told. router: float32[L, D, E]. Raises KeyError where there is no forest, that
    is beyond `policy.fitted.setting("reach")` or the last layer."""
    said = gate_scores(some.gate_input, router[layer + ahead])
    return scores(policy.fitted.arrays, layer, ahead, seen_of(some, ids, layer), said)


def evaluated(
    policy: ExpertFlow, trace: Trace, rows: np.ndarray, router: np.ndarray
) -> list[LayerReport]:
    """A report of each forest, over the rows bool[tokens] of a trace with gate inputs; those of one
    layer ahead first. router: float32[L, D, E]. Raises ValueError for a trace of another shape."""
    header, arrays = trace.header, policy.fitted.arrays
    found = header.layers, header.experts, header.top_k
    if policy.fitted.model[:3] != found or not header.gate_input:
        raise ValueError(
            f"{trace.directory} has layers, experts and top-k {found} and gate inputs of "
            f"{header.gate_input}; give a trace with gate inputs of the model that was learned from"
        )
    ids = trace.array("token.ids")
    reports = []
    for ahead in range(1, policy.fitted.setting("reach") + 1):
        for layer in range(header.layers - ahead):

            def call(
                some: LayerSamples, token: np.ndarray, layer: int = layer, ahead: int = ahead
            ) -> np.ndarray:
                return predicted_rows(policy, some, ids[token], layer, ahead, router)

            report = layer_report(trace, rows, layer, ahead, call, router)
            size = sum(array.nbytes for array in forest_of(arrays, layer, ahead))
            reports.append(report._replace(group=f"{ahead} ahead", nbytes=size))
    return reports

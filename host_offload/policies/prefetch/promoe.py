"""ProMoE: a learned predictor that looks a stride ahead."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec
from host_offload.policies.prefetch.fitted import Fitted, fitted, read_fitted
from host_offload.policies.prefetch.next_layers import chosen_by_rows, gate_scores, stages_of
from host_offload.traces.reader import Trace, TraceError

NAME = "promoe"


class Predicted(NamedTuple):
    """State of ProMoE."""

    top_k: int
    ahead: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(layer, experts) of the layers to come, the next one first."""


@dataclasses.dataclass(frozen=True)
class ProMoE:
    """Stride prefetching with learned predictors (Song et al. 2024, arXiv:2410.22134; as a baseline
    in fMoE, sections 6.1 and 7): what the router of layer l saw predicts the experts of layer
    l + stride, so that transfers have several layers' time. Everybody whom some row is predicted
    to choose is wanted, the nearest layer first. The predictors are linear, see `fit`. The first
    `stride` layers have no prediction. Needs driver="host". What is left out of the paper:
    docs/policies.md.
    """

    fitted: Fitted

    moments: frozenset[Moment] = frozenset({Moment.ROUTED})
    needs: frozenset[str] = frozenset({"gate_input"})
    writes: frozenset[str] = frozenset({"stages"})

    def init(self, spec: Spec) -> Predicted:
        """No layer is predicted yet. Raises ValueError for another model."""
        self.fitted.check(spec)
        return Predicted(spec.top_k)

    def decide(self, state: Predicted, observation: Observation) -> tuple[Predicted, Decision]:
        seen: Any = observation
        weights, bias = self.fitted.arrays["weights"], self.fitted.arrays["bias"]
        ahead = tuple(entry for entry in state.ahead if entry[0] > seen.layer) if seen.layer else ()
        if seen.layer < len(weights):
            scores = gate_scores(seen.gate_input[:, 0], weights[seen.layer]) + bias[seen.layer]
            experts = chosen_by_rows(scores, state.top_k)
            stride = self.fitted.setting("stride")
            ahead = (*ahead, (seen.layer + stride, tuple(experts)))
        stages = (s for layer, experts in ahead for s in stages_of(layer, [*experts], NAME))
        return state._replace(ahead=ahead), Decision(stages=tuple(stages))


def fit(trace: Trace, *, stride: int = 2, ridge: float = 1e-2) -> ProMoE:
    """ProMoE with predictors for the model of a trace that has gate inputs.

    For each layer l + stride, W and b minimise Σ |x W + b − y|² + ridge · tokens · |W|², x the gate
    input of layer l and y the 0/1 vector of the experts chosen. Reads the trace once, and holds
    8·(L − stride)·(D + 1)² bytes for it: 1.5 GB where L is 48 and D 2048. Raises TraceError for a
    trace without gate inputs or tokens, ValueError for a stride that leaves no layer.
    """
    header = trace.header
    if not 1 <= stride < header.layers:
        raise ValueError(f"stride must lie in 1…{header.layers - 1}, not {stride}")
    if not header.gate_input:
        raise TraceError(
            f"{trace.directory} has no gate inputs, which {NAME} learns from; record a trace with "
            "--trace-arrays gate_input"
        )
    if not trace.tokens:
        raise TraceError(f"{trace.directory} has no tokens to learn from")
    count, width = header.layers - stride, header.gate_input + 1
    squares = np.zeros((count, width, width))
    products = np.zeros((count, width, header.experts))
    for step in trace.step_traces():
        assert step.gate_input is not None
        for layer in range(count):
            x = np.ones((len(step.ids), width))
            x[:, :-1] = step.gate_input[:, layer]
            y = np.zeros((len(x), header.experts))
            np.put_along_axis(y, step.ids[:, layer + stride].astype(np.int64), 1, axis=1)
            squares[layer] += x.T @ x
            products[layer] += x.T @ y
    diagonal = np.arange(width - 1)
    squares[:, diagonal, diagonal] += ridge * trace.tokens
    # One by one: a solver copies what it is given.
    solved = np.array([*map(np.linalg.solve, squares, products)], np.float32)
    arrays = {"weights": solved[:, :-1], "bias": solved[:, -1]}
    return ProMoE(fitted(NAME, header, arrays, {"stride": stride, "ridge": ridge}))


def read(path: str) -> ProMoE:
    """The policy with the predictors that a fit wrote to the file."""
    return ProMoE(read_fitted(path, NAME))

"""ProMoE: a learned predictor that looks a stride ahead."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec
from host_offload.policies.prefetch.fitted import (
    Fitted,
    check_gate_inputs,
    fitted,
    read_fitted,
)
from host_offload.policies.prefetch.next_layers import Predicted, finite, with_predicted
from host_offload.policies.prefetch.promoe.promoe_network import Training, of_layer, stacked
from host_offload.traces.reader import Trace

NAME = "promoe"
AS_PROMOE = Training()


@dataclasses.dataclass(frozen=True)
class ProMoE:
    """Stride prefetching with learned predictors (Song et al. 2024, arXiv:2410.22134; as a baseline
    in fMoE, sections 6.1 and 7): what the router of layer l saw predicts the experts of layer
    l + stride, so that transfers have several layers' time. Everybody whom some row is predicted
    to choose is wanted, the nearest layer first. A predictor is a network of its layer, trained as
    a copy of ProMoE's training script does (see `fit`). The first `stride` layers have no
    prediction. Chunks, and demands that go before what was begun, are those of the queue of
    transfers (docs/transfers.md). Needs driver="host". What is left out of the paper:
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
        arrays, stride = self.fitted.arrays, self.fitted.setting("stride")
        scores = None
        if seen.layer < len(arrays["bias1"]):
            scores = of_layer(arrays, seen.layer).scores(finite(seen.gate_input[:, 0]))
        return with_predicted(state, seen.layer, stride, scores, NAME)


def fit(trace: Trace, *, stride: int = 2, training: Training = AS_PROMOE) -> ProMoE:
    """ProMoE with predictors for the model of a trace that has gate inputs.

    For each layer l + stride a network is trained from the gate input of layer l to the 0/1 vector
    of the experts chosen: two hidden layers, absolute error, Adam, a tenth of the tokens left out
    to see when to stop, as in deps/sparse-llm-cache-scripts/train-predict-model of huwf5/promoe,
    commit 02312ad5 (train_predict_model.py, utils.py). It reads the trace once for each layer and
    holds the inputs of one. Raises TraceError for a trace without gate inputs or tokens, ValueError
    for a stride that leaves no layer.
    """
    header = trace.header
    check_gate_inputs(trace, stride, NAME)
    networks = []
    for layer in range(header.layers - stride):
        x = np.zeros((trace.tokens, header.gate_input), np.float32)
        y = np.zeros((trace.tokens, header.experts), np.float32)
        rows = 0
        for step in trace.step_traces():
            assert step.gate_input is not None
            some = slice(rows, rows := rows + len(step.ids))
            x[some] = finite(step.gate_input[:, layer])
            np.put_along_axis(y[some], step.ids[:, layer + stride].astype(np.int64), 1, axis=1)
        networks.append(training.trained(x, y)[0])
    settings = {"stride": stride, "hidden": training.hidden}
    return ProMoE(fitted(NAME, header, stacked(networks), settings))


def read(path: str) -> ProMoE:
    """The policy with the predictors that a fit wrote to the file."""
    return ProMoE(read_fitted(path, NAME))

"""Routing of a few kinds of tokens, which decide everything: for tests of prefetch policies."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation
from host_offload.control.step_record import StepRecord
from host_offload.policies.prefetch.next_layers import softmax
from host_offload.traces.reader import Trace
from tests.host_offload.traces.traces_of import rewritten, write_trace

LAYERS, EXPERTS, TOP_K, KINDS = 4, 8, 2, 6
"""A token is of one of some kinds, which decides its experts and, one-hot, its gate inputs."""

ROUTES = np.array(
    [
        [
            np.random.default_rng((layer, kind)).permutation(EXPERTS)[:TOP_K]
            for layer in range(LAYERS)
        ]
        for kind in range(KINDS)
    ]
)
ROUTES.sort(axis=2)
ROUTER = np.zeros((LAYERS, KINDS, EXPERTS), np.float32)
for _kind, _layer in itertools.product(range(KINDS), range(LAYERS)):
    ROUTER[_layer, _kind, ROUTES[_kind, _layer]] = [3, 2]
PROBABILITIES = softmax(ROUTER.swapaxes(0, 1)).astype(np.float16)


QUICK: dict[str, Any] = {"hidden": 32, "rate": 1e-2, "dropout": 0.0, "batch": 16, "epochs": 40}
"""How ProMoE learns kinds by heart."""


def trace_of_kinds(directory: Path, kinds: list[list[int]], **header: Any) -> Trace:
    """Steps of tokens of these kinds; row r is of request r, which ends with the last step."""
    plain = write_trace(directory / "plain", [ROUTES[step] for step in kinds], EXPERTS)
    spec = {**plain.header.spec, "hidden": KINDS, "slots": 40}
    arrays = {"gate_input": KINDS, "embedding": KINDS, "probabilities": True, "token": True}
    facts = {"spec": spec, **arrays, "absent": (), **header}
    absent = {column.split(".")[1]: None for column in facts["absent"]}

    def of_kinds(step: StepRecord) -> StepRecord:
        tokens = kinds[step.number]
        kind = np.eye(KINDS, dtype=np.float16)[tokens]
        step = step._replace(
            request=np.arange(len(tokens), dtype=np.int32),
            gate_input=np.repeat(kind[:, None], LAYERS, axis=1) if facts["gate_input"] else None,
            embedding=kind if facts["embedding"] else None,
            probabilities=PROBABILITIES[tokens] if facts["probabilities"] else None,
            token=np.array(tokens, np.int32),
            draft_token=np.zeros(0, np.int32),
            draft_ids=np.zeros((0, LAYERS, TOP_K), np.int16),
            finished=tuple(range(len(tokens))) if step.number == len(kinds) - 1 else (),
        )
        return step._replace(**absent)

    return rewritten(directory / "kinds", plain, map(of_kinds, plain.step_traces()), **facts)


def routed(layer: int, kinds: list[int]) -> Observation:
    """ROUTED of a layer for tokens of these kinds."""
    return Observation(
        *(Moment.ROUTED, 0, 0, 0, -1, layer, 0.0),
        ids=ROUTES[kinds][:, layer : layer + 1].astype(np.int16),
        gate_input=np.eye(KINDS, dtype=np.float16)[kinds][:, None],
    )


def wanted(decision: Decision) -> list[tuple[int, int]]:
    assert decision.stages is not None
    return [(stage.layer, stage.expert) for stage in decision.stages]


def experts(layer: int, *kinds: int) -> set[tuple[int, int]]:
    return {(layer, int(e)) for kind in kinds for e in ROUTES[kind, layer]}

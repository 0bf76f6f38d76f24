"""From scores of a layer's experts to transfers: what policies that look ahead share."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Stage


def gate_scores(gate_input: np.ndarray, router: np.ndarray) -> np.ndarray:
    """float32[N, E]: what a router float32[D, E] says of gate inputs float16[N, D]."""
    return finite(gate_input) @ router


def finite(gate_input: np.ndarray) -> np.ndarray:
    """float32 of float16: what was beyond float16 is infinite, and infinity times zero is no
    number."""
    bound = np.float32(np.finfo(np.float16).max)
    return np.clip(gate_input.astype(np.float32), -bound, bound)


def softmax(scores: np.ndarray) -> np.ndarray:
    """Over the last axis."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def summed(rows: np.ndarray) -> np.ndarray:
    """Sum over the first axis, with the same bits in whatever order the rows are: a replay has
    them in another one than the engine."""
    return np.sort(rows, axis=0).sum(axis=0)


def mark_experts(ids: np.ndarray, experts: int, values: Any = 1) -> np.ndarray:
    """float32[N, E]: a row's values (a number, or [N, k]) where ids int[N, k] say, 0 elsewhere."""
    found = np.zeros((len(ids), experts), np.float32)
    np.put_along_axis(found, ids.astype(np.int64), np.asarray(values, np.float32), axis=1)
    return found


def chosen_by_rows(scores: np.ndarray, k: int) -> list[int]:
    """The experts that are among the k best of some row of scores [N, E]: first who is chosen by
    most rows, of these who has the largest sum of scores, of these the lowest id."""
    if not len(scores):
        return []
    best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    rows = np.bincount(best.ravel(), minlength=scores.shape[1])
    order = np.lexsort((-summed(scores), -rows))
    return order[: np.count_nonzero(rows)].tolist()


class Predicted(NamedTuple):
    """State of a policy that predicts each layer once, from an earlier one."""

    top_k: int
    ahead: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(layer, experts) of the layers to come, the next one first."""


def with_predicted(
    state: Predicted, layer: int, stride: int, scores: np.ndarray | None, cause: str
) -> tuple[Predicted, Decision]:
    """The state and the transfers after layer `layer` was routed, which says float32[N, E] scores
    of the layer `stride` on; None: it predicts nobody. Everybody whom some row is predicted to
    choose is wanted, the nearest layer first."""
    ahead = tuple(entry for entry in state.ahead if entry[0] > layer) if layer else ()
    if scores is not None:
        ahead = (*ahead, (layer + stride, tuple(chosen_by_rows(scores, state.top_k))))
    stages = (stage for later, experts in ahead for stage in stages_of(later, [*experts], cause))
    return state._replace(ahead=ahead), Decision(stages=tuple(stages))


def stages_of(layer: int, experts: list[int], cause: str) -> tuple[Stage, ...]:
    """Transfers of experts of one layer, the most urgent first."""
    return tuple(Stage(layer, expert, cause=cause) for expert in experts)

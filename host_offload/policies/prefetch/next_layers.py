"""From scores of a layer's experts to transfers: shared by policies that look ahead."""

from __future__ import annotations

import abc
import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from host_offload.control.interface import (
    Decision,
    Moment,
    Observation,
    Spec,
    Stage,
    Stages,
)
from host_offload.policies.prefetch.fitted import Fitted
from pallas_kernels.cpu.rows import finish_product, multiply_few

_T = TypeVar("_T")

ON_THIS_THREAD = 1 << 18
"""Most multiplications of a product of matrices that OpenBLAS does not give to several threads."""

HALVES_TO_WIDEN = 32
"""More rows are multiplied by float16 weights that were widened first."""

FOR_SEVERAL = 1 << 25
"""Multiplications that take so long that several threads are quicker."""


def apply_linear(rows: Any, weights: Any, bias: Any, form: str = "", xp: Any = np) -> Any:
    """form(rows [N, D] · weights [D, E] + bias [E]), see multiply_rows.

    - `form`: of pallas_kernels.cpu.rows.FORMS.
    - `xp`: numpy or jax.numpy.
    """
    if _are_few(rows, weights):
        return multiply_few(rows, weights, bias, form)
    return finish_product(multiply_rows(rows, weights) + bias, form, xp)


def _are_few(rows: Any, weights: Any) -> bool:
    """Whether a product is the native library's."""
    if not (isinstance(rows, np.ndarray) and isinstance(weights, np.ndarray)):
        return False
    most = {"e": HALVES_TO_WIDEN, "f": 4}.get(weights.dtype.char, 0)
    return len(rows) <= most and rows.dtype.char == "f"


def multiply_rows(rows: Any, weights: Any) -> Any:
    """The product of rows [N, D] and weights [D, E]. numpy's BLAS gives even one row to several
    threads, and their waking up took milliseconds beside a step, 300 ms for a prompt of 64 tokens
    on a busy machine. So few rows are the native library's, and more are multiplied in parts that
    stay on this thread. float16 weights are summed in float32."""
    if _are_few(rows, weights):
        return multiply_few(rows, weights)
    plain = isinstance(rows, np.ndarray) and isinstance(weights, np.ndarray)
    if plain and weights.dtype == np.float16:
        weights = weights.astype(np.float32)
    if plain and len(rows) <= 4:
        return np.einsum("nd,de->ne", rows, weights)
    if not plain or len(rows) * weights.size > FOR_SEVERAL:
        return rows @ weights
    found = np.empty((len(rows), weights.shape[1]), np.result_type(rows, weights))
    size = max(weights.shape[0], 1)
    wide = min(max(ON_THIS_THREAD // (8 * size), 2), weights.shape[1])
    tall = max(ON_THIS_THREAD // (wide * size), 2)
    for here in _divide(len(rows), tall):
        for there in _divide(weights.shape[1], wide):
            np.matmul(rows[here], weights[:, there], out=found[here, there])
    return found


def _divide(count: int, most: int) -> list[slice]:
    """Divides a range into parts of nearly the same length, at most `most`: a rest of one row would
    be a vector's product, which has threads sooner."""
    parts = -(-count // most)
    edges = [part * count // parts for part in range(parts + 1)]
    return list(map(slice, edges, edges[1:]))


def gate_scores(gate_input: np.ndarray, router: np.ndarray) -> np.ndarray:
    """Scores float32[N, E] of a router float32[D, E] for router inputs float16[N, D]."""
    return multiply_rows(finite(gate_input), router)


_MOST = np.float32(np.finfo(np.float16).max)


def finite(gate_input: np.ndarray) -> np.ndarray:
    """Converts float16 to finite float32. Values beyond float16 are infinite there, and infinity
    times zero is NaN."""
    found = gate_input.astype(np.float32)
    np.maximum(found, -_MOST, out=found)
    return np.minimum(found, _MOST, out=found)


def softmax(scores: np.ndarray) -> np.ndarray:
    """Softmax over the last axis."""
    powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return powers / powers.sum(axis=-1, keepdims=True)


def sum_rows(rows: np.ndarray) -> np.ndarray:
    """The sum over the first axis, with bits that do not depend on the order of rows: a replay has
    them in another order than the engine."""
    return rows[0] if len(rows) == 1 else np.sort(rows, axis=0).sum(axis=0)


def distinct(ids: np.ndarray) -> list[int]:
    """The experts among ids, ascending. For the few of a layer this takes a fifth of np.unique."""
    return sorted({*ids.ravel().tolist()})


def mark_experts(ids: np.ndarray, experts: int, values: Any = 1) -> np.ndarray:
    """float32[N, E]: each row's values (a number, or [N, k]) at its ids int[N, k], 0 elsewhere."""
    found = np.zeros((len(ids), experts), np.float32)
    found[np.arange(len(ids))[:, None], ids] = values  # a tenth of np.put_along_axis's time
    return found


def rank_chosen(scores: np.ndarray, k: int) -> list[int]:
    """The experts among the k best of some row of scores [N, E], sorted by number of rows, then by
    sum of scores, then by id."""
    if not len(scores):
        return []
    best = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    if len(best) == 1:
        return best[0].tolist()
    rows = np.bincount(best.ravel(), minlength=scores.shape[1])
    order = np.lexsort((-sum_rows(scores), -rows))
    return order[: np.count_nonzero(rows)].tolist()


def still_ahead(
    ahead: Iterable[tuple[int, _T]], layer: int, layers: int
) -> tuple[tuple[int, _T], ...]:
    """What was predicted of layers after this one. Layer 0 begins a token, from which layers are
    counted anew."""
    begun = 0 if layer else layers
    return tuple((later - begun, what) for later, what in ahead if later - begun > layer)


def last_rows(request: np.ndarray, position: np.ndarray) -> np.ndarray:
    """int64[n]: the last row of each request of a step, from which the next step goes on."""
    order = np.lexsort((position, request))
    ends = np.append(request[order][1:] != request[order][:-1], True)
    return order[ends]


class Predicted(NamedTuple):
    """State of a policy that predicts each layer once, from an earlier one."""

    top_k: int
    layers: int
    ahead: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """(layer, experts) of later layers, the next one first; those of the next token are counted on
    from the last layer."""


@dataclasses.dataclass(frozen=True)
class LayerPredictor(abc.ABC):
    """A prefetch by networks. When a layer's router has chosen, its network predicts which experts
    each row will choose `stride` layers later; in the last layers, which experts the next token
    will choose in the first ones, if there are such networks. All predicted experts are wanted, the
    nearest layer first, then experts of most rows."""

    fitted: Fitted
    """Arrays named LAYER.NAME, and the setting `stride`."""

    moments: frozenset[Moment] = frozenset({Moment.ROUTED})
    needs: frozenset[str] = frozenset({"gate_input"})
    writes: frozenset[str] = frozenset({"stages"})

    def init(self, spec: Spec) -> Any:
        """No layer is predicted yet. Raises ValueError for another model."""
        fitted = self.fitted
        fitted.check(spec)
        for layer in range(spec.layers):  # reads all arrays here, and not within the first step
            if own := fitted.of_layer(layer):
                for name, shape in self.shapes(own, spec).items():
                    fitted.array(f"{layer}.{name}", *shape, dtypes=(np.float16, np.float32))
        return Predicted(spec.top_k, spec.layers)

    @abc.abstractmethod
    def shapes(self, own: Mapping[str, np.ndarray], spec: Spec) -> dict[str, tuple[int, ...]]:
        """The shapes that a layer's arrays must have, by name; −1: any length."""

    def decide(self, state: Any, seen: Observation) -> tuple[Any, Decision]:
        return self.predict(state, seen, self.fitted.of_layer(seen.layer))

    def predict(
        self, state: Predicted, seen: Observation, own: Mapping[str, np.ndarray]
    ) -> tuple[Predicted, Decision]:
        """The decision by the layer's arrays; without any nothing is predicted from it."""
        layer, cause = seen.layer, self.fitted.policy
        ahead = still_ahead(state.ahead, layer, state.layers)
        if own:
            later = layer + self.fitted.setting("stride")
            experts = self.best(own, seen, later >= state.layers, state.top_k)
            ahead = (*ahead, (later, tuple(experts)))
        return Predicted(state.top_k, state.layers, ahead), Decision(
            stages=stages_of_layers([(x % state.layers, experts) for x, experts in ahead], cause)
        )

    def best(
        self, own: Mapping[str, np.ndarray], seen: Observation, next_token: bool, k: int
    ) -> list[int]:
        """The predicted experts, those of most rows first (rank_chosen).

        - `next_token`: whether the layer is one of the next token.
        """
        found = self.scores(own, seen)
        if next_token:
            found = found[last_rows(seen.request, seen.position)]
        return rank_chosen(found, k)

    @abc.abstractmethod
    def scores(self, own: Mapping[str, np.ndarray], seen: Observation) -> np.ndarray:
        """Scores float32[N, E] of the later layer, by this layer's arrays."""


def columns(own: Mapping[str, np.ndarray], name: str) -> int:
    """The columns of a matrix; −1 if there is no such matrix."""
    return own[name].shape[1] if name in own and own[name].ndim == 2 else -1


def stages_of(layer: int, experts: Sequence[int], cause: str) -> Stages:
    """Transfers of experts of one layer, the most urgent first."""
    return stages_of_layers([(layer, experts)], cause)


def stages_of_layers(wanted: Iterable[tuple[int, Sequence[int]]], cause: str) -> Stages:
    """Transfers of a few (layer, its experts), the most urgent first."""
    places = [(layer, expert, 0) for layer, experts in wanted for expert in experts]
    cause = sys.intern(cause)  # see stages_at
    found = Stages(Stage(*place, cause) for place in places)
    found.columns, found.cause = np.array(places, np.int64).reshape(-1, 3), cause
    return found

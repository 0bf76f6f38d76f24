"""ExpertFlow as a prefetch: forests that correct the routers' guesses, a step size that adapts, and
two levels of residents."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import Decision, Moment, Observation, Spec
from host_offload.policies.prefetch.fitted import Fitted, check_fitted, fit_of, read_fitted
from host_offload.policies.prefetch.forest import (
    HISTORY,
    Seen,
    check_forest,
    features,
    grow_forest,
    pre_gate,
    scores,
)
from host_offload.policies.prefetch.next_layers import (
    finite,
    gate_scores,
    mark_experts,
    rank_chosen,
    stages_of_layers,
)
from host_offload.traces.reader import Trace
from pallas_kernels.plan.victim import MAX_PRIOR

NAME = "expertflow"

COMPONENTS = 64
"""Principal components of the router's input, since traces lack the token's id (ours)."""

SHARE = 1 / 3
"""Share of the features among which a tree searches a split (ours)."""

MOST_LEAVES = np.iinfo(np.int16).max // 2


class Foreseen(NamedTuple):
    """The predicted experts of a later layer."""

    layer: int
    experts: tuple[int, ...]
    """Experts of most rows first."""
    absent: tuple[int, ...]
    """The experts among them that were absent when they were predicted."""


class Foreseeing(NamedTuple):
    """State of ExpertFlow."""

    router: np.ndarray
    """float32[L, D, E]"""
    top_k: int
    reach: int
    """The largest S."""
    recent: np.ndarray
    """bool[L, E]: experts that the layer's last rows used."""
    ahead: tuple[Foreseen, ...] = ()
    """The nearest layer first."""
    history: tuple[np.ndarray, ...] = ()
    """int16[N, k] of the routed layers of this step, the latest first."""
    steps: int = 1
    """S: how many layers ahead are prefetched, 1…reach (the formulas are ours)."""


@dataclasses.dataclass(frozen=True)
class ExpertFlow:
    """ExpertFlow (Shen et al., arXiv:2510.26730).

    At each layer's routing, a random forest corrects what the routers of the layers within the step
    size S say about this layer's input, by the choices here and in earlier layers. All experts that
    some row is predicted to choose are wanted, the nearest layer first. S begins at 1, grows by one
    if a layer misses a predicted expert, and shrinks if a prefetched expert was not used.

    Residents are on two lists over one pool of cells of all layers. The high list has experts that
    their layer's last rows used, and those that a layer within S is predicted to need. The least
    recently used expert of the low list is evicted, and of the high list only if the low one is
    empty. Needs driver="host". No output bit depends on it; routers that favour residents are
    another option, --cache-aware-routing. What is ours: docs/explanation/prescope.md.
    """

    fitted: Fitted
    pool: bool = True
    """True: all layers share one pool of cells; False: each layer has its own."""

    moments: frozenset[Moment] = frozenset({Moment.ROUTED})
    needs: frozenset[str] = frozenset({"gate_input", "router", "ids", "weights", "version"})
    writes: frozenset[str] = frozenset({"stages", "victim_weights", "prior"})
    victim_weights: tuple[int, int, int] = (1, 0, 1)
    """Recency, below a prior that no recency outweighs."""

    def init(self, spec: Spec) -> Foreseeing:
        """The state before the first step. Raises ValueError for another model."""
        self.fitted.check(spec)
        for layer in range(spec.layers - 1):
            self.fitted.array(f"{layer}.mean", spec.hidden)
            basis = self.fitted.array(f"{layer}.basis", spec.hidden, -1)
            for ahead in range(1, min(self.fitted.setting("reach"), spec.layers - 1 - layer) + 1):
                check_forest(self.fitted, f"{layer}.{ahead}", spec.experts, basis.shape[1])
        assert spec.router is not None
        recent = np.zeros((spec.layers, spec.experts), bool)
        return Foreseeing(spec.router, spec.top_k, self.fitted.setting("reach"), recent)

    def decide(self, state: Foreseeing, seen: Observation) -> tuple[Foreseeing, Decision]:
        layer, here, there = seen.layer, seen.ids[:, 0], seen.version >= 0
        used = np.zeros(there.shape[1], bool)
        used[here] = True
        if layer == 0:  # what was left of a step that ended early
            state = state._replace(ahead=(), history=())
        state = _adjust(state, layer, used, there[layer])
        recent = state.recent.copy()
        recent[layer] = used
        now = Seen(finite(seen.gate_input[:, 0]), here, seen.weights[:, 0], state.history)
        ahead = tuple(
            self._foresee(state, now, layer, later, there[later])
            for later in range(layer + 1, min(layer + 1 + state.steps, len(state.router)))
        )
        state = state._replace(recent=recent, ahead=ahead, history=(here, *state.history)[:HISTORY])
        prior = np.where(recent, np.int32(MAX_PRIOR), np.int32(0))
        for each in ahead:
            prior[each.layer, list(each.experts)] = MAX_PRIOR
        wanted = ((each.layer, each.experts) for each in ahead)
        return state, Decision(stages=stages_of_layers(wanted, NAME), prior=prior)

    def _foresee(
        self, state: Foreseeing, now: Seen, layer: int, later: int, there: np.ndarray
    ) -> Foreseen:
        said = gate_scores(now.gate_input, state.router[later])
        found = scores(self.fitted.arrays, layer, later - layer, now, said)
        experts = tuple(rank_chosen(found, state.top_k))
        before = [set(each.absent) for each in state.ahead if each.layer == later]
        known = before[0] if before else set()
        absent = tuple(expert for expert in experts if expert in known or not there[expert])
        return Foreseen(later, experts, absent)


def _adjust(state: Foreseeing, layer: int, used: np.ndarray, there: np.ndarray) -> Foreseeing:
    """The state with S adapted to the layer's prediction: one more if the layer waited for a
    predicted expert, one fewer if prefetched experts had no rows.

    - `used`, `there`: bool[E] of that layer.
    """
    for each in state.ahead:
        if each.layer == layer:
            late = any(used[expert] and not there[expert] for expert in each.experts)
            unused = any(there[expert] and not used[expert] for expert in each.absent)
            steps = state.steps + (1 if late else -1 if unused else 0)
            state = state._replace(steps=min(max(steps, 1), state.reach))
    return state


def fit(
    trace: Trace,
    router: np.ndarray,
    *,
    reach: int = 4,
    trees: int = 20,
    leaves: int = 256,
    seed: int = 0,
    pool: bool = True,
    report: Callable[[int, int, str], None] | None = None,
) -> ExpertFlow:
    """ExpertFlow for the model of a trace that has gate inputs. The paper has a random forest and
    no figures of it that we know; the same trace and seed give the same forests.

    - `router`: float32[L, D, E], whose guesses the forests set right.
    - `reach`: layers ahead that have forests, one for each layer and distance: the largest S.
    - `pool`: that of ExpertFlow.

    Raises TraceError for a trace without gate inputs or tokens, ValueError for settings out of
    range and for a router of other sizes, NoTrainer without scikit-learn.
    """
    from host_offload.policies.prefetch import training

    header = trace.header
    training.check_gate_inputs(trace, 1, NAME)
    if min(trees, reach) < 1 or not 2 <= leaves <= MOST_LEAVES:
        raise ValueError(
            f"trees and reach are at least 1, leaves 2 to {MOST_LEAVES}, not {trees}, {reach} and "
            f"{leaves}"
        )
    if router.shape != (header.layers, header.gate_input, header.experts):
        raise ValueError(
            f"routers of {router.shape} are not those of a model with layers, hidden size and "
            f"experts {(header.layers, header.gate_input, header.experts)}"
        )
    ids = trace.array("token.ids")
    arrays: dict[str, np.ndarray] = {}
    for layer in range(header.layers - 1):
        for ahead in range(1, min(reach, header.layers - 1 - layer) + 1):
            some = training.layer_samples(trace, layer, ahead)
            if ahead == 1:
                mean, basis = training.principal(some.gate_input, COMPONENTS)
                arrays |= {f"{layer}.mean": mean, f"{layer}.basis": basis}
            if report is not None:
                report(layer, header.layers - 1, f"{ahead} ahead")
            base = pre_gate(gate_scores(some.gate_input, router[layer + ahead]), header.top_k)
            past = [ids[:, layer - back] for back in range(1, min(HISTORY, layer) + 1)]
            seen = Seen(some.gate_input, some.ids, some.weights, past)
            wrong = mark_experts(some.later, header.experts) - base
            x = features(seen, base, mean, basis)
            forest = grow_forest(x, wrong, trees=trees, leaves=leaves, share=SHARE, seed=seed)
            arrays |= {f"{layer}.{ahead}.{name}": array for name, array in forest._asdict().items()}
    settings = {"reach": min(reach, header.layers - 1), "trees": trees}
    return ExpertFlow(fit_of(NAME, header, arrays, settings), pool)


def read_or_fit(
    path: Path, trace: Trace, router: np.ndarray, *, pool: bool = True, **settings: Any
) -> ExpertFlow:
    """ExpertFlow with the forests of a file. If there is no file, `fit` trains them with these
    settings. Raises what fit raises, and ValueError for a file of another kind or model."""
    if not path.exists():
        fit(trace, router, **settings).fitted.write(path)
    found = ExpertFlow(read_fitted(path, NAME), pool)
    check_fitted([found], trace.header.config_digest)
    return found

"""ExpertFlow: its forests, its step size and its two levels of residents
(docs/explanation/prescope.md)."""

import dataclasses
import sys

import numpy as np
import pytest

from host_offload.control.interface import Moment, Observation
from host_offload.policies.prefetch.expertflow import (
    COMPONENTS,
    SHARE,
    ExpertFlow,
    Foreseen,
    fit,
)
from host_offload.policies.prefetch.forest import (
    HISTORY,
    NoTrainer,
    Seen,
    features,
    forest_of,
    pre_gate,
    scores,
)
from host_offload.policies.prefetch.next_layers import gate_scores
from host_offload.policies.prefetch.prefetch_names import PREFETCH
from host_offload.policies.prefetch.training import (
    LayerSamples,
    layer_samples,
    principal,
    recall_of,
)
from host_offload.simulate.simulator import spec_of
from host_offload.traces.reader import Trace, TraceError
from pallas_kernels.plan.victim import LOG2_UNIT, MAX_PRIOR, victim_key
from tests.host_offload.policies.prefetch.test_llapor import (
    EXPERTS,
    LAYERS,
    TOP_K,
    deterministic,
    trace_of,
)

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

QUICK: dict = {"trees": 5, "leaves": 64, "reach": 2}


def seen_of(some: LayerSamples, ids: np.ndarray, layer: int) -> Seen:
    """What rows say of a layer. ids: int[N, L, k] of the same rows."""
    past = [ids[:, layer - back] for back in range(1, min(HISTORY, layer) + 1)]
    return Seen(some.gate_input, some.ids, some.weights, past)


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Trace:
    inputs, ids, _ = deterministic()
    return trace_of(tmp_path_factory.mktemp("expertflow"), inputs, ids)


@pytest.fixture(scope="module")
def router() -> np.ndarray:
    return deterministic()[2]


@pytest.fixture(scope="module")
def learned(trace, router) -> ExpertFlow:
    return fit(trace, router, **QUICK)


# ---- the forest


def test_it_learns_a_router_that_follows_from_the_layer_before(trace, router, learned, tmp_path):
    """On another text of the same kinds of tokens, one and two layers ahead, where reusing gates
    fails."""
    inputs, ids, _ = deterministic()
    rows = np.random.default_rng(1).permutation(len(ids))
    noise = 0.01 * np.random.default_rng(2).normal(size=inputs.shape)
    other = trace_of(tmp_path, inputs[rows] + noise, ids[rows])
    for layer, ahead in ((0, 1), (1, 1), (2, 1), (0, 2), (1, 2)):
        some = layer_samples(other, layer, ahead)
        said = gate_scores(some.gate_input, router[layer + ahead])
        seen = seen_of(some, ids[rows], layer)
        found = scores(learned.fitted.arrays, layer, ahead, seen, said)
        assert recall_of(found, some.later) >= 0.98, (layer, ahead)
        assert recall_of(said, some.later) < 0.7


def test_the_forest_answers_as_the_one_that_was_trained(trace, router, learned):
    """To float32, thresholds included, of a forest that is trained here by scikit-learn."""
    from sklearn.ensemble import RandomForestRegressor  # a second

    layer, ahead = 2, 1
    ids, every = trace.array("token.ids"), layer_samples(trace, layer, ahead)
    base = pre_gate(gate_scores(every.gate_input, router[layer + ahead]), TOP_K)
    mean, basis = principal(every.gate_input, COMPONENTS)
    x = features(seen_of(every, ids, layer), base, mean, basis)
    y = np.zeros((len(x), EXPERTS), np.float32)
    np.put_along_axis(y, every.later.astype(int), 1, axis=1)
    one = RandomForestRegressor(5, max_leaf_nodes=64, max_features=SHARE, random_state=0).fit(
        x, y - base
    )
    mine = forest_of(learned.fitted.arrays, layer, ahead)
    np.testing.assert_allclose(mine.predicted(x), one.predict(x), atol=1e-6)
    # Exactly at a threshold a row goes left.
    edge = np.repeat(x[:1], 2, axis=0)
    split_by = mine.feature[0, 0]
    edge[0, split_by] = mine.threshold[0, 0]
    edge[1, split_by] = np.nextafter(mine.threshold[0, 0], np.float32(np.inf))
    np.testing.assert_allclose(mine.predicted(edge), one.predict(edge), atol=1e-6)
    # A row's bits do not depend on who is beside it: a replay has rows in another order.
    assert np.array_equal(mine.predicted(x)[::-1], mine.predicted(x[::-1]))
    assert np.array_equal(mine.predicted(x)[:3], mine.predicted(x[:3]))


def test_what_cannot_be_learned_from(trace, router, tmp_path, monkeypatch):
    inputs, ids, _ = deterministic()
    blind = trace_of(tmp_path / "blind", inputs, ids, gate_input=0)
    with pytest.raises(TraceError, match="has no gate inputs, which expertflow learns from"):
        fit(blind, router)
    with pytest.raises(ValueError, match="are not those of a model with layers"):
        fit(trace, router[:-1])
    for changes in ({"trees": 0}, {"leaves": 1}, {"leaves": 20000}, {"reach": 0}):
        with pytest.raises(ValueError, match="at least 1, leaves 2 to 16383"):
            fit(trace, router, **{**QUICK, **changes})
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(NoTrainer, match=r"pip install 'moejax\[train\]'"):
        fit(trace, router, **QUICK)


# ---- the policy


def observed(trace: Trace, layer: int, version: np.ndarray, step: int = 0) -> Observation:
    rows = list(trace.step_traces())[step]
    assert rows.gate_input is not None and rows.weights is not None
    one = slice(layer, layer + 1)
    return Observation(
        *(Moment.ROUTED, step, 0, 0, -1, layer, 0.0),
        ids=rows.ids[:, one],
        weights=rows.weights[:, one],
        gate_input=rows.gate_input[:, one],
        version=version,
    )


def test_it_wants_whom_layers_within_the_step_size_will_use(trace, router, learned):
    """A layer ahead at first, two once a layer missed who was predicted, one again once somebody
    came for nothing; the nearest layer first."""
    spec = dataclasses.replace(spec_of(trace.header), router=router)
    ids = next(iter(trace.step_traces())).ids
    used = np.zeros((LAYERS, EXPERTS), bool)
    for layer in range(LAYERS):
        used[layer, ids[:, layer]] = True
    nobody = np.full((LAYERS, EXPERTS), -1, np.int8)
    state = learned.init(spec)
    state, decision = learned.decide(state, observed(trace, 0, nobody))
    assert {(s.layer, s.expert) for s in decision.stages} == {
        (1, int(e)) for e in np.flatnonzero(used[1])
    }
    assert state.steps == 1 and state.ahead[0].absent == state.ahead[0].experts
    some = np.where(np.arange(EXPERTS) < 4, 0, nobody).astype(np.int8)
    half, _ = learned.decide(learned.init(spec), observed(trace, 0, some))
    assert {*half.ahead[0].absent} == {e for e in half.ahead[0].experts if e >= 4} != set()
    # All that were predicted are late.
    late, decision = learned.decide(state, observed(trace, 1, nobody))
    assert late.steps == 2
    layers = [s.layer for s in decision.stages]
    assert layers == sorted(layers) and {*layers} == {2, 3}
    # All came, and one more that is not used.
    came = np.where(used, 0, -1).astype(np.int8)
    (one,) = late.ahead[:1]
    spare = int(np.flatnonzero(~used[2])[0])
    came[2, spare] = 0
    more = Foreseen(2, (*one.experts, spare), (*one.absent, spare))
    late = late._replace(ahead=(more, *late.ahead[1:]))
    fewer, decision = learned.decide(late, observed(trace, 2, came))
    assert fewer.steps == 1 and {s.layer for s in decision.stages} == {3}
    # Whoever was there before it was predicted did not come for nothing.
    there = late._replace(ahead=(more._replace(absent=()), *late.ahead[1:]))
    same, _ = learned.decide(there, observed(trace, 2, came))
    assert same.steps == 2
    last, decision = learned.decide(same, observed(trace, 3, came))
    assert decision.stages == ()
    # A new step knows nothing of the rows of the one before.
    again, _ = learned.decide(last, observed(trace, 0, came))
    assert again.steps == last.steps and len(again.history) == 1
    assert all(each.layer > 0 for each in again.ahead)


def test_two_levels_of_residents(trace, router, learned):
    """High: whom their layer used last and whom a layer within the step size is predicted to need;
    no recency makes up for it."""
    state = learned.init(dataclasses.replace(spec_of(trace.header), router=router))
    every = np.zeros((LAYERS, EXPERTS), np.int8)
    ids = [step.ids for step in trace.step_traces()]
    state, first = learned.decide(state, observed(trace, 0, every))
    high = np.zeros((LAYERS, EXPERTS), bool)
    high[0, ids[0][:, 0]] = high[1, ids[0][:, 1]] = True
    assert np.array_equal(first.prior > 0, high) and first.prior.dtype == np.int32
    for layer in range(1, LAYERS):
        state, _ = learned.decide(state, observed(trace, layer, every))
    state, decision = learned.decide(state, observed(trace, 0, every, step=1))
    high[:] = False
    for layer in range(LAYERS):  # the last step's, but of layer 0 this one's
        high[layer, ids[0 if layer else 1][:, layer]] = True
    high[1, ids[1][:, 1]] = True
    assert np.array_equal(decision.prior > 0, high)
    oldest, newest = np.int32(1 << 30), np.int32(1)
    keys = [
        victim_key(age, np.int32(0), prior, np.array(learned.victim_weights, np.int32))
        for age, prior in ((newest, np.int32(0)), (oldest, np.int32(MAX_PRIOR)))
    ]
    assert keys[0] < keys[1] and LOG2_UNIT > 0


def test_a_file_keeps_it_and_another_model_is_refused(trace, router, learned, tmp_path):
    learned.fitted.write(tmp_path / "forest.safetensors")
    assert PREFETCH.parse(f"expertflow={tmp_path / 'forest.safetensors'}") == learned
    with pytest.raises(ValueError, match="prefetch 'expertflow' needs a file that its fit wrote"):
        PREFETCH.parse("expertflow")
    with pytest.raises(ValueError, match="was fitted to a model with experts 8, this one has 9"):
        learned.init(dataclasses.replace(spec_of(trace.header), experts=9, router=router))

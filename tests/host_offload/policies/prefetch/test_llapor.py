"""LLaPor: its networks, losses, metrics, and what it learns (docs/explanation/prescope.md)."""

import dataclasses
import itertools
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from host_offload.control.interface import Moment, Observation
from host_offload.control.step_record import LinkUse
from host_offload.policies.placement.placement_names import with_placement
from host_offload.policies.prefetch import llapor, llapor_online, training
from host_offload.policies.prefetch.fitted import of_layer
from host_offload.policies.prefetch.llapor import (
    LayerTask,
    Learned,
    fit,
    fit_layer,
    scores,
    tune_layer,
)
from host_offload.policies.prefetch.llapor_online import LearnedOnline
from host_offload.policies.prefetch.next_layers import finite, gate_scores
from host_offload.policies.prefetch.prefetch_names import PREFETCH
from host_offload.policies.prefetch.training import layer_samples, leave_out, recall_of
from host_offload.policies.recorded import repeat_run
from host_offload.simulate.simulator import spec_of
from host_offload.traces.reader import Trace, TraceError
from tests.host_offload.traces.traces_of import rewritten, write_trace

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

LAYERS, EXPERTS, TOP_K, HIDDEN = 4, 8, 2, 12
STEPS, ROWS = 75, 8


def deterministic(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(gate inputs [N, L, D], ids [N, L, k], routers [L, D, E]) of a model whose later layers
    follow from the first: each input is the one before, turned. The routers of adjacent layers
    have nothing to do with each other, so reusing gates fails."""
    rng = np.random.default_rng(seed)
    turns = [np.linalg.qr(rng.normal(size=(HIDDEN, HIDDEN)))[0] for _ in range(LAYERS)]
    routers = rng.normal(size=(LAYERS, HIDDEN, EXPERTS))
    # Few kinds of tokens: who is routed where is then far from any border between experts. Each
    # row is a request of five steps, whose next token has the next kind.
    kinds = rng.normal(size=(24, HIDDEN))
    kind = rng.integers(24, size=(STEPS // 5, 1, ROWS)) + np.arange(5)[:, None]
    x = kinds[kind.ravel() % 24] + 0.01 * rng.normal(size=(STEPS * ROWS, HIDDEN))
    inputs, ids = [], []
    for turn, router in zip(turns, routers, strict=True):
        inputs.append(x)
        ids.append(np.sort(np.argsort(-(x @ router), axis=1)[:, :TOP_K], axis=1))
        x = x @ turn
    return np.stack(inputs, 1), np.stack(ids, 1), routers.astype(np.float32)


def trace_of(directory: Path, inputs: np.ndarray, ids: np.ndarray, **header) -> Trace:
    """A trace of them, ROWS requests a step, five steps a request."""
    plain = write_trace(directory / "plain", list(ids.reshape(STEPS, ROWS, LAYERS, TOP_K)), EXPERTS)
    spec = {**plain.header.spec, "hidden": HIDDEN}
    facts = {"spec": spec, "gate_input": HIDDEN, **header}
    rows = inputs.reshape(STEPS, ROWS, LAYERS, HIDDEN).astype(np.float16)
    steps = (
        step._replace(
            gate_input=rows[step.number] if facts["gate_input"] else None,
            request=(step.number // 5 * ROWS + np.arange(ROWS)).astype(np.int32),
            position=np.full(ROWS, step.number % 5, np.int32),
        )
        for step in plain.step_traces()
    )
    return rewritten(directory / "trace", plain, steps, **facts)


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Trace:
    inputs, ids, _ = deterministic()
    return trace_of(tmp_path_factory.mktemp("llapor"), inputs, ids)


@pytest.fixture(scope="module")
def learned(trace) -> Learned:
    return fit(trace, width=64, epochs=40, patience=40, batch=16, edge=1)


def test_it_learns_a_router_that_follows_from_the_layer_before(trace, learned):
    """In each group, of requests that it has not seen, where reusing the next layer's gate fails.
    The last layer predicts the first one of the next token."""
    routers, left_out = deterministic()[2], leave_out(trace, 0.25)
    for layer in range(LAYERS):
        some = layer_samples(trace, layer, 1)
        some = some.of(left_out & (some.later[:, 0] >= 0))
        own = of_layer(learned.fitted.arrays, layer)
        assert ("gate" in own) == (layer == 1)  # the middle
        assert {a.dtype.name for a in own.values() if a.ndim == 2} == {"float16"}
        found = scores(own, some.gate_input, some.ids, some.weights)
        assert recall_of(found, some.later) >= 0.99, layer
        gates = gate_scores(some.gate_input, routers[(layer + 1) % LAYERS])
        assert recall_of(gates, some.later) < 0.7


def test_the_policy_wants_whom_rows_are_predicted_to_choose(trace, learned):
    policy_state = learned.init(spec_of(trace.header))
    step, following = itertools.islice(trace.step_traces(), 2)
    wanted = []
    for seen in itertools.islice(observations(trace), LAYERS):
        policy_state, decision = learned.decide(policy_state, seen)
        wanted.append([(s.layer, s.expert, s.cause) for s in decision.stages])
    later = [step.ids[:, layer] for layer in range(1, LAYERS)] + [following.ids[:, 0]]
    for layer, entries in enumerate(wanted):
        assert {entry[0] for entry in entries} == {(layer + 1) % LAYERS}
        assert all(entry[2] == "learned" for entry in entries)
        rows = np.bincount(later[layer].ravel(), minlength=EXPERTS)
        assert {entry[1] for entry in entries} == set(np.flatnonzero(rows).tolist())
        assert rows[entries[0][1]] == rows.max()  # who has most rows comes first


@pytest.mark.parametrize("placed", [False, True])
def test_a_stride_of_two_reaches_into_the_next_token(trace, placed):
    """Each layer sees what the two layers before it predicted, also over the end of a token."""
    policy = fit(trace, width=8, epochs=1, batch=16, edge=1, stride=2)
    if placed:
        (policy,) = with_placement(f"prescope,{COSTS}", [policy])
    state: Any = policy.init(spec_of(trace.header))
    for layer, seen in enumerate(itertools.islice(observations(trace), LAYERS + 1)):
        state, decision = policy.decide(state, at_experts(seen) if placed else seen)
        expected = [layer % LAYERS + n for n in (1, 2) if layer or n == 2]
        assert [later for later, _ in state.ahead] == expected
        layers = [s.layer for s in decision.stages]
        assert {*layers} <= {later % LAYERS for later in expected}
        assert placed or [*dict.fromkeys(layers)] == [later % LAYERS for later in expected]


def at_experts(seen: Observation, there=None) -> Observation:
    """The observation of a placement. there: bool[L, E], residents."""
    counts = np.zeros((LAYERS, EXPERTS), np.int32)
    counts[seen.layer] = np.bincount(seen.ids.ravel(), minlength=EXPERTS)
    version = np.full((LAYERS, EXPERTS), -1, np.int8)
    return dataclasses.replace(
        seen,
        moment=Moment.EXPERTS_BEGIN,
        counts=counts,
        version=version if there is None else np.where(there, 0, version),
        cells=np.zeros(LAYERS, np.int32),
        **LinkUse()._asdict(),
    )


COSTS = "per_token=1,startup=1,load=1,accelerator=0.1,attention=2"


def test_a_placement_predicts_the_next_two_layers_by_the_networks(trace, learned):
    """PreScope whole: the work that it foresees is what the rows of the next layer then are, after
    the last layer those of the next token. The network of that layer reads the predicted routing
    and foresees one more layer. Prefetches are of the next layer, and of the one after it where
    nothing is missing in the next (Q4)."""
    (policy,) = with_placement(f"prescope,{COSTS}", [learned])
    steps = [*itertools.islice(trace.step_traces(), 2)]
    rows = [
        np.bincount(s.ids[:, n].ravel(), minlength=EXPERTS) for s in steps for n in range(LAYERS)
    ]
    for near in (True, False):
        state: Any = policy.init(spec_of(trace.header))
        for layer, seen in enumerate(itertools.islice(observations(trace), LAYERS)):
            there = np.zeros((LAYERS, EXPERTS), bool)
            there[(layer + 1) % LAYERS] = not near
            state, decision = policy.decide(state, at_experts(seen, there))
            assert {later for later, _ in state.ahead} == {layer + n for n in (1, 2)}
            (_, work), (_, further) = state.ahead
            assert np.abs(work - rows[layer + 1]).sum() <= 2
            given = finite(seen.gate_input[:, 0]), seen.ids[:, 0], seen.weights[:, 0]
            for source in (layer, layer + 1):
                said = scores(learned.fitted.of_layer(source % LAYERS), *given)
                given = given[0], *llapor.choose_routing(said, given[2])
            assert (further == np.bincount(given[1].ravel(), minlength=EXPERTS)).all()
            assert {s.layer for s in decision.stages} == {(layer + 2 - near) % LAYERS}


@pytest.mark.nightly
def test_networks_that_learn_on_predict_for_a_placement(trace, begun):
    """The networks that a round ended with are those that the placement predicts by from the next
    step on; its own are unchanged."""
    (policy,) = with_placement(f"prescope,{COSTS}", [begun])
    assert policy.fitted is begun.fitted
    state: Any = policy.init(spec_of(trace.header))
    seen = [at_experts(one) for one in itertools.islice(observations(trace), 26 * LAYERS)]
    for one in seen[: 25 * LAYERS]:
        state, _ = policy.decide(state, one)
        state.networks.wait()
    assert state.networks.rounds == 4
    fresh, _ = policy.decide(policy.init(spec_of(trace.header)), seen[-LAYERS])
    after, _ = policy.decide(state, seen[-LAYERS])
    actual = [at_experts(one).counts[1] for one in seen[-LAYERS:]][1]
    error = [np.abs(dict(found.ahead)[1] - actual).sum() for found in (fresh, after)]
    assert error[1] < error[0]


# ---- networks and losses


@pytest.mark.parametrize("layer", [0, 1])
def test_a_network_is_what_the_paper_draws(learned, layer):
    """Against the equations written out with jax's own gelu and sigmoid, one row at a time."""
    a = {n: jnp.asarray(x) for n, x in of_layer(learned.fitted.arrays, layer).items()}
    rng = np.random.default_rng(0)
    gate_input = rng.normal(size=(5, HIDDEN)).astype(np.float32)
    ids = np.sort([rng.permutation(EXPERTS)[:TOP_K] for _ in range(5)], axis=1)
    weights = rng.random((5, TOP_K)).astype(np.float32)
    found = scores(of_layer(learned.fitted.arrays, layer), gate_input, ids, weights)
    for row in range(5):
        pca = (gate_input[row] - a["mean"]) @ a["basis"]
        route = jnp.zeros(EXPERTS).at[ids[row]].set(weights[row])
        z = jax.nn.gelu(jnp.concatenate([pca, route]) @ a["input"] + a["input_bias"])
        if layer == 1:
            r = jax.nn.gelu(z @ a["inner1"] + a["inner1_bias"])
            r = jax.nn.gelu(r @ a["inner2"] + a["inner2_bias"])
            z = z + jax.nn.sigmoid(pca @ a["gate"] + a["gate_bias"]) * r
        np.testing.assert_allclose(found[row], z @ a["output"] + a["output_bias"], atol=2e-4)


def test_losses_are_the_papers():
    """By its formulas, in numpy: BCE over f_i, and the focal term with the probability of the true
    label."""
    rng = np.random.default_rng(0)
    found, chosen = rng.normal(size=(3, 5)), (rng.random((3, 5)) < 0.4).astype(float)
    frequency = rng.uniform(0.2, 1, 5)
    p = 1 / (1 + np.exp(-found))
    bce = chosen * np.log(p) + (1 - chosen) * np.log(1 - p)
    p_t = np.where(chosen == 1, p, 1 - p)
    expected = -np.mean(bce / frequency) - 1.5 * np.mean((1 - p_t) ** 3 * bce)
    given = jnp.asarray(found), jnp.asarray(chosen), 1 / frequency
    edge, middle = (LayerTask(deep, focal=1.5, gamma=3.0) for deep in (False, True))
    assert float(edge.loss_of(*given)) == pytest.approx(expected, 1e-4)
    assert float(middle.loss_of(*given)) == pytest.approx(-np.mean(bce), 1e-4)


# ---- training


def test_the_epoch_with_the_best_recall_is_kept_and_it_ends_early(trace):
    some, left_out = layer_samples(trace, 0, 1), leave_out(trace, 0.25)
    said: list[float] = []
    task = LayerTask(False, width=64, epochs=40, patience=3)
    given = some.of(~left_out), some.of(left_out), EXPERTS, np.random.default_rng(0)
    own = fit_layer(task, *given, lambda text: said.append(float(text.split()[2])))
    assert len(said) < 40 and len(said) == int(np.argmax(said)) + 1 + 3
    test = some.of(left_out)
    found = scores(own, test.gate_input, test.ids, test.weights)
    assert recall_of(found, test.later) == pytest.approx(max(said), abs=1e-3)
    # 1/f is of what it learned from: who is used evenly has 1, nobody more than 10.
    share = np.bincount(some.of(~left_out).later.ravel(), minlength=EXPERTS)
    expected = np.minimum(share.mean() / np.maximum(share, 1), 10)
    np.testing.assert_allclose(own["balance"], expected, rtol=1e-5)


def test_what_it_cannot_learn_from_is_refused(trace, tmp_path):
    with pytest.raises(ValueError, match="stride must lie in 1…3, not 4"):
        fit(trace, stride=4)
    inputs, ids, _ = deterministic()
    with pytest.raises(TraceError, match="has no gate inputs, which learned learns from"):
        fit(trace_of(tmp_path / "a", inputs, ids, gate_input=0))
    with pytest.raises(TraceError, match="has 120 requests, too few to leave some out"):
        leave_out(trace, 1.0)


# ---- going on to learn: rounds, who waits for them (nobody), and decisions taken again


@pytest.fixture(scope="module")
def begun(trace) -> LearnedOnline:
    """One epoch: it has learned little."""
    return LearnedOnline(fit(trace, width=32, epochs=1).fitted, rows=40, iterations=30, rate=2e-3)


def observations(trace):
    """What routing of each layer of each step shows."""
    for step in trace.step_traces():
        for layer in range(LAYERS):
            yield Observation(
                moment=Moment.ROUTED,
                step=step.number,
                layer=layer,
                age=0,
                interval=0,
                turn=-1,
                seconds=0.0,
                gate_input=step.gate_input[:, layer : layer + 1],
                ids=step.ids[:, layer : layer + 1],
                weights=step.weights[:, layer : layer + 1],
                request=step.request,
                position=step.position,
            )


def recalls(trace, arrays) -> list[float]:
    found = []
    for layer in range(LAYERS - 1):
        some = layer_samples(trace, layer, 1)
        said = scores(of_layer(arrays, layer), some.gate_input, some.ids, some.weights)
        found.append(recall_of(said, some.later))
    return found


@pytest.mark.nightly  # test_networks_learn_on_beside_an_engine has them within a run
def test_rounds_learn_from_what_steps_route_and_come_into_use_between_steps(trace, begun):
    state = begun.init(spec_of(trace.header))
    before = state.tuner.arrays
    for seen in observations(trace):
        used = state.tuner.arrays
        state, decision = begun.decide(state, seen)
        assert seen.layer == 0 or state.tuner.arrays is used
        assert decision.stages is not None
        state.tuner.wait()
    assert begun.stats(state)["rounds"] == STEPS * 8 // 40 - 1  # the last one is not in use yet
    after = recalls(trace, state.tuner.arrays)
    assert min(np.subtract(after, recalls(trace, before))) > 0.1
    assert before is begun.fitted.arrays  # which is as it was
    for kept in ("0.basis", "0.balance"):
        assert np.array_equal(state.tuner.arrays[kept], before[kept])


def test_networks_of_the_last_layers_learn_on_too(trace, begun):
    """They predict the first layers of a request's next token, which another step routes."""
    state, last = begun.init(spec_of(trace.header)), LAYERS - 1
    before = state.tuner.arrays
    for seen in itertools.islice(observations(trace), 26 * LAYERS):
        state, _ = begun.decide(state, seen)
        state.tuner.wait()
    some = layer_samples(trace, last, 1)
    some = some.of(some.later[:, 0] >= 0)
    was, now = (
        recall_of(
            scores(of_layer(arrays, last), some.gate_input, some.ids, some.weights), some.later
        )
        for arrays in (before, state.tuner.arrays)
    )
    assert now > was + 0.05
    trained = state.tuner._trained["0.input"]  # rounds go on from what was not rounded
    used = state.tuner.arrays["0.input"]
    assert (trained.dtype, used.dtype) == (np.float32, np.float16)
    assert not np.array_equal(trained, used) and np.array_equal(trained.astype(np.float16), used)


def test_no_step_waits_for_a_round(trace, begun, monkeypatch):
    """A round that does not end until the run is over: all steps go on with what there was. The
    policy begins in the middle of a step, which is left out."""
    go_on, run = threading.Event(), llapor.tune_layer

    def slow(*args):
        assert go_on.wait(60)
        return run(*args)

    monkeypatch.setattr(llapor_online, "tune_layer", slow)
    state = begun.init(spec_of(trace.header))
    for seen in itertools.islice(observations(trace), 2, None):
        state, _ = begun.decide(state, seen)
    assert begun.stats(state)["rounds"] == 0
    go_on.set()
    state.tuner.wait()
    state.tuner.swap()
    assert state.tuner.rounds == 1


def test_what_a_round_raises_is_raised_at_the_next_step(trace, begun, monkeypatch):
    def broken(*args):
        raise RuntimeError("no memory")

    monkeypatch.setattr(llapor_online, "tune_layer", broken)
    state = begun.init(spec_of(trace.header))
    seen = list(observations(trace))
    for one in seen[: 5 * LAYERS]:
        state, _ = begun.decide(state, one)
    state.tuner.wait()
    with pytest.raises(RuntimeError, match="no memory"):
        begun.decide(state, seen[5 * LAYERS])


def test_decisions_are_taken_again_from_the_trace(trace, begun, monkeypatch):
    state, lines, wanted = begun.init(spec_of(trace.header)), [], []
    for seen in observations(trace):
        state, decision = begun.decide(state, seen)
        wanted.append(decision.stages)
        stages = [[*stage] for stage in decision.stages]
        line = {"step": seen.step, "moment": "ROUTED", "policy": "LearnedOnline"}
        lines.append({**line, "decision": {"stages": stages}})
    with pytest.raises(TraceError, match="has no decisions of LearnedOnline"):
        repeat_run(trace, begun)
    monkeypatch.setattr(type(trace), "policy_decisions", lambda self: iter(lines))
    again = repeat_run(trace, begun)
    state, found = again.init(spec_of(trace.header)), []
    for seen in observations(trace):
        state, decision = again.decide(state, seen)
        found.append(decision.stages)
    assert found == wanted
    with pytest.raises(TraceError, match="no decision of LearnedOnline at ROUTED of step"):
        again.decide(state, seen)
    lines[0]["decision"]["kv_pages"] = 3
    with pytest.raises(TraceError, match=r"LearnedOnline decided kv_pages, .* repeats prior, exec"):
        repeat_run(trace, begun)


def test_what_cannot_be_is_refused(trace, begun, tmp_path):
    file = tmp_path / "learned"
    begun.fitted.write(file)
    policy = PREFETCH.parse(f"learned_online={file}")
    assert policy == LearnedOnline(begun.fitted)
    assert PREFETCH.parse(f"learned={file}") == Learned(begun.fitted)
    for wrong in ({"rows": 0}, {"iterations": 0}, {"rate": 0.0}):
        with pytest.raises(ValueError, match="learning on needs rows, iterations and a rate"):
            dataclasses.replace(begun, **wrong).init(spec_of(trace.header))


def test_each_group_learns_by_its_own_rule():
    """Section 4.2.2: 512 components and one rate in the middle, 256 and a warm-up of five epochs
    with a cosine at both ends. Without gradients AdamW only decays the weights, by rate · decay."""
    middle, edge = llapor.LayerTask(True), llapor.LayerTask(False)
    assert (middle.components, edge.components) == (512, 256)

    def shrinks(task, batches=2):
        optimizer, weights = task.optimizer(batches), {"a": jnp.ones(1)}
        state, found = optimizer.init(weights), []
        for _ in range(task.epochs * batches):
            update, state = optimizer.update({"a": jnp.zeros(1)}, state, weights)
            found.append(-float(update["a"][0]))
        return np.array(found)

    np.testing.assert_allclose(shrinks(middle), 2e-3 * 1e-2, rtol=1e-5)
    found = shrinks(edge)
    np.testing.assert_allclose(found[:11], np.linspace(0, 1e-3 * 1e-4, 11), rtol=1e-5, atol=1e-12)
    assert (np.diff(found[10:]) < 0).all() and found[-1] < 0.01 * found[10]
    kept = dataclasses.replace(edge, fixed_rate=3e-4)
    np.testing.assert_allclose(shrinks(kept), 3e-4 * 1e-4, rtol=1e-5)


def test_samples_are_of_the_stride_and_what_is_left_out_comes_last(trace):
    steps = np.concatenate([step.ids for step in trace.step_traces()])
    np.testing.assert_array_equal(layer_samples(trace, 1, 2).later, steps[:, 3])
    np.testing.assert_array_equal(layer_samples(trace, 1, 2).ids, steps[:, 1])
    request = trace.array("token.request")
    np.testing.assert_array_equal(leave_out(trace, 0.2), request > request.max() - 24)


def test_the_middle_group_is_where_router_inputs_resemble_later_ones(trace):
    found = training.input_similarity(trace, 2)
    inputs = np.concatenate([step.gate_input for step in trace.step_traces()]).astype(float)
    for layer in range(LAYERS - 2):
        a, b = inputs[:, layer], inputs[:, layer + 2]
        cosine = (a * b).sum(axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
        assert found[layer] == pytest.approx(cosine.mean(), abs=1e-3)
    for similarity, middle in (
        ([0.2, 0.8, 0.9, 0.8, 0.85, 0.4, 0.3], range(1, 5)),
        ([0.2, 0.3, 0.9, 0.3], range(2, 3)),
        ([0.9, 0.9, 0.1, 0.9, 0.9], range(1, 2)),
        ([0.9, 0.1, 0.9], range(0)),
        ([0.5, 0.5], range(0)),
    ):
        assert llapor.middle_group(np.array(similarity)) == middle
    # A model whose middle inputs are alike: it alone has the gated block.
    own = fit(trace, width=8, epochs=1).fitted
    deep = [layer for layer in range(LAYERS) if "gate" in own.of_layer(layer)]
    assert deep == [*llapor.middle_group(training.input_similarity(trace, 1))]


def test_training_disturbs_principal_components_and_nothing_else(trace):
    """By noise and by masks, drawn anew in each step, beside dropout."""
    some = layer_samples(trace, 0, 1)
    task = LayerTask(False, width=8, noise=0.0, masked=0.0, dropout=0.0)
    mean, basis = training.principal(some.gate_input, task.components)
    around = {"mean": mean, "basis": basis, "balance": np.ones(EXPERTS, np.float32)}
    weights = task.draw_weights(basis.shape[1], EXPERTS, np.random.default_rng(0))
    rows = task.rows_of(some, around)

    def loss(key: int, rows=rows, **change: float) -> float:
        changed = dataclasses.replace(task, **change)
        return float(changed.loss(weights, tuple(map(jnp.asarray, rows)), jax.random.key(key)))

    assert loss(0) == loss(1)
    for change in ({"noise": 0.5}, {"masked": 0.5}, {"dropout": 0.5}):
        assert loss(0, **change) != loss(1, **change)
    none = (np.zeros_like(rows[0]), *rows[1:])
    assert loss(0, masked=1.0) == pytest.approx(loss(0, none))


def test_tuning_keeps_the_loss_of_the_layers_group(learned, trace):
    """1/f weighs the loss of both ends, and not that of the middle."""
    some = layer_samples(trace, 0, 1)
    for layer in range(LAYERS - 1):
        own = of_layer(learned.fitted.arrays, layer)
        other = {**own, "balance": own["balance"] * 50}
        tuned, changed = (tune_layer(arrays, some, 1e-3, 2, 0) for arrays in (own, other))
        equal = np.array_equal(tuned["output"], changed["output"])
        assert equal == ("gate" in own)


@dataclasses.dataclass(frozen=True)
class Falling:
    """A task whose one weight falls by one in each step."""

    batch: int = 4
    epochs: int = 9
    patience: int = 3

    def optimizer(self, batches: int):
        return optax.sgd(1.0)

    def loss(self, weights, batch, key):
        return weights["a"].sum()


@pytest.mark.parametrize(
    ("scored", "epochs", "kept"), [([1, 9, 2, 8, 3], 5, 2), ([1, 1, 1, 1], 4, 1)]
)
def test_the_weights_of_the_best_epoch_are_kept(scored, epochs, kept):
    """Two batches an epoch; it ends after three epochs that are no better, and of equal ones the
    first counts."""
    left, said = iter(scored), []
    rows = (np.zeros((8, 1), np.float32),)
    begun = {"a": np.zeros(1, np.float32)}
    rng = np.random.default_rng(0)
    found = training.train(Falling(), begun, rows, lambda _: next(left), rng, said.append)
    assert len(said) == epochs and found["a"].tolist() == [-2.0 * kept]


def test_principal_components_are_the_directions_that_vary_most():
    """All components together have unit size, and dropout keeps the mean."""
    turned = np.linalg.qr(np.random.default_rng(0).normal(size=(6, 6)))[0]
    drawn = np.random.default_rng(1).normal(size=(4000, 6)) * [9, 5, 3, 1, 0.5, 0.1]
    mean, basis = training.principal(drawn @ turned.T + 7, 2)
    along = np.abs(turned.T @ (basis / np.linalg.norm(basis, axis=0)))
    np.testing.assert_allclose(along[:2], np.eye(2), atol=0.1)
    assert along[2:].max() < 0.1
    found = llapor.compress(drawn @ turned.T + 7, mean, basis)
    assert np.mean(found**2) == pytest.approx(1, rel=1e-3)
    assert np.mean(found, axis=0) == pytest.approx(0, abs=1e-3)
    kept = training.drop_out(jnp.ones(10_000), 0.25, jax.random.key(0))
    assert float(kept.mean()) == pytest.approx(1, abs=0.03)
    np.testing.assert_allclose(np.unique(kept), [0, 4 / 3])

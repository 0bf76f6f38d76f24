"""LLaPor: its networks, losses, metrics, and what it learns (docs/prescope.md)."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from host_offload.control.interface import Moment, Observation
from host_offload.policies.prefetch.llapor import training as training_module
from host_offload.policies.prefetch.llapor.evaluation import evaluated
from host_offload.policies.prefetch.llapor.metrics import quality
from host_offload.policies.prefetch.llapor.network import groups, of_layer, routing, scores
from host_offload.policies.prefetch.llapor.policy import Learned
from host_offload.policies.prefetch.llapor.training import (
    EDGE,
    MIDDLE,
    Samples,
    Training,
    fit,
    loss,
    principal,
    samples,
    split,
    trained,
)
from host_offload.policies.prefetch.names import prefetch_policy
from host_offload.simulate.simulator import spec_of
from host_offload.traces.reader import Trace, TraceError, read_trace
from host_offload.traces.writer import TraceWriter
from tests.host_offload.traces.traces_of import write_trace

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

LAYERS, EXPERTS, TOP_K, HIDDEN = 4, 8, 2, 12
QUICK = Training(width=64, batch=16, epochs=40, patience=40, noise=0.02, masked=0.02)
STEPS, ROWS = 75, 8


def deterministic(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(gate inputs [N, L, D], ids [N, L, k], routers [L, D, E]) of a model whose later layers
    follow from the first: each input is the one before, turned. The routers of adjacent layers
    have nothing to do with each other, so reusing gates fails."""
    rng = np.random.default_rng(seed)
    turns = [np.linalg.qr(rng.normal(size=(HIDDEN, HIDDEN)))[0] for _ in range(LAYERS)]
    routers = rng.normal(size=(LAYERS, HIDDEN, EXPERTS))
    # Few kinds of tokens: who is routed where is then far from any border between experts.
    kinds = rng.normal(size=(24, HIDDEN))
    x = kinds[rng.integers(24, size=STEPS * ROWS)] + 0.01 * rng.normal(size=(STEPS * ROWS, HIDDEN))
    inputs, ids = [], []
    for turn, router in zip(turns, routers, strict=True):
        inputs.append(x)
        ids.append(np.sort(np.argsort(-(x @ router), axis=1)[:, :TOP_K], axis=1))
        x = x @ turn
    return np.stack(inputs, 1), np.stack(ids, 1), routers.astype(np.float32)


def trace_of(directory: Path, inputs: np.ndarray, ids: np.ndarray, **header) -> Trace:
    """A trace of them, ROWS rows a step, five steps a request."""
    plain = write_trace(directory / "plain", list(ids.reshape(STEPS, ROWS, LAYERS, TOP_K)), EXPERTS)
    spec = {**plain.header.spec, "hidden": HIDDEN}
    facts = dataclasses.replace(plain.header, spec=spec, **{"gate_input": HIDDEN, **header})
    rows = inputs.reshape(STEPS, ROWS, LAYERS, HIDDEN).astype(np.float16)
    with TraceWriter(directory / "trace", facts) as writer:
        for step in plain.step_traces():
            request = np.full(ROWS, step.number // 5, np.int32)
            given = rows[step.number] if facts.gate_input else None
            writer.append(step._replace(gate_input=given, request=request, finished=()))
    return read_trace(directory / "trace")


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Trace:
    inputs, ids, _ = deterministic()
    return trace_of(tmp_path_factory.mktemp("llapor"), inputs, ids)


@pytest.fixture(scope="module")
def parts(trace) -> list[np.ndarray]:
    return split(trace, (0.6, 0.2))


@pytest.fixture(scope="module")
def learned(trace, parts) -> Learned:
    return fit(trace, training=QUICK, rows=(parts[0], parts[1]))


def test_it_learns_a_router_that_follows_from_the_layer_before(trace, parts, learned):
    """At least 99% by each metric, of requests that it has not seen, in each group, where reusing
    the next layer's gate fails."""
    reports = evaluated(learned, trace, parts[2], deterministic()[2])
    assert [(r.layer, r.group) for r in reports] == [(1, "input"), (2, "middle"), (3, "output")]
    for report in reports:
        assert min(report.learned) >= 0.99, report
        assert report.gate is not None and report.gate.recall < 0.7
        assert report.call_us > 0 and report.call_rows == ROWS and abs(report.cosine) < 1


def test_what_is_the_same_twice(trace, parts, learned):
    assert fit(trace, training=QUICK, rows=(parts[0], parts[1])) == learned


def test_the_policy_wants_whom_rows_are_predicted_to_choose(trace, learned):
    policy_state = learned.init(spec_of(trace.header))
    step = next(iter(trace.step_traces()))
    wanted = []
    for layer in range(LAYERS):
        seen = Observation(
            *(Moment.ROUTED, 0, 0, 0, -1, layer, 0.0),
            ids=step.ids[:, layer : layer + 1],
            weights=step.weights[:, layer : layer + 1],
            gate_input=step.gate_input[:, layer : layer + 1],
        )
        policy_state, decision = learned.decide(policy_state, seen)
        wanted.append([(s.layer, s.expert, s.cause) for s in decision.stages])
    for layer, entries in enumerate(wanted[:-1]):
        assert {entry[0] for entry in entries} == {layer + 1}
        assert all(entry[2] == "learned" for entry in entries)
        rows = np.bincount(step.ids[:, layer + 1].ravel(), minlength=EXPERTS)
        assert {entry[1] for entry in entries} == set(np.flatnonzero(rows).tolist())
        assert rows[entries[0][1]] == rows.max()  # who has most rows comes first
    assert wanted[-1] == []


def test_a_file_keeps_it(trace, learned, tmp_path):
    learned.fitted.write(tmp_path / "learned.safetensors")
    again = prefetch_policy(f"learned={tmp_path / 'learned.safetensors'}")
    assert again == learned
    with pytest.raises(ValueError, match=r"prefetch 'learned' needs a file"):
        prefetch_policy("learned")
    with pytest.raises(ValueError, match="was fitted to a model with experts 8, this one has 9"):
        learned.init(dataclasses.replace(spec_of(trace.header), experts=9))


# ---- networks and losses


def test_groups_have_networks_of_their_own(learned):
    assert groups(47) == ["input"] * 6 + ["middle"] * 35 + ["output"] * 6
    assert groups(5) == ["input", *["middle"] * 3, "output"]
    assert groups(3, edge=0) == ["middle"] * 3 and groups(1) == ["input"]
    names = [set(of_layer(learned.fitted.arrays, layer)) for layer in range(4)]
    shallow = {"mean", "basis", "input", "input_bias", "output", "output_bias"}
    block = {"inner1", "inner1_bias", "inner2", "inner2_bias", "gate", "gate_bias"}
    assert names == [shallow, shallow | block, shallow, set()]


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


def test_routing_has_weights_where_rows_went():
    found = routing(np.array([[0, 3], [1, 2]]), np.array([[0.7, 0.3], [0.6, 0.4]]), 4)
    expected = np.array([[0.7, 0, 0, 0.3], [0, 0.6, 0.4, 0]], np.float32)
    np.testing.assert_array_equal(found, expected)


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
    balance = 1 / frequency
    value = loss(jnp.asarray(found), jnp.asarray(chosen), balance, focal=1.5, gamma=3.0)
    assert float(value) == pytest.approx(expected, 1e-4)
    assert float(loss(jnp.asarray(found), jnp.asarray(chosen), None)) == pytest.approx(
        -np.mean(bce), 1e-4
    )


def test_principal_components_are_the_directions_of_largest_variance():
    rng = np.random.default_rng(0)
    turn = np.linalg.qr(rng.normal(size=(6, 6)))[0]
    inputs = rng.normal(size=(4000, 6)) * [9, 5, 3, 0.1, 0.1, 0.1] @ turn + 7
    mean, basis = principal(inputs, 3)
    found = (inputs - mean) @ basis
    assert np.mean(found**2) == pytest.approx(1, 1e-3)
    deviations = found.std(axis=0)
    np.testing.assert_allclose(deviations / deviations[0], [1, 5 / 9, 3 / 9], rtol=0.1)
    np.testing.assert_allclose(np.abs(basis.T @ turn.T)[:, 3:], 0, atol=0.02)
    assert principal(inputs, 99)[1].shape == (6, 6)
    flat = principal(np.ones((5, 4), np.float32), 2)
    assert np.isfinite(flat[1]).all()


# ---- training


def test_the_epoch_with_the_best_recall_is_kept_and_it_ends_early(trace, parts):
    some = samples(trace, 0, 1)
    told: list[tuple[int, float]] = []
    training = dataclasses.replace(QUICK, patience=3)
    given = some.of(parts[0]), some.of(parts[1]), EXPERTS, EDGE, training
    own = trained(*given, lambda epoch, recall: told.append((epoch, recall)))
    recalls = [recall for _, recall in told]
    assert [epoch for epoch, _ in told] == list(range(len(told))) and len(told) < 40
    assert len(told) == int(np.argmax(recalls)) + 1 + 3
    test = some.of(parts[1])
    found = scores(own, test.gate_input, test.ids, test.weights)
    assert quality(found, test.later, test.step).recall == pytest.approx(max(recalls))


def test_rare_experts_count_more_near_input_and_output(monkeypatch):
    """The balance that the loss gets is 1 / f relative to an even use, at most ten, and none in the
    middle."""
    told = []

    def step_of(group, training, batches):
        def step(weights, state, some, balance, key):
            told.append(balance)
            return weights, state

        return step

    monkeypatch.setattr(training_module, "_step_of", step_of)
    later = np.stack([np.zeros(40), [1] * 30 + [2] * 10], axis=1).astype(int)
    nothing = np.zeros((40, 3), np.float32)
    some = Samples(nothing, later, np.ones((40, 2)), later, np.arange(40))
    for group in (EDGE, MIDDLE):
        trained(some, some, 4, group, Training(width=4, epochs=1))
    # Shares 1, 3/4, 1/4 and 0 of 40 rows; evenly it would be 1/2.
    np.testing.assert_allclose(told[0], [0.5, 2 / 3, 2.0, 10.0], rtol=1e-6)
    assert told[-1] is None


def test_parts_are_whole_requests_in_their_order(trace):
    found = split(trace, (0.6, 0.2))
    request = trace.array("token.request")
    assert [sorted(set(request[part].tolist())) for part in found] == [
        list(range(9)),
        list(range(9, 12)),
        list(range(12, 15)),
    ]
    assert (np.sum(found, axis=0) == 1).all()


def test_what_it_cannot_learn_from_is_refused(trace, learned, tmp_path):
    with pytest.raises(ValueError, match="stride must lie in 1…3, not 4"):
        fit(trace, stride=4)
    inputs, ids, _ = deterministic()
    blind = trace_of(tmp_path / "a", inputs, ids, gate_input=0)
    with pytest.raises(TraceError, match="has no gate inputs, which learned learns from"):
        fit(blind)
    with pytest.raises(ValueError, match="give a trace with gate inputs"):
        evaluated(learned, blind, np.ones(blind.tokens, bool))
    with pytest.raises(TraceError, match="has 15 requests, too few to leave some out"):
        split(trace, (0.6, 0.4))


# ---- metrics


def test_metrics_of_a_step_by_hand():
    """Eight rows, k = 1. Rows of experts: real 4, 2, 1, 1 of 0…3; predicted 3 of 0, 2 of 1, 2 of 4
    and 1 of 2."""
    later = np.array([0, 0, 0, 0, 1, 1, 2, 3])[:, None]
    predicted = np.array([0, 0, 0, 4, 1, 1, 2, 4])
    scores_of = np.eye(8)[predicted]
    found = quality(scores_of, later, np.zeros(8, int))
    assert found.recall == 6 / 8
    assert found.hot == 3 / 4 and found.all_hot == 0.0  # 4 has no rows
    assert found.tokens == (3 + 2 + 1) / 8


def test_the_window_is_two_wider_and_takes_ties_in():
    later = np.repeat(np.arange(8), [9, 8, 7, 6, 5, 5, 5, 1])[:, None]
    for hot, within in ((6, 1.0), (7, 0.75)):  # 6 ties with the sixth; 7 does not
        predicted = np.repeat([0, 1, 2, hot], [12, 12, 12, 10])
        found = quality(np.eye(8)[predicted], later, np.zeros(46, int))
        assert found.hot == within


def test_steps_count_once_each():
    later = np.array([[0], [0], [0], [1]])
    found = quality(np.eye(4)[[0, 0, 0, 0]], later, np.array([5, 5, 5, 9]))
    assert found.tokens == 0.5 and found.recall == 0.75


def test_networks_of_both_kinds_are_used():
    assert (EDGE.deep, MIDDLE.deep) == (False, True)
    assert EDGE.components < MIDDLE.components and EDGE.rate < MIDDLE.rate
    assert EDGE.decay < MIDDLE.decay and EDGE.warmup == 5

"""LLaPor that goes on learning: rounds, what waits for them (nobody), and decisions taken again."""

import dataclasses
import threading

import numpy as np
import pytest

from host_offload.control.interface import Moment, Observation
from host_offload.policies.placement.names import with_placement
from host_offload.policies.prefetch.llapor import training
from host_offload.policies.prefetch.llapor.network import of_layer, scores
from host_offload.policies.prefetch.llapor.online import (
    LearnedOnline,
    Learning,
    Seen,
    Tuner,
    Tuning,
    recorded,
)
from host_offload.policies.prefetch.llapor.training import Training, fit, recall_of, samples
from host_offload.policies.prefetch.names import prefetch_policy
from host_offload.simulate.simulator import spec_of
from host_offload.traces.reader import TraceError
from tests.host_offload.policies.prefetch.llapor.test_llapor import (
    LAYERS,
    STEPS,
    deterministic,
    trace_of,
)

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

TUNING = Tuning(rows=40, iterations=30, rate=2e-3)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    inputs, ids, _ = deterministic()
    return trace_of(tmp_path_factory.mktemp("online"), inputs, ids)


@pytest.fixture(scope="module")
def begun(trace) -> LearnedOnline:
    """One epoch: it has learned little."""
    learned = fit(trace, training=Training(width=32, batch=64, epochs=1))
    return LearnedOnline(learned.fitted, tuning=TUNING)


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
                turn=None,
                seconds=0.0,
                gate_input=step.gate_input[:, layer : layer + 1],
                ids=step.ids[:, layer : layer + 1],
                weights=step.weights[:, layer : layer + 1],
            )


def recalls(trace, arrays) -> list[float]:
    found = []
    for layer in range(LAYERS - 1):
        some = samples(trace, layer, 1)
        said = scores(of_layer(arrays, layer), some.gate_input, some.ids, some.weights)
        found.append(recall_of(said, some.later))
    return found


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
    assert np.array_equal(state.tuner.arrays["0.basis"], before["0.basis"])


def test_no_step_waits_for_a_round(trace, begun, monkeypatch):
    """A round that does not end until the run is over: all steps go on with what there was, and
    what they bring is bounded."""
    go_on, run = threading.Event(), training.tuned

    def slow(*args):
        assert go_on.wait(60)
        return run(*args)

    monkeypatch.setattr(training, "tuned", slow)
    state = begun.init(spec_of(trace.header))
    for seen in observations(trace):
        state, _ = begun.decide(state, seen)
    assert begun.stats(state)["rounds"] == 0
    assert len(state.tuner._kept) == 5  # of eight rows each
    go_on.set()
    state.tuner.wait()
    state.tuner.swap()
    assert state.tuner.rounds == 1


def test_what_a_round_raises_is_raised_at_the_next_step(trace, begun, monkeypatch):
    def broken(*args):
        raise RuntimeError("no memory")

    monkeypatch.setattr(training, "tuned", broken)
    state = begun.init(spec_of(trace.header))
    seen = list(observations(trace))
    for one in seen[: 5 * LAYERS]:
        state, _ = begun.decide(state, one)
    state.tuner.wait()
    with pytest.raises(RuntimeError, match="no memory"):
        begun.decide(state, seen[5 * LAYERS])


def test_a_step_that_began_before_it_is_left_out(begun):
    tuner = Tuner(begun.fitted.arrays, 1, Tuning(rows=1))
    seen = Seen(np.zeros((2, 12), np.float16), np.zeros((2, 2), np.int16), np.ones((2, 2)))
    tuner.see(2, 3, seen)
    assert tuner._running is None and tuner._kept == []


def test_decisions_are_taken_again_from_the_trace(trace, begun, monkeypatch):
    state, lines, wanted = begun.init(spec_of(trace.header)), [], []
    for seen in observations(trace):
        state, decision = begun.decide(state, seen)
        wanted.append(decision.stages)
        stages = [[*stage] for stage in decision.stages]
        line = {"step": seen.step, "moment": "ROUTED", "policy": "LearnedOnline"}
        lines.append({**line, "decision": {"stages": stages}})
    with pytest.raises(TraceError, match="has no decisions of LearnedOnline"):
        recorded(trace, begun)
    monkeypatch.setattr(type(trace), "decided", lambda self: iter(lines))
    again = recorded(trace, begun)
    state = again.init(spec_of(trace.header))
    assert isinstance(state, Learning) and again.stats(state) == {"rounds": 0}
    found = []
    for seen in observations(trace):
        state, decision = again.decide(state, seen)
        found.append(decision.stages)
    assert found == wanted
    with pytest.raises(TraceError, match="decided nothing more in step"):
        again.decide(state, seen)


def test_what_cannot_be_is_refused(trace, begun, tmp_path):
    file = tmp_path / "learned"
    begun.fitted.write(file)
    policy = prefetch_policy(f"learned_online={file}")
    assert isinstance(policy, LearnedOnline) and policy.tuning == Tuning()
    for tuning in (Tuning(rows=0), Tuning(iterations=0), Tuning(rate=0.0)):
        with pytest.raises(ValueError, match="tuning needs rows, iterations and a rate"):
            dataclasses.replace(begun, tuning=tuning).init(spec_of(trace.header))
    with pytest.raises(ValueError, match="networks that stay as they are"):
        with_placement("prescope", [policy])

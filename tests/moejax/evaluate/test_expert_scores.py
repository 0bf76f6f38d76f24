"""`moejax trace scores`: what it counts, how it weighs errors, and that --precision reads it."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from host_offload.control.interface import Decision, Moment, Observation, Spec, routed_counts
from host_offload.control.rules import parse_interval
from host_offload.policies.precision.maps import HI, top_map
from host_offload.policies.precision.precision_names import precision_of
from host_offload.simulate.simulator import simulate
from host_offload.traces.reader import read_trace
from host_offload.traces.schema import TraceHeader
from host_offload.traces.writer import TraceWriter
from moejax.commands import main as cli
from moejax.errors import UserError
from moejax.evaluate.expert_scores import expert_scores, write_scores
from moejax.models.config import load_config
from moejax.models.model_config import config_digest
from tests.host_offload.traces.traces_of import _step, random_routing, write_trace
from tests.moejax.checkpoints.conversions import write_source

LAYERS, EXPERTS, HIDDEN, WIDTH = 2, 3, 16, 8
"""Of write_source's model."""

INTERVALS = ["2 steps", "7 tokens", "2.5 seconds", "1 tokens"]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write_source(tmp_path_factory.mktemp("hf") / "model")


@pytest.fixture(scope="module")
def digest(source):
    return config_digest(load_config(source))


@pytest.fixture
def routing(tmp_path):
    """20 steps of 3 tokens, 4 layers of 8 experts."""
    routed = random_routing(np.random.default_rng(1), 20, 4, 8, 2, rows=3)
    return write_trace(tmp_path / "routing", routed, 8)


@dataclasses.dataclass(frozen=True)
class Counted:
    """DynaExq's S, kept where a test can see it."""

    alpha: float
    interval: str
    kept: list[np.ndarray]
    moments: frozenset[Moment] = frozenset({Moment.INTERVAL})
    needs: frozenset[str] = frozenset({"counts"})
    writes: frozenset[str] = frozenset()

    def init(self, spec: Spec) -> np.ndarray:
        return np.zeros((spec.layers, spec.experts))

    def decide(self, state, observation: Observation):
        state = self.alpha * state + (1 - self.alpha) * np.asarray(observation.counts)
        self.kept.append(state)
        return state, Decision()


@pytest.mark.parametrize("interval", INTERVALS)
@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_scores_are_what_a_policy_counted(routing, alpha, interval):
    policy = Counted(alpha, interval, [])
    simulate(routing, policies=[policy])
    found = expert_scores(routing, alpha, interval)
    assert found.intervals == len(policy.kept) > 1
    np.testing.assert_allclose(found.scores, policy.kept[-1], rtol=1e-12)
    np.testing.assert_array_equal(found.counts, routed_counts(routing.array("token.ids"), 8))
    assert parse_interval(interval, "")[1] in interval


@pytest.mark.parametrize(
    ("alpha", "interval", "message"),
    [
        (1.0, "2 steps", "alpha must lie from 0 to below 1, not 1.0"),
        (0.5, "2 bytes", "interval '2 bytes' is not a number of"),
        (0.5, "61 tokens", "the trace has 60 tokens, less than an interval of 61 tokens"),
    ],
)
def test_settings_without_a_score_are_refused(routing, alpha, interval, message):
    with pytest.raises(UserError, match=message):
        expert_scores(routing, alpha, interval)


def test_a_trace_without_times_has_no_seconds(tmp_path):
    absent = ("step.start_s", "step.read_s")
    trace = write_trace(tmp_path / "t", [np.zeros((1, 1, 1))] * 3, 2, absent=absent)
    assert expert_scores(trace, 0.0, "1 steps").scores.tolist() == [[1, 0]]
    with pytest.raises(UserError, match="no times; give --interval in tokens or steps"):
        expert_scores(trace, 0.0, "1 seconds")


def traced(directory, digest, *, steps=4, rows=20, gate_input=HIDDEN):
    """A trace of the small model: random inputs, routing and weights; no expert 2 in layer 1."""
    rng = np.random.default_rng(2)
    spec = {"dtype": "bfloat16"}
    header = TraceHeader(
        *(LAYERS, EXPERTS, 2),
        **dict(config_digest=digest, spec=spec, machine={}, command=[], created="now"),
        gate_input=gate_input,
    )
    with TraceWriter(directory, header) as writer:
        for number in range(steps):
            drawn = [rng.permutation(n)[:2] for _ in range(rows) for n in (EXPERTS, 2)]
            ids = np.sort(np.array(drawn).reshape(rows, LAYERS, 2)).astype(np.int16)
            step = _step(number, ids, EXPERTS, 1)
            shares = rng.random(ids.shape).astype(np.float32)
            inputs = rng.standard_normal((rows, LAYERS, HIDDEN)).astype(np.float16)
            step = step._replace(weights=shares)
            writer.append(step._replace(gate_input=inputs) if gate_input else step)
    return read_trace(directory)


def test_files_are_what_precision_reads(routing, tmp_path):
    found = expert_scores(routing, 0.5, "2 steps")
    write_scores(tmp_path, found, 0.25)
    fixed = precision_of(f"map={tmp_path / 'map.npy'}")
    expected = top_map(found.counts, 8)
    np.testing.assert_array_equal(fixed.start(4, 8, 8), expected)
    assert (expected == HI).sum(axis=1).tolist() == [2] * 4
    warm = precision_of(f"dynaexq,scores={tmp_path / 'scores.npy'}")
    np.testing.assert_array_equal(warm.start(4, 8, 8), top_map(found.scores, 8))
    with pytest.raises(UserError, match="is there already; give another directory"):
        write_scores(tmp_path, found, 0.25)
    with pytest.raises(UserError, match="hi_share is a share of the experts, from 0 to 1, not 2"):
        write_scores(tmp_path / "other", found, 2)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write to"):
        write_scores(tmp_path / "file" / "in it", found, 0.25)


def test_the_command(source, digest, tmp_path, capsys):
    traced(tmp_path / "t", digest)
    command = ["trace", "scores", str(tmp_path / "t"), str(tmp_path / "hot"), "--hi-share", "0.5"]
    assert cli.main([*command, "--interval", "16 tokens", "--model", str(source), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["intervals"] == 4 and said["alpha"] == 0.5 and len(said["files"]) == 2
    assert cli.main([*command, "--interval", "16 tokens"]) == 2
    assert "is there already" in capsys.readouterr().err
    command[3] = str(tmp_path / "plain")
    assert cli.main([*command, "--interval", "16 tokens"]) == 0
    assert "80 tokens, intervals of 16 tokens: 4, alpha 0.5" in capsys.readouterr().out
    assert {file.name for file in (tmp_path / "plain").iterdir()} == {"map.npy", "scores.npy"}
    assert cli.main([*command, "--model", "demo"]) == 2
    assert "is of another model" in capsys.readouterr().err
    assert cli.main(["trace", "scores", str(tmp_path), str(tmp_path / "x")]) == 2
    assert "is no trace" in capsys.readouterr().err

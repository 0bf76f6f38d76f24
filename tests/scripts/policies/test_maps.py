"""What maps are worth: similarity beside hits, how soon online maps are as good, drawn routing."""

import json

import numpy as np
import pytest

from host_offload.policies.prefetch.expert_map.policy import fit
from host_offload.policies.prefetch.expert_map.store import stored
from host_offload.simulate.simulator import Simulation
from scripts.policies import maps
from scripts.policies.recurring import Recurring, recurring_trace

SHAPE = Recurring(0.98, 0.0, paths=4, layers=5, experts=16, top_k=2, hidden=32)
SIZES = {"sequences": 4, "prompt": 6, "output": 10}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recurs(tmp_path_factory):
    return recurring_trace(tmp_path_factory.mktemp("maps") / "t", SHAPE, **SIZES)[0]


def test_drawn_iterations_come_again(recurs, tmp_path):
    """Those of one path go where the last one went, and others elsewhere; noise goes nowhere."""

    def common(trace) -> tuple[float, float]:
        """The mean share of experts of two tokens of one path, and of two paths."""
        ids, embedding = (trace.array(f"token.{name}") for name in ("ids", "embedding"))
        near = embedding.astype(np.float32)
        near /= np.linalg.norm(near, axis=1, keepdims=True)
        same = near @ near.T > 0.9
        shared = np.array([[np.isin(a, b).mean() for b in ids[:, 0]] for a in ids[:, 0]])
        apart = ~np.eye(len(ids), dtype=bool)
        return float(shared[same & apart].mean()), float(shared[~same].mean())

    same, other = common(recurs)
    assert same > 0.85 > 0.5 > other
    noise = Recurring(0.0, 0.0, flat=True, paths=4, layers=5, experts=16, top_k=2, hidden=32)
    same, other = common(recurring_trace(tmp_path / "t", noise, **SIZES)[0])
    assert abs(same - other) < 0.15
    assert [step.kind for step in recurs.step_traces()].count("prefill") == SIZES["sequences"]


def test_a_gate_sees_the_next_layer_as_far_as_it_is_told(tmp_path):
    shares = []
    for ahead in (0.0, 2.0):
        shape = Recurring(0.0, ahead, flat=True, layers=4, experts=16, top_k=2, hidden=64)
        trace, spec = recurring_trace(tmp_path / str(ahead), shape, **SIZES)
        assert spec.router is not None
        seen = trace.array("token.gate_input").astype(np.float32)
        scores = np.einsum("nld,lde->nle", seen[:, :-1], spec.router[1:])
        best = np.argsort(-scores, axis=2)[:, :, :2]
        ids = trace.array("token.ids")[:, 1:]
        shares.append(np.mean((ids[..., None] == best[:, :, None]).any(axis=3)))
    assert shares[0] < 0.25 and shares[1] > 0.8


def test_similarity_and_hits_of_the_requests_left_out(recurs):
    policy = fit(recurs, capacity=64, share=maps.SHARE)
    assert policy.fitted is not None
    store = stored(policy.fitted.arrays["embeddings"], policy.fitted.arrays["maps"])
    first = 2  # of four requests two are given
    found = maps.matches(recurs, store, 3, first)
    steps = [s for s in recurs.step_traces() if s.kind == "decode" and s.request[0] >= first]
    assert len(found["semantic"]) == len(steps) and len(found["trajectory"]) == 2 * len(steps)
    step = steps[3]
    assert step.embedding is not None and step.probabilities is not None
    embedding = step.embedding[0].astype(np.float32)
    cosines = store.embeddings @ (embedding / np.linalg.norm(embedding))
    nearest = store.maps[:, int(np.argmax(cosines))]
    top = [set(np.argsort(-row, kind="stable")[:2].tolist()) for row in nearest]
    hits = np.mean([len(top[n] & {*step.ids[0, n].tolist()}) / 2 for n in range(3)])
    np.testing.assert_allclose(found["semantic"][3], [cosines.max(), hits], rtol=1e-5)
    # Layer 1's search looks at layers 0 and 1 and is for layer 4.
    seen = step.probabilities[0, :2].astype(np.float32)
    seen = (seen / seen.sum(axis=1, keepdims=True)).ravel()
    old = store.maps[:2].swapaxes(0, 1).reshape(store.size, -1)
    cosines = old @ seen / np.linalg.norm(old, axis=1) / np.linalg.norm(seen)
    score, share = found["trajectory"][2 * 0 + len(steps) * 0 + 3 * 2 + 1]
    best = store.maps[4, int(np.argmax(cosines))]
    top = {*np.argsort(-best, kind="stable")[:2].tolist()}
    np.testing.assert_allclose(
        [score, share], [cosines.max(), len(top & {*step.ids[0, 4].tolist()}) / 2], rtol=1e-5
    )
    assert found["semantic"][:, 1].mean() > 0.8, "iterations that recur"


def test_when_a_rate_is_reached():
    """Of 40 decode steps the first 10 have no hit, the others only hits; prefill does not count."""
    steps = 44
    kind = np.array([0, 0, 0, 0] + [1] * 40, np.int8)
    hits = np.zeros((steps, 1), np.int32)
    hits[14:], hits[:4] = 2, 50
    zero = np.zeros_like(hits)
    found = Simulation(np.arange(steps), kind, hits, 2 - hits.clip(0, 2), zero, zero, zero, None)
    assert maps.hit_rate(found) == 0.75 and maps.hit_rate(found, 14) == 1.0
    assert maps.when(found, 22 / 32) == 32
    assert maps.when(found, 23 / 32) == 33
    assert maps.when(found, 30 / 32) == 40 and maps.when(found, 31 / 32) is None


def test_maps_win_where_iterations_recur_and_gates_say_nothing(tmp_path):
    shape = {"flat": True, "layers": 4, "experts": 16, "top_k": 2, "hidden": 32, "paths": 8}
    found = {}
    for recurrence, ahead in ((0.97, 0.0), (0.0, 2.0)):
        drawn = Recurring(recurrence, ahead, memory=0.2, **shape)
        trace, spec = recurring_trace(tmp_path / str(ahead), drawn, **SIZES)
        found[ahead] = maps.compared(trace, spec, 0.5)
    assert found[0.0]["maps"] > max(found[0.0]["lfu"], found[0.0]["lfu_gate"])
    assert found[2.0]["maps"] < found[2.0]["lfu_gate"]


def test_the_command(recurs, capsys):
    place = str(recurs.directory)
    assert maps.main(["similarity", place, "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["semantic_n"] == 20 and -1 <= line["semantic_r"] <= 1
    assert maps.main(["online", place, "--cells", "50", "--json"]) == 0
    line = json.loads(capsys.readouterr().out)
    assert 0 < line["offline"] <= 1 and line["all_steps"] == 40
    assert line["steps"] == -1 or maps.WINDOW <= line["steps"] <= 40
    assert maps.main(["online", place, "--cells", "0"]) == 2
    assert "percentages of a layer's experts" in capsys.readouterr().err
    assert maps.main(["similarity", place + "x"]) == 2
    assert "is no trace" in capsys.readouterr().err

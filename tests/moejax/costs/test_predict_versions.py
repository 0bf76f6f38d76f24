"""Runs that mix versions are predicted from what each version was measured to cost."""

import json

import numpy as np
import pytest

from host_offload.simulate.prediction import predict
from host_offload.sizing.cost_model import CostError
from host_offload.traces.reader import read_trace
from moejax import LLM, SamplingParams
from moejax.costs import measure
from moejax.costs.store import cost_file, identity
from moejax.serve.costs import cost_model_of

SMALL = dict(max_num_seqs=2, max_model_len=64, max_num_batched_tokens=128)


@pytest.fixture(autouse=True)
def quick(tmp_path, monkeypatch):
    """Calibration of one round, kept in a place of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(measure, "STEPS", 1)


@pytest.mark.nightly
def test_a_dynaexq_run_is_predicted_from_the_costs_of_both(tmp_path):
    costs = {v: cost_model_of("demo", precision=v, **SMALL) for v in ("dense", "int4")}
    files = [json.loads(path.read_text()) for path in (tmp_path / "cache").rglob("costs/*.json")]
    assert sorted(str(file["about"].get("versions")) for file in files) == [
        "None",
        "[['int4', 'int4']]",
    ]
    assert costs["int4"].expert_bytes < 0.3 * costs["dense"].expert_bytes
    told = dict(precision="dynaexq", interval="8 tokens", hi_share=0.5, progress=False, **SMALL)
    with LLM("demo", trace=tmp_path / "t", **told) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [4, 5]}], params)
        policies = llm.plan.settings.precision.policies
        stats = llm.stats()["precision"]
    trace = read_trace(tmp_path / "t")
    found = predict(trace, costs, policies=policies)
    # With intervals in tokens it moves what the engine moved: transitions, and nothing else.
    assert not found.simulation.misses.any() and stats["promotions"] > 0
    moved = stats["promotions"] * costs["dense"].expert_bytes
    assert found.bytes == moved + stats["demotions"] * costs["int4"].expert_bytes
    # A step reads between its experts all low and all high; at first all are low.
    active = np.array([np.sum([len(np.unique(i)) for i in s.ids.T]) for s in _by_layer(trace)])
    low, high = (active * costs[v].expert_bytes for v in ("int4", "dense"))
    assert (low <= found.active_bytes).all() and (found.active_bytes <= high).all()
    assert found.active_bytes[0] == low[0] and (found.active_bytes[-8:] > low[-8:]).all()
    assert (found.seconds >= found.compute_s).all() and (found.compute_s > 0).all()
    with pytest.raises(CostError, match="no costs of version int4"):
        predict(trace, {"dense": costs["dense"]}, policies=policies)


def _by_layer(trace):
    """Steps whose ids are [rows · k, L]."""
    for step in trace.step_traces():
        yield step._replace(ids=step.ids.transpose(0, 2, 1).reshape(-1, step.ids.shape[1]))


@pytest.mark.nightly
def test_costs_of_records_decoded_in_transit_are_no_dense_costs():
    files = []
    for precision in ("dense", "lossless12", "lossless12,in_transit=true"):
        with LLM("demo", precision=precision, progress=False, **SMALL) as llm:
            files.append(cost_file(identity(llm.plan.steps)))
    assert len(set(files)) == 3

"""Experts in two versions within a grid: equal bytes, what was learned, a run over all texts."""

import json
import re

import numpy as np
import pytest

import moejax
from moejax import LLM
from moejax.errors import UserError
from moejax.evaluate.evaluation import perplexity
from moejax.evaluate.experiments.definition import read_experiment
from moejax.evaluate.experiments.report.tables import tables_of
from moejax.evaluate.experiments.sources.corpus import Prompts
from moejax.evaluate.experiments.sources.precisions import read_mix
from moejax.evaluate.token_ids import TokenIds
from tests.host_offload.traces.traces_of import write_trace

MIX = "hi=dense,lo=int4"

GRID = {
    "policies": ["lru", "lfu"],
    "precision": [
        "int8",
        f"map=train,{MIX}",
        f"dynaexq,{MIX},interval=64 tokens,spares=2",
        f"dynaexq,{MIX},paged=true",
    ],
    "budgets": ["int8"],
    "texts": ["story", "math"],
    "prompt_tokens": 40,
    "output_tokens": 6,
    "train_prompts": 2,
    "repeats": 1,
    "quality_tokens": 130,
    "options": {"max_num_batched_tokens": 64},
}


def counted(tmp_path, ids):
    """A trace of one layer of four experts that selects these."""
    return write_trace(tmp_path / "t", [np.array(ids).reshape(-1, 1, 1)], 4)


def test_a_map_has_those_high_that_were_selected_most(tmp_path):
    trace = counted(tmp_path, [2, 2, 2, 1, 1, 0])
    found = read_mix(f"map=train,{MIX}", tmp_path)
    assert found.learns == "map"
    taught = found.teach(trace)
    assert not taught.learns
    assert taught.precision.start(1, 4, 2).tolist() == [[1, 0, 0, 1]]
    assert taught.precision.start(1, 4, 1).tolist() == [[1, 1, 0, 1]]
    with pytest.raises(ValueError, match="the map is of 1 layers × 4 experts"):
        taught.precision.start(2, 4, 1)


def test_a_policy_learns_scores_from_the_training_part(tmp_path):
    found = read_mix(f"dynaexq,{MIX},interval=6 tokens,scores=train", tmp_path)
    taught = found.teach(counted(tmp_path, [2, 2, 2, 1, 1, 0]))
    assert taught.precision.policy.scores.tolist() == [[1, 2, 3, 0]]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    return moejax.ablate(GRID, tmp_path_factory.mktemp("mixed") / "out", progress=False)


@pytest.mark.slow
def test_versions_have_equal_bytes_and_one_policy(mixed):
    assert not mixed.failures
    rows = [row for row in mixed.of_mode("measured") if row["policy"] == "lru"]
    assert len(rows) == 4 * 2 and len(mixed.of_mode("measured")) == 4 * 2 + 2
    sizes = [row["expert_bytes"] for row in rows]
    assert max(sizes) / min(sizes) < 1.05
    for row in rows:
        if row["precision"] == "int8":
            assert "hi" not in row
        elif "paged" in row["precision"]:
            assert row["hi"] + row["lo"] < 64 and row["decode_misses"] > 0
        else:
            assert row["hi"] + row["lo"] == 64 and row["decode_misses"] == 0
    # A map and DynaExq without its spares: as many high ones.
    (fixed,) = {row["hi"] for row in rows if row["precision"].startswith("map")}
    assert 10 < fixed < 24


@pytest.mark.slow
def test_quality_of_a_run_that_changes_versions_is_that_of_one_engine(mixed):
    """All texts, one after the other, from a cold start; as `moejax eval` with the same options."""
    (record,) = [row for row in mixed.of_mode("quality") if "spares" in row["precision"]]
    lines = record["texts"]
    assert [line["text"] for line in lines] == ["story", "math"]
    prompts = Prompts(read_experiment(GRID))
    window = lines[0]["window"]
    options = {"precision": "dynaexq,spares=2,interval=64 tokens"}
    options |= {"max_num_batched_tokens": 64, "max_num_seqs": 1}
    budget = 64 * 50176  # int8's bytes
    with LLM(
        "demo",
        max_model_len=window,
        expert_budget=budget,
        enable_prefix_caching=False,
        progress=False,
        **options,
    ) as llm:
        for line in lines:
            ids = np.array(prompts.quality_tokens(line["text"]))
            alone = perplexity(llm, TokenIds([ids], "0" * 64), window=window, stride=window)
            assert line["perplexity"] == pytest.approx(alone.total.perplexity, rel=1e-6)
        stats = llm.stats()["precision"]
    assert stats["promotions"] == lines[-1]["promotions"] > 0


@pytest.mark.slow
def test_the_report_compares_precisions(mixed):
    panel, other, quality = tables_of(mixed)
    assert panel.title.startswith("story") and other.title.startswith("math")
    names = [row[0] for row in panel.rows]
    assert [name.partition(", ")[0] for name in names] == ["lru", "lfu", "lru", "lru", "lru"]
    assert len(set(names)) == 5
    assert "high/low" in panel.headings
    assert [row[2] for row in quality.rows] == [
        *["story"] * 4,
        *["math"] * 4,
        *["all texts"] * 4,
    ]
    assert quality.rows[0][4] == "–" and quality.rows[1][4].startswith(("+", "-"))
    # A grid that goes on starts nothing and scores nothing.
    again = moejax.ablate(GRID, mixed.directory, progress=False)
    assert (again.rows, again.sessions) == (mixed.rows, mixed.sessions)


OWN = """
import dataclasses
from host_offload.control.interface import Decision, Moment, Transition

@dataclasses.dataclass(frozen=True)
class Promote:
    '''Wants the experts that one step's first layer used most in the high version.'''
    count: int = 1
    interval: str = "16 tokens"
    moments: frozenset = frozenset({Moment.INTERVAL})
    needs: frozenset = frozenset({"counts", "version"})
    writes: frozenset = frozenset({"transitions"})
    def init(self, spec): return None
    def decide(self, state, observation):
        high = [int(e) for e in (observation.version[0] == 0).nonzero()[0]]
        hot = [int(e) for e in (-observation.counts[0]).argsort(kind="stable")[: self.count]]
        moved = [Transition(0, e, 1) for e in high if e not in hot]
        moved += [Transition(0, e, 0) for e in hot if e not in high]
        return state, Decision(transitions=tuple(moved))

@dataclasses.dataclass(frozen=True)
class Idle(Promote):
    writes: frozenset = frozenset()
"""


@pytest.mark.slow
def test_a_precision_policy_of_ones_own(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    name = f"own.py:Promote,{MIX},spares=2,count=3"
    grid = {"policies": ["lru"], "precision": [name], "budgets": ["int8"], "repeats": 1}
    grid["modes"] = ["measured", "simulated"]
    grid |= {"prompt_tokens": 40, "output_tokens": 24, "options": {"max_num_batched_tokens": 64}}
    (tmp_path / "grid.yaml").write_text(json.dumps(grid))
    found = moejax.ablate(tmp_path / "grid.yaml", tmp_path / "out", progress=False)
    for row in found.rows:
        assert row["error"] is None and row["promotions"] >= 3
        assert row["hi"] == 3 and row["lo"] == 61
    measured, simulated = found.rows
    assert (measured["mode"], simulated["mode"]) == ("measured", "simulated")
    for name in ("prefill_steps", "decode_steps", "decode_misses", "cells_least", "expert_bytes"):
        assert simulated[name] == measured[name], name
    assert simulated["decode_bytes"] == pytest.approx(measured["decode_bytes"], rel=0.5)
    assert "own.py" in found.asked["files"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("own.py:Idle", "writes neither of transitions and fill_version"),
        ("own.py:Promote,counts=1", "did you mean 'count'"),
        ("own.py:Promote,hi=int4,lo=int8", "hi=int4 must have more bytes"),
        ("own.py:Promote,paged=true,spares=1", "spares does not apply with paged=true"),
        ("own.py:Absent", "has no class Absent; it has Idle, Promote"),
        ("none.py:Promote", "there is no file"),
        ("random,step_bytes=1", "add spares=1"),
    ],
)
def test_a_precision_policy_is_refused_by_name(tmp_path, text, said):
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(UserError, match=re.escape(said)):
        read_mix(text, tmp_path)

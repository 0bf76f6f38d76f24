"""Who decides the split where nobody was asked, and options that do not go together."""

from __future__ import annotations

import dataclasses
import shutil

import pytest

from host_offload.sizing.configurator import configure, turns_of
from host_offload.sizing.split import division_of, miss_costs
from host_offload.traces.reader import read_trace
from moejax import LLM, UserError
from moejax.commands.main import main
from moejax.costs.store import cost_file, identity, write_cost_model
from moejax.engine.control import spec_of_engine
from moejax.start.decide.split import check_split, find_workload, remember, workload_file
from tests.moejax.engine.budget_workload import (
    COSTS,
    LAYERS,
    LIMITS,
    MEMORY,
    cells_now,
    planned,
    recorded,
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_slots_of_two_versions_do_not_move():
    """As in a run whose layers are in versions of their own."""
    plan = planned()
    two = dataclasses.replace(plan.steps.layout, records=plan.steps.layout.records * 2)
    steps = dataclasses.replace(plan.steps, layout=two)
    with pytest.raises(UserError, match="with two versions of the experts in memory slots do not"):
        check_split(None, steps, (1, 1), 0)  # type: ignore[arg-type]


# ---- a workload that is remembered


@pytest.mark.slow
def test_what_is_remembered(tmp_path, capsys):
    directory, _ = recorded()
    trace = read_trace(directory)
    digest = trace.header.config_digest
    assert find_workload(digest) is None
    assert main(["plan", "--trace", str(directory), "--remember"]) == 0
    assert str(workload_file(digest)) in capsys.readouterr().out
    assert find_workload(digest) == str(directory) and find_workload("f" * 64) is None
    workload_file(digest).write_text("{")
    with pytest.raises(UserError, match=r"cannot be read .*; delete it"):
        find_workload(digest)
    assert main(["plan", "--trace", str(directory), "--remember", "--json"]) == 0
    assert find_workload(digest) == str(directory)
    assert main(["plan", "--trace", str(directory), "--remember", "--memory", "3MiB"]) == 2
    assert main(["plan", "--trace", str(tmp_path), "--remember"]) == 2
    workload_file(digest).unlink()
    workload_file(digest).mkdir()
    with pytest.raises(UserError, match=r"\.json cannot be written"):
        remember(trace)


@pytest.mark.slow
def test_memory_is_split_by_what_is_remembered(tmp_path):
    """Without numbers, where not everything fits: by the marginal rule if a workload is remembered
    and costs were measured, else by the stated rule; the explanation says by which."""
    directory, _ = recorded()
    rule = "split: KV keeps at least 1/8 or one sequence, experts the rest; "
    plain = planned()
    assert rule + "no workload is remembered" in plain.budget.notes[-1]
    kept = tmp_path / "kept"
    shutil.copytree(directory, kept)
    trace = read_trace(kept)
    remember(trace)
    assert planned().budget.notes[-1] == (
        rule + "the remembered workload could not be used: costs of this start were not "
        "measured: `moejax calibrate`"
    )
    assert planned().cells == plain.cells
    # KV is dear, so that the split is another one.
    about = identity(plain.steps)
    dear = dataclasses.replace(COSTS, kv_swap_per_byte=1e-6, about=about)
    write_cost_model(cost_file(about), dear)
    with LLM("demo", memory=MEMORY, progress=False, **LIMITS) as llm:
        spec = spec_of_engine(llm.engine.runner, max_model_len=256, seed=0)
        found = configure(turns_of(trace), division_of(spec), miss_costs(dear.costs(), spec))
        assert cells_now(llm) == [found.cap] * LAYERS != list(plain.cells)
        budget = llm.plan.budget
        assert budget.pages == found.kv_pages == llm.stats()["arena"]["kv_pages"]
        note = f"split: by the remembered workload {kept}: {found.cap} cells"
        assert note in budget.notes[-1] and note in str(llm.explain())
    # Nothing is decided for who said something, or where everything fits.
    for given in ({"kv_budget": 1 << 20}, {"expert_budget": 1 << 20}, {"memory": 8 << 20}):
        assert not any("split:" in note for note in planned(**given).budget.notes)
    shutil.rmtree(kept)
    note = planned().budget.notes[-1]
    assert rule in note and "kept is no trace" in note

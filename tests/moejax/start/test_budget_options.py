"""Who decides the split where nobody was asked, and options that do not go together."""

from __future__ import annotations

import dataclasses
import shutil
import types

import pytest

from host_offload.memory.arena import SlotArena
from host_offload.memory.layout import slot_layout
from host_offload.sizing.configurator import configure, turns_of
from host_offload.sizing.split import division_of, miss_costs
from host_offload.traces.reader import read_trace
from moejax import LLM, UserError
from moejax.commands.main import main
from moejax.costs.calibration import cost_file, identity, write_cost_model
from moejax.engine.control import spec_of_engine
from moejax.start.budget_options import BudgetOptions, parse_budget_options, start_budget
from moejax.start.build import Limits
from moejax.start.remembered import remember, remembered, workload_file
from tests.moejax.engine.budget_workload import COSTS, LAYERS, LIMITS, MEMORY, cells_now, recorded


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_trace_that_would_not_be_opened_is_refused():
    with pytest.raises(UserError, match="shares its cells by its own trace; leave out =b of cells"):
        parse_budget_options("mv_wsa=a", "none", "optimal=b", Limits())


@pytest.mark.parametrize("options", [{"given_cells": (1, 1)}, {"given_cells": (2, 0)}])
def test_slots_of_two_versions_do_not_move(options):
    """As in a run whose layers are in versions of their own."""
    layout = slot_layout(hidden=128, width=128, itemsize=2, layers=2, kv_heads=2, head_dim=32)
    arena = SlotArena(layout, 9, 2, 4, cells=4)
    arena.grant_cells([1, 1])
    records = types.SimpleNamespace(records=layout.records * 2)
    engine = types.SimpleNamespace(
        scheduler=types.SimpleNamespace(arena=arena), runner=types.SimpleNamespace(layout=records)
    )
    with pytest.raises(UserError, match="with two versions of the experts in memory slots do not"):
        start_budget(engine, BudgetOptions(**options), None)  # type: ignore[arg-type]


# ---- a workload that is remembered


def test_what_is_remembered(tmp_path, capsys):
    directory, _ = recorded()
    trace = read_trace(directory)
    digest = trace.header.config_digest
    assert remembered(digest) is None
    assert main(["plan", "--trace", str(directory), "--remember"]) == 0
    assert str(workload_file(digest)) in capsys.readouterr().out
    assert remembered(digest) == str(directory) and remembered("f" * 64) is None
    workload_file(digest).write_text("{")
    with pytest.raises(UserError, match=r"cannot be read .*; delete it"):
        remembered(digest)
    assert main(["plan", "--trace", str(directory), "--remember", "--json"]) == 0
    assert remembered(digest) == str(directory)
    assert main(["plan", "--trace", str(directory), "--remember", "--memory", "3MiB"]) == 2
    assert main(["plan", "--trace", str(tmp_path), "--remember"]) == 2
    workload_file(digest).unlink()
    workload_file(digest).mkdir()
    with pytest.raises(UserError, match=r"\.json cannot be written"):
        remember(trace)


def test_memory_is_split_by_what_is_remembered(tmp_path):
    """Without numbers, where not everything fits: by the marginal rule if a workload is remembered
    and costs were measured, else by the stated rule; the explanation says by which."""
    directory, _ = recorded()
    with LLM("demo", memory=MEMORY, progress=False, **LIMITS) as llm:
        rule = "split: KV keeps at least 1/8 or one sequence, experts the rest; "
        assert rule + "no workload is remembered" in str(llm.explain())
        plain, before = parse_budget_options("fixed", "none", "uniform", Limits()), cells_now(llm)
        kept = tmp_path / "kept"
        shutil.copytree(directory, kept)
        trace = read_trace(kept)
        remember(trace)
        note = start_budget(llm.engine, plain, llm.budget).notes[-1]
        assert note == (
            rule + "the workload that is remembered was of no use: costs of this start were not "
            "measured: `moejax calibrate`"
        )
        # KV is dear, so that the split is another one.
        about = identity(llm.engine.runner)
        dear = dataclasses.replace(COSTS, kv_swap_per_byte=1e-6, about=about)
        write_cost_model(cost_file(about), dear)
        assert cells_now(llm) == before
        budget = start_budget(llm.engine, plain, llm.budget)
        spec = spec_of_engine(llm.engine.runner, max_model_len=256, seed=0)
        found = configure(turns_of(trace), division_of(spec), miss_costs(dear.costs(), spec))
        assert cells_now(llm) == [found.cap] * LAYERS != before
        assert budget.pages == found.kv_pages == llm.stats()["arena"]["kv_pages"]
        assert f"split: by the remembered workload {kept}: {found.cap} cells" in budget.notes[-1]
        # Nothing is decided for who said something.
        for given in (Limits(kv_budget=1 << 20), Limits(expert_budget=1 << 20)):
            said = parse_budget_options("fixed", "none", "uniform", given)
            assert start_budget(llm.engine, said, llm.budget) == llm.budget
        uncut = dataclasses.replace(llm.budget, cut=False)
        assert start_budget(llm.engine, plain, uncut) == uncut
        shutil.rmtree(kept)
        note = start_budget(llm.engine, plain, llm.budget).notes[-1]
        assert rule in note and "kept is no trace" in note

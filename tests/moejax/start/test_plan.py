"""A plan is complete, is made without a device's buffers, and is what the engine then is."""

from __future__ import annotations

import gc
import json

import jax
import numpy as np
import pytest

from host_offload.control.paging import PagedSpec
from host_offload.memory.arena import SlotClass
from moejax import LLM, UserError
from moejax.commands.main import main
from moejax.start.options import Config
from moejax.start.report.dry_run import dry_run
from tests.moejax.engine.budget_workload import LIMITS, MEMORY, cells_now, planned, recorded

VARIANTS = [
    {},
    {"precision": "dynaexq,margin=0", "memory": 4 << 20},
    {"precision": "dynaexq,paged=true", "memory": 4 << 20},
    {"cells": "9,8,6,5", "max_num_seqs": 3, "kv_overflow": "recompute", "swap_space": 1 << 20},
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [pytest.param(v, marks=[pytest.mark.nightly] * (i == 1)) for i, v in enumerate(VARIANTS)],
)
def test_an_engine_is_what_its_plan_says(options):
    """And a dry run, which reads no weights, says the same plan."""
    given = Config.of("demo", progress=False, **{"memory": MEMORY, **LIMITS, **options})
    dry, _ = dry_run(given)
    with LLM.from_config(given) as llm:
        plan, engine = llm.plan, llm.engine
        assert plan.describe().keys() == dry.describe().keys()
        ours = {"device": ""}
        assert plan.describe() | ours == dry.describe() | ours
        assert plan.steps == dry.steps and plan.budget.notes == dry.budget.notes
        runner, scheduler, arena = engine.runner, engine.scheduler, engine.scheduler.arena
        assert runner.slots == plan.budget.slots and runner.steps == plan.steps
        assert (
            arena.count(SlotClass.KV) == plan.budget.kv_slots and arena.pages == plan.budget.pages
        )
        assert arena.count(SlotClass.EXPERT) == plan.budget.expert_slots
        assert runner.tables.cell_row.shape[1] == plan.spec.cell_bound
        granted = np.sum(np.asarray(runner.tables.cell_row) >= 0, axis=1).tolist()
        if isinstance(plan.mixed, PagedSpec):
            assert granted == plan.mixed.cells.sum(axis=1).tolist()
        elif plan.mixed is not None:
            assert runner.placement is not None
            assert runner.placement.resident.capacity == plan.mixed.capacity
        else:
            assert granted == list(plan.cells) == cells_now(llm)
        assert scheduler.max_num_seqs == plan.max_num_seqs
        assert scheduler.max_model_len == plan.max_model_len
        assert scheduler.admission == min(plan.admission, scheduler.max_num_seqs)


@pytest.mark.parametrize(
    "options", [*VARIANTS, {"cells": "uniform,split="}, {"resize": "peak_headroom"}]
)
def test_decide_touches_no_device(options, monkeypatch):
    """Nothing is put on a device, compiled or read back."""

    def refuse(*_, **__):
        raise AssertionError("decide used a device")

    costs = None
    if options.get("cells", "").endswith("split="):
        from tests.moejax.engine.budget_workload import COSTS

        options, costs = {"cells": f"uniform,split={recorded()[0]}"}, COSTS.costs()
    for name in ("device_put", "device_get", "jit"):
        monkeypatch.setattr(jax, name, refuse)
    gc.collect()  # arrays of earlier tests, which would be freed in between
    before = len(jax.live_arrays())
    plan = planned(costs, **options)
    assert len(jax.live_arrays()) == before
    assert plan.budget.slots and plan.steps.shapes.rows and str(plan)


def test_a_dry_run_is_printed(capsys):
    asked = ["plan", "--dry-run", "demo", "--memory", "4MiB", "--max-num-seqs", "4"]
    assert main(asked) == 0
    lines = capsys.readouterr().out.splitlines()
    words = {line.split()[0] for line in lines}
    assert {"device", "model", "ops", "steps", "arena", "experts", "cells", "KV", "note"} <= words
    assert any("42 slots of 98304 bytes" in line for line in lines)
    assert "assumed: the weights are what config and headers say" in lines
    assert main([*asked, "--json", "--precision", "lossless12"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "lossless12" in found["experts"] and len(found["assumed"]) == 2


def test_a_dry_run_measures_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(UserError, match="costs of this start were not measured"):
        dry_run(Config.of("demo", memory=MEMORY, resize="mv_wsa", **LIMITS))

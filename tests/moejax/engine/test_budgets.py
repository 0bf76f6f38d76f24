"""resize= and cells=: names to policies and splits, in the engine and refused."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest

from host_offload.policies.budget.joint_budget import JointBudget
from host_offload.policies.budget.layer_cells import LayerCells
from host_offload.policies.budget.mv_wsa import MvWsa
from host_offload.policies.budget.peak_headroom import PeakHeadroom
from host_offload.policies.budget.user_caps import UserCaps
from moejax import LLM, UserError
from moejax.engine.control import control_of
from moejax.start.options import Config
from moejax.start.settings import settings_of
from scripts.parts.controllers import start_controller
from tests.moejax.engine.budget_workload import (
    COSTS,
    EXPERTS,
    LIMITS,
    MEMORY,
    PER_SLOT,
    USERS,
    cells_now,
    converse,
    planned,
    recorded,
)


def parsed(**options):
    return settings_of(Config.of("demo", **options))


@pytest.mark.parametrize(
    ("options", "policies"),
    [
        ({}, ()),
        ({"resize": "peak_headroom"}, (PeakHeadroom(),)),
        ({"resize": "mv_wsa"}, (MvWsa(),)),
        (
            {"resize": "mv_wsa", "cells": "marginal", "kv_overflow": "recompute"},
            (MvWsa(allocation="marginal", kv_miss="recompute"),),
        ),
        ({"resize": "right_size"}, (UserCaps(),)),
        ({"resize": "joint"}, (JointBudget(),)),
        ({"cells": "marginal"}, (LayerCells(allocation="marginal"),)),
        # A trace says it once; nothing moves while requests run.
        ({"cells": "marginal=trace"}, ()),
        ({"cells": "marginal,split=trace"}, ()),
        ({"cells": "uniform,split=trace", "resize": "mv_wsa"}, (MvWsa(trace="trace"),)),
        ({"cells": [1, 2, 3, 4]}, ()),
        ({"cells": "1,2,3,4"}, ()),
    ],
)
def test_names_are_policies(options, policies):
    _, *budgets = parsed(**options).policies
    assert tuple(budgets) == policies


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"cells": "uniform,spilt=t"}, r"no setting 'spilt=t', did you mean 'split'\?; known: sp"),
        ({"resize": "live"}, "unknown resize 'live'; known: none, peak_headroom, right_size, mv_w"),
        ({"cells": "best"}, "unknown cells 'best'; known: uniform, marginal"),
        ({"cells": ""}, "unknown cells ''"),
        (
            {"cells": "marginal=a,split=b"},
            "cells=marginal,split=TRACE and cells=marginal=a do not go",
        ),
        ({"cells": "uniform=t"}, "cells=uniform=TRACE: it needs no trace; leave it out"),
        (
            {"cells": "uniform,split=t", "kv_budget": 1 << 20},
            "cells=uniform,split=TRACE and kv_budget do not go",
        ),
        ({"resize": "peak_headroom", "cells": "marginal"}, "gives every layer as many cells"),
        ({"cells": "3,x"}, "a name or a whole number a layer"),
        ({"cells": [3, None]}, "a name or a whole number a layer"),
        ({"cells": [3, 3, 3, 3], "resize": "mv_wsa"}, "cells in numbers and resize do not go"),
    ],
)
def test_what_does_not_go_together_is_refused(options, match):
    with pytest.raises(UserError, match=match):
        parsed(**options)


@pytest.fixture(scope="module")
def llm():
    """Slots move by MV-WSA, with costs that are not measured: KV is dear at first."""
    dear = dataclasses.replace(COSTS, kv_swap_per_byte=1e-6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moejax.start.build.step_costs", lambda steps, runner: dear.costs())
        with LLM("demo", memory=MEMORY, resize="mv_wsa", progress=False, **LIMITS) as llm:
            yield llm


@pytest.mark.slow
def test_live_resize_changes_no_token_and_says_what_it_did(llm):
    _, answers = recorded()
    assert converse(llm) == answers
    stats = llm.stats()["budget"]
    assert stats["resize"] == "mv_wsa" and stats["budget"] == "fixed"
    assert stats["resizes"] > 0 and stats["slots_moved"] > 0 and stats["failed"] == 0
    assert {"pages_moved", "deferred", "cells"} <= stats.keys()
    arena = llm.stats()["arena"]
    assert arena["expert_slots"] + arena["kv_slots"] + arena["free_slots"] == arena["slots"] == 32


@pytest.mark.slow
def test_width_kv_and_cells_together(llm):
    """The same engine with the joint policy, where a step of one sequence takes a thousandth of one
    of four: once it knows steps, no other sequence begins beside one that runs, and no token
    changes."""
    engine = llm.engine
    before, narrow = engine.control, dataclasses.replace(COSTS.costs(), step_s={1: 1e-3, 4: 1.0})
    controller = start_controller(
        engine.runner, [JointBudget()], max_model_len=256, seed=0, costs=narrow
    )
    engine.control = control_of(engine.runner, controller, engine.resizer)
    seen: list[tuple[int, int]] = []
    scheduler = engine.scheduler
    engine.listener = lambda step: seen.append((scheduler.max_running, len(scheduler.running)))
    try:
        assert converse(llm) == recorded()[1]
        limits, running = zip(*seen, strict=True)
        assert limits[0] == 4 == max(running) and limits[-1] == 1
        assert llm.stats()["budget"]["max_running"] == 1
        # Those that had begun go on.
        assert list(running[limits.index(1) :]) == sorted(running[limits.index(1) :], reverse=True)
        assert running.count(1) > len(running) // 2
    finally:
        engine.control, engine.listener = before, None
        engine.resizer.limit(LIMITS["max_num_seqs"])


@pytest.mark.slow
def test_users_get_their_working_sets(llm):
    """The same engine with right-sizing: it knows each session's set after its first turn, cells
    follow the largest of those that run, and no token changes."""
    engine, before = llm.engine, llm.engine.control
    policies = [UserCaps(epsilon=0.3, dead=1)]
    controller = start_controller(engine.runner, policies, max_model_len=256, seed=0)
    engine.control = control_of(engine.runner, controller, engine.resizer)
    try:
        moved = llm.stats()["budget"]["slots_moved"]
        assert converse(llm) == recorded()[1]
        (said,) = llm.stats()["control"]["said"].values()
        assert len(said["caps"]) == USERS and max(said["caps"].values()) < EXPERTS
        assert len(set(cells_now(llm))) == 1 and llm.stats()["budget"]["slots_moved"] > moved
    finally:
        engine.control = before


@pytest.mark.slow
def test_cells_of_a_trace_or_in_numbers():
    directory, _ = recorded()
    plan = planned(cells=f"marginal={directory}")
    assert sum(plan.cells) == 28 and len(set(plan.cells)) > 1
    assert plan.budget.pages == 4 * PER_SLOT
    assert planned(cells=[9, 8, 6, 5]).cells == (9, 8, 6, 5)
    for wrong in ([9, 8, 6], [9, 9, 9, 9]):
        with pytest.raises(UserError, match=r"the model has 4 layers .* and the budget 28 cells"):
            planned(cells=wrong)
    with pytest.raises(UserError, match="the split cannot be set: cells per layer"):
        planned(cells=[EXPERTS + 1, 0, 0, 0])
    with LLM("demo", memory=MEMORY, cells=[9, 8, 6, 5], progress=False, **LIMITS) as given:
        assert cells_now(given) == [9, 8, 6, 5]


@pytest.mark.slow
def test_traces_that_are_of_no_use_are_refused(tmp_path):
    directory, _ = recorded()
    with pytest.raises(UserError, match=r"nowhere"):
        planned(cells=f"marginal={tmp_path / 'nowhere'}")
    header = (directory / "trace.json").read_text()
    other = tmp_path / "other"
    other.mkdir()
    (other / "trace.json").write_text(re.sub(r'"layers": 4', '"layers": 5', header))
    with pytest.raises(UserError, match="of another model: 5 layers"):
        planned(cells=f"marginal={other}")
    # Without a cost nothing can be weighed.
    free = COSTS.costs()
    free = type(free)(**{**vars(free), "fill": np.zeros(2)})
    with pytest.raises(UserError, match="a missing expert costs nothing"):
        planned(free, cells=f"uniform,split={directory}")

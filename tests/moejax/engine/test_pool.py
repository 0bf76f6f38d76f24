"""An engine whose cells are of one pool: same bits, whole tables, budgets that move, and a replay
that is what it did."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from host_offload.memory.arena import SlotClass
from host_offload.simulate.replay import replay
from host_offload.traces.reader import read_trace
from moejax import LLM
from moejax.engine.resize import cells_of, know_cells
from tests.faults import Faults, inject
from tests.moejax.engine_runs import mixed_jobs, run
from tests.pallas_kernels.contract import NATIVE

pytestmark = [NATIVE, pytest.mark.slow]

LIMITS: dict[str, Any] = {
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "progress": False,
}
HOST = {"driver": "host", "expert_budget": "40%", **LIMITS}


@pytest.fixture(scope="module")
def at_rest():
    with LLM("demo", **LIMITS) as llm:
        return run(llm, mixed_jobs(), check=False)


def cells_now(llm: LLM) -> np.ndarray:
    return np.sum(np.asarray(llm.engine.runner.tables.cell_row) >= 0, axis=1)


def assert_same_bits(found, wanted) -> None:
    assert all(a.same_bits(b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("options", [{"eviction": "global-lfu", "prefill_waves": 2}], ids=str)
def test_bits_tables_budgets_and_replay(options, at_rest, tmp_path):
    """All invariants after every step, before and after budgets moved."""
    with LLM("demo", **options, **HOST, trace=tmp_path / "t") as llm:
        engine = llm.engine
        arena, kv_slots = engine.scheduler.arena, engine.scheduler.arena.count(SlotClass.KV)
        total = cells_now(llm).sum()
        assert_same_bits(run(llm, mixed_jobs()), at_rest)
        assert cells_now(llm).sum() == total and len({*cells_now(llm).tolist()}) > 1
        know_cells(engine.runner, arena)
        assert cells_of(arena) == cells_now(llm).tolist()
        engine.set_budget([3, 2, 5, 4], kv_slots)
        assert cells_now(llm).tolist() == [3, 2, 5, 4]
        assert_same_bits(run(llm, mixed_jobs()), at_rest)
        assert cells_now(llm).sum() == 14 and cells_now(llm).tolist() != [3, 2, 5, 4]
        assert engine.control.controller.pool.handed > 100
    found = replay(read_trace(tmp_path / "t"))
    assert found.fills.sum() > 0 and found.hits.sum() > 0


@pytest.mark.parametrize(
    "options",
    [
        {"prefetch": "expert_map", "link_rate": "300MB/s", "chunk_bytes": "16KiB"},
        pytest.param({"prefetch": "expert_map", "transfers": "queue"}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_cells_go_on_while_experts_fly(options, at_rest, tmp_path):
    """What was on its way into a cell that another layer got is nobody's."""
    with LLM("demo", **options, **HOST, trace=tmp_path / "t") as llm:
        if (queue := llm.engine.runner.queue) is not None:
            inject(queue, Faults(seed=2, delay=1e-3, delayed=0.3))
        assert_same_bits(run(llm, mixed_jobs(), check=False), at_rest)
        assert not llm.engine.runner.faults()
        assert llm.engine.control.controller.pool.handed > 100
        assert sum(llm.stats()["transfers"]["prefetches"].values()) > 0
    arrays = "probs,embedding"
    with LLM(
        "demo", prefetch="expert_map", **HOST, trace=tmp_path / "u", trace_arrays=arrays
    ) as llm:
        assert_same_bits(run(llm, mixed_jobs(), check=False), at_rest)
    assert replay(read_trace(tmp_path / "u")).staged.sum() > 0

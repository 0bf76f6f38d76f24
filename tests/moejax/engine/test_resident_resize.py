"""The line between KV and experts moves while experts change versions: nothing is lost, and a
replay finds every move again. The transitions' own contract: control/test_precision_transitions.py.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from host_offload.control.interface import Decision, Moment, Observation, Spec
from host_offload.control.rules import PolicyError
from host_offload.memory.arena import SlotClass
from host_offload.policies.precision.dynaexq import DynaExq
from host_offload.simulate.replay import replay
from host_offload.traces.reader import read_trace
from host_offload.traces.schema import TraceError
from tests.moejax.engine.scenes import open_llm
from tests.moejax.engine_runs import mixed_jobs, run

pytestmark = pytest.mark.slow


@dataclasses.dataclass(frozen=True)
class Line:
    """Wants another number of KV pages every few steps, from the floor to all but the least of
    experts; often before the last wish was carried out."""

    seed: int = 0
    every: int = 4
    moments: frozenset[Moment] = frozenset({Moment.STEP_END})
    needs: frozenset[str] = frozenset()
    writes: frozenset[str] = frozenset({"kv_pages"})

    def init(self, spec: Spec) -> tuple[int, int, int, int]:
        assert spec.slot_bytes is not None and spec.resident is not None
        per_slot = spec.slot_bytes // spec.page_bytes
        floor = -(-spec.kv_floor_bytes // (per_slot * spec.page_bytes))
        most = spec.budget_bytes // spec.slot_bytes - spec.resident.least_slots()
        return 0, per_slot, floor, most

    def decide(self, state, observation: Observation):
        calls, per_slot, floor, most = state
        state = calls + 1, per_slot, floor, most
        if calls % self.every:
            return state, Decision()
        slots = np.random.default_rng((self.seed, calls)).choice([floor, (floor + most) // 2, most])
        return state, Decision(kv_pages=int(slots) * per_slot)


OPTIONS = {"precision": "dynaexq,margin=0,alpha=0,interval=6 tokens", "memory": 5 << 20}


def test_versions_and_slots_move_at_once(tmp_path):
    """All bytes are compared with the stores after each step."""
    options = {**OPTIONS, "policies": [Line()], "trace": tmp_path / "t"}
    with open_llm(enable_prefix_caching=False, **options) as llm:
        engine = llm.engine
        arena, transitions = engine.scheduler.arena, engine.control.controller.transitions
        dispatched, seen = engine.control.after_dispatch, []

        def watched(number: int) -> None:
            dispatched(number)
            experts = np.flatnonzero(arena.slot_class == SlotClass.EXPERT)
            assert set(transitions.pools.slots) == set(experts.tolist())
            assert len(experts) + arena.count(SlotClass.KV) == arena.slots
            seen.append(len(experts))

        engine.control.after_dispatch = watched
        run(llm, mixed_jobs())
        stats, moved = llm.stats()["precision"], engine.resizer.stats()
        with pytest.raises(PolicyError, match="for experts, which need"):
            engine.resizer.move(None, arena.slots * arena.layout.pages_per_slot)
        with pytest.raises(PolicyError, match="layers have no cells of their own"):
            engine.resizer.move(np.ones(4, np.int32), None)
    assert moved["resizes"] > 1 and moved["deferred"] > 0
    steps = np.sign(np.diff(seen))
    assert {-1, 1} <= {*steps.tolist()} and stats["promotions"] > 4 < stats["demotions"]
    trace = read_trace(tmp_path / "t")
    policies = [DynaExq(alpha=0, margin=0, interval="6 tokens"), Line()]
    found = replay(trace, policies=policies)
    assert found.staged.sum() == stats["promotions"] + stats["demotions"]
    other = [policies[0], Line(seed=9)]
    with pytest.raises(TraceError, match=r"experts come to have|the trace has|no policy wanted"):
        replay(trace, policies=other)

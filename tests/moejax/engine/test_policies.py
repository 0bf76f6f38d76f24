"""The contract of policies beside an engine: no bit changes, no table breaks, transfers are carried
out, and a replay of the trace is what the engine did: every count, byte and decision."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest

from examples.recent_prefetch import RecentPrefetch
from host_offload.control.interface import Decision, Moment, Policy, Spec, Stage
from host_offload.control.rules import PolicyError
from host_offload.control.step_record import USES, LinkUse
from host_offload.memory.arena import SlotClass
from host_offload.memory.budget import format_bytes
from host_offload.policies.eviction.fifo import FIFO
from host_offload.policies.eviction.static import HotTable, Static
from host_offload.policies.prefetch import llapor
from host_offload.policies.prefetch.coactivation import CoActivation
from host_offload.policies.prefetch.expert_map import in_step
from host_offload.policies.prefetch.expert_map.in_step import ExpertMapInStep
from host_offload.policies.prefetch.llapor_online import LearnedOnline, Learning
from host_offload.policies.recorded import repeat_run
from host_offload.simulate.replay import replay
from host_offload.simulate.simulator import simulate
from host_offload.traces.reader import Trace, TraceError, read_trace
from host_offload.traces.writer import TraceWriter
from moejax.engine.resize import cells_of as cells_of_arena
from moejax.engine.resize import know_cells
from tests.host_offload.control.erratic_policy import Erratic
from tests.host_offload.control.policy_runs import scripted
from tests.moejax.engine.scenes import (
    GREEDY,
    LIMITS,
    RECORD,
    at_rest,
    cells_of,
    delay,
    open_llm,
    same_bits,
    tokens_of,
)
from tests.moejax.engine_runs import mixed_jobs, run
from tests.pallas_kernels.contract import NATIVE

pytestmark = NATIVE


MOVES_CELLS = scripted(
    {(Moment.STEP_END, 7): Decision(cells=np.array([8, 4, 5, 6]))},
    needs={"cells", "state"},
    writes={"cells"},
)
HOST = {"driver": "host"}
SUBJECTS: dict[str, tuple[dict[str, Any], tuple[Policy, ...]]] = {
    "lru": ({"eviction": "lru", "driver": "device,waves=2"}, ()),
    "recent": ({"eviction": "lru"}, (RecentPrefetch(),)),
    "fifo": ({}, (FIFO(), RecentPrefetch(window=2))),
    "static": ({}, (Static(warmup=90),)),
    "erratic": ({}, (Erratic(),)),
    "moves cells": ({}, (MOVES_CELLS, RecentPrefetch())),
    "lfru, host": ({"eviction": "lfru", **HOST}, ()),
    "one pool": ({"eviction": "global-lfu", "driver": "host,waves=2"}, ()),
    "next layer": (HOST, (CoActivation(),)),
    "erratic between layers": (HOST, (Erratic(moments=frozenset(Moment)),)),
    **{
        f"streamed layers, {budget}": ({"prefetch": "fluxmoe", "expert_budget": budget, **HOST}, ())
        for budget in ("30%", "55%", "80%")
    },
}
QUICK = {"fifo", "next layer"}
"""With the programs of test_what_an_engine_says_of_its_policies."""


def traced(directory, policies=(), late: bool = False, **options) -> Trace:
    """The trace of a run under these policies, of a cold engine. late: transfers are."""
    given = {"expert_budget": "40%", "policies": policies, "trace": directory, **options}
    with open_llm(enable_prefix_caching=False, **given) as llm:
        if late:
            delay(llm, 1e-3, 0.2)
        erratic = any(isinstance(policy, Erratic) for policy in policies)
        # Erratic policies refuse fills and take experts out of cells between two counts.
        found = run(llm, mixed_jobs(), check=not late and not erratic)
        assert same_bits(found, at_rest())
    return read_trace(directory)


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in SUBJECTS]
)
def test_no_bit_changes_and_a_replay_is_what_the_engine_did(name, tmp_path):
    options, policies = SUBJECTS[name]
    trace = traced(tmp_path / "t", policies, **options)
    found = replay(trace, policies=policies)
    for field in ("hits", "fills", "read_through"):
        np.testing.assert_array_equal(getattr(found, field), trace.array(f"step.{field}"))
    np.testing.assert_array_equal(found.bytes, found.transfers * RECORD)
    assert found.misses.sum() > 0 and found.of_kind("decode").sum() > 20
    if (policies or "prefetch" in options) and name != "static":
        assert found.staged.sum() > 0 and len(list(trace.transfers())) > 0
    read, dispatched = trace.array("step.read_s"), trace.array("step.start_s")
    # A step with hooks is read before the next one is dispatched, others mostly after.
    between = name in ("next layer", "erratic between layers", "one pool") or "prefetch" in options
    assert (read[:-1] > dispatched[1:]).any() == (not between)


# ---- what a replay finds


@pytest.fixture(scope="module")
def recent(tmp_path_factory) -> Trace:
    return traced(tmp_path_factory.mktemp("replay") / "t", (RecentPrefetch(),), eviction="lru")


@pytest.mark.slow
def test_what_differs_is_said(recent):
    """Other policies than the run's, and a trace that says something else of a decision."""
    policies = (RecentPrefetch(),)
    other = simulate(recent, eviction="lru", policies=(RecentPrefetch(window=1),))
    again = replay(recent, policies=policies)
    assert (other.transfers.sum(axis=0) != again.transfers.sum(0)).any()
    with pytest.raises(TraceError, match=r"the trace has .*, the replay .*; give the policies"):
        replay(recent, policies=(RecentPrefetch(window=1),))
    with pytest.raises(TraceError, match=r"step \d+: bytes: the trace has \d+, the replay \d+"):
        replay(recent)
    spec = {**recent.header.spec, "cells": [3, 4, 4, 4]}
    header = dataclasses.replace(recent.header, spec=spec)
    with pytest.raises(TraceError, match=r"step 0 \(prefill\), layer 0: \w+: the trace has"):
        replay(dataclasses.replace(recent, header=header), policies=policies)
    path = recent.directory / "decisions.jsonl"
    text = path.read_text()
    lines = text.splitlines(keepends=True)
    for changed, match in (
        ("".join(lines[:-1]), "decision: the trace has None, the replay"),
        ("".join([*lines, lines[-1]]), r"decision: the trace has .*, the replay none"),
        (text.replace("recent", "other", 1), r"the trace has .*other.*, the replay .*recent"),
    ):
        path.write_text(changed)
        with pytest.raises(TraceError, match=match):
            replay(recent, policies=policies)
    path.write_text(text)


@pytest.mark.slow
def test_what_cannot_be_replayed(recent, tmp_path):
    with pytest.raises(ValueError, match=r"writes 'kv_pages', and the simulator has no KV"):
        simulate(recent, policies=(scripted(writes={"kv_pages"}),))
    with pytest.raises(TraceError, match="needs 'probs', which this trace does not have; record"):
        simulate(recent, policies=(scripted(needs={"probs"}),))
    steps = [step._replace(number=step.number + 3) for step in recent.step_traces()]
    with TraceWriter(tmp_path / "late", recent.header) as writer:
        for step in steps:
            writer.append(step)
    with pytest.raises(TraceError, match=r"step 0 is not in the trace .*; use simulate"):
        replay(read_trace(tmp_path / "late"), policies=(RecentPrefetch(),))
    spec = {**recent.header.spec, "eviction": "FIFO"}
    header = dataclasses.replace(recent.header, spec=spec)
    with pytest.raises(TraceError, match="eviction was by 'FIFO', which is no policy of moejax"):
        replay(dataclasses.replace(recent, header=header))


@pytest.mark.slow
def test_budgets_that_wait_are_replayed(tmp_path):
    """KV in use is in the way of a policy that moves cells and pages at once; the replay waits as
    long. Then a budget is moved by hand, between two requests."""
    least = -(-LIMITS["max_model_len"] // 16)
    script = {
        (Moment.STEP_END, 9): Decision(cells=np.array([7, 3, 8, 5]), kv_pages=least),
        (Moment.STEP_END, 60): Decision(cells=np.array([6, 5, 4, 3])),
    }
    moving = scripted(script, needs={"cells", "state"}, writes={"cells", "kv_pages"})
    policies = (moving, RecentPrefetch())
    longer = dataclasses.replace(GREEDY, max_tokens=30)
    last = dataclasses.replace(GREEDY, max_tokens=90)
    options = {"eviction": "lfu", "policies": policies, "trace": tmp_path / "t"}
    with open_llm(expert_budget="40%", enable_prefix_caching=False, **options) as llm:
        for first, params in ((5, longer), (8, longer), (3, last)):
            llm.engine.add([*range(first, first + 90)], params)
        while not llm.engine.idle:
            llm.engine.step()
        llm.engine.drain()
        llm.engine.set_budget([2, 9, 4, 7], llm.engine.scheduler.arena.count(SlotClass.KV))
        tokens_of(llm)
    trace = read_trace(tmp_path / "t")
    *moved, last_moved, by_hand = trace.budgets()
    # A decision is read a step late, so step 11 is the first that could have it.
    assert moved[0].step == 11 and not moved[0].settled and moved[-1].settled
    assert moved[-1].step > 12 and moved[-1].cells == (7, 3, 8, 5)
    assert last_moved.cells == (6, 5, 4, 3)
    assert least <= moved[-1].kv_pages < trace.array("step.use")[0, USES.index("kv_pages")]
    assert by_hand.by_hand and by_hand.cells == (2, 9, 4, 7)
    assert not any(budget.by_hand for budget in (*moved, last_moved))
    found = replay(trace, policies=policies)
    assert found.control is not None
    assert found.control["budget_deferred"] == moved[-1].step - 11
    # By hand in place of a policy.
    path = trace.directory / "decisions.jsonl"
    path.write_text(path.read_text().replace('"step": 11', '"step": 4', 1))
    with pytest.raises(TraceError, match=r"before step 4 a budget was .* no policy"):
        replay(read_trace(trace.directory), policies=policies)


# ---- decisions by what transfers do


@dataclasses.dataclass(frozen=True)
class ByWhatFlies:
    """Stages between layers, the more the fewer bytes are left on the link, and says what it saw in
    priors."""

    moments: frozenset[Moment] = frozenset({Moment.ROUTED, Moment.TRANSFER})
    needs: frozenset[str] = frozenset(LinkUse._fields)
    writes: frozenset[str] = frozenset({"stages", "prior"})

    def init(self, spec: Spec) -> tuple[int, tuple[int, int]]:
        return 0, (spec.layers, spec.experts)

    def decide(self, state, observation):
        asked, (layers, experts) = state
        link = [getattr(observation, name) for name in LinkUse._fields]
        prior = np.full((layers, experts), sum(link) % 997, np.int32)
        target = (observation.layer + 1) % layers
        count = 1 + 4 * (observation.link_bytes_left < 1 << 16)
        stages = tuple(Stage(target, (3 * asked + i) % experts) for i in range(count))
        return (asked + 1, state[1]), Decision(stages=stages, prior=prior)


OVER_A_LINK = {"transfers": "queue,rate=300MB/s,chunk_bytes=16KiB"}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{**OVER_A_LINK, **HOST}, {"transfers": "queue", **HOST}])
def test_decisions_by_what_is_on_the_link_are_made_again(options, tmp_path):
    """With the native queue, and with one of copies by jax."""
    policies = [ByWhatFlies()]
    trace = traced(tmp_path / "t", policies, late=True, eviction="lru", **options)
    uses = np.array([each.use for each in trace.link()])
    flying, left, arrived, failed, busy = uses.T[:5]
    assert len(uses) > 100 and not failed.any() and np.all((left > 0) <= (flying > 0))
    assert flying.max() > 0 and arrived[-1] > 0
    assert all(np.all(np.diff(sums) >= 0) and sums[-1] > sums[0] for sums in (arrived, busy))
    busy = trace.array("step.use")[:, USES.index("link_busy_us")].tolist()
    assert busy == sorted(busy) and busy[-1] > busy[0]
    replay(trace, policies=policies)
    # With another link it decides otherwise: what it saw is what makes the replay equal.
    path = tmp_path / "t" / "link.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps([*line[:-1], line[-1] + 1]) + "\n" for line in lines))
    with pytest.raises(TraceError, match="decision: the trace has"):
        replay(read_trace(tmp_path / "t"), policies=policies)


# ---- cells that move, and what earlier runs taught


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"driver": "host", "placement": "fiddler-code,STATED"}])
def test_a_hot_table_in_the_engine(options):
    """One layer's experts are used more than all others': its cells become more, no bit changes,
    and nobody else comes in."""
    stated = "per_token=1us,startup=1us,load=4us,accelerator=1us,attention=1us"
    options = {k: v.replace("STATED", stated) for k, v in options.items()}
    counts = np.ones((4, 16), int)
    counts[2] += 9
    table = HotTable(counts=tuple(tuple(c) for c in counts.tolist()))
    with open_llm(expert_budget="40%", policies=[table], **options) as llm:
        before = cells_of(llm)
        assert same_bits(run(llm, mixed_jobs(), check=False), at_rest())
        assert cells_of(llm)[2] == 16 > before[2] and sum(cells_of(llm)) == sum(before)
        runner = llm.engine.runner
        assert (np.asarray(runner.tables.address)[2] >= 0).all() and not runner.faults()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"eviction": "global-lfu"},
        # What was on its way into a cell that another layer got is nobody's.
        {"prefetch": "expert_map", **OVER_A_LINK},
        {"prefetch": "fluxmoe", **OVER_A_LINK},
        pytest.param({"prefetch": "expert_map", "transfers": "queue"}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_cells_of_one_pool_go_on_and_budgets_move(options):
    with open_llm(expert_budget="40%", driver="host", **options) as llm:
        engine, arena = llm.engine, llm.engine.scheduler.arena
        delay(llm, 1e-3, 0.3)
        total = sum(cells_of(llm))
        assert same_bits(run(llm, mixed_jobs(), check=False), at_rest())
        assert not engine.runner.faults()
        assert sum(cells_of(llm)) == total and len({*cells_of(llm)}) > 1
        know_cells(engine.runner, arena)
        assert cells_of_arena(arena) == cells_of(llm)
        engine.set_budget([3, 2, 5, 4], arena.count(SlotClass.KV))
        assert cells_of(llm) == [3, 2, 5, 4]
        assert same_bits(run(llm, mixed_jobs(), check=False), at_rest())
        assert sum(cells_of(llm)) == 14 and cells_of(llm) != [3, 2, 5, 4]
        assert engine.control.controller.pool.handed > 100


@pytest.fixture(scope="module")
def earlier(tmp_path_factory):
    """A run that networks and forests learn from: (trace, routers)."""
    directory = tmp_path_factory.mktemp("earlier") / "t"
    with open_llm(prefetch="fate", trace=f"{directory},arrays=gate_input", **HOST) as llm:
        run(llm, mixed_jobs(), check=False)
        router = llm.engine.control.controller.spec.router
    return read_trace(directory), router


@pytest.mark.slow
def test_networks_learn_on_beside_an_engine(earlier, tmp_path):
    """Networks that were trained on a run learn on in the next one, swapped between steps: the same
    tokens, and a replay of the trace takes the run's decisions again."""
    fitted = llapor.fit(earlier[0], width=16, epochs=1).fitted
    policy = LearnedOnline(fitted, rows=32, iterations=2)
    options = {"trace": f"{tmp_path / 't'},arrays=gate_input", "policies": [policy], **HOST}
    with open_llm(expert_budget="40%", **options) as llm:
        for _ in range(2):
            assert same_bits(run(llm, mixed_jobs(), check=False), at_rest())
            for seat in llm.engine.control.controller._seats:
                if isinstance(seat.state, Learning):
                    seat.state.tuner.wait()  # the next run finds what it learned
        (said,) = llm.stats()["control"]["said"].values()
        assert said["rounds"] >= 1
        fills = llm.stats()["experts"]["fills"]
    trace = read_trace(tmp_path / "t")
    assert replay(trace, policies=[repeat_run(trace, policy)]).fills.sum() == fills


# ---- expert maps that decode steps search themselves


def resident_trace(directory, jobs) -> Trace:
    """Of an engine without the policy and with every expert there."""
    with open_llm(trace=f"{directory},arrays=probs+embedding") as llm:
        run(llm, jobs, check=False)
    return read_trace(directory)


@pytest.mark.slow
def test_same_bits_while_the_store_of_maps_grows(tmp_path):
    """All invariants after every step; transfers are counted, traced and used; what the trace's
    policy wrote is what the device holds."""
    policy = ExpertMapInStep(capacity=60, distance=2)
    with open_llm(expert_budget="40%", policies=[policy], trace=tmp_path / "t") as llm:
        assert same_bits(run(llm, mixed_jobs()), at_rest())
        runner, controller = llm.engine.runner, llm.engine.control.controller
        counts = controller.staging.counts["prefetch"]
        assert counts["done"] > 200 and counts["used"] > 100 and not counts["skipped"]
        assert [str(k) for k in runner.executables() if k.maps] == [
            "write_maps_maps60x2",
            "decode_traced_maps60x2@1",
            "decode_traced_maps60x2",
        ]
        store = controller._seats[0].state.store
        assert store.size == 60
        llm.engine.control.before_step(10_000)  # what the last step taught is written now
        for held, kept in zip(runner.maps.arrays, store, strict=True):
            assert np.array_equal(np.asarray(held), kept)
        notes = " ".join(llm.stats()["notes"])
        assert f"expert maps take {format_bytes(policy.search.nbytes(4, 16, 128))}" in notes
    trace = read_trace(tmp_path / "t")
    made = [t for t in trace.transfers() if t.published >= 0]
    assert len(made) > 150 and {t.layer for t in made} == {0, 1, 2, 3}
    assert trace.array("step.bytes")[:, 2].sum() == counts["bytes"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pooled", "most"),
    [(False, None), (True, None), (True, 3), pytest.param(False, 3, marks=pytest.mark.nightly)],
)
def test_a_simulation_counts_what_steps_that_search_do(tmp_path, monkeypatch, pooled, most):
    """Of routing that was recorded without the policy; then at another budget and over a link. A
    replay has each hit, transfer and decision. A trace without routers' probabilities is
    refused. In a pool cells pass from layer to layer, and none is lost. Of few transfers between
    two layers the most urgent ones are made."""
    trace = resident_trace(tmp_path / "rest", mixed_jobs())
    fitted = in_step.fit(trace, capacity=40, distance=3, share=0.5, pooled=pooled, most=most)
    found = simulate(trace, policies=[fitted], cells=4, driver="device")
    options = {"policies": [fitted], "trace": f"{tmp_path / 'run'},arrays=probs+embedding"}
    with open_llm(expert_budget="25%", transfers="queue,rate=200MB/s", **options) as llm:
        counts, control = [], llm.engine.control
        before_step = control.before_step

        def count_cells() -> None:
            cells = np.asarray(llm.engine.runner.tables.cell_row) >= 0
            counts.append(cells.sum(axis=1))

        monkeypatch.setattr(control, "before_step", lambda n: (count_cells(), before_step(n))[1])
        run(llm, mixed_jobs(), check=False)
        count_cells()
        assert counts[-1].sum() == 16
        assert any(np.ptp(cells) > 0 for cells in counts) == pooled  # at the end they may be even
    engine = read_trace(tmp_path / "run")
    assert np.array_equal(replay(engine, policies=[fitted]).staged, found.staged)
    if most is not None:
        # Three before the first layer and after each of the four; all at once would be more.
        assert 0 < found.staged.sum(axis=1).max() <= most * 5
    for name in ("hits", "fills", "read_through"):
        assert np.array_equal(engine.array(f"step.{name}"), getattr(found, name)), name
    assert engine.array("step.bytes")[:, 2].sum() == found.staged.sum() * RECORD
    assert found.staged.sum() > 100
    with pytest.raises(TraceError, match=r"the trace has .*, the replay"):
        replay(engine, policies=[dataclasses.replace(fitted, distance=2)])
    bare = dataclasses.replace(engine, header=dataclasses.replace(engine.header, embedding=0))
    with pytest.raises(TraceError, match="a decode step searches 'embedding', which"):
        simulate(bare, policies=[fitted], driver="device")
    with pytest.raises(PolicyError, match="use driver='device'"):
        simulate(trace, policies=[fitted], driver="host")


# ---- the tutorial's


@pytest.fixture(scope="module")
def fifo():
    """FIFO and the tutorial's policy, 40% of the experts, as its file asks for."""
    policies = [RecentPrefetch()]
    with open_llm(expert_budget="40%", eviction="fifo", policies=policies) as llm:
        yield llm


def test_what_an_engine_says_of_its_policies(fifo):
    compiled = {*map(str, fifo.engine.runner.executables())}
    assert {"decode_staged", "prefill_staged", "snapshot"} <= compiled
    tokens_of(fifo)
    stats = fifo.stats()
    assert stats["eviction"] == "fifo"
    assert stats["control"]["policies"] == ["FIFO", "RecentPrefetch"]
    assert stats["control"]["decisions"]["RecentPrefetch"] > 0
    transfers = stats["control"]["transfers"]["recent"]
    assert transfers["done"] > 0 and transfers["issued"] == transfers["done"] + transfers["skipped"]
    assert transfers["bytes"] == transfers["done"] * RECORD
    tables = fifo.engine.runner.tables
    np.testing.assert_array_equal(tables.victim_weights, [0, 0, 1])
    assert np.asarray(tables.prior).max() == fifo.config.num_experts


@pytest.mark.slow
def test_policies_that_are_weights_cost_nothing():
    with open_llm(expert_budget="40%", eviction="lfru") as llm:
        assert llm.engine.control is None and llm.stats()["control"] is None
        np.testing.assert_array_equal(llm.engine.runner.tables.victim_weights, [1, 1, 0])
        assert not {"snapshot", "decode_staged"} & {*map(str, llm.engine.runner.executables())}


def test_the_tutorial_shows_the_file_that_runs(repository):
    page = (repository / "docs/extending/write_a_policy.md").read_text()
    source = (repository / "examples" / "recent_prefetch.py").read_text()
    (shown,) = re.findall(r"```python\n(import dataclasses.*?)```", page, re.DOTALL)
    body = source[source.index("import dataclasses") : source.index('if __name__ == "__main__"')]
    assert shown.strip() == body.strip()

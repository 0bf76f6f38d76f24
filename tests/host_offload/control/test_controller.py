"""The controller: what policies see and when, and what becomes of what they decide."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.control.controller import Controller, Decided, Observed
from host_offload.control.interface import (
    Costs,
    Decision,
    Moment,
    Stage,
    StagedTransfer,
    Transition,
    stages_at,
)
from host_offload.control.rules import PolicyError
from host_offload.control.staging import Staging
from host_offload.control.step_record import Glance, LinkUse, StepRows
from host_offload.memory.pager import order_cells
from host_offload.memory.tables import (
    Entry,
    Residency,
    cold_tables,
    empty_tables,
    read_snapshot,
    snapshot,
)
from host_offload.policies.eviction.eviction_names import EVICTION
from pallas_kernels.plan import Tables, host, plan
from tests.host_offload.control.policy_runs import (
    CELLS,
    EXPERTS,
    LAYERS,
    record,
    scripted,
    seen,
    spec,
    use,
)
from tests.host_offload.memory.layered_device import LayeredDevice
from tests.host_offload.traces.traces_of import random_routing, write_trace
from tests.pallas_kernels.pager import INT, Pager, tables_of

END, BEGIN = Moment.STEP_END, Moment.STEP_BEGIN


def empty() -> Residency:
    """Eight free dense cells a layer."""
    tables = empty_tables(LAYERS, EXPERTS, CELLS)
    row = np.arange(LAYERS * CELLS, dtype=np.int32).reshape(LAYERS, CELLS)
    return Residency(*map(np.asarray, tables._replace(cell_row=row)))


def end(controller: Controller, step: int, *, sets=((0, 1), (2, 3)), **changes) -> None:
    given = {"age": 1, "seconds": float(step), "tables": empty()}
    given |= {name: changes.pop(name) for name in given if name in changes}
    controller.end_step(record(step, *sets, **changes), **given)


# ---- what a policy sees


def test_a_policy_sees_what_it_needs_at_the_moments_it_asked_for_and_nothing_else():
    needs = {"counts", "running", "state", "cells", "in_flight", "last_used", "clock"}
    controller = Controller(spec(), [scripted(moments={BEGIN, END}, needs=needs)])
    assert controller.needs_residency
    controller.see(empty())
    controller.begin_step(0, seconds=0.0)
    end(controller, 0, sets=((0, 1), (1, 7)))
    begin, after = seen(controller)
    assert (begin.moment, begin.step, begin.age) == (BEGIN, 0, 0)
    assert begin.counts is None and begin.running is None  # no step was read yet
    assert (begin.cells == CELLS).all() and begin.in_flight == ()
    assert (after.moment, after.step, after.age, after.turn, after.layer) == (END, 0, 1, -1, -1)
    want = np.zeros((LAYERS, EXPERTS), int)
    want[0, [0, 1]] = want[1, [1, 7]] = 1
    np.testing.assert_array_equal(after.counts, want)
    assert after.running == 1 and not after.state.any() and not after.clock.any()
    assert (after.last_used == -1).all()
    assert after.ids is None and after.weights is None and after.frequency is None
    assert repr(dataclasses.replace(after)) == repr(after)  # whole, though made without its class
    controller.begin_step(1, seconds=1.0)
    assert seen(controller)[-1].running == 1 and seen(controller)[-1].counts is None


@dataclasses.dataclass(frozen=True)
class Answers(type(scripted())):
    """Decides what a function says of an observation."""

    answer: Any = None

    def decide(self, state, observation):
        return self.answer(observation)


@pytest.mark.parametrize(
    ("answer", "error", "match", "needs"),
    [
        (lambda seen: seen.counts.fill(9), ValueError, "read-only", "counts"),
        (lambda seen: ((), Decision(prior=seen.counts * 1)), TypeError, "NoneType", "missed"),
        (lambda seen: None, PolicyError, "STEP_END of step 3: decide must return", "counts"),
        (lambda seen: ((), Decision(), 1), PolicyError, "decide must return", "counts"),
    ],
)
def test_errors_name_the_policy_and_what_it_did_not_ask_for(answer, error, match, needs):
    policy = Answers(needs=frozenset({needs}), answer=answer)
    with pytest.raises(error, match=match) as caught:
        end(Controller(spec(), [policy]), 3)
    if error is not PolicyError:
        where, *more = caught.value.__notes__
        assert where == "in policy Answers at STEP_END of step 3"
        assert more == [
            f"fields of the observation that its `needs` lacks are None; it needs {needs}"
        ]


def test_errors_of_init_name_the_policy():
    class Wrong(type(scripted())):
        def init(self, spec):
            return spec.layerz

    with pytest.raises(AttributeError) as caught:
        Controller(spec(), [Wrong()])
    assert caught.value.__notes__ == ["in policy Wrong at its init"]


@pytest.mark.parametrize("need", ["costs", "router"])
def test_what_the_spec_does_not_have_is_refused(need):
    policy = scripted(needs={need})
    with pytest.raises(PolicyError, match=f"policy Scripted needs '{need}', which this Spec"):
        Controller(spec(), [policy])


@pytest.mark.parametrize(
    ("interval", "steps"),
    [
        ("3 steps", [2, 5]),
        ("2 tokens", [1, 3, 5]),  # one row a step
        ("2.5 seconds", [3, 5]),  # step s is read at second s
    ],
)
def test_intervals_sum_counts(interval, steps):
    policy = scripted(moments={Moment.INTERVAL, END}, needs={"counts"}, interval=interval)
    controller = Controller(spec(), [policy])
    for step in range(7):
        end(controller, step)
    marks = [o for o in seen(controller) if o.moment == Moment.INTERVAL]
    assert [o.step for o in marks] == steps
    assert [o.interval for o in marks] == list(range(1, len(steps) + 1))
    between = np.diff([-1, *steps])
    np.testing.assert_array_equal([o.counts[0, 1] for o in marks], between)
    ends = [o for o in seen(controller) if o.moment == END]
    assert all(o.counts[0, 1] == 1 for o in ends)


def test_a_turn_ends_with_each_finished_request_and_has_its_pages():
    pair, none = np.zeros(2), np.zeros((0, 2))
    costs = Costs(pair, pair, none, pair, {}, 0.0, 0.0, 0.0)
    policy = scripted(moments={Moment.TURN_END}, needs={"request", "kv_refs", "costs"})
    controller = Controller(spec(costs=costs), [policy])
    row = dict(user=np.array([7], np.int32), position=np.array([16], np.int32))
    end(controller, 0, **row)
    end(controller, 1, **row, finished=(5, 9))
    five, nine = seen(controller)
    assert [(o.step, o.turn) for o in (five, nine)] == [(1, 5), (1, 9)] and five.costs is costs
    assert five.kv_refs.tolist() == [[7, 0], [7, 1]] and not len(nine.kv_refs)


# ---- decisions


def test_decisions_merge_and_are_handed_out_once():
    prior = np.arange(LAYERS * EXPERTS).reshape(LAYERS, EXPERTS)
    script = {(END, 0): Decision(prior=prior), (END, 1): Decision(prior=prior + 1)}
    policies = [
        scripted(script, writes={"prior"}),
        scripted({(END, 0): Decision(fill_version=prior * 0 - 1)}, writes={"fill_version"}),
        scripted(writes={"victim_weights"}, victim_weights=(0, 1, 0), moments=()),
    ]
    events = []
    controller = Controller(spec(), policies, listener=events.append)
    assert controller.moments and not controller.needs_residency
    end(controller, 0)
    update = dict(controller.changes.contents)
    assert set(update) == {"prior", "fill_version", "victim_weights"}
    assert all(values.dtype == np.int32 for values in update.values())
    np.testing.assert_array_equal(update["victim_weights"], [0, 1, 0])
    controller.changes.contents.clear()
    end(controller, 1)
    assert [*controller.changes.contents] == ["prior"]
    np.testing.assert_array_equal(controller.changes.contents["prior"], prior + 1)
    assert [(e.step, e.policy) for e in events if isinstance(e, Decided)] == [
        (0, "Scripted"),
        (0, "Scripted"),
        (1, "Scripted"),
    ]


def test_a_budget_waits_until_it_can_be_carried_out():
    cells = np.array([3, 2])
    policy = scripted({(END, 0): Decision(cells=cells, kv_pages=8)}, writes={"cells", "kv_pages"})
    controller = Controller(spec(), [policy])
    end(controller, 0)
    np.testing.assert_array_equal(controller.wanted_cells, cells)
    controller.settle_budget(False)
    assert controller.wanted_kv_pages == 8 and controller.stats()["budget_deferred"] == 1
    controller.settle_budget(True)
    assert controller.wanted_cells is None and controller.wanted_kv_pages is None


# ---- which cell makes room


@functools.cache
def planner():
    return jax.jit(functools.partial(plan, layer=0))


WEIGHTS = [(1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1), (3, -2, 5)]


@st.composite
def used_tables(draw) -> tuple[Tables, list[int]]:
    """Tables of one layer after some references, and experts that are absent."""
    experts = st.integers(0, EXPERTS - 1)
    pager = Pager(draw(st.lists(st.integers(0, 1), min_size=6, max_size=6)), EXPERTS)
    granted = draw(st.lists(st.sampled_from([0, 0, 0, -1]), min_size=6, max_size=6))
    pager.regrant([-1 if g < 0 else 10 * i for i, g in enumerate(granted)])
    weights = draw(st.sampled_from(WEIGHTS))
    pager.fill_version = draw(st.lists(st.integers(0, 1), min_size=EXPERTS, max_size=EXPERTS))
    pager.prior = draw(st.lists(st.integers(-3, 3), min_size=EXPERTS, max_size=EXPERTS))
    for active in draw(st.lists(st.frozensets(experts, min_size=1, max_size=3), max_size=12)):
        pager.reference(active, weights)
    absent = [e for e in range(EXPERTS) if e not in pager.where]
    return tables_of([pager], weights), absent


@settings(max_examples=40)
@given(used_tables())
def test_the_cells_are_those_that_plan_would_take(case):
    """Staging all absent experts, as if the next reference missed them and needed nobody else."""
    tables, absent = case
    wanted = tuple(Stage(0, e, int(tables.fill_version[0, e])) for e in absent)
    script = {(BEGIN, 0): Decision(stages=wanted)}
    policy = scripted(script, moments={BEGIN}, writes={"stages"})
    sizes = {"dense": np.array([100]), "small": np.array([40])}
    one_layer = dict(layers=1, version_bytes=sizes, min_cells=np.zeros(1), cell_bound=6)
    controller = Controller(spec(**one_layer, stage_entries=8, staging_bytes=10**6), [policy])
    controller.see(Residency(*tables))
    controller.begin_step(0, seconds=0.0)
    entries = controller.stages(0)
    active = np.isin(np.arange(EXPERTS), absent)
    _, work = planner()(jax.tree.map(jnp.asarray, tables), active=active)
    count = int(work.fill_count)
    assert [e.expert for e in entries] == work.fill_expert[:count].tolist()
    assert [e.version for e in entries] == work.fill_version[:count].tolist()
    rows = tables.cell_row[0, [e.cell for e in entries]]
    np.testing.assert_array_equal(rows, work.fill_row[:count])


def test_a_wrong_formula_would_be_noticed():
    """The mutation: age instead of recency. The property above depends on it."""
    pager = Pager([0, 0], EXPERTS)
    pager.regrant([0, 10])
    for active in ({0}, {1}):
        pager.reference(active, (1, 0, 0))
    tables = Residency(*tables_of([pager], (1, 0, 0)))
    assert order_cells(tables, 0, 0)[0] == 0
    assert order_cells(tables._replace(victim_weights=INT([-1, 0, 0])), 0, 0)[0] == 1


@pytest.mark.parametrize("weights", [(1, 0, 0), (0, 1, 0), (2, 1, 3), (-1, 0, 1), (0, 0, 0)])
def test_the_native_order_of_cells_is_numpys(weights):
    rng, order = np.random.default_rng(0), host.cell_order()
    assert order is not None
    for _ in range(20):
        cell_row = np.where(rng.random((3, 9)) < 0.8, rng.permutation(27).reshape(3, 9), -1)
        owner = np.where(rng.random((3, 9)) < 0.7, rng.integers(EXPERTS, size=(3, 9)), -1)
        of_experts = [rng.integers(low, 5, (3, EXPERTS)) for low in (-1, 0, 0, -2, -5)]
        shown = cell_row, rng.integers(2, size=(3, 9)), owner, rng.integers(9, size=(3, 9))
        found = *shown, *of_experts, np.full(3, 9), np.array(weights)
        tables = Residency(*(each.astype(np.int32) for each in found))
        for layer, version in itertools.product(range(3), range(2)):
            plain = order_cells(tables, layer, version)
            np.testing.assert_array_equal(order_cells(tables, layer, version, order), plain)


# ---- staging


def wanting(*stages, needs=(), writes=("stages",), **more) -> Controller:
    script = {(BEGIN, 0): Decision(stages=stages), **more.pop("script", {})}
    policy = scripted(script, moments={BEGIN, END}, needs=needs, writes=writes)
    controller = Controller(spec(**more), [policy])
    controller.see(empty())
    controller.begin_step(0, seconds=0.0)
    return controller


def flags(*done: int) -> np.ndarray:
    return np.array([*done, *[0] * (8 - len(done))], np.int32)


def counts(controller: Controller, cause: str = "prefetch") -> dict:
    return {k: v for k, v in controller.stats()["transfers"][cause].items() if v}


def test_the_life_of_a_transfer():
    needs = {"state", "finished", "retired", "in_flight"}
    controller = wanting(Stage(0, 4), Stage(1, 6, cause="guess"), Stage(0, 5), needs=needs)
    controller.listener = (events := []).append
    assert len(controller.stages(0)) == 3
    # Expert 4 is used in the step that carries it out, which does not count: it came too late.
    missed = np.zeros((LAYERS, EXPERTS), bool)
    missed[0, 4] = True
    address = empty().address.copy()
    address[0, 4], address[1, 6] = 4, 6
    now = empty()._replace(address=address)
    end(controller, 0, sets=((4, 0), (1, 2)), staged=flags(1, 1, 0), tables=now)
    a, b, c = seen(controller)[-1].finished
    assert a == StagedTransfer(0, 4, 0, 0, 100, "prefetch", issued=0, published=0)
    assert b == StagedTransfer(1, 6, 0, 0, 100, "guess", issued=0, published=0)
    assert c.skipped and c.published == -1
    assert seen(controller)[-1].retired == () and seen(controller)[-1].in_flight == ()
    # The skipped one is still wanted.
    assert [e.expert for e in controller.stages(1)] == [5]
    gone = now._replace(address=np.where(address == 6, -1, address))
    end(controller, 1, sets=((4, 0), (1, 2)), staged=flags(0), tables=gone)
    last = seen(controller)[-1]
    assert [(t.expert, t.first_use) for t in last.retired] == [(4, 1), (6, -1)]
    assert counts(controller) == {"issued": 3, "done": 1, "skipped": 2, "used": 1, "bytes": 100}
    assert counts(controller, "guess") == {"issued": 1, "done": 1, "unused": 1, "bytes": 100}
    assert [t.expert for t in events if isinstance(t, StagedTransfer)] == [5, 5, 4, 6]


def test_who_is_no_longer_wanted_is_cancelled_and_a_pause_holds_all_back():
    later = {
        (END, 0): Decision(stages=(Stage(1, 1),), pause_stages=True),
        (END, 1): Decision(pause_stages=False),
    }
    writes = {"stages", "pause_stages"}
    controller = wanting(
        Stage(0, 4), Stage(0, 5), Stage(0, 6), stage_entries=1, script=later, writes=writes
    )
    assert [e.expert for e in controller.stages(0)] == [4]
    end(controller, 0, staged=flags(0))
    # What was skipped was still in the queue.
    assert counts(controller) == {"issued": 1, "deferred": 2, "skipped": 1, "cancelled": 3}
    assert controller.stages(1) == [] and controller.stats()["queued"] == 1
    end(controller, 1)
    assert [(e.layer, e.expert) for e in controller.stages(2)] == [(1, 1)]


def test_a_step_that_was_never_dispatched_gives_its_entries_back():
    controller = wanting(Stage(0, 4))
    first = controller.stages(0)
    assert controller.stages(1) == []
    controller.staging.forget(0)
    assert controller.stages(1) == first
    assert counts(controller) == {"issued": 1, "deferred": 1}


def test_a_step_whose_results_were_lost_skipped_its_entries():
    controller = wanting(Stage(0, 4))
    controller.stages(0)
    end(controller, 1)
    assert counts(controller) == {"issued": 1, "skipped": 1}
    assert [e.expert for e in controller.stages(2)] == [4]


# ---- between layers


def test_the_queue_is_seen_between_layers_as_it_is_then():
    """By who needs it; at other moments as the last step left it."""
    needs = {"link_bytes_left", "link_flying"}
    moments = {Moment.LAYER_BEGIN, Moment.ROUTED, Moment.STEP_END}
    policies = [scripted(moments=moments, needs=needs), scripted(moments={Moment.ROUTED})]
    logged = []
    controller = Controller(spec(driver="host"), policies, listener=logged.append)
    rows = StepRows(*np.zeros((4, 1), np.int32))
    looks = [LinkUse(1, 40, 3, 0, 5), LinkUse(2, 30, 3, 0, 6)]
    for link, moment in zip(looks, (Moment.LAYER_BEGIN, Moment.ROUTED), strict=True):
        controller.between_layers(moment, 3, 1, seconds=0.0, rows=rows, link=link)
    controller.end_step(
        record(3, (0, 1), use=use(link_flying=7, link_bytes_left=9)), age=0, seconds=0.0
    )
    found = [[(o.link_flying, o.link_bytes_left) for o in seen(controller, i)] for i in range(2)]
    assert found == [[(1, 40), (2, 30), (7, 9)], [(None, None)]]
    shown = [event for event in logged if isinstance(event, Observed)]
    assert [(e.step, e.moment, e.layer, e.link) for e in shown] == [
        (3, Moment.LAYER_BEGIN, 1, looks[0]),
        (3, Moment.ROUTED, 1, looks[1]),
    ]


# ---- under way


@settings(max_examples=25)
@given(st.integers(0, 2**32 - 1), st.integers(0, 2), st.integers(1, CELLS))
def test_lists_stay_legal_under_lag(tmp_path_factory, seed, age, cells):
    """Over random steps read late: never two entries on one cell, never one for who is known to be
    there, never more bytes than allowed; every transfer ends in one way."""
    rng = np.random.default_rng(seed)
    script = {}
    for step in range(12):
        wanted = [Stage(int(p // 8), int(p % 8)) for p in rng.permutation(16)[: rng.integers(9)]]
        if rng.random() < 0.7:
            script[END, step] = Decision(stages=tuple(wanted))
    policy = scripted(script, needs={"in_flight"}, writes={"stages"})
    controller = Controller(spec(staging_bytes=500), [policy])
    original = controller.stages

    def checked(step):
        flying = {(t.layer, t.cell) for t in controller.staging.in_flight}
        entries = original(step)
        places = [(e.layer, e.cell) for e in entries]
        assert len(set(places)) == len(places) and flying.isdisjoint(places)
        assert all(controller.tables.address[e.layer, e.expert] < 0 for e in entries)
        assert sum(t.bytes for t in controller.staging.in_flight) <= 500
        return entries

    controller.stages = checked
    routed = random_routing(rng, 14, LAYERS, EXPERTS, 2)
    trace = write_trace(tmp_path_factory.mktemp("t") / "t", routed, EXPERTS)
    LayeredDevice(controller, cells, age=age).run(trace)
    total = controller.stats()["transfers"].get("prefetch", dict.fromkeys(("issued",), 0))
    if total["issued"]:
        assert total["issued"] == total["done"] + total["skipped"]
        assert total["done"] == total["used"] + total["unused"]
        assert total["bytes"] == 100 * total["done"]


def listed_by_the_rule(staging, tables, queues) -> list[Entry]:
    """The next list, entry by entry. queues: of Transition and of Stage, as they were given."""
    told, flying = staging.spec, {(t.layer, t.expert) for t in staging.in_flight}
    taken = {(t.layer, t.cell) for t in staging.in_flight}
    room = told.staging_bytes - sum(t.bytes for t in staging.in_flight)
    ranks = [{(e.layer, e.expert): i for i, e in enumerate(queue)} for queue in queues]
    found: list[Entry] = []
    for kind, queue in enumerate(queues):
        for entry in queue:
            layer, expert, version = entry[:3]
            have = tables.version[layer, expert] if tables.address[layer, expert] >= 0 else -1
            if (layer, expert) in flying or (have == version if kind == 0 else have >= 0):
                continue
            size = (100, 40)[version]
            if len(found) == told.stage_entries or size > room:
                return found
            place = layer, expert
            cells = [
                (c, (layer, int(tables.owner[layer, c])))
                for c in order_cells(tables, layer, version).tolist()
                if (layer, c) not in taken
            ]
            unwanted = [c for c, who in cells if who not in ranks[0] and who not in ranks[1]]
            above = ranks[0] if kind else {}
            less = [
                c
                for c, who in cells
                if who not in above and ranks[kind].get(who, 99) >= ranks[kind][place]
            ]
            if not (unwanted or less):
                continue
            cell = (unwanted or less)[0]
            taken.add((layer, cell))
            flying.add(place)
            room -= size
            found.append(Entry(layer, expert, version, cell))
    return found


def test_stages_of_an_expert_below_zero_are_not_those_of_another():
    assert stages_at(0, np.array([-1, 2]), "x") == (Stage(0, -1, 0, "x"), Stage(0, 2, 0, "x"))


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32))
def test_lists_are_those_of_the_rule(seed):
    """Queues of changes and of stages, in arrays or one by one, in two versions, with transfers in
    flight: the most urgent first, into cells of unwanted experts, then of less urgent ones."""
    rng = np.random.default_rng(seed)
    experts, cells, some = 12, 7, int(rng.integers(1, 7))
    sizes = {"dense": np.array([100, 100]), "small": np.array([40, 40])}
    told = spec(
        experts=experts,
        version_bytes=sizes,
        cell_bound=cells,
        stage_entries=int(rng.integers(1, 9)),
        staging_bytes=int(rng.integers(100, 1200)),
    )
    tables = cold_tables(
        np.full((LAYERS, 2), (some, cells - some)), experts, rng.integers(0, 2, 3), cells
    )
    for layer in range(LAYERS):
        owners = rng.permutation(experts)[:cells]
        owners[rng.random(cells) < 0.2] = -1
        tables.owner[layer] = owners
        held = owners >= 0
        tables.address[layer, owners[held]] = tables.cell_row[layer, held]
        tables.version[layer, owners[held]] = tables.cell_version[layer, held]
    for table in (tables.last_used, tables.frequency, tables.prior):
        table[:] = rng.integers(0, 4, table.shape)
    tables.fill_version[:] = rng.integers(0, 2, tables.fill_version.shape)
    tables.clock[:] = 4
    staging = Staging(told, lambda transfer: None)

    def places() -> np.ndarray:
        chosen = rng.permutation(LAYERS * experts)[: rng.integers(16)]
        return np.stack(np.divmod(chosen, experts))

    for step in range(3):
        changes = [Transition(*place, int(rng.integers(2))) for place in places().T.tolist()]
        layer, expert = places()
        stages = stages_at(layer, expert, "x")
        places_of = zip(layer.tolist(), expert.tolist(), strict=True)
        assert stages == tuple(Stage(*place, cause="x") for place in places_of)
        filled = tables.fill_version[layer, expert].tolist()
        wanted = [one._replace(version=v) for one, v in zip(stages, filled, strict=True)]
        staging.want("transitions", changes, tables)
        staging.want("stages", stages if rng.random() < 0.5 else [*stages], tables)
        expected = listed_by_the_rule(staging, tables, (changes, wanted))
        assert staging.entries(step, tables) == expected


def test_a_snapshot_reads_back_as_the_tables():
    tables = empty_tables(LAYERS, EXPERTS, 5, EVICTION["lfru"])
    tables = tables._replace(frequency=jnp.arange(16, dtype=jnp.int32).reshape(2, 8))
    copy = read_snapshot(np.asarray(snapshot(tables)), tables)
    for name, a, b in zip(Tables._fields, copy, tables, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name, strict=True)
    assert Residency._fields == Tables._fields


@dataclasses.dataclass(frozen=True)
class Resting:
    """Notes what it is told."""

    moments = frozenset({END})
    needs = writes = frozenset()

    def init(self, spec):
        return ()

    def decide(self, state, seen):
        return (*state, "asked"), Decision()

    def rests(self, state, glance):
        return None if glance.compiled else (*state, glance.missed)

    def skips(self, state):
        return 3, 10

    def skipped(self, state, steps, misses):
        return *state, (steps, misses)


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([(True, 2, 0, 0)] * 3, [(3, 3)]),
        ([(True, 2, 0, 9)], [(1, 9)]),
        ([(True, 2, 0, 4), (True, 2, 0, 5)], [(2, 9)]),
        ([(True, 2, 0, 10)], []),
        ([(False, 2, 0, 1)], []),
        ([(True, 3, 0, 1)], []),
        ([(True, 2, 1, 1)], []),
    ],
)
def test_steps_like_the_last_one_may_be_skipped(steps, told):
    """As many and with so many misses as the policy says, decode steps of as many requests, while
    none waits. It is told of them before it is told or asked anything else."""

    def glance(decode=True, running=2, waiting=0, missed=1, compiled=False):
        return Glance(decode, 4, missed, 0.0, compiled, dict, 4, 40, 0, running, waiting, 0)

    controller = Controller(spec(), [Resting()])
    assert not controller.skip(True, 2, 0, 0)
    assert controller.rest(glance())
    passed = [controller.skip(*step) for step in steps]
    assert passed == [bool(told)] * len(steps)
    if told:
        assert not controller.skip(True, 2, 0, 9)
    assert not controller.rest(glance(missed=10, compiled=True))
    assert not controller.skip(True, 2, 0, 0)
    assert controller._seats[0].state == (1, *told)


def test_a_policy_that_skips_is_told_so_before_it_is_asked():
    controller = Controller(spec(), [Resting()])
    step = record(kind="decode", compiled=False, use=use(running=1, waiting=0))
    for number in range(4):
        controller.end_step(step._replace(number=number), age=0, seconds=0.0)
    controller.end_step(step._replace(number=4, compiled=True), age=0, seconds=0.0)
    assert controller._seats[0].state == (0, (3, 3), "asked")

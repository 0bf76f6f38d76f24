"""Budgets that move while requests run: the same tokens, equal memory, and nothing lost by a move
that fails. Over a model of the device, and in the engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import moejax.budgets
from host_offload.arena import SlotArena, SlotClass
from host_offload.kv_cache import KVCache
from host_offload.policy import Decision, Moment, Observation, Spec
from host_offload.policy_rules import PolicyError
from moejax import LLM
from moejax.budgets import MOVED_PAGES, Resizer, cells_of, within
from moejax.work import Work
from tests.moejax.engine_runs import run as run_engine
from tests.moejax.scheduler_model import LAYOUT, Device, Turn, run
from tests.moejax.test_same_bits import conversations
from tests.moejax.test_scheduler import SMALL, check_against_alone, workload

PER_SLOT = LAYOUT.pages_per_slot
LAYERS, BOUND = 3, 16
FLOOR = -(-SMALL["max_model_len"] // 16)
"""Pages of one sequence of max_model_len tokens."""
FLOOR_SLOTS = -(-FLOOR // PER_SLOT)
SLOTS = 24


class Refused(jax.errors.JaxRuntimeError):
    """What a device says that has no memory left for a copy."""


@dataclasses.dataclass
class Tables:
    """The runner, as far as budgets see it. failing: calls of grant_cells that are refused."""

    arena: SlotArena
    cell_row: np.ndarray = dataclasses.field(init=False)
    failing: Callable[[], bool] = lambda: False

    def __post_init__(self):
        self.cell_row = self.arena.cell_row.copy()

    def grant_cells(self, cell_row: np.ndarray) -> None:
        if self.failing():
            raise Refused("RESOURCE_EXHAUSTED")
        # D1: what the device's tables are given never lies where KV is.
        kv = set(np.flatnonzero(self.arena.slot_class == SlotClass.KV).tolist())
        rows = cell_row[cell_row >= 0] // LAYOUT.slot_rows
        assert len(set(rows.tolist())) == rows.size and kv.isdisjoint(rows.tolist())
        self.cell_row = cell_row.copy()


Wish = tuple[np.ndarray | None, int | None]


class Moving(Device):
    """Has its budgets moved before each step, as moejax.control does it. wishes: a step's number →
    what a policy wants from then on; it waits until it was carried out."""

    def __init__(self, wishes: Callable[[int], Wish | None], kv_slots: int, **options):
        arena = SlotArena(LAYOUT, SLOTS, LAYERS, BOUND, BOUND)
        super().__init__(pages=kv_slots * PER_SLOT, arena=arena, **{**SMALL, **options})
        self.tables = Tables(arena)
        self.resizer = Resizer(self.tables, self.scheduler)  # type: ignore[arg-type]
        self.wishes, self.wish, self.steps = wishes, None, 0
        self.at_once: list[int] = []
        """Pages that each step's move copied."""

    def _run(self, work: Work) -> dict[int, int]:
        self.steps += 1
        self.wish = self.wishes(self.steps) or self.wish
        if self.wish is not None:
            before = self.scheduler.cache.moved + self.scheduler.cache.swapped_out
            split = cells_of(self.arena), self.arena.count(SlotClass.KV)
            moved = self.resizer.move(*self.wish)
            has = cells_of(self.arena), self.arena.count(SlotClass.KV)
            cache = self.scheduler.cache
            self.at_once.append(cache.moved + cache.swapped_out - before)
            assert moved.changed == (has != split)
            assert sum(has[0]) + has[1] <= SLOTS
            np.testing.assert_array_equal(self.tables.cell_row, self.arena.cell_row)
            if moved.settled:
                self.wish = None
        return super()._run(work)

    @property
    def arena(self) -> SlotArena:
        return self.scheduler.arena


def random_wishes(seed: int, every: int) -> Callable[[int], Wish | None]:
    """Another split now and then: all slots KV's, all but the floor experts', or in between."""
    rng = np.random.default_rng(seed)

    def wish(step: int) -> Wish | None:
        if rng.integers(every):
            return None
        kv_slots = int(rng.choice([FLOOR_SLOTS, FLOOR_SLOTS + 1, SLOTS // 2, SLOTS]))
        cells = rng.multinomial(rng.integers(0, SLOTS - kv_slots + 1), [1 / LAYERS] * LAYERS)
        return np.minimum(cells, BOUND), kv_slots * PER_SLOT

    return wish


def crowd(seed: int, size: int = 32) -> list[Turn]:
    """A workload whose requests come fast and have less in common."""
    return [
        dataclasses.replace(
            t, arrival=t.arrival // 2, prompt=(i + 1, *t.prompt) if i % 2 else t.prompt
        )
        for i, t in enumerate(workload(np.random.default_rng(seed), size))
    ]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("every", [1, 5])
def test_budgets_that_move_change_no_token(seed, every):
    """Contract 1 and D2, at every point between two steps."""
    turns = crowd(seed)
    device = Moving(random_wishes(seed, every), FLOOR_SLOTS + 4)
    check_against_alone(turns, run(device, turns))
    assert device.resizer.resizes > 3 and max(device.at_once) <= MOVED_PAGES


def test_the_workloads_reach_what_they_are_for():
    totals = dict.fromkeys(("resizes", "slots_moved", "pages_moved", "deferred"), 0)
    for seed in range(4):
        device = Moving(random_wishes(seed, 3), FLOOR_SLOTS + 4)
        run(device, crowd(seed))
        totals = {name: n + device.resizer.stats()[name] for name, n in totals.items()}
    assert all(totals.values()), totals


@pytest.mark.parametrize("swap_bytes", [0, 20 * LAYOUT.page.nbytes])
@pytest.mark.parametrize("seed", range(3))
def test_no_request_is_refused_that_a_fixed_split_would_serve(seed, swap_bytes):
    """With little or no host memory for KV, requests that have begun could wait for each other."""
    turns = [t for t in crowd(seed) if t.session is None]
    smallest = lambda step: (np.full(LAYERS, 5), FLOOR)  # noqa: E731
    fixed = run(Moving(lambda _: None, SLOTS, swap_bytes=swap_bytes), turns)
    moving = run(Moving(smallest, SLOTS, swap_bytes=swap_bytes), turns)
    for request, same in zip(moving, fixed, strict=True):
        assert (request.finish_reason, request.output) == (same.finish_reason, same.output)


def test_a_slot_that_is_in_use_is_emptied_not_waited_for():
    """Every second of the requests that fill more slots than KV will have is cancelled; the others
    run on, with pages in all of them."""
    device = Moving(lambda step: (np.full(LAYERS, 5), FLOOR) if step == 16 else None, SLOTS)
    turns = [
        Turn((i + 1, *range(1, 100)), 40, abort=12 if i % 2 else None)  # 7 pages each
        for i in range(8)
    ]
    seen: list[tuple[int, int, int]] = []

    def recorded(work, of=device._run):
        before = device.scheduler.cache.slots_in_use, len(device.scheduler.running)
        done = of(work)
        seen.append((*before, device.arena.count(SlotClass.KV)))
        return done

    device._run = recorded  # type: ignore[method-assign]
    run(device, turns)
    used, running, slots = zip(*seen, strict=True)
    assert used[15] > FLOOR_SLOTS and slots[14] == SLOTS
    done = slots.index(FLOOR_SLOTS)
    assert done < 20 and running[done] == running[15] > 2
    assert cells_of(device.arena) == [5, 5, 5] and device.scheduler.cache.moved > 0


def test_fewer_sequences_run_where_a_policy_says_so():
    device = Moving(lambda _: None, SLOTS)
    device.resizer.limit(2)
    turns = crowd(1)
    running = []
    of = device._run
    device._run = lambda work: running.append(len(device.scheduler.running)) or of(work)  # type: ignore
    check_against_alone(turns, run(device, turns))
    assert max(running) == 2
    device.resizer.limit(99)
    assert device.resizer.stats()["max_running"] == SMALL["rows"]


@given(
    wanted=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    have=st.lists(st.integers(0, 9), min_size=3, max_size=3),
    more=st.integers(0, 9),
)
def test_the_way_to_other_cells_never_takes_more_than_there_is(wanted, have, more):
    room = sum(have) + more
    cells = within(wanted, have, room)
    assert sum(cells) == min(room, sum(wanted))
    for w, h, n in zip(wanted, have, cells, strict=True):
        assert min(w, h) <= n <= w


# ---- D3: a move that fails leaves the earlier split


class Nth:
    """True at the n-th call, once."""

    def __init__(self, n: int):
        self.left = n

    def __call__(self, *args) -> bool:
        self.left -= 1
        return self.left == 0


@pytest.mark.parametrize("what", ["tables", "move", "read"])
@pytest.mark.parametrize("nth", [1, 3])
def test_a_move_that_fails_leaves_the_earlier_split(what, nth):
    turns = crowd(5)
    device = Moving(random_wishes(5, 2), FLOOR_SLOTS + 4)
    failing = Nth(nth)
    if what == "tables":
        device.tables.failing = failing
    else:
        name = f"_{what}"
        copy = getattr(device, name)

        def refusing(*args):
            if moving and failing():
                raise Refused("RESOURCE_EXHAUSTED: no memory for the copy")
            return copy(*args)

        setattr(device.scheduler.cache, what, refusing)
    move, moving, splits = device.resizer.move, [], []

    def watched(*wish):
        before = cells_of(device.arena), device.arena.count(SlotClass.KV)
        failed = device.resizer.failed
        moving.append(True)
        moved = move(*wish)
        moving.clear()
        if device.resizer.failed > failed:
            splits.append((before, (cells_of(device.arena), device.arena.count(SlotClass.KV))))
            assert moved.settled and not moved.changed
        return moved

    device.resizer.move = watched  # type: ignore[method-assign]
    check_against_alone(turns, run(device, turns))
    ((before, after),) = splits
    assert before == after and device.resizer.failed == 1 and device.resizer.resizes > 0


def test_a_refused_move_of_pages_takes_no_page():
    arena = SlotArena(LAYOUT, 4, 1, 1, 1)
    arena.grant_kv_slots(3)

    def refuse(*rows):
        raise Refused("RESOURCE_EXHAUSTED")

    cache = KVCache(arena, lambda rows: [None] * len(rows), lambda *_: None, refuse, 10**9)
    blocks = cache.allocate(PER_SLOT + 1)
    rows = [b.row for b in blocks]
    with pytest.raises(Refused):
        cache.empty_slot(MOVED_PAGES)
    assert [b.row for b in blocks] == rows and cache.faults([], [blocks]) == []
    assert cache.moved == 0


def test_what_can_never_be_is_the_policys_mistake():
    device = Moving(lambda _: None, FLOOR_SLOTS)
    with pytest.raises(PolicyError, match="what the arena cannot give: 33 cells"):
        device.resizer.move(np.full(LAYERS, 11), None)


@pytest.mark.parametrize("check", [True, False])
def test_pages_that_move_behind_a_sequences_back_are_found(check, monkeypatch):
    monkeypatch.setattr(
        moejax.budgets, "empty_slot", lambda scheduler, most: len(scheduler.cache.empty_slot(most))
    )
    device, turns = Moving(random_wishes(5, 2), FLOOR_SLOTS + 4), crowd(5)
    with pytest.raises(AssertionError, match="does not have its" if check else None):
        check_against_alone(turns, run(device, turns, check=check))


def test_a_page_that_is_not_copied_is_found():
    device, turns = Moving(random_wishes(5, 2), FLOOR_SLOTS + 4), crowd(5)
    device.scheduler.cache.move = lambda sources, targets: None
    with pytest.raises(AssertionError):
        check_against_alone(turns, run(device, turns))


# ---- in the engine

LIMITS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256}
DEMO_LAYERS, EXPERTS = 4, 16


@dataclasses.dataclass(frozen=True)
class MoveAlways:
    """Wants another split after every step that was read."""

    slots: int = 0
    moments = frozenset({Moment.STEP_END})
    needs = frozenset({"cells"})
    writes = frozenset({"cells", "kv_pages"})

    def init(self, spec: Spec) -> tuple[int, int, int]:
        record = int(spec.version_bytes["dense"][0])
        return spec.seed, spec.budget_bytes // record, record // spec.page_bytes

    def decide(self, state: tuple[int, int, int], observation: Observation):
        number, slots, per_slot = state
        rng = np.random.default_rng(number // 3)  # time to fill what it got
        floor = -(-LIMITS["max_model_len"] // 16 // per_slot)
        kv_slots = floor + int(rng.choice([0, 1, 8]))
        share = rng.dirichlet(np.ones(DEMO_LAYERS)) * (slots - kv_slots)
        cells = np.minimum(share.astype(np.int32), EXPERTS)
        return (number + 1, slots, per_slot), Decision(cells=cells, kv_pages=kv_slots * per_slot)


@pytest.mark.parametrize(
    "driver", ["device", pytest.param("host", marks=[pytest.mark.slow, pytest.mark.nightly])]
)
def test_resizes_between_all_steps_of_the_engine_change_no_bit(driver):
    """Sessions, shared beginnings, preemption and cancellation; every invariant of tables, store
    and pages is checked after every step."""
    options = {"memory": "3MiB", "driver": driver, "policies": [MoveAlways()]}
    with LLM("demo", dtype="bfloat16", progress=False, **LIMITS, **options) as llm:
        engine, jobs = llm.engine, conversations(np.random.default_rng(0))
        before = set(engine.runner.executables())
        moving = run_engine(llm, jobs)
        stats = engine.resizer.stats()
        assert stats["resizes"] > 10 and stats["pages_moved"] > 0 and stats["failed"] == 0, stats
        assert set(engine.runner.executables()) - before <= {
            *("integrity", "sample", "adjust", "add_bias", "tally", "recount", "swap_in"),
        }
        engine.control = None
        for session in [s.session_id for s in engine.scheduler.sessions.all]:
            llm.end_session(session)
        fixed = run_engine(llm, jobs, check=False)
        for job, got, want in zip(jobs, moving, fixed, strict=True):
            if job.abort is None:
                assert got.same_bits(want)

"""Budgets that move while requests run: the same tokens, equal memory, and nothing lost by a move
that fails. Over a model of the device, and in the engine."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from host_offload.control.interface import Decision, Moment, Observation, Spec
from host_offload.control.rules import PolicyError
from host_offload.memory.arena import SlotArena, SlotClass
from host_offload.policies.budget.peak_headroom import PeakHeadroom
from host_offload.simulate.replay import replay
from host_offload.traces.reader import read_trace
from moejax import LLM, SamplingParams
from moejax.engine.resize import MOVED_PAGES, ArenaResizer, cells_of
from moejax.engine.step_work import ScheduledWork
from scripts.check.kv_faults import kv_faults
from tests.moejax.engine.budget_workload import MEMORY, SLOT
from tests.moejax.engine.scenes import Known
from tests.moejax.engine.scheduler_model import LAYOUT, Device, Turn, run
from tests.moejax.engine.test_same_bits import conversations
from tests.moejax.engine.test_scheduler import SMALL, check_against_alone, workload
from tests.moejax.engine_runs import run as run_engine

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

    host: SlotArena
    cell_row: np.ndarray = dataclasses.field(init=False)
    failing: Callable[[], bool] = lambda: False
    pooled = False
    arena = tables = ()
    """Nothing that could be donated."""

    def __post_init__(self):
        self.cell_row = self.host.cell_row.copy()

    def grant_cells(self, cell_row: np.ndarray) -> None:
        if self.failing():
            raise Refused("RESOURCE_EXHAUSTED")
        # D1: what the device's tables are given never lies where KV is.
        kv = set(np.flatnonzero(self.host.slot_class == SlotClass.KV).tolist())
        rows = cell_row[cell_row >= 0] // LAYOUT.slot_rows
        assert len(set(rows.tolist())) == rows.size and kv.isdisjoint(rows.tolist())
        self.cell_row = cell_row.copy()


Wish = tuple[np.ndarray | None, int | None]


class Moving(Device):
    """Has its budgets moved before each step, as moejax.engine.control does it. wishes: a step's
    number → what a policy wants from then on; it waits until it was carried out."""

    def __init__(self, wishes: Callable[[int], Wish | None], kv_slots: int, **options):
        arena = SlotArena(LAYOUT, SLOTS, LAYERS, BOUND, BOUND)
        super().__init__(pages=kv_slots * PER_SLOT, arena=arena, **{**SMALL, **options})
        self.tables = Tables(arena)
        self.resizer = ArenaResizer(self.tables, self.scheduler)  # type: ignore[arg-type]
        self.wishes, self.wish, self.steps = wishes, None, 0
        self.blocked = 0
        """How often KV had to be given slots for a step to be possible at all."""
        self.at_once: list[int] = []
        """Pages that each step's move copied."""

    def _run(self, work: ScheduledWork) -> dict[int, int]:
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

    def unblocked(self) -> ScheduledWork | None:
        self.blocked += 1
        work = None
        while work is None and self.resizer.take_slot():
            work = self.scheduler.next_work()
        return work

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


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.nightly) for n in range(1, 5))]
)
@pytest.mark.parametrize("every", [1, 5])
def test_budgets_that_move_change_no_token(seed, every):
    """Contract 1 and D2, at every point between two steps."""
    turns = crowd(seed)
    device = Moving(random_wishes(seed, every), FLOOR_SLOTS + 4)
    check_against_alone(turns, run(device, turns))
    assert device.resizer.resizes > 3 and max(device.at_once) <= MOVED_PAGES


SMALLEST = np.full(LAYERS, 5), FLOOR
"""As little KV as a policy may want."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "swap_pages", [0, 8, *(pytest.param(n, marks=pytest.mark.nightly) for n in (4, 12))]
)
def test_no_request_is_refused_that_a_fixed_split_would_serve(swap_pages):
    """With little or no host memory for KV, admitted requests could wait for each other, and
    sessions that have grown leave a turn no room. All KV at first, then as little as can be."""
    blocked = 0
    for seed in range(8):
        turns = [dataclasses.replace(t, abort=None) for t in crowd(seed, 24)]
        swap_bytes = swap_pages * LAYOUT.page.nbytes
        fixed = run(Moving(lambda _: None, SLOTS, swap_bytes=swap_bytes), turns, check=False)
        device = Moving(lambda step: SMALLEST, SLOTS, swap_bytes=swap_bytes)
        moving = run(device, turns)
        ends = {r.finish_reason for r in (*fixed, *moving)}
        assert ends <= {"stop", "length"}
        if not seed:
            check_against_alone(turns, moving)
        blocked += device.blocked
    assert blocked, "KV was never given slots because requests waited"


def test_kv_keeps_room_for_one_more_beside_sessions():
    """The host takes four pages of what six sessions hold; a turn of max_model_len fits beside the
    rest at once, and nobody is stuck first."""
    device = Moving(lambda _: None, SLOTS, swap_bytes=4 * LAYOUT.page.nbytes)
    run(device, [Turn((i + 1, *range(1, 90)), 8, f"s{i}") for i in range(6)])
    while device.resizer.move(*SMALLEST).changed:
        pass
    sessions = device.scheduler.sessions.pages
    assert sessions > 30 and FLOOR < sessions + FLOOR - 4 <= device.arena.pages < SLOTS * PER_SLOT
    run(device, [Turn((7, *range(1, 480)), 16)])
    assert device.blocked == 0


# ---- D3: a move that fails leaves the earlier split


class Nth:
    """True at the n-th call, once."""

    def __init__(self, n: int):
        self.left = n

    def __call__(self, *args) -> bool:
        self.left -= 1
        return self.left == 0


@pytest.mark.parametrize("what", ["tables", "move", "read"])
@pytest.mark.parametrize("nth", [1, pytest.param(3, marks=pytest.mark.slow)])
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


def test_what_can_never_be_is_the_policys_mistake():
    device = Moving(lambda _: None, FLOOR_SLOTS)
    with pytest.raises(PolicyError, match="what the arena cannot give: 33 cells"):
        device.resizer.move(np.full(LAYERS, 11), None)


def test_a_page_that_is_not_copied_is_found():
    device, turns = Moving(random_wishes(5, 2), FLOOR_SLOTS + 4), crowd(5)
    device.scheduler.cache.move = lambda sources, targets: None
    with pytest.raises((AssertionError, KeyError)):  # other bytes, or a page that has none yet
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
    """Sessions, shared beginnings, preemption, cancellation and drafts; every invariant of tables,
    store and pages is checked after every step."""
    options = {"memory": "3MiB", "driver": driver, "policies": [MoveAlways()], "max_num_seqs": 8}
    with LLM("demo", dtype="bfloat16", progress=False, **LIMITS | options) as llm:
        engine, jobs = llm.engine, conversations(np.random.default_rng(0))
        before = set(engine.runner.executables())
        control, engine.control = engine.control, None
        fixed = run_engine(llm, jobs, check=False)
        engine.control = control
        for session in [s.session_id for s in engine.scheduler.sessions.all]:
            llm.end_session(session)
        if driver == "device":
            engine.drafts = Known({i: each.tokens for i, each in enumerate(fixed)})
        moving = run_engine(llm, jobs)
        assert engine.drafts is None or engine.drafts.counts["accepted"] > 50
        stats = engine.resizer.stats()
        assert stats["resizes"] > 10 and stats["pages_moved"] > 0 and stats["failed"] == 0, stats
        new = {re.split("[@/]", str(key))[0] for key in {*engine.runner.executables()} - before}
        chosen = {"sample", "greedy", "adjust", "add_bias", "tally", "recount", "place"}
        assert new <= {*chosen, "snapshot", "swap_in", "decode"}
        for job, got, want in zip(jobs, moving, fixed, strict=True):
            if job.abort is None:
                assert got.same_bits(want)


SESSIONS = {"expert_budget": 12 * SLOT, "memory": MEMORY, "swap_space": 200_000}
"""20 slots of KV, 120 pages, and 12 on the host."""


def grown(llm: LLM) -> tuple[list[Any], list[int]]:
    """Requests of their own, then turns of four sessions that grow; tokens and log-probabilities,
    and KV's pages before the first turn and after each."""
    llm.generate([[5, 7, 9]], dataclasses.replace(TURN, max_tokens=60), use_tqdm=False)
    llm.generate([[6, 7, 9]], dataclasses.replace(TURN, max_tokens=60), use_tqdm=False)
    said: list[list[int]] = [[] for _ in range(4)]
    answers, pages = [], [llm.stats()["arena"]["kv_pages"]]
    for turn in range(3):
        for i in range(4):
            prompt = [*said[i], *range(5 + 9 * i + turn, 45 + 7 * i + 2 * turn)]
            (output,) = llm.generate([prompt], TURN, session_id=[f"user {i}"], use_tqdm=False)
            answer = output.outputs[0]
            answers.append((answer.token_ids, answer.logprobs))
            said[i] = [*prompt, *answer.token_ids]
            pages.append(llm.stats()["arena"]["kv_pages"])
    return answers, pages


TURN = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, logprobs=2)


@pytest.mark.slow
def test_sessions_that_grow_after_kv_shrank_are_served(tmp_path):
    """By the closed form, which sees what is swapped out. The same bits as without, and a replay
    finds all of it again."""
    with LLM("demo", progress=False, **SESSIONS, **LIMITS) as llm:
        fixed, pages = grown(llm)
        assert set(pages) == {120}
    options = {"resize": "peak_headroom", "trace": tmp_path / "t"}
    with LLM("demo", progress=False, **options, **SESSIONS, **LIMITS) as llm:
        moving, pages = grown(llm)
        assert kv_faults(llm.engine.scheduler) == []
        stats = llm.engine.resizer.stats()
    assert moving == fixed and stats["resizes"] > 0
    assert pages[0] < pages[-1] and pages[0] < 60
    found = read_trace(tmp_path / "t")
    replayed = replay(found, policies=[PeakHeadroom()])
    measured = found.array("step.fills") + found.array("step.read_through")
    np.testing.assert_array_equal(replayed.misses, measured)
    assert any(b.by_hand for b in found.budgets()), "slots that no policy wanted moved"


@pytest.mark.slow
def test_a_copy_that_is_lost_ends_the_engine():
    """When the device has taken arena and tables nothing can run any more."""
    with LLM("demo", progress=False, policies=[MoveAlways()], memory=MEMORY, **LIMITS) as llm:
        runner, engine = llm.engine.runner, llm.engine
        call = runner.compiler.call

        def after(name, *args):
            found = call(name, *args)
            if str(name) == "regrant":
                raise Refused("INTERNAL: the copy was lost")
            return found

        runner.compiler.call = after  # type: ignore[method-assign]
        with pytest.raises(Refused, match="the copy was lost"):
            llm.generate([[5, 7, 9]], TURN, use_tqdm=False)
        assert engine.resizer.failed == 0 and engine.idle

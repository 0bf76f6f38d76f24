"""Auto finds the cheaper arm, by measured times where predictions are wrong, and stays with it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from host_offload.control.interface import Decision, Moment, Observation
from host_offload.control.paging import PagedSpec
from host_offload.control.step_record import Glance
from host_offload.memory.pager import Pager
from host_offload.memory.tables import cold_tables
from host_offload.policies.eviction.eviction_names import EVICTION
from host_offload.policies.precision.hobbit import find_heavy
from host_offload.policies.precision.maps import top_map
from host_offload.simulate import auto
from host_offload.simulate.auto import (
    LEAST,
    Auto,
    Prices,
    Watched,
    auto_of,
    choose_arm,
    correct,
    policies_of,
    versions_of,
)
from host_offload.simulate.prediction import predict
from host_offload.simulate.shadows import AGES, Shadows, active_of, cold_shadows
from host_offload.simulate.simulator import simulate
from host_offload.simulate.timeline import Link
from host_offload.sizing.cost_model import CostModel, StepCost
from host_offload.traces.schema import TraceError
from tests.host_offload.control.policy_runs import spec
from tests.host_offload.traces.traces_of import rewritten, write_trace
from tests.pallas_kernels.contract import NATIVE

pytestmark = pytest.mark.slow  # nothing here depends on the version of jax

LAYERS, EXPERTS, CELLS = 2, 16, 8
COMPUTE_S, FILL_S = 2e-2, 2e-3
NOTHING = np.zeros((3, 3))
HOT, MOVED, UNEVEN = "hot", "moved", "uneven"
"""Loads. `hot`: 4 experts at every third step, and between them a scan over the others, 4 a step:
LFU keeps what LRU evicts. `moved`: 8 other experts, which fit, but LFU still keeps the hot ones.
`uneven`: the first layer uses 4 experts and the second one 12 by turns."""


@pytest.fixture(autouse=True)
def windows_at_once(monkeypatch):
    """Rests before simulated windows are as short as they can be."""
    monkeypatch.setattr(auto, "SIMULATE_S", 0.0)


def routed(load: str, step: int) -> np.ndarray:
    """int16[2, L, 3], the experts of a step's two rows."""
    if load == UNEVEN:
        first = 4 * (step % 3)
        rows = [[[i, i + 1, i + 2], [first + i, first + i + 1, first + i + 2]] for i in (0, 1)]
        return np.array(rows, np.int16)
    if load == MOVED:
        first = 4 + 4 * (step % 2)
        rows = [[first, first + 1, first + 2], [first + 1, first + 2, first + 3]]
    elif step % 3 == 0:
        rows = [[0, 1, 2], [1, 2, 3]]
    else:
        first = 4 * (2 * (step // 3) + step % 3 - 1)
        scan = [4 + (first + i) % (EXPERTS - 4) for i in range(4)]
        rows = [scan[:3], scan[1:]]
    return np.repeat(np.sort(np.array(rows, np.int16))[:, None], LAYERS, axis=1)


@dataclasses.dataclass
class World:
    """An engine of two requests, whose times are COMPUTE_S and fill_s for each miss."""

    policy: Auto
    fill_s: float = FILL_S
    bucket: int = 4
    phase: int = 1
    running: int = 2
    glances: bool = True
    rested: int = 0
    cells: tuple[int, ...] = (CELLS,)
    """Of each version."""

    def __post_init__(self):
        tables = cold_tables(np.tile(self.cells, (LAYERS, 1)), EXPERTS, bound=2 * EXPERTS)
        self.pager = Pager(tables, len(self.cells))
        self.seconds, self.step, self.arms = 0.0, 0, list[str]()
        told = spec(
            layers=LAYERS, experts=EXPERTS, cell_bound=EXPERTS, budget_bytes=4000,
            capacity=tuple(LAYERS * n for n in self.cells) if len(self.cells) > 1 else None,
        )  # fmt: skip
        self.state: Watched = self.policy.init(told)
        self.weights = np.array([[[0.5, 0.3, 0.2]], [[0.6, 0.3, 0.1]]], np.float32)

    def run(self, load: str, steps: int) -> int:
        """Returns the misses."""
        total = 0
        for _ in range(steps):
            ids = routed(load, self.step)
            active = np.zeros((LAYERS, EXPERTS), bool)
            for row in ids:
                np.put_along_axis(active, row.astype(int), True, axis=1)
            missed = self.pager.reference(active).missing
            small = self.pager.tables.version[missed].sum()  # of 40 bytes instead of 100
            self.seconds += COMPUTE_S + self.fill_s * (int(missed.sum()) - 0.6 * small)
            total += int(missed.sum())
            known = self.phase == 1, self.bucket, int(missed.sum()), self.seconds, self.step == 0
            glance = Glance(*known, lambda ids=ids: ids, 4, 40, 0, self.running, 0, 0)
            passed = self.policy.rests(self.state, glance) if self.glances else None
            self.rested += self.state.rest > 0
            self.step += 1
            if passed is not None:
                self.state = passed
                continue
            seen = Observation(
                moment=Moment.STEP_END, step=self.step, age=1, interval=0, turn=-1, layer=-1,
                seconds=self.seconds, ids=ids, phase=np.full(2, self.phase, np.uint8),
                missed=missed, bucket=self.bucket, compiled=self.step == 1,
                weights=np.repeat(self.weights, LAYERS, axis=1),
                waiting=0, waiting_tokens=0, kv_used=4, kv_swapped=0, kv_pages=40,
                running=self.running,
            )  # fmt: skip
            self.state, decision = self.policy.decide(self.state, seen)
            tables = {name: getattr(decision, name) for name in ("victim_weights", "fill_version")}
            self.pager.set_tables({k: v for k, v in tables.items() if v is not None})
            if decision.cells is not None:
                self.pager.regrant(decision.cells)
            self.arms.append(self.policy.arms[self.state.arm])
        return total


def costs_of(fill_s: float) -> CostModel:
    """Costs of COMPUTE_S a step and so much a miss."""
    step = StepCost(COMPUTE_S, 0.0, 0.0, 0.0, 0.0, fill=fill_s, read=fill_s)
    return CostModel(
        LAYERS, EXPERTS, 3, expert_bytes=100, chunk=16, row_tile=16, decode={4: step},
        prefill=step, control=0.0, recompute_per_token=0.0, kv_swap_per_byte=0.0,
        link_per_byte=1e-9,
    )  # fmt: skip


def an_auto(fill_s: float = FILL_S, **changes) -> Auto:
    return Auto((CELLS,) * LAYERS, costs_of(fill_s), **changes)


def fixed(arm: str, loads: list[tuple[str, int]]) -> int:
    """The misses of an arm alone."""
    world = World(an_auto(arms=(arm,)))
    world.pager.set_tables({"victim_weights": np.array(EVICTION[arm])})
    return sum(world.run(load, steps) for load, steps in loads)


def follows_the_load() -> None:
    """Auto changes to the better arm and back, and misses less than any arm alone."""
    loads = [(HOT, 300), (MOVED, 120), (HOT, 200)]
    world, misses = World(an_auto()), 0
    for load, steps in loads:
        misses += world.run(load, steps)
        assert (world.arms[-1] == "lru") == (load == MOVED), load
    assert misses < min(fixed(arm, loads) for arm in auto.EVICTIONS)


def layers_get_what_they_use() -> None:
    """Where one layer uses few experts its cells go to the other one, and stay where both have
    enough. The arm alone does so too."""
    for arms in (("lru", "lru+layers"), ("lru+layers",)):
        world = World(an_auto(arms=arms))
        world.run(UNEVEN, 150)
        assert world.arms[-1] == "lru+layers"
        assert np.sum(world.pager.tables.cell_row >= 0, axis=1).tolist() == [4, 12]
        assert not world.run(UNEVEN, 20)
    world = World(an_auto(arms=("lru", "lru+layers")))
    world.run(MOVED, 150)
    assert world.state.switches == 0


def brings_fewer_bits_where_it_pays() -> None:
    """A start is exact. What changes outputs must gain a tenth of the time."""
    arms = ("lru+precision=dense", "lru+precision=small")
    for fill_s, arm in ((FILL_S, "lru+precision=small"), (FILL_S / 12, "lru+precision=dense")):
        world = World(an_auto(fill_s, arms=arms), fill_s=fill_s, cells=(4, 10))
        world.run(HOT, 7)
        assert world.state.arm == 0
        world.run(HOT, 200)
        assert world.arms[-1] == arm
        said = world.policy.stats(world.state)["step_s"]
        assert said["lru+precision=small"] < said["lru+precision=dense"]


def learns_from_times() -> None:
    """A miss takes 500 times as long as was predicted: only measurement shows that LFU pays."""
    world = World(an_auto(fill_s=FILL_S / 500), fill_s=FILL_S)
    world.run(HOT, 400)
    assert world.arms[-1] != "lru"
    assert world.state.ratios[1] == pytest.approx(500, rel=0.3)


def pays_before_it_changes() -> None:
    """Loads that change so fast that no arm pays for long: what the changes cost is no more than a
    tenth of what the best arm misses."""
    loads = [(HOT, 12), (MOVED, 12)] * 20
    world = World(an_auto())
    misses = sum(world.run(load, steps) for load, steps in loads)
    assert misses < 1.1 * min(fixed(arm, loads) for arm in auto.EVICTIONS)


def stays_if_little_is_gained() -> None:
    """Misses that take next to nothing: the cheapest arm gains less than a change costs."""
    world = World(an_auto(fill_s=1e-6), fill_s=1e-6)
    world.run(HOT, 400)
    assert world.state.switches == 0


def looks_ahead() -> None:
    """A switch that does not pay within the horizon is not made, and one that pays is; of two that
    pay, the one that gains more."""
    for steps, arm in ((49, 0), (51, 2), (1001, 1)):
        prices = Prices((2.0, 0.99, 1.0), (0.0, 60.0, 50.0), 0)
        assert auto.choose_arm(prices, horizon=steps) == arm


CHECKS = (
    follows_the_load,
    learns_from_times,
    layers_get_what_they_use,
    brings_fewer_bits_where_it_pays,
    pays_before_it_changes,
    stays_if_little_is_gained,
    looks_ahead,
)
MUTANTS: dict[str, tuple[str, Any, Callable[[], None]]] = {
    "correction ignored": ("correct", lambda *known: ((1.0, 1.0), known[4]), learns_from_times),
    "outputs change for any gain": ("FEWER_BITS", 0.0, brings_fewer_bits_where_it_pays),
    "hysteresis ignored": (
        "choose_arm",
        lambda prices, horizon: choose_arm(prices, horizon=10**9),
        stays_if_little_is_gained,
    ),
    "horizon ignored": (
        "choose_arm",
        lambda prices, horizon: choose_arm(prices, horizon=512),
        looks_ahead,
    ),
    "cost of a switch ignored": (
        "choose_arm",
        lambda prices, horizon: choose_arm(
            prices._replace(switch_s=(0.0,) * len(prices.step_s)), horizon=horizon
        ),
        looks_ahead,
    ),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_choices(check):
    check()


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutants_are_found(mutant, monkeypatch):
    name, replaced, check = MUTANTS[mutant]
    monkeypatch.setattr(auto, name, replaced)
    with pytest.raises(AssertionError):
        check()


@pytest.mark.parametrize(
    ("startup", "more", "changes", "chosen"),
    [
        ("100us", "", {}, "placement"),
        ("3ms", "", {}, "lfu"),
        ("2200us", "", {}, "placement"),
        ("2200us", "", {"same_bits": False}, "lfu"),
        ("2200us", ",defer=1", {}, "lfu"),
        ("100us", ",defer=1", {"same_bits": False}, "placement"),
    ],
)
def test_a_placement_is_chosen_where_it_pays(startup, more, changes, chosen, tmp_path, monkeypatch):
    """By the time that the second processor takes for an expert, which a load brings in 2 ms. One
    that changes outputs must gain a tenth of the time."""
    monkeypatch.setattr(auto, "SIMULATE_S", 3e-4)
    costs = f"per_token=1us,startup={startup},load=2ms,accelerator=10us,attention=10us"
    arms = ("lru", "lfu", f"placement=fiddler,{costs}{more}")
    trace = write_trace(tmp_path / "t", [routed(HOT, step) for step in range(100)], EXPERTS)
    policy = an_auto(arms=arms, bare=True, **changes)
    run = predict(trace, costs_of(FILL_S), policies=(policy,), cells=CELLS, driver="host")
    assert run.simulation.control is not None
    assert run.simulation.control["said"]["auto"]["arm"].startswith(chosen)
    beside = 0 if run.simulation.placed is None else run.simulation.placed.sum()
    assert (beside > 0) == (chosen == "placement")


@pytest.mark.parametrize("learns", [True, False])
def test_a_prefetch_that_learns_is_priced_by_what_it_learned_before_the_window(
    learns, tmp_path, monkeypatch
):
    """48 tokens by turns, of which a window has 16, each with experts of its own: within a window
    none comes twice, so a prefetch that began with it would know nothing."""
    rng, link = np.random.default_rng(0), Link(rate=100 / FILL_S)
    tokens = [step % 48 for step in range(400)]
    ids = np.sort([[rng.permutation(EXPERTS)[:3] for _ in range(LAYERS)] for _ in range(48)])
    plain = write_trace(tmp_path / "plain", list(ids[tokens][:, None]), EXPERTS)
    none = {"draft_token": np.zeros(0, np.int32), "draft_ids": np.zeros((0, LAYERS, 3), np.int16)}
    steps = (
        step._replace(token=np.array([token], np.int32), **none)
        for step, token in zip(plain.step_traces(), tokens, strict=True)
    )
    trace = rewritten(tmp_path / "t", plain, steps, token=True)
    policy = an_auto(arms=("lru", "tokens"), bare=True, link=link)
    if not learns:
        monkeypatch.setattr(Auto, "_begun", lambda self, state: self.predicted)
    given = {"policies": (policy,), "cells": CELLS, "driver": "host", "link": link}
    run = predict(trace, costs_of(FILL_S), **given)
    assert run.simulation.control is not None
    assert run.simulation.control["said"]["auto"]["arm"] == ("tokens" if learns else "lru")
    used = run.simulation.control["transfers"].get("tokens", {"used": 0})["used"]
    assert (used > 100) == learns


@dataclasses.dataclass(frozen=True)
class Timed(Auto):
    """Steps with a pool take `host_s` longer, and each choice `think_s`. `ran` gets the arm of each
    step, `chose` the choices before it."""

    host_s: float = 0.0
    think_s: float = 0.0
    chose: list[int] = dataclasses.field(default_factory=list)
    ran: list[str] = dataclasses.field(default_factory=list)

    def rests(self, state: Watched, glance: Glance) -> None:
        """Every step is counted."""

    def decide(self, state: Watched, seen: Observation) -> tuple[Watched, Decision]:
        if seen.moment == Moment.STEP_END:
            self.ran.append(self.arms[state.arm])
            self.chose.append(state.choices)
        shown = object.__new__(Observation)
        slow = self.host_s * self.ran.count("fluxmoe") + self.think_s * state.choices
        shown.__dict__.update(vars(seen), seconds=seen.seconds + slow)
        return super().decide(state, shown)


def streamed(tmp_path, used: int, *arms: str, steps: int = 60, **known) -> tuple[Timed, Any, Any]:
    """Steps of 24 rows that use so many of 16 experts, with 10 cells a layer. Returns (the policy,
    what it said, the tables in the end)."""
    layers, experts, rows, cells, link = 6, 16, 24, 10, Link(rate=4.3e5)
    step = StepCost(layers * 2e-3, 0.0, 0.0, 0.0, 0.0, fill=1e-4, read=1e-4)
    costs = CostModel(
        layers, experts, 3, expert_bytes=100, chunk=16, row_tile=16, decode={rows: step},
        prefill=step, control=0.0, recompute_per_token=0.0, kv_swap_per_byte=0.0,
        link_per_byte=1 / 4.3e5,
    )  # fmt: skip
    rng = np.random.default_rng(0)
    shape = steps, rows, layers
    ids = [rng.permutation(used)[:3] for _ in range(np.prod(shape))]
    plain = write_trace(tmp_path / "plain", list(np.sort(ids).reshape(*shape, 3)), experts)
    requests = np.arange(rows, dtype=np.int32)
    each = (record._replace(request=requests) for record in plain.step_traces())
    tables = cold_tables(np.full((layers, 1), cells), experts, bound=experts)
    policy = Timed((cells,) * layers, costs, link, arms, bare=True, **known)
    run = predict(
        rewritten(tmp_path / "t", plain, each), costs, cells=cells, driver="host", link=link,
        policies=(policy,), tables=tables,
    )  # fmt: skip
    assert run.simulation.control is not None
    return policy, run.simulation.control["said"]["auto"], tables


@pytest.mark.parametrize(
    ("used", "first", "chosen"), [(16, "lru", "fluxmoe"), (8, "fluxmoe", "lru")]
)
def test_layers_are_streamed_where_steps_use_most_experts(used, first, chosen, tmp_path):
    """And not where an even share of the cells holds what a layer uses: it gets that back."""
    _, said, tables = streamed(tmp_path, used, first, chosen)
    assert said["arm"] == chosen
    assert (said["step_s"]["lru"] == pytest.approx(6 * 2e-3)) == (chosen == "lru")
    shares = np.sum(tables.cell_row >= 0, axis=1).tolist()
    assert (shares == [10] * 6) == (chosen == "lru")


def test_a_pool_that_takes_host_work_is_left(tmp_path, monkeypatch):
    """After its first window, and for long: not even as long as it was tried is lost twice. A start
    that learned it does not try."""
    slow, said, _ = streamed(tmp_path, 16, "lru", "fluxmoe", steps=160, host_s=0.02)
    assert [len([*group]) for _, group in itertools.groupby(slow.ran)] == [17, 17, 126]
    assert said["arm"] == "lru" and said["switches"] == 2
    assert said["pool_s"] == pytest.approx(0.02 * (1 - auto.FORGET) ** 6, rel=0.2)
    quick, said, _ = streamed(tmp_path / "q", 16, "lru", "fluxmoe", steps=100, host_s=1e-4)
    assert said["arm"] == "fluxmoe" and said["switches"] == 1
    assert said["pool_s"] == pytest.approx(1e-4, rel=0.2) and "fluxmoe" in quick.ran
    _, said, _ = streamed(tmp_path / "l", 16, "lru", "fluxmoe", pool_s=0.02)
    assert said["switches"] == 0


@pytest.mark.parametrize(("think_s", "rest"), [(0.0, 32), (0.03, 50)])
def test_simulating_windows_takes_no_more_than_its_share(think_s, rest, tmp_path, monkeypatch):
    """Also the first one, which steps of 12 ms pay for by what it takes at least. What one took the
    next one will take."""
    monkeypatch.setattr(auto, "SIMULATE_S", 0.0192 / (6 * 16 * 2))
    policy, _, _ = streamed(tmp_path, 8, "lru", "fluxmoe", steps=160, think_s=think_s)
    first, second, *_ = np.flatnonzero(np.diff(policy.chose))
    assert first == pytest.approx(32 + 2 + 17, abs=3)
    assert second - first == pytest.approx(rest + 2 + 17, abs=2)


BESIDE = "placement=fiddler,per_token=1us,startup=100us,load=2ms,accelerator=10us,attention=10us"


@pytest.mark.parametrize("link", [None, Link(50e3, 1e-6)])
@pytest.mark.parametrize(
    "arm",
    [
        "lru+precision=small",
        "layer-streaming+precision=dense",
        "layer-streaming+precision=small",
        "layer-streaming+precision=dynaexq,paged=true,interval=1 steps",
        f"precision=small+{BESIDE}",
        f"precision=hobbit+{BESIDE}",
        f"layer-streaming+precision=small+{BESIDE}",
    ],
)
def test_versions_with_prefetch_and_placement_are_priced_as_they_run(
    arm, link, tmp_path, monkeypatch
):
    """By the residents of each version at a window's begin and what comes then: no time has to be
    corrected."""
    changing = "dynaexq" in arm  # is priced as if the hottest stayed the same, so in one window
    if changing:
        monkeypatch.setattr(auto, "SIMULATE_S", 2e-3)
    trace = write_trace(tmp_path / "t", [routed(HOT, step) for step in range(200)], EXPERTS)
    high, low = (0, 8) if "small" in arm else (3, 5)  # free cells would be filled first
    sizes = {name: np.full(LAYERS, size) for name, size in (("dense", 100), ("small", 40))}
    told = spec(
        layers=LAYERS, experts=EXPERTS, top_k=3, driver="host", version_bytes=sizes,
        capacity=(LAYERS * high, LAYERS * low),
    )  # fmt: skip
    policy = an_auto(arms=(arm, arm), bare=True, link=link)
    costs = {name: costs_of(FILL_S).of_size(int(of[0])) for name, of in sizes.items()}
    fills = np.full((LAYERS, EXPERTS), versions_of(arm, [*sizes])[-1], np.int8)
    cells = PagedSpec(np.tile((high, low), (LAYERS, 1)), fills)
    options: dict[str, Any] = {"cells": cells, "driver": "host", "spec": told, "link": link}
    run = predict(trace, costs, policies=(policy,), **options)
    assert run.simulation.control is not None
    said = run.simulation.control["said"]["auto"]
    assert said["ratios"] == pytest.approx((1, 1), rel=0.2 if changing else 0.01)
    assert (run.simulation.staged.sum() > 0) == ("layer" in arm)
    beside = 0 if run.simulation.placed is None else run.simulation.placed.sum()
    assert (beside > 0) == (BESIDE in arm)


@pytest.mark.parametrize(("brings", "loads"), [(0, 3), (1, 5)])
def test_a_placement_fills_free_cells_of_the_version_that_misses_bring(brings, loads, tmp_path):
    """Those of the other version stay free, and the second processor computes."""
    trace = write_trace(tmp_path / "t", [routed(HOT, step)[:1] for step in range(60)], EXPERTS)
    cells = PagedSpec(np.tile((3, 5), (LAYERS, 1)), np.full((LAYERS, EXPERTS), brings, np.int8))
    capacity = (3 * LAYERS, 5 * LAYERS)
    told = spec(layers=LAYERS, experts=EXPERTS, top_k=3, driver="host", capacity=capacity)
    run = simulate(trace, policies=policies_of(BESIDE), cells=cells, driver="host", spec=told)
    assert run.fills.sum() == loads * LAYERS and not run.read_through.sum()
    assert run.placed.sum() == run.misses.sum() - run.fills.sum() > 0


@pytest.fixture(params=[pytest.param("native", marks=NATIVE), "numpy"])
def follow(request) -> Callable[..., tuple[Shadows, np.ndarray]]:
    """Shadows.follow with the library and without it."""
    return Shadows.follow_by_numpy if request.param == "numpy" else Shadows.follow


@pytest.mark.parametrize(
    ("cells", "rows", "experts"),
    [(12, 1, EXPERTS), (6, 5, EXPERTS), (3, 20, EXPERTS), (12, 3, 1100)],
)
@pytest.mark.parametrize("clock", [0, AGES - 20])
def test_shadows_choose_as_the_device(cells, rows, experts, clock, follow):
    """Also where cells are too few for a step, after cells were taken and given, and after so many
    steps that numbers get large."""
    rng, every = np.random.default_rng(cells), [EVICTION[arm] for arm in auto.EVICTIONS]
    pagers = [Pager(cold_tables(np.full(LAYERS, cells), experts)) for _ in every]
    for pager, weights in zip(pagers, every, strict=True):
        pager.set_tables({"victim_weights": np.array(weights)})
        pager.tables.clock[:] = clock
    shadows, often = cold_shadows(every, [cells] * LAYERS, experts), rng.dirichlet([0.5] * experts)
    shadows = shadows._replace(clock=clock)
    for _ in range(80):
        ids = np.zeros((rows, LAYERS, 3), np.int16)
        for layer, row in np.ndindex(LAYERS, rows):
            ids[row, layer] = rng.choice(experts, 3, replace=False, p=often)
        active = active_of(ids, experts)
        shadows, missed = follow(shadows, ids)
        for arm, pager in enumerate(pagers):
            found = pager.reference(active)
            assert missed[arm] == found.missing.sum()
            assert (shadows.resident[arm] == (pager.tables.address >= 0)).all()
    held = shadows.resident
    fewer = shadows.regrant(np.full(LAYERS, cells - 2))
    assert (fewer.resident.sum(2) == cells - 2).all() and (fewer.resident <= held).all()
    assert (fewer.regrant(np.full(LAYERS, cells)).resident == fewer.resident).all()


def test_a_version_may_be_three_formats():
    names = "q5_k+q5_k+q6_k", "int2"
    assert [versions_of(f"lru+precision={name}", names) for name in names] == [(0,), (1,)]


@NATIVE
def test_the_library_keeps_the_shadows_that_numpy_keeps():
    """Also after cells were taken and given, and after a time in which no last use counts."""
    rng, every = np.random.default_rng(0), [EVICTION[arm] for arm in auto.EVICTIONS]
    mine = its = cold_shadows(every, [12, 9], EXPERTS)
    for cells, pause in (([12, 9], 0), ([5, 4], 0), ([5, 4], AGES + 1), ([8, 9], 0)):
        mine, its = (
            each.regrant(np.array(cells))._replace(clock=each.clock + pause) for each in (mine, its)
        )
        for _ in range(30):
            ids = rng.integers(EXPERTS, size=(2, LAYERS, 3)).astype(np.int16)
            mine, missed = mine.follow(ids)
            its, wanted = its.follow_by_numpy(ids)
            for one, another in zip((*mine, missed), (*its, wanted), strict=True):
                np.testing.assert_array_equal(one, another, strict=True)


@NATIVE
def test_the_library_refuses_experts_and_layers_that_are_not_there():
    shadows = cold_shadows([EVICTION["lru"]], [CELLS] * LAYERS, EXPERTS)
    for expert, dtype in ((-1, np.int16), (EXPERTS, np.int16), (1 << 16, np.int32), (-1, np.int64)):
        ids = routed(HOT, 0).astype(dtype)
        ids[-1, -1, -1] = expert
        with pytest.raises(IndexError, match="an id is not of the 16 experts"):
            shadows.follow(ids)
    with pytest.raises(ValueError, match="ids of 1 layers; there are 2"):
        shadows.follow(routed(HOT, 0)[:, :1])


def test_the_shadows_of_two_versions_miss_what_the_device_misses(follow):
    """Where a miss brings what Hobbit says."""
    policy = an_auto(arms=("lru+precision=hobbit,lo=int8", "lru+precision=dense"))
    world, rng = World(policy, cells=(3, 6)), np.random.default_rng(0)
    state: Any = world.state
    for step in range(100):
        ids = rng.permuted(np.tile(np.arange(EXPERTS), (2, LAYERS, 1)), axis=2)[:, :, :3]
        seen: Any = SimpleNamespace(ids=ids, weights=rng.random(ids.shape))
        heavy = find_heavy(ids, seen.weights, EXPERTS, 0.6)
        world.pager.set_tables({"fill_version": np.where(heavy, 0, 1)})
        missing = world.pager.reference(active_of(ids, EXPERTS)).missing
        shadows, fills = follow(state.shadows, ids, policy._brings(state, seen))
        state = state._replace(shadows=shadows)
        assert fills[:2].tolist() == [(missing & heavy).sum(), (missing & ~heavy).sum()], step


@pytest.mark.parametrize("precision", ["hobbit", "dynaexq,paged=true"])
def test_the_shadows_of_layers_without_a_high_version_miss_what_the_device_misses(
    precision, follow
):
    """Their misses come in the low one, with its cells and at its price, under every arm."""
    policy = an_auto(
        arms=(f"lru+precision={precision}", "lru+precision=dense", "lru+precision=small")
    )
    sizes = {"dense": np.array([50, 100, 80]), "small": np.array([60, 40, 20])}
    told = spec(layers=3, experts=EXPERTS, capacity=(12, 18), version_bytes=sizes)
    state: Any = policy.init(told)
    arms, shadows = state.places.fill_s.shape
    assert (arms, shadows) == (3, 5)
    price = state.places.fill_s.sum(axis=0) / FILL_S
    np.testing.assert_allclose(price, [0.9, 0.4, 0.9, 0.6, 0.4])
    high = np.array([False, True, True])[:, None]
    bounds = np.stack([np.where(high[:, 0], 6, 0), np.full(3, 6)], axis=1)
    pagers = [Pager(cold_tables(bounds, EXPERTS, bound=2 * EXPERTS), 2) for _ in range(3)]
    rng = np.random.default_rng(0)
    for step in range(100):
        ids = rng.permuted(np.tile(np.arange(EXPERTS), (2, 3, 1)), axis=2)[:, :, :3]
        seen: Any = SimpleNamespace(ids=ids, weights=rng.random(ids.shape))
        if policy.hobbit is None:
            wanted = top_map(np.where(high, state.shadows.frequency, -1), 12, high[:, 0].tolist())
            state = state._replace(brings=policy._hottest(state))
            mixed = wanted == 0
        else:
            mixed = find_heavy(ids, seen.weights, EXPERTS, 0.6) & high
        found = list[int]()
        for pager, heavy in zip(pagers, (mixed, high, False), strict=True):
            version = np.broadcast_to(np.where(heavy, 0, 1), (3, EXPERTS))
            pager.set_tables({"fill_version": version})
            missing = pager.reference(active_of(ids, EXPERTS)).missing
            found += [(missing & (version == v)).sum() for v in (0, 1)]
        brings = policy._brings(state, seen)
        shadows, fills = follow(state.shadows, ids, brings)
        state = state._replace(shadows=shadows)
        assert fills.tolist() == [*found[:4], found[5]], step


def test_another_load_begins_anew():
    """Four times the sequences are another load, whose first choice needs no older steps."""
    world = World(an_auto())
    world.run(HOT, 30)
    assert len(world.state.window) == 29  # but for the one that compiled
    world.running = 8
    world.run(HOT, 3)
    assert (len(world.state.window), world.state.fresh) == (3, 3)


def test_a_glance_is_enough():
    """Whether steps are passed by a glance or shown whole, the states are the same."""
    worlds = [World(an_auto(), glances=glances) for glances in (True, False)]
    for world in worlds:
        for load, steps in ((HOT, 150), (MOVED, 150)):
            world.run(load, steps)
            world.running = 8
    ours, theirs = (world.state for world in worlds)
    assert ours.switches == theirs.switches > 1 and ours.priced == theirs.priced
    assert len(worlds[0].arms) < len(worlds[1].arms) / 4


def test_what_is_seldom_missed_is_seldom_watched(monkeypatch):
    """Where watching costs as much as 1.5 misses, most steps are passed, but for those after the
    load has changed. One arm alone is never watched."""
    monkeypatch.setattr(auto, "WATCH_S", 1.5 * FILL_S)
    world = World(an_auto())
    world.run(HOT, 600)
    assert 400 < world.rested < 580 and world.arms[-1] == "lfu"
    world.run(MOVED, 250)
    assert world.arms[-1] == "lru"
    before, world.running = world.rested, 8
    world.run(MOVED, 7)
    assert world.rested - before <= 1
    alone = World(an_auto(arms=("lfu",)))
    alone.run(HOT, 30)
    assert not alone.arms


def test_steps_that_are_skipped_count_as_those_that_are_shown(monkeypatch):
    monkeypatch.setattr(auto, "WATCH_S", 100 * FILL_S)
    world = World(an_auto())
    world.run(HOT, 30)
    state, policy = world.state, world.policy
    steps, misses = policy.skips(state)
    assert 0 < steps < policy.window < misses == state.rest
    shown: Watched | None = state
    for missed in (0, 3, *[1] * steps)[:steps]:
        glance = Glance(True, 4, missed, 1.0, False, lambda: NOTHING, 4, 40, 0, 2, 0, 0)
        assert shown is not None
        shown = policy.rests(shown, glance)
    assert shown is not None and policy.skips(shown)[0] == 0
    skipped = policy.skipped(state, steps, steps + 2)
    for field in ("rest", "fresh", "held"):
        assert getattr(skipped, field) == getattr(shown, field)
    assert policy.skips(policy.init(state.spec)) == (0, 0)


def test_no_rest_begins_while_a_change_is_about_to_pay(monkeypatch):
    """A change that takes more than a window to pay, where rests would be much longer."""
    monkeypatch.setattr(auto, "WATCH_S", 200 * FILL_S * auto.COST)
    gained = fixed("lru", [(HOT, 80)]) - fixed("lfu", [(HOT, 80)])
    monkeypatch.setattr(auto, "SWITCH_S", 12 * FILL_S * gained / 80)
    world = World(an_auto())
    world.run(HOT, 60)
    assert world.arms[-1] == "lfu"
    rested = world.rested
    world.run(HOT, 40)
    assert world.rested > rested + 20


def test_prompts_count():
    """Experts that a prompt misses are priced with the next decode step."""
    world = World(an_auto())
    world.run(HOT, 4)
    world.phase = 0
    world.run(HOT, 2)
    carried = world.state.carried
    world.phase = 1
    world.run(HOT, 1)
    assert (world.state.window[-1].fills >= carried).all() and np.all(carried > 0)
    assert len(world.state.window) == 4 and not np.any(world.state.carried)


def test_a_correction_separates_computing_from_moves():
    """Also beside a disturbed step, and without misses, which say nothing of moves."""
    rng = np.random.default_rng(0)
    compute, moves = np.full(64, 1.0), rng.integers(0, 5, 64).astype(float)
    seconds = 3 * compute + 2 * moves
    seconds[7] = 1000.0
    found, _ = correct(seconds, compute, moves, (1.0, 1.0), NOTHING)
    assert found == pytest.approx((3, 2), rel=0.02)
    for nothing in (np.zeros(64), 1e-7 * moves):
        found, _ = correct(3 * compute, compute, nothing, (1.0, 7.0), NOTHING)
        assert found == pytest.approx((3, 7), rel=0.01)


def test_windows_in_which_steps_miss_nearly_alike_separate_them_together():
    """Though the first figures take moves for cheap and computing for dear: a window alone divides
    what they leave unexplained between both."""
    rng = np.random.default_rng(1)
    ratios, known, apart = (1.0, 1.0), NOTHING, []
    for _ in range(12):
        compute, moves = np.full(8, 2.6), 0.06 * rng.poisson(13, 8)
        seconds = (0.4 * compute + 4.5 * moves) * rng.lognormal(0, 0.05, 8)
        ratios, known = correct(seconds, compute, moves, ratios, known)
        apart.append(abs(ratios[1] - 4.5))
    assert apart[0] > 1.5 and apart[-1] < 0.7


def test_no_ratio_falls_at_once_below_a_share_of_itself():
    """Steps that miss more and take less time say nothing sensible."""
    compute, moves = np.full(8, 1.0), np.arange(8.0)
    (ratio, moved), _ = correct(9 - moves, compute, moves, (1.0, 1.0), NOTHING)
    assert moved == LEAST and ratio > 1
    (ratio, moved), _ = correct(moves**3, compute, moves, (1.0, 1.0), NOTHING)
    assert ratio == LEAST and moved > 1


def test_steps_that_are_read_two_by_two_all_count():
    """More of them take no time than take that of two."""
    compute, moves = np.full(63, 1.0), np.random.default_rng(0).integers(0, 5, 63).astype(float)
    seconds = 3 * compute + 2 * moves
    read = np.zeros(63)
    read[1::2] = seconds[:-1:2] + seconds[1::2]
    ratios, _ = correct(read, compute, moves, (1.0, 1.0), NOTHING)
    said = ratios[0] * compute + ratios[1] * moves
    assert said.sum() == pytest.approx(read.sum(), rel=0.1)


def test_settings_come_back_from_a_trace():
    made = an_auto(arms=("lfu", "lru"), forced=3, ratios=(2.0, 0.5), link=Link(1e9, 1e-6))
    assert auto_of(made.said) == made
    with pytest.raises(TraceError, match="policy auto of another moejax chose in this run, which"):
        auto_of(made.said | {"margin": 0.02})


def split_spec(budget_bytes: int):
    """What a policy that splits memory is told."""
    return spec(layers=LAYERS, experts=EXPERTS, cell_bound=EXPERTS, budget_bytes=budget_bytes,
                version_bytes={"dense": np.full(LAYERS, 100)}, slot_bytes=100)  # fmt: skip


def decoded(step: int, **changes: Any) -> Observation:
    """A decode step of two requests that misses nothing, but for the changes."""
    known = dict(
        moment=Moment.STEP_END, step=step, age=1, interval=0, turn=-1, layer=-1,
        seconds=(step + 1) * COMPUTE_S, ids=routed(HOT, step), phase=np.ones(2, np.uint8),
        missed=np.zeros((LAYERS, EXPERTS), bool), bucket=4, compiled=False, kv_swapped=0,
        running=2, waiting=0, waiting_tokens=0,
    )  # fmt: skip
    return Observation(**{**known, **changes})


def test_kv_gets_what_its_peak_needs():
    """A split by need: the experts' share follows the peak of KV, and grows back at once."""
    policy = an_auto(arms=("lru+split",), window=8)
    told = split_spec(4000)
    state, wanted, longest = policy.init(told), [], 0
    for step in range(40):
        many = step >= 12
        seen = decoded(
            step, seconds=step * 1e-3, kv_used=60 if many else 10, kv_pages=60 if many else 280,
            waiting=int(many), waiting_tokens=64 * many,
        )  # fmt: skip
        state, decision = policy.decide(state, seen)
        longest = max(longest, state.fresh)
        if decision.cells is not None:
            wanted.append((step, decision.cells.tolist(), decision.kv_pages))
    rest = state._replace(fresh=policy.window - 1)
    crowded = dataclasses.replace(
        seen, step=40, kv_used=300, kv_pages=300, waiting=6, waiting_tokens=600
    )
    state, decision = policy.decide(rest, crowded)  # also where the split is fitted anyway
    assert decision.cells is not None and decision.cells[0] < EXPERTS
    (first, experts, pages), (then, fewer, more), *_ = wanted
    assert first == 0 and experts == [EXPERTS] * LAYERS and pages >= 10
    assert then == 12 and fewer[0] < EXPERTS and more > 60
    assert longest < policy.window  # a prompt that waits for long does not keep a window open


def test_sequences_that_grow_find_kv():
    """What they need until the next fit is theirs before, though experts lose one cell a layer."""
    policy = an_auto(arms=("lru+split",), window=8)
    told = dataclasses.replace(split_spec(4000), page_tokens=1)
    state, pages, caps = policy.init(told), 280, []
    for step in range(64):
        used = 40 + 2 * step
        assert used <= pages
        state, decision = policy.decide(state, decoded(step, kv_used=used, kv_pages=pages))
        pages = pages if decision.kv_pages is None else decision.kv_pages
        caps.append(state.cap)
    assert min(np.diff(caps)) == -1


def test_requests_that_wait_for_kv_get_it():
    """A step of more sequences gives more tokens, which a price a step would not show. Those that
    wait for a row need no KV."""
    policy = an_auto(arms=("lru", "lru+split"))
    told = split_spec(1900)
    for waiting, rows, chosen in ((0, None, "lru"), (4, None, "lru+split"), (4, 2, "lru")):
        state = policy.init(dataclasses.replace(told, max_num_seqs=rows))
        for step in range(40):
            seen = decoded(
                step, kv_used=24, kv_pages=24, waiting=waiting, waiting_tokens=8 * waiting
            )
            state, _ = policy.decide(state, seen)
        assert policy.arms[state.arm] == chosen


@pytest.mark.parametrize(("saved", "chosen"), [(0.02, "lru"), (0.2, "lru+split")])
def test_memory_that_kv_does_not_use_goes_to_experts_where_it_pays(saved, chosen):
    """And only once a window showed it, since requests that come would have to wait for it."""
    fill_s = saved * COMPUTE_S / (4 / 3 * LAYERS)  # LRU misses 4 experts of a layer in 2 of 3 steps
    policy = an_auto(fill_s, arms=("lru+split", "lru"))
    told = split_spec(4000)
    state, moved = policy.init(told), []
    for step in range(200):
        seen = decoded(step, kv_used=10, kv_pages=280)
        state, decision = policy.decide(state, seen)
        if decision.cells is not None and decision.cells.max() > CELLS:
            moved.append(step)
    assert policy.arms[state.arm] == chosen
    assert moved[:1] == ([] if chosen == "lru" else [pytest.approx(20, abs=12)])


def test_a_split_is_priced_by_steps_with_its_cells():
    """Before a window ends requests take the KV that experts would have had."""
    fill_s = 0.2 * COMPUTE_S / (4 / 3 * LAYERS)
    policy = an_auto(fill_s, arms=("lru", "lru+split"))
    told = split_spec(4000)
    state, caps = policy.init(told), []
    for step in range(24):
        seen = decoded(step, kv_used=10 if step < 6 else 250, kv_pages=280)
        state, _ = policy.decide(state, seen)
        caps.append(state.cap)
    assert max(caps) > caps[-1] and policy.arms[state.arm] == "lru"


def test_a_change_of_eviction_alone_moves_no_cell():
    """Also where the start's cells are not even, as those of a split by need are."""
    policy = Auto((8, 7), costs_of(FILL_S), arms=("lru+split", "lfu+split"))
    told = split_spec(1900)
    state, decisions = policy.init(told), []
    for step in range(60):
        seen = decoded(
            step, seconds=step * COMPUTE_S, missed=np.ones((LAYERS, EXPERTS), bool),
            kv_used=24, kv_pages=24,
        )  # fmt: skip
        state, decision = policy.decide(state, seen)
        decisions.append(decision)
    assert state.switches == 1
    assert all(decision.cells is None for decision in decisions)

"""What every policy keeps: pure, repeated, legal, within what it needs and writes; the same in the
simulator as under a controller beside a device in plain Python, and never below MIN."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import itertools
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from examples.recent_prefetch import RecentPrefetch
from host_offload.control.controller import Controller
from host_offload.control.interface import Costs, Decision, Moment, Observation, Policy, Spec
from host_offload.control.rules import (
    BETWEEN_LAYERS,
    PolicyError,
    check_decision,
    check_policies,
    moments_with,
    search_of,
    wants_pool,
)
from host_offload.control.step_record import LinkUse
from host_offload.policies.budget.joint_budget import JointBudget
from host_offload.policies.budget.layer_cells import LayerCells
from host_offload.policies.budget.mv_wsa import MvWsa
from host_offload.policies.budget.peak_headroom import PeakHeadroom
from host_offload.policies.budget.user_caps import UserCaps
from host_offload.policies.eviction.eviction_names import POLICIES
from host_offload.policies.eviction.fifo import FIFO
from host_offload.policies.eviction.static import Static
from host_offload.policies.placement.placement_names import placement_policy
from host_offload.policies.placement.rivals import AHEAD, SCHEDULERS
from host_offload.policies.precision.dynaexq import DynaExq
from host_offload.policies.prefetch.expert_map.expert_map_policy import ExpertMap
from host_offload.policies.prefetch.fate import Fate
from host_offload.policies.prefetch.oracle import oracle_of
from host_offload.policies.prefetch.prefetch_names import PREFETCH
from host_offload.simulate.bounds import in_one_pool, min_transfers, read_references
from host_offload.simulate.simulator import simulate, spec_of
from host_offload.sizing.split import MissCosts
from host_offload.traces.reader import Trace
from scripts.experiments.static_layers import StaticLayers
from tests.host_offload.control.policy_runs import spec
from tests.host_offload.memory.layered_device import LayeredDevice
from tests.host_offload.policies.kinds import EXPERTS, KINDS, LAYERS, QUICK, ROUTER, trace_of_kinds

COSTS = Costs(
    fill=np.array([0.0, 1e-5]),
    stage=np.zeros(2),
    gpu_expert=np.array([[1, 1e-4]]),
    cpu_expert=np.array([1e-3, 1e-4]),
    step_s={4: 0.01, 8: 0.012},
    attention_s=1e-4,
    prefill_s_per_token=1e-3,
    kv_swap_s_per_byte=1e-8,
)
FITS: dict[str, Any] = PREFETCH.fits | {
    "promoe": functools.partial(PREFETCH.fits["promoe"], **QUICK),
    "learned": functools.partial(PREFETCH.fits["learned"], width=8, epochs=2),
    "expertflow": functools.partial(
        PREFETCH.fits["expertflow"], router=ROUTER, trees=2, leaves=8, reach=2
    ),
}
WAITING = "per_token=1,startup=1,load=4,accelerator=1,attention=2"

PAGED: dict[str, Any] = {
    **{name: lambda trace, make=make: make() for name, make in POLICIES.items()},
    **{name: lambda trace, make=make: make() for name, make in PREFETCH.plain.items()},
    **{f"{name}, fitted": fit for name, fit in FITS.items()},
    "static, warmed up": lambda trace: Static(warmup=5),
    "recent": lambda trace: RecentPrefetch(),
    "oracle": oracle_of,
    "static-layers": lambda trace: StaticLayers(),
}
"""Name → policy of experts that are paged, of a trace that it may learn from."""

OTHERS: dict[str, Any] = {
    "fate, shallow": lambda trace: Fate(shallow=1),
    "joint": lambda trace: JointBudget(),
    "layer cells": lambda trace: LayerCells(interval="5 steps"),
    "mv-wsa": lambda trace: MvWsa(costs=MissCosts(1.0, 1.0), allocation="marginal", window=2),
    "mv-wsa, measured": lambda trace: MvWsa(),
    "peak headroom": lambda trace: PeakHeadroom(),
    "right size": lambda trace: UserCaps(),
    "dynaexq": lambda trace: DynaExq(),
    "dynaexq, slack": lambda trace: DynaExq(slack=2),
    "dynaexq, paged": lambda trace: DynaExq(paged=True),
    "dynaexq, resized": lambda trace: DynaExq(resized=True),
    **{
        f"{name}, placed": lambda trace, name=name: placement_policy(
            f"{name},{WAITING}" + ",predict=gates" * (name in AHEAD)
        )
        for name in SCHEDULERS
    },
}


def told(policy: Policy) -> Spec:
    """Two versions where a policy chooses one; a slot of each expert, all of them fit."""
    sizes = {"dense": np.full(LAYERS, 100), "small": np.full(LAYERS, 40)}
    if not isinstance(policy, DynaExq):
        del sizes["small"]
    return spec(
        layers=LAYERS,
        experts=EXPERTS,
        hidden=KINDS,
        page_bytes=20,
        budget_bytes=4000,
        kv_floor_bytes=200,
        staging_bytes=10_000,
        driver="device" if search_of([policy]) else "host",
        version_bytes=sizes,
        min_cells=np.zeros(LAYERS, np.int32),
        stage_entries=8,
        capacity=(6, LAYERS * EXPERTS),
        slot_bytes=100,
        router=ROUTER,
        costs=COSTS,
        second_processor=True,
    )


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Trace:
    return a_trace(tmp_path_factory.mktemp("contract"), seed=0)


def a_trace(directory, seed: int, steps: int = 16) -> Trace:
    rng = np.random.default_rng(seed)
    kinds = [rng.integers(KINDS, size=rng.integers(1, 4)).tolist() for _ in range(steps)]
    return trace_of_kinds(directory, kinds)


def observed(trace: Trace, policy: Policy) -> Iterator[Observation]:
    """All moments of a policy over a trace, each with what it needs and nothing else; the state of
    the device is drawn."""
    rng, shape = np.random.default_rng(1), (LAYERS, EXPERTS)

    def at(moment: Moment, step, layer: int, turn: int, rows: slice) -> Observation:
        active = np.zeros(shape, np.int32)
        for number in range(LAYERS)[rows]:
            active[number] = np.bincount(step.ids[:, number].ravel(), minlength=EXPERTS)
        version = rng.integers(-1, 2 if isinstance(policy, DynaExq) else 1, shape).astype(np.int8)
        known = {
            **step._asdict(),
            "ids": step.ids[:, rows],
            "weights": step.weights[:, rows],
            "probs": step.probabilities[:, rows],
            "gate_input": step.gate_input[:, rows],
            "counts": active,
            "missed": (active > 0) & (rng.random(shape) < 0.5),
            "version": version,
            "state": (version >= 0).astype(np.int8),
            "last_used": rng.integers(0, 9, shape).astype(np.int32),
            "clock": np.full(LAYERS, 9, np.int32),
            "frequency": rng.integers(0, 9, shape).astype(np.int32),
            "cells": rng.integers(5, size=LAYERS).astype(np.int32),
            "fill_version": np.zeros(shape, np.int32),
            "capacity": int(rng.integers(3, 9)),
            **dict.fromkeys(("finished", "retired", "in_flight"), ()),
            "kv_refs": np.stack([np.zeros(9, np.int64), np.arange(9)], axis=1),
            **LinkUse(link_arrived=step.number, link_busy_us=7 * step.number)._asdict(),
            **dict(kv_used=20, kv_peak=30, kv_pages=60, kv_swapped=5),
            **dict(running=2, waiting=3, waiting_tokens=90, bucket=8, compiled=False),
            "costs": COSTS,
        }
        given = {name for name in policy.needs - {"router"} if moment in moments_with(name)}
        fields = {name: known[name] for name in given}
        for value in fields.values():
            if isinstance(value, np.ndarray):
                value.flags.writeable = False
        interval = (step.number + 1) // 5
        number = step.number
        return Observation(*(moment, number, 1, interval, turn, layer, float(number)), **fields)

    every, none = slice(None), slice(0)
    for step in trace.step_traces():
        moments = [(Moment.STEP_BEGIN, -1, -1, none), (Moment.EMBEDDED, -1, -1, none)]
        for layer in range(LAYERS):
            one = slice(layer, layer + 1)
            for moment in sorted(BETWEEN_LAYERS - {Moment.EMBEDDED}):
                rows = one if moment in (Moment.ROUTED, Moment.EXPERTS_BEGIN) else none
                moments.append((moment, layer, -1, rows))
        moments.append((Moment.STEP_END, -1, -1, every))
        if step.number % 5 == 4:
            moments.append((Moment.INTERVAL, -1, -1, every))
            moments.append((Moment.TURN_END, -1, step.number % 3, every))
        for moment, layer, turn, rows in moments:
            if moment in policy.moments:
                yield at(moment, step, layer, turn, rows)


class Fields(pickle.Pickler):
    """What values are, without what a dataclass keeps of its own computations."""

    def reducer_override(self, value):
        if not dataclasses.is_dataclass(value) or isinstance(value, type):
            return NotImplemented
        return type(value), tuple(getattr(value, f.name) for f in dataclasses.fields(value))


def dumped(*values: Any) -> bytes:
    file = io.BytesIO()
    Fields(file).dump(values)
    return file.getvalue()


def check_contract(policy: Policy, trace: Trace) -> None:
    given = told(policy)
    check_policies([policy], given.driver)
    observations = [*observed(trace, policy)]
    given = given if "router" in policy.needs else dataclasses.replace(given, router=None)
    given = given if "costs" in policy.needs else dataclasses.replace(given, costs=None)

    def decisions(policy: Policy) -> list[bytes]:
        state, made = policy.init(given), []
        for observation in observations:
            before, kept = dumped(state, observation), state
            state, decision = policy.decide(state, observation)
            assert dumped(kept, observation) == before, "changed in place"
            check_decision(decision, policy, given, observation.moment.name)
            made.append(dumped(decision))
        return made

    first = decisions(policy)
    assert first == decisions(copy.deepcopy(policy)), "not repeated"
    assert first == decisions(pickle.loads(pickle.dumps(policy))), "not repeated from a copy"
    assert hash(policy) == hash(copy.deepcopy(policy))


QUICK_TO_LEARN = [
    pytest.param(
        name, marks=[pytest.mark.slow] * name.startswith(("learned", "expertflow", "promoe, "))
    )
    for name in PAGED | OTHERS
]


@pytest.mark.parametrize("name", QUICK_TO_LEARN)
def test_it_is_pure_repeats_itself_and_decides_what_is_legal(name, trace):
    check_contract((PAGED | OTHERS)[name](trace), trace)


class Impure(FIFO):
    """Counts in the state that it was given."""

    def decide(self, state, observation):
        state += 1
        return state, super().decide(state, observation)[1]


class Restless(FIFO):
    """Decides by how often it was asked in this process."""

    asked = itertools.count()

    def decide(self, state, observation):
        prior = np.full((LAYERS, EXPERTS), next(self.asked), np.int32)
        return state, Decision(prior=prior)


class Curious(FIFO):
    """Looks at what it has not asked for."""

    def decide(self, state, observation):
        return state, Decision(prior=observation.counts + 1)


@pytest.mark.parametrize(
    ("policy", "error", "match"),
    [
        (Impure(), AssertionError, "changed in place"),
        (Restless(), AssertionError, "not repeated"),
        (Curious(), TypeError, "NoneType"),
        (dataclasses.replace(RecentPrefetch(), writes=frozenset({"prior"})), PolicyError, "writes"),
    ],
)
def test_a_policy_with_a_mistake_is_found(policy, error, match, trace):
    with pytest.raises(error, match=match):
        check_contract(policy, trace)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", PAGED)
def test_it_pages_as_plain_python_and_moves_no_less_than_min(name, seed, tmp_path):
    """Through the same controller, beside a device in plain Python that has the moments between
    layers; steps that search maps, cells that a policy moves and those of one pool have tests of
    their own. MIN of one pool for those whose cells go from layer to layer."""
    trace = a_trace(tmp_path, seed)
    policy = PAGED[name](trace)
    given = dataclasses.replace(spec_of(trace.header), driver="host", router=ROUTER)
    references = read_references(trace)
    cells = int(references.largest.max())
    seen: list = []
    missed: list = []
    driver = "host" if search_of([policy]) is None else "device"
    run: dict[str, Any] = dict(spec=given, cells=cells, driver=driver)
    found = simulate(trace, policies=[policy], **run)
    pool = in_one_pool(references)
    assert found.transfers.sum() >= min_transfers(pool, cells * LAYERS).sum()
    if name != "static-layers" and not wants_pool(policy):
        assert (found.transfers.sum(axis=0) >= min_transfers(references, cells)).all()
    if isinstance(policy, ExpertMap):
        policy = dataclasses.replace(policy, pool=False)
    if search_of([policy]) or wants_pool(policy) or "cells" in policy.writes:
        return
    wanted: list = []
    device = LayeredDevice(Controller(given, [policy], listener=wanted.append), cells)
    device.run(trace)
    watcher = dict(listener=seen.append, watcher=lambda step: missed.append(step.missed))
    found = simulate(trace, policies=[policy], **run, **watcher)
    np.testing.assert_array_equal(missed, device.missed)
    assert found.staged.sum(axis=1).tolist() == device.staged
    assert list(map(repr, seen)) == list(map(repr, wanted))

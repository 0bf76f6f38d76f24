"""The simulator pages as plain Python does, and refuses traces that cannot be simulated."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from examples.recent_prefetch import RecentPrefetch
from host_offload.control.interface import Moment
from host_offload.memory.pager import Pager
from host_offload.memory.tables import Entry, Residency, cold_tables, regrant
from host_offload.policies.eviction.fifo import FIFO
from host_offload.simulate.replay import replay
from host_offload.simulate.simulator import simulate
from host_offload.traces.reader import TraceError, columns, read_trace
from pallas_kernels.plan.host import planner
from pallas_kernels.stage import specs
from tests.host_offload.control.policy_runs import (
    CELLS,
    EXPERTS,
    LAYERS,
    scripted,
    spec,
)
from tests.host_offload.traces.traces_of import random_routing, write_trace
from tests.pallas_kernels.pager import tables_of
from tests.pallas_kernels.staged_memory import Memory

# ---- the pager against plain Python


def assert_tables(pager: Pager, memory: Memory, weights) -> None:
    for name, wanted in tables_of(memory.pagers, weights)._asdict().items():
        np.testing.assert_array_equal(getattr(pager.tables, name), wanted, err_msg=name)


@settings(max_examples=60)
@given(seed=st.integers(0, 2**32), native=st.booleans())
def test_the_pager_is_plan_and_stage(seed, native):
    """All tables after each of some references, lists, contents and grants; two versions."""
    rng = np.random.default_rng(seed)
    versions = [int(v) for v in rng.integers(2, size=CELLS)]
    cells = rng.integers(CELLS + 1, size=LAYERS)
    tables = cold_tables(cells, EXPERTS, (1, 0, 0))
    tables.cell_version[:] = versions
    pager = Pager(tables, versions=2)
    pager._bound = tables, planner(tables) if native else None
    assert not native or planner(tables)
    shape = specs.Spec(CELLS, EXPERTS, 6, (1, 1), LAYERS)
    stores = [np.zeros((LAYERS, EXPERTS, 1, shape.hidden), np.uint16)] * 2
    memory = Memory(shape, versions, stores)
    for plain, rows in zip(memory.pagers, tables.cell_row, strict=True):
        plain.regrant(rows.tolist())
    weights = (1, 0, 0)
    for _ in range(12):
        what = rng.integers(8)
        if what == 0:
            weights = tuple(rng.integers(-2, 3, 3).tolist())
            contents = {
                "victim_weights": np.array(weights),
                "prior": rng.integers(-9000, 9000, (LAYERS, EXPERTS)),
                "fill_version": rng.integers(-2, 2, (LAYERS, EXPERTS)),
            }
            pager.set_tables(contents)
            for layer, plain in enumerate(memory.pagers):
                plain.prior = contents["prior"][layer].tolist()
                plain.fill_version = contents["fill_version"][layer].tolist()
        elif what == 1:
            pager.regrant(rng.integers(CELLS + 1, size=LAYERS))
            for plain, rows in zip(memory.pagers, pager.tables.cell_row, strict=True):
                plain.regrant(rows.tolist())
        elif what < 4:
            size = rng.integers(7)
            limits = np.array([LAYERS, EXPERTS, 2, CELLS])
            entries = [Entry(*e) for e in rng.integers(-1, limits + 1, (size, 4)).tolist()]
            only, coming = (None if rng.random() < 0.5 else int(rng.integers(2)) for _ in "12")
            wanted = np.zeros(size, np.int32)
            for layer, plain in enumerate(memory.pagers):
                if only in (None, layer):
                    plain.clock += (early := coming is not None and layer >= coming)
                    wanted |= np.array(memory.stage(layer, entries), np.int32)
                    plain.clock -= early
            done = pager.stage(entries, layer=only, coming=coming)
            np.testing.assert_array_equal(done, wanted)
        else:
            active = rng.random((LAYERS, EXPERTS)) < rng.random()
            only = None if what < 7 else int(rng.integers(LAYERS))
            span = slice(None) if only is None else slice(only, only + 1)
            found = pager.reference(active[span], only)
            for i, layer in enumerate(range(LAYERS)[span]):
                plan = memory.pagers[layer].reference(np.flatnonzero(active[layer]), weights)
                numbers = plan.hits, plan.fill_count, plan.read_through
                assert [int(n[i]) for n in found[:3]] == [int(n) for n in numbers]
        assert_tables(pager, memory, weights)


def test_a_grant_is_that_of_the_device():
    rng = np.random.default_rng(0)
    pager = Pager(cold_tables(np.array([3, 8]), EXPERTS, (1, 0, 0)))
    for _ in range(4):
        pager.reference(rng.random((LAYERS, EXPERTS)) < 0.5)
    before = pager.copy()
    pager.regrant(np.array([5, 2]))
    assert (pager.tables.cell_row >= 0).sum(axis=1).tolist() == [5, 2]
    wanted = regrant(before, pager.tables.cell_row)  # type: ignore[arg-type]
    for name in Residency._fields:
        np.testing.assert_array_equal(getattr(pager.tables, name), getattr(wanted, name))


# ---- what is refused


@pytest.fixture
def trace(tmp_path):
    """Forty decode steps of two layers of eight experts, in some chunks."""
    routing = random_routing(np.random.default_rng(0), 40, LAYERS, EXPERTS, 2)
    return write_trace(tmp_path / "t", routing, EXPERTS, chunk_bytes=1000)


def edited(trace, number: int = 1, **arrays):
    """The trace with other arrays in one chunk, `step_waves=` for step.waves."""
    path = trace.chunks[number].path
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
    found = load_file(path)
    for name, change in arrays.items():
        found[name.replace("_", ".")] = change(found[name.replace("_", ".")].copy())
    save_file(found, path, metadata)
    return read_trace(trace.directory)


def both_paths(trace, match: str) -> None:
    """The trace is refused beside a controller and without one."""
    for policies in ((), (FIFO(),)):
        with pytest.raises(TraceError, match=match):
            simulate(trace, policies=policies)


def test_damaged_traces_are_refused(trace):
    assert len(trace.chunks) > 2

    def other_expert(ids):
        ids[0, 1, 1] = EXPERTS
        return ids

    both_paths(edited(trace, token_ids=other_expert), r"names experts 0…8, the model has 8; trace")


def test_steps_that_mean_nothing_are_refused(trace):
    uneven = edited(trace, step_waves=lambda waves: waves + np.array([0, 1], np.int16))
    both_paths(uneven, "the layers of a step must have the same waves, at least one")
    edited(trace, step_waves=lambda waves: waves * 0 + 1)
    wrong = edited(trace, step_tokens=lambda tokens: tokens + 1)
    with pytest.raises(TraceError, match=r"the steps have \d+ tokens, \d+ were routed; copy the"):
        simulate(wrong)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"cells": 9}, r"cells of a layer must lie in 0…8, not 9"),
        ({"cells": [-1, 2]}, r"cells of a layer must lie in 0…8, not \[-1, 2\]"),
        ({"cells": [1, 2, 3]}, "cells must be an integer or 2 integers"),
        ({"cells": 0.5}, "cells must be an integer or 2 integers, not 0.5"),
        ({"eviction": "mru"}, "unknown eviction policy 'mru'"),
        ({"policies": [scripted(moments={Moment.ROUTED})]}, "which driver='device' lacks"),
        ({"policies": [scripted(needs={"kv_used"})]}, "needs 'kv_used', which step 0 does not say"),
        (
            {"policies": [scripted(needs={"embedding"})]},
            "record one with --trace DIR,arrays=embedding",
        ),
        ({"policies": [scripted(needs={"router"})]}, "needs 'router', which this Spec does not"),
    ],
)
def test_what_cannot_be_simulated(trace, options, match):
    with pytest.raises(ValueError, match=match):
        simulate(trace, **options)


def test_what_a_trace_does_not_say_must_be_given(tmp_path):
    """A converted trace: routing, and neither times nor sizes nor kinds of steps."""
    routing = random_routing(np.random.default_rng(1), 20, LAYERS, EXPERTS, 2)
    kept = {"token.ids", "token.user", "step.number", "step.tokens"}
    full = write_trace(tmp_path / "full", routing, EXPERTS)
    absent = sorted(set(columns(full.header)) - kept)
    bare = write_trace(tmp_path / "bare", routing, EXPERTS, absent=absent)
    bare = dataclasses.replace(bare, header=dataclasses.replace(bare.header, spec={}))
    with pytest.raises(TraceError, match="does not say how many cells its layers had; give cells="):
        simulate(bare)
    with pytest.raises(TraceError, match=r"spec does not say 'version_bytes', .*give spec="):
        simulate(bare, cells=4, policies=[FIFO()])
    with pytest.raises(TraceError, match="needs 'weights', and this trace, which was converted"):
        simulate(bare, cells=4, spec=spec(), policies=[scripted(needs={"weights"})])
    with pytest.raises(TraceError, match="no run to replay; use simulate"):
        replay(bare)
    found, same = simulate(bare, cells=4), simulate(full, cells=4)
    np.testing.assert_array_equal(found.misses, same.misses)
    assert found.bytes is None and (found.kind == -1).all() and (same.kind == 1).all()
    # Read one step late, as the steps of `full` are.
    policies = [RecentPrefetch()]
    found = simulate(bare, cells=4, policies=policies, spec=spec())
    same = simulate(full, cells=4, policies=policies, spec=spec())
    np.testing.assert_array_equal(found.staged, same.staged)
    assert found.staged.any()

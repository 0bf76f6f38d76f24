"""Two versions and misses: layers have some high and some low cells. What a step computes with
follows from the tables, bytes are counted by version, and a trace says enough to be replayed."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from host_offload.control.paging import version_cells
from host_offload.policies.precision.dynaexq import DynaExq
from host_offload.policies.precision.hobbit import Hobbit
from host_offload.policies.precision.precision_names import Precision, precision_of
from host_offload.simulate.replay import replay
from host_offload.traces.reader import TraceError, read_trace
from moejax.checkpoints.random_model import shape
from moejax.engine.step_work import demand_bytes
from moejax.errors import UserError
from moejax.traces.tracer import start_trace
from tests.moejax.engine.scenes import open_llm, same_bits
from tests.moejax.engine_runs import mixed_jobs, run
from tests.moejax.start.precision_engines import EXPERTS, JOBS, LAYERS, LIMITS, start_planned
from tests.pallas_kernels.contract import NATIVE

pytestmark = pytest.mark.slow
SLOTS = 8
"""4 slots of dense cells and 4 of int4 ones, 4 in a slot: 2 and 8 in each layer, of 16 experts."""

HOT = DynaExq(margin=0, interval="16 tokens", paged=True)
PAGED = precision_of("dynaexq,margin=0,paged=true,interval=16 tokens")


def layout(precision: Precision = PAGED):
    return shape("demo", layers=LAYERS).slot_layout(2, precision.versions)


def played(
    directory, precision: Precision = PAGED, driver: str = "device", slots: int = SLOTS
) -> SimpleNamespace:
    """The jobs in a new engine, every invariant and all bytes checked after each step."""
    engine, plan = start_planned(driver, precision, LIMITS, layers=LAYERS, slots=slots)
    settings = {"model": "demo", "eviction": "lru"}
    tracer = start_trace(directory, engine.runner, plan.spec, settings=settings)
    engine.tracer = tracer
    if engine.control is not None:
        engine.control.controller.listener = tracer.event
    recorded = run(SimpleNamespace(engine=engine), JOBS)  # pyright: ignore[reportArgumentType]
    control = None
    if engine.control is not None:
        engine.control.controller.finish()
        control = engine.control.controller.stats()
    tracer.close()
    found = SimpleNamespace(
        recorded=recorded,
        control=control,
        bytes=engine.statistics.summary()["bytes"],
        paging=dict(engine.statistics.paging),
        notes=plan.budget.notes,
    )
    engine.runner.delete()
    return found


@pytest.fixture(scope="module", params=["device", pytest.param("host", marks=pytest.mark.nightly)])
def run_of(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("paged") / request.param
    return played(directory, driver=request.param), read_trace(directory)


def test_a_run_pages_and_changes_versions(run_of):
    found, _ = run_of
    said = found.control["precision"]
    assert said["promotions"] > 0 and said["demotions"] > 0
    assert said["hi"] > 0 and said["lo"] > 0 and said["absent"] > 0
    assert said["hi"] + said["lo"] + said["absent"] == LAYERS * EXPERTS
    cells = zip((2 * LAYERS, 8 * LAYERS), layout().records, strict=True)
    assert said["budget_bytes"] == sum(count * record.nbytes for count, record in cells)
    assert found.paging["fills"] > 0 and found.paging["read_through"] > 0
    assert any("paged, 4 dense and 16 int4 cells for 32 experts" in note for note in found.notes)


def test_bytes_are_those_of_the_versions(run_of):
    """Statistics, trace and replay count the same, and it is neither version's bytes alone."""
    found, trace = run_of
    fill, through, _ = trace.array("step.bytes").sum(axis=0).tolist()
    assert found.bytes == {"fill": fill, "read_through": through}
    dense, low = (record.nbytes for record in layout().records)
    assert found.paging["fills"] * low < fill < found.paging["fills"] * dense


def test_a_trace_is_replayed_exactly(run_of):
    found, trace = run_of
    again = replay(trace, policies=[HOT])
    assert again.bytes is not None and again.control is not None
    assert np.array_equal(again.bytes.sum(axis=1), trace.array("step.bytes").sum(axis=1))
    assert again.control["precision"] == found.control["precision"]


def test_a_replay_of_other_cells_or_fills_is_found_out(run_of):
    """The header decides: with one cell less, or misses that fill the other version, the replay
    says which step differs."""
    _, trace = run_of
    for name, change in (("cells", -1), ("fill_version", -1)):
        said = {**trace.header.spec["paged"]}
        said[name] = np.array(said[name]) + change
        if name == "cells":
            said[name] = np.maximum(said[name], 0)
        spec = {**trace.header.spec, "paged": {**said, name: said[name].tolist()}}
        other = dataclasses.replace(trace, header=dataclasses.replace(trace.header, spec=spec))
        with pytest.raises(TraceError, match="the trace has"):
            replay(other, policies=[HOT])


@pytest.mark.nightly
def test_misses_that_weigh_little_come_in_fewer_bits(tmp_path):
    """HOBBIT: with threshold 1 every miss is dense, with 0 but the first of each row is int4."""
    fills, nbytes = {}, {}
    for threshold in (0.0, 1.0):
        precision = precision_of(f"hobbit,threshold={threshold}")
        found = played(tmp_path / str(threshold), precision, driver="host")
        again = replay(read_trace(tmp_path / str(threshold)), policies=[Hobbit(threshold)])
        assert again.bytes is not None
        nbytes[threshold] = sum(found.bytes.values())
        assert nbytes[threshold] == again.bytes.sum()
        fills[threshold] = sum(found.paging[name] for name in ("fills", "read_through"))
    dense, low = (record.nbytes for record in layout().records)
    assert nbytes[1.0] == fills[1.0] * dense
    assert fills[0.0] * low < nbytes[0.0] < fills[0.0] * (dense + low) / 2


@NATIVE
def test_the_full_version_follows_whatever_the_link(tmp_path):
    """Beside the steps, so that bits do not depend on its speed; a step's promotions and the misses
    of the step before are at most as many as the setting says, and a replay has each."""
    text, found = "hobbit,threshold=0.2,hi_share=0.6,promote=6", []
    for rate in ("2GB/s", "20MB/s"):
        options: dict[str, Any] = {"driver": "host", "memory": 4 << 20, "precision": text}
        options |= {"transfers": f"queue,rate={rate}", "enable_prefix_caching": False}
        with open_llm(trace=tmp_path / rate[:2], **options) as llm:
            found.append(run(llm, mixed_jobs(), check=False))
            said = llm.stats()["control"]["precision"]
        trace = read_trace(tmp_path / rate[:2])
        again = replay(trace, policies=precision_of(text).policies)
        assert again.bytes is not None and again.control is not None
        assert again.bytes.sum() == trace.array("step.bytes").sum()
        assert again.control["precision"] == said and said["promotions"] > 20
        missed = np.unpackbits(trace.array("step.missed"), axis=-1).sum(axis=(1, 2))
        promoted = again.staged.sum(axis=1)
        assert (promoted[1:] <= np.maximum(6 - missed[:-1], 0)).all()
    assert same_bits(*found)
    with pytest.raises(UserError, match=r"promote=6 without a queue: .*add transfers='queue'"):
        open_llm(**{**options, "transfers": "ops"})


@pytest.mark.parametrize(
    ("slots", "share", "wanted"),
    [
        (8, None, ((2, 2), (8, 8))),
        (8, 0.0, ((0, 0), (16, 16))),  # 32 cells are all that low ones can be
        (8, 1.0, ((4, 4), (0, 0))),
        (5, 0.2, ((1, 0), (8, 8))),
        (0, None, ((0, 0), (0, 0))),
        # More slots than low cells are of use: the rest are high ones.
        (16, 0.0, ((4, 4), (16, 16))),
        (60, 1.0, ((16, 16), (16, 16))),
    ],
)
def test_slots_become_cells_of_both_versions(slots, share, wanted):
    cells = version_cells(layout(), slots, LAYERS, EXPERTS, share)
    assert cells.T.tolist() == [list(each) for each in wanted]
    per_slot = layout().cells_per_slot
    assert sum(-(-int(n) // c) for n, c in zip(cells.sum(0), per_slot, strict=True)) <= slots


def test_cells_of_one_version_do_not_mix():
    with pytest.raises(ValueError, match="pages mix two versions, not 1"):
        version_cells(layout(precision_of("int4")), 8, LAYERS, EXPERTS)


def test_demand_is_counted_by_version():
    assert demand_bytes(7, 5, None, (100,)) == (700, 500)
    demand = np.array([[[1, 3], [0, 2]], [[0, 3], [2, 1]]])
    assert demand_bytes(7, 5, demand, (100, 10)) == (160, 230)

"""The contract of a step's drivers: the bits of experts that are all there, whatever is resident,
however experts come and wherever they are kept; what does not come ends the requests of its step,
and no others. One engine a subject."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moejax import LLM, UserError
from moejax.checkpoints.conversion import convert
from moejax.engine.statistics import kv_stats
from moejax.evaluate.quantization import quantize
from tests.moejax.engine.scenes import (
    EXPERTS,
    GREEDY,
    LAYERS,
    LINK,
    PROMPTS,
    QUEUE,
    RECORD,
    STREAM_QUEUE,
    at_rest_twice,
    delay,
    failing,
    forget_residents,
    open_llm,
    same_bits,
    tokens_of,
)
from tests.moejax.engine_runs import mixed_jobs, run, set_budget
from tests.pallas_kernels.contract import NATIVE

pytestmark = NATIVE

PACKED = 74752
"""Bytes of an expert that lossless12 holds."""
ALL_RESIDENT = "dynaexq,margin=0"
"""Every expert has its low version from the start, so that a step may find all it asks for: whether
a promotion of the step before is still in flight is chance."""
CACHED = {**QUEUE, "store": f"file,host_memory={12 * RECORD}"}
STREAM = {"driver": "stream", "transfers": "queue,chunk_bytes=64KiB"}
LATE = {"transfers": "queue,latency=50us,chunk_bytes=16KiB"}
WAVES = {"driver": "device,waves=3"}
ONE_THREAD = {"transfers": "queue,threads=1"}
TWO_LAYERS = (2 * EXPERTS + 3) * RECORD
"""Three slots of KV for four sequences: pages go out and back."""


@dataclasses.dataclass(frozen=True)
class Subject:
    options: dict[str, Any]
    dense: int = 0
    """Experts of each layer that stay where the others stream."""
    packed: int = 0
    slow: bool = True
    nightly: bool = False
    """Each of its options is another subject's too."""

    @property
    def streams(self) -> bool:
        return self.options.get("driver", "").startswith("stream")

    @property
    def pairs(self) -> bool:
        """Experts have two versions, and which one is a policy's."""
        return "dynaexq" in self.options.get("precision", "")

    @property
    def can_fail(self) -> bool:
        """Experts come by a queue of transfers, and some are not there."""
        in_files = "file" in self.options.get("store", "")
        brings = "transfers" in self.options or self.streams or in_files
        return brings and not self.pairs and self.dense + self.packed < EXPERTS


def flux(tiers: str, dense: int, packed: int, nightly: bool = False, **options) -> Subject:
    given = {**options, "driver": f"stream,tiers={tiers},planner=none"}
    return Subject(given, dense, packed, nightly=nightly)


SUBJECTS = {
    # Missed experts are filled by the steps' own ops.
    "device": Subject({"eviction": "lru"}),
    "host": Subject({"driver": "host", "eviction": "lfu", "expert_budget": "40%"}),
    "donated": Subject({"ops": "fill=xla", "eviction": "lru", "expert_budget": "40%"}),
    "in transit": Subject({"precision": "lossless12,in_transit=true", "expert_budget": "40%"}),
    # They pass a link beside compute.
    "link": Subject({**LINK, "expert_budget": "40%"}),
    "link, chunks": Subject(
        {
            "transfers": "queue,rate=500MB/s,latency=50us,threads=3,chunk_bytes=1000",
            "driver": "host",
            "prefetch": "moe-infinity",
            "expert_budget": "60%",
        }
    ),
    "link, waves": Subject({**LATE, **WAVES, "eviction": "lfu", "expert_budget": "40%"}),
    "link, int8": Subject({**LINK, "precision": "int8", "expert_budget": "40%"}),
    "link, paged": Subject({**LINK, "precision": "dynaexq,paged=true", "memory": 4 << 20}),
    "link, resident": Subject({**LINK, "precision": ALL_RESIDENT, "memory": 4 << 20}, nightly=True),
    # jax copies them.
    "queue": Subject(
        {**QUEUE, "driver": "host,waves=2", "expert_budget": "60%", "prefetch": "random"},
        slow=False,
    ),
    "queue, chunks": Subject(
        {
            **QUEUE,
            "transfers": "queue,chunk_bytes=20000,threads=9",
            "expert_budget": "40%",
            "prefetch": "coactivation",
        }
    ),
    "queue, int8": Subject(
        {**QUEUE, "precision": "int8", "expert_budget": "40%", "prefetch": "random"}, nightly=True
    ),
    "queue, native": Subject({"transfers": "queue", "expert_budget": "40%"}),
    # Layers stream through a window.
    "stream": Subject({**STREAM, **LINK}, slow=False),
    "stream, residents": Subject({**STREAM, "expert_budget": "80%"}, dense=9),
    "stream, all": Subject({**STREAM, "expert_budget": "100%"}, dense=EXPERTS),
    "stream, little KV": Subject({**STREAM, **ONE_THREAD, "memory": TWO_LAYERS}),
    "stream, int8": Subject({**STREAM, "precision": "int8", **LINK}, nightly=True),
    "stream, packed": flux("flux,dense=25%,packed=50%", 4, 8, **STREAM),
    "stream, all packed": flux("flux,packed=100%", 0, EXPERTS, True, **STREAM),
    "stream, packed in place": flux(
        "flux-direct,packed=50%", 0, 8, transfers="queue,rate=1GB/s,chunk_bytes=64KiB"
    ),
    "stream, whole layers": Subject({**STREAM, "driver": "stream,tiers=flux,by=layers,packed=75%"}),
    "stream queue": Subject({**STREAM_QUEUE, "expert_budget": "80%"}, dense=11),
    "stream queue, little KV": Subject({**STREAM_QUEUE, "memory": TWO_LAYERS}),
    "stream queue, packed": flux("flux,dense=12.5%,packed=50%", 2, 8, **STREAM_QUEUE),
    "stream queue, in place": flux("flux-direct,dense=25%,packed=50%", 4, 8, True, **STREAM_QUEUE),
    "stream queue, whole layers": Subject(
        {**STREAM_QUEUE, "driver": "stream,tiers=flux,by=layers,packed=50%"}, nightly=True
    ),
    # They are in files.
    "file": Subject({"store": "file", "expert_budget": "25%"}),
    "file, all": Subject({"store": "file"}, nightly=True),
    "file, none resident": Subject(
        {"store": "file,verify=false", "driver": "host", "expert_budget": 0}
    ),
    "file, ahead": Subject(
        {"store": "file", **WAVES, "prefetch": "random", "expert_budget": "40%"}
    ),
    "file, int8": Subject({"store": "file", "precision": "int8", "expert_budget": "25%"}),
    "file, stream": Subject({"store": "file", **STREAM}),
    "cached": Subject(
        {**CACHED, "driver": "host,waves=2", "expert_budget": "40%", "prefetch": "random"}
    ),
    "cached, all": Subject(
        {**QUEUE, "store": "file,host_memory=1GiB", "expert_budget": "40%"}, nightly=True
    ),
    "cached, int8": Subject({**CACHED, "precision": "int8", "expert_budget": "25%"}, nightly=True),
    "cached, stream, int8": Subject(
        {**STREAM_QUEUE, "store": CACHED["store"], "precision": "int8"}, nightly=True
    ),
    "cached, stream": Subject(
        {"store": CACHED["store"], **STREAM_QUEUE, "expert_budget": "80%"}, dense=11
    ),
    # Fewer than a layer has, so that what is on its way makes room for what comes.
    "cached, little": Subject(
        {
            "store": f"file,host_memory={9 * RECORD},verify=false",
            **STREAM_QUEUE,
            **ONE_THREAD,
            "memory": TWO_LAYERS,
        }
    ),
    "shared memory": Subject({"store": "shared", "expert_budget": "40%"}),
}


@pytest.fixture(scope="session")
def in_files(demo_dir, tmp_path_factory) -> Path:
    """The demo, converted, and an int8 version of its experts."""
    directory = tmp_path_factory.mktemp("drivers")
    convert(demo_dir, directory / "demo")
    return quantize(directory / "demo", directory / "int8", ["int8"]).conversion.directory


@dataclasses.dataclass(frozen=True)
class Running:
    llm: LLM
    subject: Subject
    name: str

    @property
    def options(self) -> dict[str, Any]:
        return self.subject.options

    @property
    def wanted(self) -> list[list]:
        """What the jobs give twice with every expert there."""
        precision = self.options.get("precision")
        changes = None if precision is None or precision.startswith("lossless") else precision
        memory = self.options["memory"] if self.subject.pairs else None
        return at_rest_twice(precision=changes, memory=memory)

    @property
    def jobs(self) -> list:
        return mixed_jobs()[:4] if self.subject.streams else mixed_jobs()

    def delay(self, seconds: float) -> None:
        many = "chunk_bytes=1000" in self.options.get("transfers", "")
        delay(self.llm, seconds, 0.01 if many else 1.0)

    @property
    def brings(self) -> bool:
        """Experts come by a queue of transfers."""
        return self.llm.stats()["transfers"] is not None


@pytest.fixture(scope="module")
def running(request, in_files) -> Iterator[Running]:
    subject = SUBJECTS[request.param]
    model = in_files if "file" in subject.options.get("store", "") else "demo"
    with open_llm(model, enable_prefix_caching=False, **subject.options) as llm:
        yield Running(llm, subject, request.param)


def over(
    chosen: Callable[[Subject], Any], quick: str = "", few: tuple[str, ...] = ()
) -> pytest.MarkDecorator:
    """Runs a test with these subjects, one after the other, each with one engine. quick: the only
    one that is not slow; default those that say so. few: those that are not nightly; default all
    but those that say so."""
    some = {name: subject for name, subject in SUBJECTS.items() if chosen(subject)}

    def marks(name: str, subject: Subject) -> list[pytest.MarkDecorator]:
        slow = subject.slow or bool(quick and name != quick)
        nightly = subject.nightly or bool(few and name not in few)
        return [pytest.mark.slow] * slow + [pytest.mark.nightly] * nightly

    marked = [pytest.param(name, marks=marks(name, subject)) for name, subject in some.items()]
    return pytest.mark.parametrize("running", marked, indirect=True, scope="module")


@over(lambda subject: True)
def test_the_bits_are_those_of_experts_that_are_there(running):
    """Once with all invariants after every step, which waits for what flies, and once with copies
    that are late and no wait but the ops' own. Integrity sees a byte of a cell."""
    llm, runner, pairs = running.llm, running.llm.engine.runner, running.subject.pairs
    first = run(llm, running.jobs, check=not pairs)
    assert pairs or same_bits(first, running.wanted[0])
    running.delay(2e-4 if running.subject.streams else 1e-3)
    # Some policies move experts in the first run only.
    assert same_bits(run(llm, running.jobs, check=False), running.wanted[1])
    assert not runner.faults()
    delay(llm, 0.0)
    stats = llm.stats()
    xla = "xla" in running.options.get("ops", "")
    assert stats["arena_owner"] == ("XLA" if xla else "native ops")
    if running.brings:
        check_transfers(running, stats)
    if running.subject.streams and "whole layers" not in running.name:
        check_window(running, stats)
    if "file" in running.options.get("store", ""):
        check_files(running, stats)
    row = int(np.asarray(runner.tables.address).max())
    if runner.buffers.memory is not None and row >= 0:
        runner.buffers.memory.view()[row, 3] ^= 1
        assert any("differ" in fault for fault in runner.faults())
        runner.buffers.memory.view()[row, 3] ^= 1
        assert not runner.faults()


def check_transfers(running: Running, stats: dict) -> None:
    moved = stats["transfers"]
    assert moved["failed"] == 0 and moved["busy_seconds"] > 0
    all_there = running.subject.dense + running.subject.packed == EXPERTS
    # Low versions of all experts may be there, so that a step waits for a high one by chance only.
    assert moved["waits"] > 0 or all_there or running.subject.pairs
    if running.options.get("prefetch"):
        assert moved["ahead"] > 0
    if not running.subject.streams:
        assert moved["demand_bytes"] > 0 and moved["flying"] == 0


def check_window(running: Running, stats: dict) -> None:
    """Cells are those of the window and residents, bytes those of the layers: all that was queued
    came, and a layer ahead of the last step at that."""
    moved, stream, arena = stats["transfers"], stats["stream"], stats["arena"]
    dense, packed = running.subject.dense, running.subject.packed
    by_jax = running.options.get("ops") == "move=xla"
    in_place = "flux-direct" in running.options["driver"]
    record = running.llm.engine.runner.layout.records[0].nbytes
    host = EXPERTS - dense - packed
    window = host + (0 if in_place else packed)
    residents = LAYERS * (dense * record + packed * PACKED)
    halves = 1 if by_jax else 2
    assert stream["bytes"] == residents + halves * window * record
    assert stream["resident_per_layer"] == dense
    assert stream["bytes_per_step"] == LAYERS * host * record
    arrived = moved["demand_bytes"] + moved["ahead_bytes"] + moved["bytes_left"]
    passed = LAYERS * dense * record if by_jax else residents
    assert arrived == stream["steps"] * stream["bytes_per_step"] + passed + host * record
    assert moved["cancelled"] == 0
    if by_jax:
        assert stream["staging_bytes"] == host * record
        assert packed or arena["expert_slots"] == stream["cells"] == 4 * dense + host
    if packed:
        ahead = 0 if by_jax else 1  # the layer ahead of the last step is decoded too
        decoded = (0 if in_place else packed) * (ahead + LAYERS * stream["steps"])
        assert running.llm.engine.runner.transport.totals().unpacked == decoded
    assert stats["experts"]["hit_rate"] == 1 and 0 < stream["used"] < 1


def check_files(running: Running, stats: dict) -> None:
    store, options = stats["store"], running.options
    assert store["kind"] == "file"
    if options.get("precision") is None:
        assert store["file_bytes"] == LAYERS * EXPERTS * RECORD
    assert store["verify_reads"] == ("verify=false" not in options["store"])
    if "host_memory" not in options["store"]:
        assert store["memory_bytes"] == 0 == running.llm.engine.runner.store.nbytes
        assert isinstance(store["past_the_page_cache"], bool)
        return
    cache = store["cache"]
    assert "through a cache in pinned host memory" in str(running.llm.explain())
    assert 0 < store["memory_bytes"] == cache["bytes_held"] <= cache["bytes"]
    assert 0 < cache["bytes_read"] <= cache["misses"] * RECORD
    if running.subject.streams:  # layers come in turn, so a small cache has none of them again
        assert cache["bytes_read"] >= stats["stream"]["steps"] * stats["stream"]["bytes_per_step"]
    elif "1GiB" in options["store"]:  # each is read once
        assert cache["bytes_read"] <= 64 * RECORD < cache["hits"] * RECORD
    else:
        assert cache["hits"] > 0 and cache["bytes_read"] > 64 * RECORD


WAYS = (
    *("device", "link", "queue", "queue, native", "stream", "stream, packed", "stream queue"),
    *("file", "file, stream", "cached", "cached, stream", "shared memory"),
)
"""One subject for each way in which experts come."""


@over(lambda subject: subject.can_fail, few=WAYS)
def test_what_does_not_come_ends_the_requests_of_its_step_only(running):
    llm, engine = running.llm, running.llm.engine
    want = tokens_of(llm)
    with failing(llm):
        first, second = (engine.add(p, GREEDY) for p in PROMPTS)
        if not running.subject.streams:
            forget_residents(llm)
        while first.error is None:
            engine.step()
        assert "expert" in str(first.error) and "an injected error" in str(first.error)
        assert "could not be read: " in str(first.error) and first.finish_reason == "abort"
    while not engine.idle:
        engine.step()
    if second.error is None:  # it was in none of the steps that were under way
        assert second.output == want[1]
    assert not engine.runner.faults()
    assert llm.stats()["transfers"]["failed"] > 0
    # What failed is absent, is read through where a layer is mapped already, and comes again.
    assert tokens_of(llm) == tokens_of(llm) == want
    if not running.subject.streams:
        forget_residents(llm)
        with failing(llm), pytest.raises(UserError, match=r"could not be read: .*injected error"):
            llm.score(list(range(300, 340)))
        engine.drain()


@over(lambda subject: "prefetch" in subject.options and "store" not in subject.options)
def test_a_transfer_ahead_of_need_that_fails_is_tried_again(running):
    """No prefetch comes: who needs its expert brings it as a demand."""
    before = running.llm.stats()["transfers"]
    with failing(running.llm, ahead_only=True):
        found = run(running.llm, running.jobs, check=False)
    assert not running.llm.engine.runner.faults()
    stats = running.llm.stats()["transfers"]
    assert stats["failed"] + stats["retried"] > before["failed"] + before["retried"]
    assert stats["ahead"] - stats["late"] == before["ahead"] - before["late"]
    assert same_bits(found, running.wanted[0])


@over(
    lambda subject: not subject.streams and "precision" not in subject.options,
    quick="device",
    few=WAYS,
)
def test_budgets_move_while_experts_fly(running):
    """Pages go to the host and back, cells move: three slots of KV for four sequences."""
    room = running.llm.engine.scheduler.arena.slots - 3
    before = kv_stats(running.llm.engine.scheduler)
    running.delay(5e-4)
    for cells in ([3, 9, 16, 0], [1, 1, 1, 1]):
        fewer = min(1.0, room / sum(cells))
        set_budget(running.llm, [int(n * fewer) for n in cells], 3)
        found = run(running.llm, running.jobs, check=False)
        assert not running.llm.engine.runner.faults()
        assert same_bits(found, running.wanted[0])
    delay(running.llm, 0.0)
    after = kv_stats(running.llm.engine.scheduler)
    for name in ("swapped_out_bytes", "preemptions"):
        assert after[name] > before[name]

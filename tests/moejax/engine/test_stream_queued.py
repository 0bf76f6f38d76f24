"""The stream driver by jax's own copies, as on a GPU: the bits of full residency in the cells of
one layer and staging of the next, in the order that the device's stream needs.

Ops that compute are native, as in most tests, but one that touches the arena is XLA's, so that the
arena is an array.
"""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from host_offload.queue.pinned import PinnedBuilder, PinnedRecords
from moejax import LLM, UserError
from moejax.checkpoints.random_model import random_model
from moejax.device import select_device
from moejax.start.build import start_engine
from moejax.start.options import Options
from moejax.step.drivers.host import HostRunner
from moejax.step.drivers.stream_queued import QueuedStreamRunner
from tests.moejax.checkpoints.conversions import copied
from tests.moejax.engine.test_device_queue import delay
from tests.moejax.engine.test_file_store import converted, expert_file
from tests.moejax.engine.test_stream import (
    GREEDY,
    LIMITS,
    PROMPTS,
    Running,
    config_of,
    short_jobs,
    slow,
)
from tests.moejax.engine_runs import Faulty, mixed_jobs, run
from tests.moejax.interpreted_engine import interpreted_llm, three_jobs
from tests.pallas_kernels.contract import NATIVE

__all__ = ["converted"]

EXPERTS = 16
RECORD = 98304
STREAM = {"driver": "stream", "ops": "move=xla"}


def open_llm(model="demo", **options) -> LLM:
    return LLM(model, progress=False, **{**LIMITS, **STREAM, **options})


@functools.cache
def at_rest(ops: str = "auto"):
    """What the jobs give with every expert resident."""
    with open_llm(driver="device", ops=ops) as llm:
        return run(llm, mixed_jobs()[:4], check=False)


def same(ours, theirs) -> bool:
    return all(a.same_bits(b) for a, b in zip(ours, theirs, strict=True))


# ---- bits and memory


@NATIVE
@pytest.mark.parametrize(
    "options",
    [
        {"expert_budget": "80%"},
        slow(),
        pytest.param({"expert_budget": "100%"}, marks=pytest.mark.nightly),
        # Two layers, and three slots of KV for four sequences: pages go out and back.
        slow(memory=(2 * EXPERTS + 3) * RECORD),
        pytest.param({"chunk_bytes": 20_000, "transfer_threads": 1}, marks=pytest.mark.nightly),
        pytest.param({"ops": "xla"}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_the_bits_are_those_of_full_residency(options):
    """Once with all invariants after every step, and once with copies that are late, so that every
    record is waited for in stream order."""
    with open_llm(**options) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, QueuedStreamRunner) and runner.driver == "stream"
        found = [run(llm, mixed_jobs()[:4])]
        delay(llm, 300)
        found.append(run(llm, mixed_jobs()[:4], check=False))
        assert not runner.faults()
        stats = llm.stats()
        moved, stream = stats["transfers"], stats["stream"]
        record = runner.layout.records[0].nbytes
        # 11 residents of each layer, and cells for the 5 others of one: 49 of 51 that 80% are.
        resident = {"80%": 11, "100%": EXPERTS}.get(options.get("expert_budget"), 0)
        streamed = EXPERTS - resident
        assert stream["resident_per_layer"] == resident
        assert stream["bytes_per_step"] == 4 * streamed * record
        assert stream["bytes"] == (4 * resident + streamed) * record
        assert stream["staging_bytes"] == runner.staging_bytes == streamed * record
        arena = stats["arena"]
        assert arena["expert_slots"] == stream["cells"] == 4 * resident + streamed
        # All that was queued comes: residents, each step's, and the first layer of the next one.
        every = (stream["steps"] * 4 * streamed + 4 * resident + streamed) * record
        assert sum(moved["bytes"].values()) + moved["in_flight"]["bytes"] == every
        assert moved["cancelled"] == moved["failed"] == 0 and (moved["waits"] > 0 or not streamed)
        assert stats["experts"]["hit_rate"] == 1 and 0 < stream["used"] < 1
    for one in found:
        assert same(one, at_rest(options.get("ops", "auto")))


@NATIVE
@pytest.mark.parametrize(
    "tiers",
    [
        "flux-direct,dense=25%,packed=50%,planner=none",
        "flux,dense=12.5%,packed=50%,planner=none",
        pytest.param("flux-direct,packed=50%,by=layers", marks=pytest.mark.slow),
        pytest.param("flux,packed=50%,by=layers", marks=pytest.mark.slow),
    ],
)
def test_packed_residents_are_computed_as_they_are_or_decoded(tiers):
    """In cells of their own beside dense ones, bytes of which are those of the window. Computed as
    they are, nothing of them streams; decoded, they have places in the ring, and nothing of them
    passes the link."""
    direct = tiers.startswith("flux-direct")
    with open_llm(tiers=tiers) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, QueuedStreamRunner)
        found = run(llm, mixed_jobs()[:4])
        assert not runner.faults()
        assert runner.window is not None
        stream, placement = llm.stats()["stream"], runner.window.placement
        dense, packed, host = placement.sum(axis=0).tolist()
        small = runner.layout.records[1].nbytes
        assert packed == 4 * EXPERTS // 2 and small < RECORD
        ring = int(placement[:, 2 if direct else 1 :].sum(axis=1).max())
        assert stream["bytes"] == (ring + dense) * RECORD + packed * small
        assert stream["staging_bytes"] == int(placement[:, 2].max()) * RECORD
        decoded = 0 if direct else packed * stream["steps"]
        assert runner.transfer_totals().unpacked == decoded
        assert stream["bytes_per_step"] == host * RECORD
        moved = llm.stats()["transfers"]
        every = stream["steps"] * host + dense + int(placement[0, 2])
        assert sum(moved["bytes"].values()) + moved["in_flight"]["bytes"] == every * RECORD
    assert same(found, at_rest())


def not_decoded(self, layer):
    """Cells of packed residents keep what was there."""


def decoded_from_others(self, layer, decoded=QueuedStreamRunner._unpack):
    """Each out of the cell of the next one."""
    call = self._call

    def rolled(key, arena, sources, *rest):
        return call(key, arena, np.roll(sources, 1), *rest)

    self._call = rolled
    decoded(self, layer)
    del self._call


def decoded_before_they_have_cells(self, layer, decoded=QueuedStreamRunner._unpack):
    """The following layer's, while these experts are computed from the cells."""
    decoded(self, (layer + 1) % len(self.window.tier))


@NATIVE
@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake", [not_decoded, decoded_from_others, decoded_before_they_have_cells]
)
def test_a_mistake_in_decoding_is_found(mistake, monkeypatch):
    monkeypatch.setattr(QueuedStreamRunner, "_unpack", mistake)
    with open_llm(tiers="flux,packed=50%,planner=none") as llm:
        found = run(llm, mixed_jobs()[:4], check=False)
    assert not same(found, at_rest())


TIERS = ("flux-direct,dense=25%,packed=50%,planner=none", "flux,packed=50%,planner=none")


@pytest.mark.nightly
@pytest.mark.parametrize("tiers", [None, *TIERS])
def test_the_bits_are_those_of_full_residency_with_kernels(tiers):
    """Every op a Triton-lowered kernel, interpreted: decode and prefill of three chunks."""
    limits = {"max_model_len": 128, "max_num_seqs": 20, "max_num_batched_tokens": 192}
    jobs, found = three_jobs(vocabulary=4096), []
    for driver in ("device", "stream"):
        asked = {"tiers": tiers} if driver == "stream" else {}
        with interpreted_llm("demo", driver=driver, prefill_waves=1, **asked, **limits) as llm:
            found.append(run(llm, jobs, check=False))
            if driver == "stream":
                assert not llm.engine.runner.faults()
                assert llm.stats()["stream"]["staging_bytes"] > 0
                assert llm.stats()["ops"]["expert_ffn"] == "pallas"
    assert same(*found)


@NATIVE
def test_memory_is_shared_by_both_halves_residents_and_kv():
    """Of 50 records of memory 16 are the half that is staging, or 6 where 10 of each layer stay."""
    for residents in (0, 10):
        streamed = EXPERTS - residents
        budget = (4 * residents + streamed) * RECORD
        with open_llm(memory=80 * RECORD, expert_budget=budget) as llm:
            arena, stream = llm.stats()["arena"], llm.stats()["stream"]
            assert stream["staging_bytes"] == streamed * RECORD
            left = 80 - streamed - 4 * residents - streamed
            assert arena["expert_slots"] == 80 - streamed - left
            assert arena["kv_slots"] == left
            runner = llm.engine.runner
            assert runner.layout.slot_bytes == RECORD
            assert runner.arena.nbytes + stream["staging_bytes"] == 80 * RECORD


# ---- experts in files


@NATIVE
@pytest.mark.parametrize(
    "options",
    [
        {"expert_budget": "80%"},
        slow(),
        slow(
            transfer_threads=1,
            host_memory=9 * RECORD,
            verify_reads=False,
            memory=(2 * EXPERTS + 3) * RECORD,
        ),
        pytest.param({"host_memory": "1GiB", "chunk_bytes": 20_000}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_experts_in_files_have_the_bits_of_those_in_memory(options, converted):
    """Through a cache of twelve records, or nine: fewer than a layer has, so that what is on its
    way makes room for what comes. Once as it is, and once with copies that are late."""
    given = {"model": converted, "store": "file", "host_memory": 12 * RECORD, **options}
    with open_llm(**given) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, QueuedStreamRunner)
        found = [run(llm, mixed_jobs()[:4])]
        delay(llm, 300)
        found.append(run(llm, mixed_jobs()[:4], check=False))
        assert not runner.faults()
        stats = llm.stats()
        cache, stream = stats["store"]["cache"], stats["stream"]
        assert stats["store"]["kind"] == "file" and stats["transfers"]["failed"] == 0
        streamed = EXPERTS - (11 if "expert_budget" in options else 0)
        assert stream["bytes_per_step"] == 4 * streamed * RECORD
        # Layers come in turn, so a cache of fewer than all that stream has none of them again.
        read = 4 * EXPERTS if given["host_memory"] == "1GiB" else stream["steps"] * 4 * streamed
        assert cache["bytes_read"] >= read * RECORD
    for one in found:
        assert same(one, at_rest())


@NATIVE
@pytest.mark.slow
def test_a_file_that_fails_ends_the_requests_of_its_steps(converted, tmp_path):
    broken = copied(converted, tmp_path / "broken")
    path = expert_file(broken, 2, 6)
    with open_llm(model=broken, store="file", host_memory=12 * RECORD) as llm:
        want = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids
        away = path.rename(tmp_path / "away")
        request = llm.engine.add(PROMPTS[0], GREEDY)
        while request.error is None:
            llm.engine.step()
        assert str(path) in str(request.error)
        away.rename(path)
        while not llm.engine.idle:
            llm.engine.step()
        assert not llm.engine.runner.faults()
        assert llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids == want


# ---- order


@functools.cache
def loaded(layers: int, builder: type):
    options = {} if builder is None else {"new_builder": builder}
    return random_model(config_of(layers), device=select_device(), **options)


def started(layers: int, driver: str = "stream", **options) -> Running:
    ops = "move=xla" if driver == "stream" else "auto"
    made = Options("demo", driver=driver, ops=ops, **{**LIMITS, **options})
    model = loaded(layers, PinnedBuilder if driver == "stream" else None)
    return Running(start_engine(model, made, select_device())[0])


@functools.cache
def at_rest_of(layers: int):
    running = started(layers, "device")
    found = run(running, short_jobs(6), check=False)
    running.engine.runner.delete(given=False)
    return found


def told(runner: QueuedStreamRunner, monkeypatch) -> list[tuple[str, int]]:
    """What is dispatched, in order: `copy`, a record's layer; `seat`, the cells'; `land`, -1,
    for each record; `compute`, a layer."""
    events: list[tuple[str, int]] = []
    records, queue, call = runner.records, runner.device_queue, runner._call
    assert isinstance(records, PinnedRecords)
    layer_of = {
        id(piece): layer
        for layer, experts in enumerate(records.pieces)
        for piece in itertools.chain.from_iterable(experts)
    }
    put, computed = queue.put, HostRunner._experts

    def begun(pieces):
        events.append(("copy", layer_of[id(pieces[0])]))
        return put(pieces)

    def called(key, *args):
        if key.kind == "seat":
            events.append(("seat", int(args[2])))
        if key.kind.startswith("land"):
            events.extend([("land", -1)] * np.size(args[1]))
        return call(key, *args)

    def experts(self, parts, step, layer, *args):
        events.append(("compute", layer))
        return computed(self, parts, step, layer, *args)

    monkeypatch.setattr(queue, "put", begun)
    monkeypatch.setattr(runner, "_call", called)
    monkeypatch.setattr(HostRunner, "_experts", experts)
    return events


def out_of_order(layers: int, monkeypatch, **options) -> list[str]:
    """What a run says against the order: layer by layer its cells, its records into them, the next
    layer's copies, and it computes. So no copy waits for a layer beside which it should run, and
    no more than one layer is in staging."""
    running = started(layers, **options)
    runner = running.engine.runner
    try:
        streamed, wrong = runner.window.half, []
        count = len(runner.window.tier)
        events = told(runner, monkeypatch)
        found = run(running, short_jobs(6), check=False)
        if not same(found, at_rest_of(layers)):
            wrong.append("other bits")
        wrong += runner.faults()
        expected: list[tuple[str, int]] = []
        for number in range(sum(what == "compute" for what, _ in events)):
            layer = number % count
            expected += [("seat", layer), *[("land", -1)] * streamed]
            expected += [("copy", (layer + 1) % count)] * streamed
            expected += [("compute", layer)]
        if events != expected:
            wrong.append("another order")
        return wrong
    except (Faulty, RuntimeError, KeyError) as error:
        return [f"{type(error).__name__}: {error}"]
    finally:
        runner.delete(given=False)


@NATIVE
@pytest.mark.parametrize("layers", [3, 4, pytest.param(5, marks=pytest.mark.slow)])
def test_layers_and_loads_are_in_order(layers, monkeypatch):
    assert out_of_order(layers, monkeypatch) == []


def landed_too_early(runner: type[QueuedStreamRunner], monkeypatch) -> None:
    """The next layer's records are moved into the cells before the layer has computed."""

    def experts(self, parts, step, layer, *args):
        if self._holder != layer:
            self._materialize(layer)
        following = (layer + 1) % len(self.window.tier)
        self._begin(following)
        self._materialize(following)
        return HostRunner._experts(self, parts, step, layer, *args)

    monkeypatch.setattr(runner, "_experts", experts)


def copied_late(runner: type[QueuedStreamRunner], monkeypatch) -> None:
    """A layer's copies begin when the one before has been dispatched, in series with it."""

    def experts(self, parts, step, layer, *args):
        self._materialize(layer)
        found = HostRunner._experts(self, parts, step, layer, *args)
        self._begin((layer + 1) % len(self.window.tier))
        return found

    monkeypatch.setattr(runner, "_experts", experts)


def copied_early(runner: type[QueuedStreamRunner], monkeypatch) -> None:
    """A layer's copies begin while the one before is in staging, which takes the memory of two."""
    original = runner._land_all

    def land_all(self, seats):
        self._begin((self._holder + 1) % len(self.window.tier))
        return original(self, seats)

    begin = runner._begin

    def begin_once(self, layer):
        if self._coming is None or self._coming[0] != layer:
            begin(self, layer)

    monkeypatch.setattr(runner, "_begin", begin_once)
    monkeypatch.setattr(runner, "_land_all", land_all)


def in_another_place(runner: type[QueuedStreamRunner], monkeypatch) -> None:
    """Records are moved into each other's cells."""
    original = runner._land_all

    def land_all(self, seats):
        rows = [seat.row for seat in seats]
        return original(self, [s._replace(row=r) for s, r in zip(seats, rows[::-1], strict=True)])

    monkeypatch.setattr(runner, "_land_all", land_all)


def from_another_layer(runner: type[QueuedStreamRunner], monkeypatch) -> None:
    """The cells are taken from who does not have them."""
    original = runner._materialize

    def materialize(self, layer):
        self._holder = (self._holder - 1) % len(self.window.tier)
        original(self, layer)

    monkeypatch.setattr(runner, "_materialize", materialize)


@NATIVE
@pytest.mark.slow
@pytest.mark.parametrize(
    "mistake",
    [landed_too_early, copied_late, copied_early, in_another_place, from_another_layer],
)
def test_an_order_with_a_mistake_is_found(mistake, monkeypatch):
    at_rest_of(3)
    mistake(QueuedStreamRunner, monkeypatch)
    assert out_of_order(3, monkeypatch)


@NATIVE
def test_other_memory_than_the_windows_is_found_while_running():
    with open_llm() as llm:
        runner = llm.engine.runner
        rows = np.asarray(runner.tables.cell_row).copy()
        rows[3, 0] = rows.max()
        runner.set_tables({"cell_row": rows})
        with pytest.raises(RuntimeError, match=f"had {17 * 98304} bytes in a step, and their"):
            llm.generate(PROMPTS[0], GREEDY)


# ---- failures and refusals


@NATIVE
def test_a_layer_that_does_not_come_ends_the_requests_of_its_step_only():
    with open_llm() as llm:
        engine, queue = llm.engine, llm.engine.runner.device_queue
        want = [llm.generate(p, GREEDY)[0].outputs[0].token_ids for p in PROMPTS]
        put = queue.put

        def broken(pieces):
            raise OSError("an injected error")

        queue.put = broken
        first = engine.add(PROMPTS[0], GREEDY)
        while first.error is None:
            engine.step()
        assert "could not be read: OSError: an injected error" in str(first.error)
        queue.put = put
        while not engine.idle:
            engine.step()
        assert not engine.runner.faults()
        stats = llm.stats()["transfers"]
        assert stats["failed"] > stats["tried_again"] > 0
        # What failed is absent, and comes again.
        assert [llm.generate(p, GREEDY)[0].outputs[0].token_ids for p in PROMPTS] == want


@NATIVE
@pytest.mark.slow
def test_a_record_that_fails_ahead_of_need_is_brought_again():
    with open_llm() as llm:
        queue = llm.engine.runner.device_queue
        put, begin, calls = queue.put, queue._begin, itertools.count()

        def broken(pieces):
            raise MemoryError("no staging")

        def breaking(ticket, chunks):
            demand = queue._staged[ticket].transfer.demand
            queue.put = put if demand or next(calls) % 7 else broken
            begin(ticket, chunks)

        queue._begin = breaking
        found = run(llm, mixed_jobs()[:4], check=False)
        assert not llm.engine.runner.faults()
        stats = llm.stats()["transfers"]
        assert stats["failed"] >= stats["tried_again"] > 20 and stats["demands"] > 20
    assert same(found, at_rest())


@NATIVE
def test_a_step_that_ends_in_the_middle_leaves_the_next_one_whole(monkeypatch):
    with open_llm() as llm:
        want = llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids
        computed = HostRunner._experts

        def broken(self, parts, step, layer, *args):
            if layer == 2:
                raise RuntimeError("in the middle")
            return computed(self, parts, step, layer, *args)

        monkeypatch.setattr(HostRunner, "_experts", broken)
        with pytest.raises(RuntimeError, match="in the middle"):
            llm.generate(PROMPTS[1], GREEDY)
        monkeypatch.undo()
        assert llm.generate(PROMPTS[0], GREEDY)[0].outputs[0].token_ids == want
        assert not llm.engine.runner.faults()


@NATIVE
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"tiers": "flux"},
            "planner=live moves residents of an arena that the native library owns",
        ),
        ({"tiers": "flux-direct,packed=25%"}, "planner=live moves residents of an arena that the"),
        ({"precision": "int8"}, "driver='stream' with ops that are not native brings dense expe"),
        ({"link_rate": "2GB/s"}, "jax's copies pass the link as it is: leave link_rate out"),
        ({"store": "file"}, "read through a cache in pinned host memory here: say how large"),
        ({"memory": 16 * RECORD}, "the next layer's experts take in staging 1.5 MiB of device mem"),
        ({"store": "shared"}, "keeps experts in pinned arrays of its own, not in memory that pro"),
        ({"transfers": "ops"}, "loads layers by a queue of transfers; leave out transfers='ops'"),
        ({"prefill_waves": 2}, "so prefill_waves says nothing"),
        ({"expert_budget": "20%"}, "holds a layer, beside the next one in staging, of experts, 1"),
        ({"hooks": object()}, "which no hook can enter; use driver='host'"),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
def test_what_cannot_be_is_refused_with_what_to_write(options, message):
    with pytest.raises((UserError, ValueError)) as refused:
        open_llm(**options).close()
    assert message in str(refused.value)

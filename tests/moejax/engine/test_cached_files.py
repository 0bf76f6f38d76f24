"""Experts in files behind a cache in pinned memory, which jax's own copies read: the bits of
experts in memory, what is counted, and what goes wrong with files.

One op that touches the arena is XLA's, as in test_device_queue.py, so that it is as on a GPU.
"""

from __future__ import annotations

import os

import pytest

from host_offload.queue.cached import CachedRecords
from moejax import LLM, UserError
from moejax.start.decide.residency import check_store
from moejax.start.decide.transfers import automatic, new_builder
from moejax.start.options import Options
from moejax.start.report.dry_run import dry_run
from moejax.start.settings import Settings, settings_of
from tests.moejax.checkpoints.conversions import copied, rewrite_manifest
from tests.moejax.engine.test_device_queue import assert_same_bits, delay
from tests.moejax.engine.test_file_store import (
    CHANGED,
    LIMITS,
    answered,
    converted,
    expert_file,
    flip_kept_time,
    jobs,
    truncate,
    vanish,
    with_another_crc,
    without_crcs,
)
from tests.moejax.engine_runs import run, set_budget
from tests.pallas_kernels.contract import NATIVE

__all__ = ["converted"]

RECORD = 98304
"""Bytes of an expert of the demo; it has 64."""
CACHED = {"store": "file", "transfers": "queue", "driver": "host", "ops": "move=xla"}
SMALL = {"host_memory": 12 * RECORD}


def cached(model, **options) -> LLM:
    return LLM(model, **{"progress": False, **LIMITS, **CACHED, **SMALL, **options})


def records_of(llm: LLM) -> CachedRecords:
    (records,) = llm.engine.runner.store.arrays.values()
    assert isinstance(records, CachedRecords)
    return records


def slow(*options):
    return pytest.param(*options, marks=pytest.mark.slow)


@NATIVE
@pytest.mark.parametrize(
    "options",
    [
        {"expert_budget": "40%", "prefetch": "random", "prefill_waves": 2},
        slow({"expert_budget": 0, "verify_reads": False}),
        slow({"expert_budget": "25%", "chunk_bytes": 20000, "transfer_threads": 2}),
        slow({"expert_budget": "40%", "prefetch": "random", "ops": "xla"}),
        slow({"expert_budget": "40%", "host_memory": "1GiB", "eviction": "lru"}),
    ],
    ids=str,
)
def test_the_bits_are_those_of_experts_in_memory(options, converted):
    ops = options.get("ops", "auto")
    with LLM(converted, progress=False, ops=ops, **LIMITS) as llm:
        wanted = run(llm, jobs(), check=False)
    with cached(converted, **options) as llm:
        for trips in (0, 300):
            delay(llm, trips)
            assert_same_bits(run(llm, jobs(), check=False), wanted)
            assert not llm.engine.runner.faults()
        assert "through a cache in pinned host memory" in str(llm.explain())
        stats = llm.stats()
        store, cache = stats["store"], stats["store"]["cache"]
        assert store["kind"] == "file" and store["file_bytes"] == 64 * RECORD
        assert store["verify_reads"] == options.get("verify_reads", True)
        assert 0 < store["memory_bytes"] == cache["bytes_held"] <= cache["bytes"]
        assert 0 < cache["bytes_read"] <= cache["misses"] * RECORD
        assert stats["transfers"]["failed"] == 0
        if options["expert_budget"] != 0:  # else all experts pass, in the order of the layers
            assert cache["hits"] > 0
        if options.get("host_memory"):  # it holds all of them, and each is read once
            assert cache["bytes_read"] <= 64 * RECORD < cache["hits"] * RECORD
        else:
            assert cache["bytes_read"] > 64 * RECORD
        if options.get("prefetch"):
            assert sum(stats["transfers"]["prefetches"].values()) > 0


@NATIVE
@pytest.mark.slow
def test_budgets_move_while_records_are_read(converted):
    with LLM(converted, progress=False, **LIMITS) as llm:
        wanted = run(llm, jobs(), check=False)
    with cached(converted, expert_budget="100%", prefetch="random") as llm:
        for cells in ([3, 9, 16, 0], [1, 1, 1, 1]):
            set_budget(llm, cells, 3)
            assert_same_bits(run(llm, jobs(), check=False), wanted)
            assert not llm.engine.runner.faults()


@NATIVE
@pytest.mark.parametrize(
    ("harm", "message", "options"),
    [
        (flip_kept_time, "do not have their checksum", {"expert_budget": "25%"}),
        (vanish, "No such file", {"expert_budget": 0}),
        (truncate, CHANGED, {"expert_budget": "25%", "verify_reads": False}),
    ],
)
def test_a_file_that_fails_while_it_runs(harm, message, options, converted, tmp_path):
    """The requests of steps that needed it fail and say its name; others have the same bits, and
    when the file is there again, so has everything."""
    broken, tokens = copied(converted, tmp_path / "broken"), range(300, 312)
    path = expert_file(broken, 2, 6)
    with cached(broken, **options) as llm:
        kept, status = path.read_bytes(), path.stat()
        harm(path)
        found = answered(llm, tokens)
        errors = [error for _, error in found if error]
        assert 0 < len(errors) < len(tokens)
        assert all(str(path) in error and message in error for error in errors)
        assert not llm.engine.runner.faults()
        assert llm.stats()["transfers"]["failed"] >= len(errors)
        if path.exists():
            path.write_bytes(kept)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            again = answered(llm, tokens)
            assert not any(error for _, error in again)
            assert all(a[1] or a == b for a, b in zip(found, again, strict=True))
            with LLM(converted, progress=False, **LIMITS) as there:
                assert answered(there, tokens) == again


@NATIVE
@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "harm"), [(without_crcs, flip_kept_time), (with_another_crc, lambda path: None)]
)
def test_reads_are_verified_by_crc32c_where_it_is_known_else_by_sha256(
    change, harm, converted, tmp_path
):
    broken = copied(converted, tmp_path / "broken")
    rewrite_manifest(broken, change)
    harm(path := expert_file(broken, 2, 6))
    with cached(broken, expert_budget="25%") as llm:
        errors = [error for _, error in answered(llm, range(300, 312)) if error]
    assert errors and all(str(path) in e and "have their checksum" in e for e in errors)


# ---- what is refused, and what is planned


@pytest.mark.parametrize(
    ("options", "platform", "message"),
    [
        ({"host_memory": None}, "gpu", "say how large, host_memory=SIZE"),
        ({"driver": "device"}, "gpu", "for driver='host' and driver='stream', not 'device'"),
        ({"driver": "stream", "host_memory": None}, "gpu", "say how large, host_memory=SIZE"),
        ({"transfers": None}, "gpu", "or driver='host' and transfers='queue' for a cache"),
        pytest.param(
            {"transfers": None}, "cpu", "or driver='host' and transfers='queue'", marks=NATIVE
        ),
        pytest.param(
            {"ops": "auto", "memory": "1GiB"}, "cpu", "together; give one of them", marks=NATIVE
        ),
        pytest.param(
            {"ops": "auto", "memory": "1GiB", "driver": "stream", "transfers": None},
            "cpu",
            "together; give one of them",
            marks=NATIVE,
        ),
        ({"precision": "int8"}, "cpu", "brings dense experts, not precision int8"),
    ],
    ids=str,
)
def test_what_has_no_cache_is_refused_with_what_to_write(options, platform, message, converted):
    settings = settings_of(Options(converted, **{**CACHED, **SMALL, **options}))
    with pytest.raises(UserError, match=message):
        check_start(settings, platform)


def check_start(settings: Settings, platform: str) -> None:
    check_store(settings, platform)
    new_builder(settings, platform)


def test_a_cache_of_less_than_what_is_on_its_way_is_refused(converted):
    """8 demands and 4 ahead of need."""
    options = {**LIMITS, **CACHED, "expert_budget": "25%"}
    with pytest.raises(UserError, match=rf"is too small a cache.*\({12 * RECORD} bytes\)"):
        dry_run(Options(converted, host_memory=12 * RECORD - 1, **options))
    plan, _ = dry_run(Options(converted, host_memory=12 * RECORD, **options))
    assert any("are a cache of 12 of them" in note for note in plan.budget.notes)


def test_the_cache_is_none_of_the_devices_memory(converted):
    with_cache = {**CACHED, **SMALL}
    assert automatic(settings_of(Options(converted, **with_cache)), "gpu")
    assert not automatic(settings_of(Options(converted, memory="1MiB", **with_cache)), "gpu")
    plan, _ = dry_run(Options(converted, memory="3MiB", **LIMITS, **with_cache))
    arena = plan.budget.slots * plan.steps.layout.slot_bytes
    assert 0 <= (3 << 20) - arena < plan.steps.layout.slot_bytes

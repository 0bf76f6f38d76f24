"""Experts in files: what a start reads, what goes wrong with a file while an engine runs, and what
cannot be kept there. Bits: test_drivers.py."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import time
from pathlib import Path

import pytest

from host_offload.memory import bounded_reads
from host_offload.queue.cached import CachedRecords
from moejax import LLM, UserError
from moejax.checkpoints.conversion import convert
from moejax.checkpoints.load import load_checkpoint
from moejax.checkpoints.shards import find_shards
from moejax.models.config import load_config
from moejax.start.decide.store_choice import store_builder
from moejax.start.decide.transfers import automatic
from moejax.start.options import Config
from moejax.start.report.dry_run import dry_run
from moejax.start.settings import settings_of
from tests.faults import Faults, inject
from tests.moejax.checkpoints.conversions import copied, flip, rewrite_manifest
from tests.moejax.engine.scenes import GREEDY, LIMITS, QUEUE, RECORD, STREAM_QUEUE, open_llm
from tests.pallas_kernels.contract import NATIVE

CACHED = {**QUEUE, "store": f"file,host_memory={12 * RECORD}"}
UNCHECKED = {"store": f"{CACHED['store']},verify=false", "expert_budget": "25%"}
PLACED = {
    "driver": "host",
    "placement": "fiddler,per_token=50us,startup=300us,load=1ms,accelerator=9us,attention=9us",
}
"""A second processor computes what is missed, but what free cells take."""


@pytest.fixture(scope="module")
def converted(demo_dir, tmp_path_factory) -> Path:
    return convert(demo_dir, tmp_path_factory.mktemp("file-store") / "demo").directory


# ---- what is read, and where it is said


def read_so_far() -> int:
    """Bytes that this process asked for by reads."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar:")).split()[1])


@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="Linux counts what is read")
def test_no_expert_is_read_to_load(converted):
    load_checkpoint(converted, in_files=True)  # modules are imported
    before = read_so_far()
    loaded = load_checkpoint(converted, in_files=True)
    read = read_so_far() - before
    assert loaded.store.nbytes == 0 and loaded.store.file_bytes == 6 << 20
    assert read < 5 << 20  # parameters have 2.4 MiB, other files less
    files = loaded.store.files["dense"]
    assert Path(files.paths[3][15]).stat().st_size == RECORD and files.checksums.shape == (4, 16)


def test_host_memory_is_parameters_and_arena(converted):
    plan, _ = dry_run(Config.of(converted, store="file,host_memory=5MiB", **LIMITS))
    arena = plan.budget.slots * plan.steps.layout.slot_bytes
    params = 2509824
    assert 0 <= (5 << 20) - params - arena < plan.steps.layout.slot_bytes
    (said,) = (note for note in plan.budget.notes if "store file" in note)
    assert "6 MiB of experts stay in files (checksums verified)" in said
    options = Config.of(converted, store="file,verify=false", memory="3MiB", **LIMITS)
    assert "checksums NOT verified" in str(dry_run(options)[0])
    with pytest.raises(UserError, match="does not hold the parameters beside experts"):
        dry_run(Config.of(converted, store="file,host_memory=1MiB", **LIMITS))


def test_host_memory_counts_the_model_that_drafts(converted):
    """Its parameters, its experts and its arena."""
    drafts = {"method": "draft_model", "model": "demo"}

    def plan_of(model=converted, **more):
        return dry_run(Config.of(model, **LIMITS, **more))

    def arena(plan) -> int:
        return plan.budget.slots * plan.steps.layout.slot_bytes

    own, _ = plan_of("demo")
    alone, _ = plan_of(store="file,host_memory=16MiB")
    beside, notes = plan_of(store="file,host_memory=16MiB", speculative_config=drafts)
    taken = 2509824 + 4 * 16 * RECORD + arena(own)
    assert abs(arena(alone) - arena(beside) - taken) < alone.steps.layout.slot_bytes
    assert any(
        "the model that drafts takes" in note and "host_memory 16 MiB" in note for note in notes
    )
    with pytest.raises(UserError, match="of host_memory 8 MiB; raise it"):
        plan_of(store="file,host_memory=8MiB", speculative_config=drafts)


def test_a_cache_holds_what_is_on_its_way_and_is_none_of_the_devices_memory(converted):
    """8 demands and 4 ahead of need."""
    options = {**LIMITS, **CACHED}
    assert automatic(settings_of(Config.of(converted, **options)), "gpu")
    assert not automatic(settings_of(Config.of(converted, memory="1MiB", **options)), "gpu")
    plan, _ = dry_run(Config.of(converted, memory="3MiB", **options))
    arena = plan.budget.slots * plan.steps.layout.slot_bytes
    assert 0 <= (3 << 20) - arena < plan.steps.layout.slot_bytes
    plan, _ = dry_run(Config.of(converted, expert_budget="25%", **options))
    assert any("are a cache of 12 of them" in note for note in plan.budget.notes)
    options |= {"store": f"file,host_memory={12 * RECORD - 1}", "expert_budget": "25%"}
    with pytest.raises(UserError, match=rf"is too small a cache.*\({12 * RECORD} bytes\)"):
        dry_run(Config.of(converted, **options))


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"store": "disk"}, "unknown store 'disk'; known: memory, shared, file"),
        ({"store": "memory,host_memory=1GiB"}, "'memory' has no setting 'host_memory=1GiB'"),
        ({"store": "file,host_memory=1GiB", "memory": "1GiB"}, "give one of them"),
    ],
)
def test_options_that_go_with_files(options, message):
    with pytest.raises(UserError, match=message):
        settings_of(Config.of("demo", **options))


@NATIVE
@pytest.mark.parametrize(
    ("options", "platform", "message"),
    [
        ({}, "gpu", "store='file' and a GPU do not go"),
        ({"ops": "xla"}, "cpu", "xla, move xla, paged_attention xla, stage xla do not go"),
        ({"ops": {"fill": "xla"}}, "cpu", "store='file' and fill xla do not go"),
        (
            {"precision": "lossless12,in_transit=true"},
            "cpu",
            "store=file and precision lossless12 do not go",
        ),
        ({"precision": "dynaexq"}, "cpu", "store=file and precision dynaexq do not go"),
        ({"resize": "joint"}, "cpu", "what steps cost there is not measured"),
        ({**QUEUE, "store": "file"}, "gpu", "say how large, store='file,host_memory=SIZE'"),
        (
            {**CACHED, "driver": "device"},
            "gpu",
            "tore='file' through a cache and driver=device do not go",
        ),
        ({**STREAM_QUEUE, "transfers": "queue"}, "gpu", "say how large, store='file,host_mem"),
        ({**CACHED, "transfers": None}, "gpu", "or driver='host' and transfers='queue' for a cach"),
        ({**CACHED, "transfers": None}, "cpu", "or driver='host' and transfers='queue'"),
        ({**CACHED, "ops": "auto", "memory": "1GiB"}, "cpu", "together; give one of them"),
        (
            {"driver": "stream", "store": CACHED["store"], "memory": "1GiB"},
            "cpu",
            "together; give one of them",
        ),
    ],
    ids=str,
)
def test_what_does_not_read_files(options, platform, message):
    with pytest.raises(UserError, match=message):
        store_builder(settings_of(Config.of("demo", **{"store": "file", **options})), platform)


@NATIVE
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float32"}, "in bfloat16, not float32; .*convert SRC DST --dtype float32"),
        (
            {**CACHED, "enable_prefix_caching": False, **PLACED},
            "computes experts where they lie in memory; take store='memory'",
        ),
        ({"precision": "int4"}, "has no version int4; .*moejax quantize .* DST --versions int4"),
    ],
)
def test_what_the_files_do_not_have(options, message, converted):
    with pytest.raises(UserError, match=message):
        open_llm(converted, **{"store": "file", **options})


# ---- what goes wrong while it runs


def expert_file(directory: Path) -> Path:
    return directory / "state" / "experts.dense.2" / "c" / "6" / "0" / "0"


def vanish(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    os.truncate(path, 5000)


def to_pipe(path: Path) -> None:
    """Nobody writes into it."""
    path.unlink()
    os.mkfifo(path)


def replace(path: Path) -> None:
    """The same bytes in another file."""
    shutil.copy(path, path.with_name("other"))
    path.with_name("other").replace(path)


def flip_kept_time(path: Path) -> None:
    """Another byte; size and time as before."""
    times = path.stat()
    flip(path, 70000)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def answered(llm: LLM, tokens: range) -> list[tuple[list[int], str]]:
    """What prompts of one token get, one after the other: the next token, and the error."""
    found = []
    for token in tokens:
        request = llm.engine.add([token], ONCE)
        while not llm.engine.idle:
            llm.engine.step()
        found.append((request.output, str(request.error or "")))
    return found


ONCE = dataclasses.replace(GREEDY, max_tokens=1)
ASKED = range(300, 312)


@pytest.fixture(scope="module")
def wanted(demo_dir) -> list[tuple[list[int], str]]:
    """What the prompts of ASKED get with every expert in memory."""
    with open_llm(demo_dir) as llm:
        return answered(llm, ASKED)


THROUGH, CELLS = {"store": "file", "expert_budget": 0}, {"store": "file", "expert_budget": "25%"}
CHANGED = "changed since it was opened first"


@NATIVE
@pytest.mark.slow
@pytest.mark.parametrize(
    ("harm", "message", "options"),
    [
        (vanish, "No such file", CELLS),
        (flip_kept_time, "do not have their checksum", THROUGH),
        (truncate, CHANGED, CELLS | {"driver": "host"}),
        (replace, CHANGED, THROUGH),
        (flip_kept_time, "do not have their checksum", CACHED | {"expert_budget": "25%"}),
        (vanish, "No such file", CACHED | {"expert_budget": 0}),
        (truncate, CHANGED, QUEUE | UNCHECKED),
        (flip_kept_time, CHANGED, QUEUE | UNCHECKED),
        (flip_kept_time, CHANGED, CELLS | {"store": "file,verify=false", "driver": "host"}),
        (to_pipe, CHANGED, THROUGH),
        (to_pipe, CHANGED, CACHED | {"expert_budget": 0}),
    ],
)
def test_a_file_that_fails_while_it_runs(harm, message, options, converted, wanted, tmp_path):
    """The requests of steps that needed it fail and say its name; others have the same bits, and
    when the file is there again, so has everything."""
    broken = copied(converted, tmp_path / "broken")
    path = expert_file(broken)
    with open_llm(broken, **options) as llm:
        kept, status = path.read_bytes(), path.stat()
        harm(path)
        found = answered(llm, ASKED)
        errors = [error for _, error in found if error]
        assert 0 < len(errors) < len(ASKED)
        assert all(str(path) in error and message in error for error in errors)
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours[1] or ours == theirs
        assert not llm.engine.runner.faults()
        if isinstance(llm.engine.runner.store.arrays.get("dense"), CachedRecords):
            assert llm.stats()["transfers"]["failed"] >= len(errors)
        checked = "verify=false" not in options["store"]
        if path.is_file() and path.stat().st_ino == status.st_ino and checked:
            path.write_bytes(kept)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            assert answered(llm, ASKED) == wanted
            assert not llm.engine.runner.faults()


@NATIVE
@pytest.mark.slow
@pytest.mark.parametrize("options", [CELLS, THROUGH])
def test_a_disk_that_does_not_answer_for_a_while(options, converted, wanted, monkeypatch):
    """Requests that need it fail and name a file, nothing else gets the memory that its late bytes
    may come into, and all is well again afterwards."""
    monkeypatch.setattr(bounded_reads, "READ_S", 0.5)
    with open_llm(converted, **options) as llm:
        queue = llm.engine.runner.transport.queue
        inject(queue, Faults(seed=3, delay=4.0))
        ((_, error),) = answered(llm, ASKED[:1])
        assert re.search(rf"{converted}.*: no answer within 0\.5 s", error)
        with pytest.raises(ValueError, match=r"have had no answer for 0\.5 s"):
            llm.engine.runner.faults()
        inject(queue, Faults())
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            try:
                queue.require_answers()
                break
            except ValueError:
                time.sleep(0.05)
        monkeypatch.undo()
        assert answered(llm, ASKED) == wanted
        assert not llm.engine.runner.faults()


@NATIVE
@pytest.mark.slow
@pytest.mark.parametrize("options", [CELLS, THROUGH, CACHED | {"expert_budget": "25%"}])
def test_experts_are_paged_from_the_files_that_people_download(options, demo_dir, wanted, tmp_path):
    """Without a conversion, to the same bits, until somebody writes into them."""
    original = copied(demo_dir, tmp_path / "original")
    with open_llm(original, **{**options, "transfers": "queue,chunk_bytes=2000"}) as llm:
        assert answered(llm, ASKED[:6]) == wanted[:6] and not llm.engine.runner.faults()
        assert llm.stats()["store"]["verify_reads"] is False
        os.utime(path := original / "model.safetensors", ns=(1, 1))
        errors = [error for _, error in answered(llm, range(306, 318)) if error]
        assert errors and all(str(path) in error for error in errors)


@NATIVE
@pytest.mark.slow
@pytest.mark.parametrize("matrix", ["up", "down"])
@pytest.mark.parametrize("options", [CELLS, THROUGH, CACHED | {"expert_budget": "25%"}])
def test_values_that_are_not_finite_are_refused_where_they_are_read(
    options, matrix, demo_dir, tmp_path
):
    broken = copied(demo_dir, tmp_path / "broken")
    (shard,) = find_shards(broken)
    with shard.path.open("r+b") as file:
        for expert in range(load_config(broken).num_experts):
            name = f"model.layers.1.mlp.experts.{expert}.{matrix}_proj.weight"
            file.seek(shard.begins[name] + 2 * (expert + 1))
            file.write(b"\xc0\xff")  # NaN
    with open_llm(broken, **{**options, "transfers": "queue,chunk_bytes=2001"}) as llm:
        errors = [error for _, error in answered(llm, ASKED)]
    assert all(re.search(r"model\.safetensors.* values that are NaN or inf", e) for e in errors)


def without_crcs(content: dict) -> None:
    """As conversions before these wrote it, or without the native library."""
    del content["crcs"]


def with_another_crc(content: dict) -> None:
    content["crcs"]["dense"]["2"][6] = "01234567"


@NATIVE
@pytest.mark.slow
@pytest.mark.parametrize("options", [CELLS, CACHED | {"expert_budget": "25%"}])
@pytest.mark.parametrize("change", [without_crcs, with_another_crc])
def test_reads_are_verified_by_crc32c_where_it_is_known_else_by_sha256(
    change, options, converted, tmp_path
):
    broken = copied(converted, tmp_path / "broken")
    rewrite_manifest(broken, change)
    path = expert_file(broken)
    if change == without_crcs:
        flip_kept_time(path)
    with open_llm(broken, **options) as llm:
        errors = [error for _, error in answered(llm, ASKED) if error]
    assert errors and all(str(path) in e and "have their checksum" in e for e in errors)

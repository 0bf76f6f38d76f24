"""Experts in files: the bits of experts in memory, and what goes wrong with files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from moejax import LLM, SamplingParams, UserError
from moejax.checkpoints.convert import convert
from moejax.checkpoints.load import load_checkpoint
from moejax.evaluate.quantization import quantize
from moejax.start.decide.residency import check_store
from moejax.start.options import Options
from moejax.start.report.dry_run import dry_run
from moejax.start.settings import settings_of
from tests.moejax.checkpoints.conversions import copied, flip, rewrite_manifest
from tests.moejax.engine_runs import Job, run, set_budget
from tests.pallas_kernels.contract import NATIVE

LIMITS = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256}
PLACED = {
    "driver": "host",
    "placement": "fiddler,per_token=50us,startup=300us,load=1ms,accelerator=9us,attention=9us",
}
"""A second processor computes what is missed, but what free cells take."""
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def converted(demo_dir, tmp_path_factory) -> Path:
    return convert(demo_dir, tmp_path_factory.mktemp("file-store") / "demo").directory


def jobs() -> list[Job]:
    rng = np.random.default_rng(4)
    found = []
    for i, length in enumerate((17, 130, 40)):
        sampling = {"temperature": 0.9} if i % 2 else {"temperature": 0}
        params = SamplingParams(max_tokens=8, seed=i, ignore_eos=True, **sampling)
        found.append(Job(tuple(rng.integers(1, 4096, length).tolist()), params, arrival=i))
    return found


def in_files(model: Path, **options) -> LLM:
    return LLM(model, **{"store": "file", "progress": False, **LIMITS, **options})


# ---- bits


@NATIVE
@pytest.mark.parametrize(
    ("options", "cells"),
    [
        ({"expert_budget": "25%"}, [[16, 0, 1, 2]]),
        pytest.param({"driver": "host", "expert_budget": "25%"}, [[0] * 4], marks=pytest.mark.slow),
        pytest.param({"prefetch": "random", "expert_budget": "40%"}, [], marks=pytest.mark.slow),
        pytest.param({"verify_reads": False, "expert_budget": 0}, [], marks=pytest.mark.slow),
        pytest.param({"prefill_waves": 3, "expert_budget": "30%"}, [], marks=pytest.mark.slow),
        pytest.param({}, [], marks=pytest.mark.slow),  # a cell for each
        (PLACED | {"expert_budget": "25%", "link_rate": "500MB/s"}, [[16, 0, 1, 2]]),
    ],
    ids=str,
)
def test_the_bits_are_those_of_experts_in_memory(options, cells, converted):
    with LLM(converted, progress=False, **LIMITS) as llm:
        wanted = run(llm, jobs(), check=False)
    with in_files(converted, **options) as llm:
        assert llm.engine.runner.store.nbytes == 0
        for per_layer in [[], *cells]:
            if per_layer:
                set_budget(llm, per_layer, 8)
            found = run(llm, jobs(), check=bool(per_layer))
            assert all(a.same_bits(b) for a, b in zip(found, wanted, strict=True))
        assert not llm.engine.runner.faults()
        stats = llm.stats()
        assert stats["store"]["kind"] == "file" and stats["store"]["memory_bytes"] == 0
        assert stats["store"]["file_bytes"] == 6 << 20
        assert stats["store"]["verify_reads"] == options.get("verify_reads", True)
        assert isinstance(stats["store"]["past_the_page_cache"], bool)
        if "placement" in options:
            assert stats["placement"]["experts"] > 0
        assert stats["experts"]["fills"] + stats["experts"]["read_through"] > 0


@NATIVE
@pytest.mark.slow
def test_a_version_that_quantize_wrote(converted, tmp_path):
    quantize(converted, tmp_path / "int8", ["int8"])
    options = {"precision": "int8", "expert_budget": "25%"}
    with LLM(tmp_path / "int8", progress=False, **LIMITS, **options) as llm:
        wanted = run(llm, jobs(), check=False)
    with in_files(tmp_path / "int8", **options) as llm:
        found = run(llm, jobs(), check=False)
        assert not llm.engine.runner.faults()
    assert all(a.same_bits(b) for a, b in zip(found, wanted, strict=True))


@NATIVE
def test_integrity_sees_a_byte_of_a_cell(converted):
    with in_files(converted, expert_budget="25%") as llm:
        llm.generate([[5, 6, 7]], GREEDY)
        runner = llm.engine.runner
        assert not runner.faults()
        row = int(np.asarray(runner.tables.address).max())
        runner.memory.view()[row, 3] ^= 1
        assert runner.faults() == ["the bytes of a resident expert differ from the store's (1×)"]


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
    leaf = Path(files.paths[3][15])
    assert leaf.stat().st_size == 98304 and files.checksums.shape == (4, 16)


def test_host_memory_is_parameters_and_arena(converted):
    plan, _ = dry_run(Options(converted, store="file", host_memory="5MiB", **LIMITS))
    arena = plan.budget.slots * plan.steps.layout.slot_bytes
    params = 2509824
    assert 0 <= (5 << 20) - params - arena < plan.steps.layout.slot_bytes
    (said,) = (note for note in plan.budget.notes if "store file" in note)
    assert "6 MiB of experts stay in files (checksums verified)" in said
    options = Options(converted, store="file", memory="3MiB", verify_reads=False, **LIMITS)
    assert "checksums NOT verified" in str(dry_run(options)[0])
    with pytest.raises(UserError, match="does not hold the parameters beside experts"):
        dry_run(Options(converted, store="file", host_memory="1MiB", **LIMITS))


# ---- what is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"store": "disk"}, "store is one of memory, file"),
        ({"host_memory": "1GiB"}, "host_memory is what may be kept of experts in files"),
        ({"verify_reads": False}, "goes with store='file'"),
        ({"store": "file", "host_memory": "1GiB", "memory": "1GiB"}, "give one of them"),
    ],
)
def test_options_that_go_with_files(options, message):
    with pytest.raises(UserError, match=message):
        Options("demo", **options)


@NATIVE
@pytest.mark.parametrize(
    ("options", "platform", "message"),
    [
        ({}, "gpu", "for a CPU with native ops; on a GPU use store='memory'"),
        ({"ops": "xla"}, "cpu", "expert_ffn xla, fill xla.* is not; use ops='cpu'"),
        ({"ops": {"fill": "xla"}}, "cpu", "and fill xla is not"),
        ({"precision": "lossless12,in_transit=true"}, "cpu", "not precision lossless12"),
        ({"precision": "dynaexq"}, "cpu", "not precision dynaexq"),
        ({"resize": "joint"}, "cpu", "what steps cost there is not measured"),
    ],
)
def test_what_does_not_read_files(options, platform, message):
    settings = settings_of(Options("demo", store="file", **options))
    with pytest.raises(UserError, match=message):
        check_store(settings, platform)


@NATIVE
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float32"}, "in bfloat16, not float32; .*convert SRC DST --dtype float32"),
        ({"precision": "int4"}, "has no version int4; .*moejax quantize .* DST --versions int4"),
    ],
)
def test_what_the_files_do_not_have(options, message, converted):
    with pytest.raises(UserError, match=message):
        in_files(converted, **options)


@NATIVE
def test_a_directory_that_is_not_converted(demo_dir):
    for start in (in_files, lambda model: dry_run(Options(model, store="file"))):
        with pytest.raises(UserError, match=r"run `moejax convert .*demo DST` once"):
            start(demo_dir)


def test_a_file_of_another_size(converted, tmp_path):
    broken = copied(converted, tmp_path / "broken")
    path = expert_file(broken, 1, 2)
    os.truncate(path, 5000)
    with pytest.raises(UserError, match=f"{path}.*5000 bytes, not 98304"):
        load_checkpoint(broken, in_files=True)


# ---- what goes wrong while it runs


def expert_file(directory: Path, layer: int, expert: int) -> Path:
    return directory / "state" / f"experts.dense.{layer}" / "c" / str(expert) / "0" / "0"


def vanish(path: Path) -> None:
    path.unlink()


def truncate(path: Path) -> None:
    os.truncate(path, 5000)


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
    found, once = [], SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    for token in tokens:
        request = llm.engine.add([token], once)
        while not llm.engine.idle:
            llm.engine.step()
        found.append((request.output, str(request.error or "")))
    return found


THROUGH, CELLS = {"expert_budget": 0}, {"expert_budget": "25%"}
CHANGED = "changed since it was opened first"


@NATIVE
@pytest.mark.parametrize(
    ("harm", "message", "options"),
    [
        (vanish, "No such file", CELLS),
        (flip_kept_time, "do not have their checksum", THROUGH),
        (flip_kept_time, "do not have their checksum", THROUGH | PLACED),
        pytest.param(flip_kept_time, "do not have their checksum", CELLS, marks=pytest.mark.slow),
        pytest.param(truncate, CHANGED, CELLS, marks=pytest.mark.slow),
        pytest.param(replace, CHANGED, THROUGH, marks=pytest.mark.slow),
        pytest.param(vanish, "No such file", CELLS | {"driver": "host"}, marks=pytest.mark.slow),
    ],
)
def test_a_file_that_fails_while_it_runs(harm, message, options, converted, tmp_path):
    """The requests of steps that needed it fail and say its name; others have the same bits, and
    when the file is there again, so has everything."""
    broken, tokens = copied(converted, tmp_path / "broken"), range(300, 312)
    path = expert_file(broken, 2, 6)
    with in_files(converted, expert_budget=0) as llm:
        wanted = answered(llm, tokens)
    with in_files(broken, **options) as llm:
        kept, status = path.read_bytes(), path.stat()
        harm(path)
        found = answered(llm, tokens)
        errors = [error for _, error in found if error]
        assert 0 < len(errors) < len(tokens)
        assert all(str(path) in error and message in error for error in errors)
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours[1] or ours == theirs
        assert not llm.engine.runner.faults()
        if path.exists() and path.stat().st_ino == status.st_ino:
            path.write_bytes(kept)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            assert answered(llm, tokens) == wanted
            assert not llm.engine.runner.faults()


def without_crcs(content: dict) -> None:
    """As conversions before these wrote it, or without the native library."""
    del content["crcs"]


def with_another_crc(content: dict) -> None:
    content["crcs"]["dense"]["2"][6] = "01234567"


@NATIVE
@pytest.mark.parametrize(
    ("change", "harm"),
    [
        pytest.param(without_crcs, flip_kept_time, marks=pytest.mark.slow),
        (with_another_crc, lambda path: None),
    ],
)
def test_reads_are_verified_by_crc32c_where_it_is_known_else_by_sha256(
    change, harm, converted, tmp_path
):
    broken = copied(converted, tmp_path / "broken")
    rewrite_manifest(broken, change)
    harm(path := expert_file(broken, 2, 6))
    with in_files(broken, **CELLS) as llm:
        errors = [error for _, error in answered(llm, range(300, 312)) if error]
    assert errors and all(str(path) in e and "have their checksum" in e for e in errors)

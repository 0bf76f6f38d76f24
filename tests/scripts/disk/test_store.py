"""A model under a limit of memory, with experts in files."""

import json
import sys

import pytest

from moejax.checkpoints.load import load_checkpoint
from moejax.errors import UserError
from scripts.disk import memory_limit, store
from scripts.disk.plain_reads import read_rate
from scripts.disk.random_converted import converted
from tests.pallas_kernels.contract import NATIVE


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return converted(tmp_path_factory.mktemp("random"), "demo", 2)


def test_a_random_checkpoint_loads_and_is_written_once(checkpoint):
    assert checkpoint.name == "demo-2.orbax"
    assert converted(checkpoint.parent, "demo", 2) == checkpoint
    files = load_checkpoint(checkpoint, in_files=True).store.files["dense"]
    assert len({*files.checksums.ravel().tolist()}) == 32  # no two experts are equal
    assert load_checkpoint(checkpoint).store.nbytes == 32 * 98304


def test_plain_reads_read_everything(checkpoint):
    files = load_checkpoint(checkpoint, in_files=True).store.files["dense"]
    try:
        assert read_rate(files.paths[0], 2) > 0
    except OSError as error:
        pytest.skip(f"this filesystem has no O_DIRECT: {error}")


def test_without_a_memory_controller_it_is_refused(checkpoint, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(memory_limit, "CONTROLLER", tmp_path / "none")
    arguments = [str(checkpoint.parent), "--shape", "demo", "--layers", "2"]
    assert store.main([*arguments, "--limit", "1GiB"]) == 2
    assert "needs the memory controller of cgroups" in capsys.readouterr().err


def writable() -> bool:
    try:
        with memory_limit.limited(64 << 20):
            return True
    except UserError:
        return False


@pytest.mark.skipif(not writable(), reason="no memory controller that can be written")
def test_the_limit_is_the_kernels():
    with memory_limit.limited(64 << 20) as group:
        said = memory_limit.run(group, [sys.executable, "-c", "print(len(bytearray(16 << 20)))"])
        assert int(said) == 16 << 20 and memory_limit.usage(group)["peak"] > 16 << 20
        with pytest.raises(UserError, match=r"failed \(-9\)"):
            memory_limit.run(group, [sys.executable, "-c", "print(len(bytearray(128 << 20)))"])


@NATIVE
@pytest.mark.slow
@pytest.mark.skipif(not writable(), reason="no memory controller that can be written")
def test_two_budgets_give_the_same_bits(checkpoint, capsys):
    arguments = [str(checkpoint.parent), "--shape", "demo", "--layers", "2", "--limit", "2GiB"]
    small = ["--budgets", "6MiB,5MiB", "--rounds", "1", "--tokens", "4", "--batch", "2", "--json"]
    assert store.main([*arguments, *small, "--kill"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["budget"] for row in rows] == ["6MiB", "5MiB", "6MiB, after a kill"]
    assert len({row["bits"] for row in rows}) == 1 and len({row["cells"] for row in rows}) == 2
    assert all(0 < row["resident"] < 2048 and row["cgroup"] <= 2148 for row in rows)

"""Files are brought into the page cache while jax is imported."""

import json
import os
import subprocess
import sys
import threading

import pytest

from moejax.checkpoints import read_ahead as module
from moejax.checkpoints.read_ahead import read_ahead


@pytest.fixture
def advised(monkeypatch):
    """(file's name, first byte, advice) of each call of posix_fadvise."""
    found = []

    def advise(descriptor, begin, nbytes, advice):
        found.append((os.path.basename(os.readlink(f"/proc/self/fd/{descriptor}")), begin, advice))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    read_ahead.cache_clear()
    return found


def wait():
    while waiting := [one for one in threading.enumerate() if one.name == "moejax-ahead"]:
        waiting[0].join()


def test_every_byte_is_asked_for_once_and_files_larger_than_memory_are_not(
    advised, tmp_path, monkeypatch
):
    for name, size in (
        ("model-b.safetensors", 12 << 20),
        ("model-a.safetensors", 10),
        ("consolidated.safetensors", 10),
    ):
        with (tmp_path / name).open("wb") as file:
            file.truncate(size)
    for _ in range(2):
        read_ahead(str(tmp_path))
    wait()
    places = (
        ("model-a.safetensors", 0),
        ("model-b.safetensors", 0),
        ("model-b.safetensors", 1 << 20),
        ("model-b.safetensors", 9 << 20),
    )
    assert sorted(advised) == [(*place, os.POSIX_FADV_WILLNEED) for place in places]
    read_ahead.cache_clear()
    monkeypatch.setattr(module, "host_available_bytes", lambda: 20 << 20)  # a control group's
    for path in (tmp_path, tmp_path / "missing", "~nobody-has-this-name", "a\0b"):
        read_ahead(str(path))
    wait()
    assert len(advised) == 4


def test_beginnings_of_all_files_are_asked_for_before_a_header_is_read(
    advised, tmp_path, monkeypatch
):
    """So that a start from many files waits for their headers about once."""
    parse, asked = module._early_blocks, []
    monkeypatch.setattr(
        module, "_early_blocks", lambda *args: asked.append([*advised]) or parse(*args)
    )
    for number in range(3):
        (tmp_path / f"model-{number}.safetensors").write_bytes(bytes(3 << 20))
    read_ahead(str(tmp_path))
    wait()
    beginnings = [(f"model-{number}.safetensors", 0, os.POSIX_FADV_WILLNEED) for number in range(3)]
    assert asked == [beginnings] * 3 and len(advised) == 6


def test_weights_that_a_start_needs_first_are_asked_for_first(advised, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_THREADS", 1)
    sizes = {"mlp.experts.0.w": 20 << 20, "o": 3, "mlp.experts.1.w": 9 << 20, "shared_experts.w": 1}
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, size in sizes.items():
        header[f"model.layers.0.{name}"] = {"data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path = tmp_path / "model-a.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text)
    os.truncate(path, 8 + len(text) + end)
    # Damaged files change nothing, and nothing fails.
    offsets = [0, "b"], [-1e99, 1], [-(10**30), 10**30]
    others = [], {"a": {}}, *({"a": {"data_offsets": pair}} for pair in offsets)
    for number, damaged in enumerate(map(json.dumps, others)):
        other = tmp_path / f"model-b{number}.safetensors"
        other.write_bytes(len(damaged).to_bytes(8, "little") + damaged.encode())
    read_ahead(str(tmp_path))
    wait()
    mib = 1 << 20
    begins = [begin // mib for name, begin, _ in advised if name == path.name]
    assert begins == [0, 20, 29, 1, 9, 17, 21]  # header, o, shared_experts; then experts
    assert len(advised) == len(begins) + len(others)


def test_a_command_begins_before_it_imports_jax(tmp_path):
    text = (
        "import sys, argparse, moejax.commands.model as model\n"
        "model.read_ahead = lambda name: print(name, 'jax' in sys.modules) or sys.exit()\n"
        "with model.start_llm(argparse.Namespace(model='m'), {}): pass\n"
    )
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True)
    assert ran.stdout == "m False\n", ran.stderr

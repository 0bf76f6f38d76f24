"""A fingerprint is of what a checkpoint holds, not of where it lies or of what stands beside it."""

from __future__ import annotations

import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moejax import UserError
from moejax.checkpoints import fingerprint as module
from moejax.checkpoints.fingerprint import file_fingerprint, fingerprint
from moejax.models.hub import model_directory

HOSTILE_OFFSETS = b"[0, 1e300]", b"[0.5, 1]", b"[-9999, 5]", b"[0, 99999999999999999999999]"


@pytest.fixture
def copy(tmp_path, monkeypatch):
    """The embedded model elsewhere; its weights count as a large file."""
    monkeypatch.setattr(module, "WHOLE", 1 << 20)
    return shutil.copytree(model_directory("demo"), tmp_path / "copy")


def test_a_copy_a_model_card_and_results_change_nothing(copy):
    before = fingerprint(model_directory("demo"))
    (copy / "README.md").write_text("About it")
    (copy / "results.jsonl").write_text("{}")
    assert fingerprint(copy) == before == fingerprint(str(copy))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_every_byte_of_a_small_file_counts(copy, name):
    before = fingerprint(copy)
    with (copy / name).open("a") as file:
        file.write(" ")
    assert fingerprint(copy) != before


def test_one_other_tensor_counts(copy, monkeypatch):
    """Whether other samples meet it or not."""
    monkeypatch.setattr(module, "SAMPLES", 1)
    weights = copy / "model.safetensors"
    save_file(tensors := load_file(weights), weights)  # another header
    before = fingerprint(copy)
    for name in (min(tensors), max(tensors, key=lambda n: tensors[n].size)):
        bits = tensors[name].view(np.uint16)
        save_file({**tensors, name: (bits ^ 1).view(tensors[name].dtype)}, weights)
        assert fingerprint(copy) != before
    save_file(tensors, weights)
    assert fingerprint(copy) == before
    weights.write_bytes(weights.read_bytes()[:-2])
    assert fingerprint(copy) != before


def test_a_large_file_whose_header_is_bad_has_a_fingerprint_too(copy):
    (copy / "model.safetensors").write_bytes(b"\xff" * (1 << 21))
    first = fingerprint(copy)
    for header in (b"[]", *(b'{"a":{"data_offsets":%s}}' % each for each in HOSTILE_OFFSETS)):
        begin = len(header).to_bytes(8, "little") + header
        (copy / "model.safetensors").write_bytes(begin + bytes(1 << 21))
        assert fingerprint(copy) != first


def test_what_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(UserError, match="no such directory"):
        fingerprint(tmp_path / "none")
    with pytest.raises(UserError, match=r"tokenizer\.json cannot be read: No such file"):
        file_fingerprint(tmp_path / "tokenizer.json")

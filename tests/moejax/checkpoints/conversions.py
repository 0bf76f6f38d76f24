"""Converted checkpoints: their comparison, and damage done to them."""

import json
import pathlib
import shutil
import signal

import jax
import numpy as np
import pytest

from host_offload.versions.encoders import NUMPY_DTYPES
from moejax.checkpoints.orbax import manifest as orbax_manifest
from moejax.checkpoints.orbax.destination import LOCK
from moejax.errors import MOST_LINE, UserError
from tests.moejax.checkpoints.random_checkpoint import CONFIG, random_tensors, write


def write_source(directory):
    """A small checkpoint in two shards, with a tokenizer and a file in a directory of its own."""
    directory = write(directory, random_tensors(CONFIG), shards=2)
    (directory / "tokenizer.json").write_text("{}")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates/rag.jinja").write_text("{{ rag }}")
    return directory


def assert_same_model(found, expected):
    """Two LoadedModels are the same, bit for bit."""
    assert (found.config, found.dtype, found.layout) == (
        expected.config,
        expected.dtype,
        expected.layout,
    )
    assert jax.tree.structure(found.params) == jax.tree.structure(expected.params)
    for a, b in zip(jax.tree.leaves(found.params), jax.tree.leaves(expected.params), strict=True):
        assert a.committed and a.dtype == b.dtype and a.shape == b.shape
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
    assert found.store.arrays.keys() == expected.store.arrays.keys()
    for version, array in expected.store.arrays.items():
        np.testing.assert_array_equal(np.asarray(found.store.arrays[version]), np.asarray(array))


def contents(directory):
    """Every file of a conversion but what differs with its time: bytes by relative path."""
    found = {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in pathlib.Path(directory).rglob("*")
        if path.is_file() and path.name != LOCK  # of who was killed right before the end
    }
    manifest = json.loads(found[orbax_manifest.MANIFEST])
    for name in ("provenance", "self"):
        del manifest[name]
    del found["_CHECKPOINT_METADATA"], manifest["files"]["_CHECKPOINT_METADATA"]
    return found | {orbax_manifest.MANIFEST: manifest}


def read_tensor(file, reader, name, index=None):
    """A tensor of an open file, or tensor[index]."""
    header = file.tensors[name]
    values = np.empty(header.shape[index is not None :], NUMPY_DTYPES[header.dtype])
    rows = values.reshape(-1, (values.shape or (1,))[-1]) if values.size else values
    reader.rows(name, index)(0, rows)
    return values


def copied(directory, to):
    """A copy to be damaged."""
    return pathlib.Path(shutil.copytree(directory, to))


def flip(path, at=-1):
    """Changes a bit of a file."""
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def rewrite_manifest(directory, change):
    """Changes moejax.json by change(content), with a checksum that fits again."""
    path = directory / orbax_manifest.MANIFEST
    content = json.loads(path.read_text())
    del content["self"]
    change(content)
    canonical = json.dumps(content, sort_keys=True).encode()
    path.write_text(json.dumps({**content, "self": orbax_manifest.checksum(canonical)}))


def refuses(message, call, *args, **options):
    """A UserError, of lines that can be read, within a minute."""

    def fail(*_):
        raise TimeoutError("not refused within 60 s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(60)
    try:
        with pytest.raises(UserError, match=message) as caught:
            call(*args, **options)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert max(map(len, str(caught.value).split("\n"))) <= MOST_LINE

"""What an arena's queue is told of records in files."""

import dataclasses
import hashlib

import numpy as np
import pytest

from host_offload.memory.store import RecordFiles
from host_offload.queue.file_sources import file_sources
from host_offload.queue.native import NativeQueue
from host_offload.queue.transfer import QueueError
from pallas_kernels.records.format import RecordFormat
from tests.pallas_kernels.contract import NATIVE

pytestmark = NATIVE

DENSE = RecordFormat("dense", 32, 4, "bfloat16")


def written(folder, layers=2, experts=3) -> RecordFiles:
    """Files of random records."""
    rng, paths, sums = np.random.default_rng(0), [], np.zeros((layers, experts), np.uint64)
    for layer, expert in np.ndindex(layers, experts):
        path, record = folder / f"{layer}.{expert}", rng.bytes(DENSE.nbytes)
        path.write_bytes(record)
        sums[layer, expert] = int(hashlib.sha256(record).hexdigest()[:16], 16)
        paths.append(str(path))
    return RecordFiles(tuple(tuple(paths[i * experts :][:experts]) for i in range(layers)), sums)


def test_each_record_is_a_file_with_its_checksum(tmp_path):
    files = written(tmp_path)
    with NativeQueue(threads=1) as queue:
        found = file_sources((files,), (DENSE,), queue)
        assert found.parts == ((4 * 64,) * 3,)
        assert found.records["file"][0, 1, 2] == queue.file_number(files.paths[1][2])
        assert len(set(found.records["file"].ravel().tolist())) == 6
        assert (found.records["checksum"][0] == files.checksums).all()
        assert (found.records["check"] == 1).all() and not found.records["place"].any()
        crcs = np.arange(6, dtype=np.uint64).reshape(2, 3)
        cheaper = dataclasses.replace(files, crcs=crcs)
        found = file_sources((cheaper,), (DENSE,), queue)
        assert (found.records["checksum"][0] == crcs).all() and (found.records["check"] == 2).all()
        unchecked = dataclasses.replace(cheaper, verify=False)
        assert not file_sources((unchecked,), (DENSE,), queue).records["check"].any()


def test_a_file_that_is_not_there_is_named(tmp_path):
    files = written(tmp_path)
    (tmp_path / "1.1").unlink()
    with NativeQueue(threads=1) as queue, pytest.raises(QueueError, match=r"1\.1: No such file"):
        file_sources((files,), (DENSE,), queue)

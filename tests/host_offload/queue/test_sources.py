"""Where records are, what an arena is told of it, and what is refused."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from host_offload.memory.record_source import StackedRecords, locate_records
from host_offload.queue.native import NativeQueue
from host_offload.queue.transfer import QueueError
from pallas_kernels.cpu.arena import ArenaMemory
from pallas_kernels.cpu.sources import MEMORY, NOWHERE
from pallas_kernels.records.format import RecordFormat
from tests.host_offload.queue.test_cached import files_in
from tests.host_offload.queue.test_device_copies import PIECE
from tests.pallas_kernels.contract import NATIVE, pinned

DENSE = RecordFormat("dense", 32, 4, "bfloat16")
INT4 = RecordFormat("int4", 32, 4, "bfloat16")
NO_FILES = {}.__getitem__


def stores():
    return [
        StackedRecords(fmt, pinned(jnp.zeros((2, 3, fmt.rows, 32), jnp.uint16)))
        for fmt in (DENSE, INT4)
    ]


def test_records_lie_where_their_stores_have_them():
    held = stores()
    found = locate_records(held, (None, (1, -1)), 2, NO_FILES)
    assert found.parts == ((4 * 64,) * 3, (INT4.nbytes,))
    first = [source.array.unsafe_buffer_pointer() for source in held]
    parts = first[0] + 5 * DENSE.nbytes + np.arange(3) * 4 * 64
    assert (found.records["place"][0, 1, 2, :3] == parts).all()
    assert found.records["place"][1, 0, 1, 0] == first[1] + 4 * INT4.nbytes
    assert (found.records["file"][:, :, 0, 0] == [[MEMORY, MEMORY], [MEMORY, NOWHERE]]).all()


@NATIVE
def test_an_arena_is_attached_to_an_open_queue():
    held = stores()
    sources = locate_records(held, (None, None), 2, NO_FILES)
    memory = ArenaMemory(64, 32)
    queue = NativeQueue(threads=1)
    memory.attach(queue.handle, sources, ahead=queue.cause_number("prefetch"))
    assert memory.sources is sources and memory.failures(2**31 - 1) == []
    closed = NativeQueue()
    closed.close()
    with pytest.raises(ValueError, match="is closed"):
        memory.attach(closed.handle, sources, ahead=1)
    memory.close()  # and with it the queue's threads
    queue.close()


# ---- records in files


@NATIVE
def test_each_record_is_a_file_with_its_checksum(tmp_path):
    files = files_in(tmp_path)
    with NativeQueue(threads=1) as queue:
        found = files.locate(queue.file_number)
        assert (found["file"][1, 2] == queue.file_number(files.paths[1][2])).all()
        assert len(set(found["file"].ravel().tolist())) == 8
        assert (found["checksum"] == files.checksums).all()
        assert (found["check"] == 1).all() and (
            found["place"][..., :3] == [0, PIECE, 2 * PIECE]
        ).all()
        crcs = np.arange(8, dtype=np.uint64).reshape(2, 4)
        cheaper = dataclasses.replace(files, crcs=crcs)
        found = cheaper.locate(queue.file_number)
        assert (found["checksum"] == crcs).all() and (found["check"] == 2).all()
        unchecked = dataclasses.replace(cheaper, verify=False)
        assert not unchecked.locate(queue.file_number)["check"].any()
    (tmp_path / "1.1").unlink()
    with NativeQueue(threads=1) as queue, pytest.raises(QueueError, match=r"1\.1: No such file"):
        files.locate(queue.file_number)

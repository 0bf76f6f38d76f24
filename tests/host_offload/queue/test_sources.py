"""Where records are, what an arena is told of it, and what is refused."""

import jax.numpy as jnp
import numpy as np
import pytest

from host_offload.queue.native import NativeQueue
from host_offload.queue.sources import memory_sources, record_parts
from pallas_kernels.cpu.arena import ArenaMemory
from pallas_kernels.cpu.sources import MEMORY, NOWHERE, SOURCE, Sources
from pallas_kernels.records.format import RecordFormat
from pallas_kernels.records.versions import VersionFormats
from tests.pallas_kernels.contract import NATIVE, pinned

DENSE = RecordFormat("dense", 32, 4, "bfloat16")
INT4 = RecordFormat("int4", 32, 4, "bfloat16")


def stores():
    return tuple(pinned(jnp.zeros((2, 3, fmt.rows, 32), jnp.uint16)) for fmt in (DENSE, INT4))


def test_a_dense_record_comes_in_three_parts_and_others_in_one():
    assert record_parts(DENSE) == (4 * 64,) * 3
    assert record_parts(INT4) == (INT4.nbytes,)


def test_records_lie_where_their_stores_have_them():
    arrays = stores()
    formats = VersionFormats(DENSE, DENSE), VersionFormats(INT4, INT4, (1, -1))
    found = memory_sources(arrays, (DENSE, INT4), 2, formats)
    first = [array.unsafe_buffer_pointer() for array in arrays]
    assert found.records["place"][0, 1, 2] == first[0] + 5 * DENSE.nbytes
    assert found.records["place"][1, 0, 1] == first[1] + 4 * INT4.nbytes
    assert (found.records["file"][:, :, 0] == [[MEMORY, MEMORY], [MEMORY, NOWHERE]]).all()


def test_tables_that_do_not_fit_are_refused():
    records = np.zeros((1, 2, 3), SOURCE)
    for wrong, match in (
        ({"records": records["place"], "parts": ((1,),)}, "SOURCE"),
        ({"records": records, "parts": ((1,), (1,))}, "1 versions, parts of 2"),
        ({"records": records, "parts": ((1, 2),)}, "one part or three"),
        ({"records": records, "parts": ((1, 0, 2),)}, "one part or three"),
    ):
        with pytest.raises(ValueError, match=match):
            Sources(**wrong)


@NATIVE
def test_an_arena_is_attached_to_an_open_queue():
    sources = memory_sources(stores(), (DENSE, INT4), 2, None)
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

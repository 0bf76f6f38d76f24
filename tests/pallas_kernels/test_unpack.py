"""Packed residents decoded by the queue's threads: every value, in chunks of any even size, and
places that are not there."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from host_offload.memory.arena import own_arena
from host_offload.memory.record_source import StackedRecords, locate_records
from host_offload.queue.native import NativeQueue
from host_offload.versions.encoders import encode
from pallas_kernels.cpu.arena import drain
from pallas_kernels.fill.unpack import unpack
from pallas_kernels.records import RecordFormat
from pallas_kernels.records.versions import VersionFormats
from tests.pallas_kernels.contract import NATIVE

pytestmark = NATIVE

HIDDEN, WIDTH = 128, 192
DENSE, PACKED = (RecordFormat(v, HIDDEN, WIDTH, "bfloat16") for v in ("dense", "lossless12"))
FORMATS = tuple(VersionFormats(fmt, fmt) for fmt in (DENSE, PACKED))
ROW = DENSE.rows
"""Where the packed record begins, after two dense cells' room."""


def every_value() -> np.ndarray:
    """uint16[3·I, D]: all 65,536 values, each block of 32 rows of 15 exponents."""
    blocks = 3 * WIDTH // 32
    found = np.zeros((blocks, 32 * HIDDEN), np.uint16)
    sign, mantissa = np.arange(2)[:, None, None] << 15, np.arange(128)
    for block in found:
        first = 15 * len(seen) if (seen := [b for b in found if b.any()]) else 0
        exponents = (first + np.arange(15)).clip(max=255)
        values = (sign | (exponents[:, None] << 7) | mantissa).reshape(-1)
        block[: len(values)], block[len(values) :] = values, values[-1]
    return found.reshape(3 * WIDTH, HIDDEN)


def unpacked(values: np.ndarray, source: int, row: int, *, chunk_bytes: int) -> np.ndarray:
    """The dense rows that came of a record at 2·ROW, decoded into a cell at `row`."""
    record = encode(values.view(ml_dtypes.bfloat16)[None], PACKED)[0]
    memory = own_arena(2 * ROW + PACKED.rows, HIDDEN)
    memory.view()[2 * ROW :] = record
    device = jax.devices("cpu")[0]
    stores = tuple(
        jax.device_put(np.zeros((1, 1, fmt.rows, HIDDEN), np.uint16), device)
        for fmt in (DENSE, PACKED)
    )
    with NativeQueue(chunk_bytes=chunk_bytes) as queue:
        held = [*map(StackedRecords, (DENSE, PACKED), stores)]
        sources = locate_records(held, (None, None), 1, queue.file_number)
        memory.attach(queue.handle, sources, ahead=1, buffers=1)
        cells = jnp.array([row], jnp.int32)

        def run(arena):
            listed = jnp.zeros(1, jnp.int32), jnp.array([source], jnp.int32), cells, jnp.int32(1)
            return drain(unpack(arena, 0, *listed, packed=PACKED), cells)

        _, failed = jax.block_until_ready(jax.jit(run)(memory.on(device)))
        assert not failed.any()
        totals = queue.totals()
        assert (totals.unpacked, totals.unpacked_bytes) == (1, DENSE.nbytes)
        assert totals.demand_bytes == totals.ahead_bytes == 0  # nothing over the link
        found = memory.view()[row : row + ROW].copy()
    memory.close()
    return found


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 1000, 254])
def test_every_value_comes_out_as_it_went_in(chunk_bytes):
    """Checkable property 6: all 65,536 bfloat16 values, bit by bit."""
    values = every_value()
    assert len(np.unique(values)) == 1 << 16
    assert np.array_equal(unpacked(values, 2 * ROW, 0, chunk_bytes=chunk_bytes), values)
    assert not np.array_equal(  # by a row, a mistake is seen
        np.roll(values, 1, axis=0), unpacked(values, 2 * ROW, ROW, chunk_bytes=chunk_bytes)
    )


@pytest.mark.parametrize(("source", "row"), [(2 * ROW + 1, 0), (-1, 0), (2 * ROW, 5 * ROW)])
def test_a_place_that_is_not_there_is_refused(source, row):
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"unpack: .* rows from .* are not among"):
        unpacked(every_value(), source, row, chunk_bytes=1 << 20)


def test_another_format_is_refused():
    with pytest.raises(ValueError, match="residents are packed as lossless12, not dense"):
        unpack(None, 0, None, None, None, None, packed=DENSE)

"""What every builder of a store keeps: the bits of every record, once each, complete, in pinned
memory; written in place, updated by jax, or as separate arrays of pieces."""

import concurrent.futures
import dataclasses
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from host_offload.memory import store as store_module
from host_offload.memory.store import (
    ExpertStore,
    StoreBuilder,
    aligned_empty,
    copy_transposed,
    update,
)
from host_offload.queue.pinned import PinnedBuilder
from host_offload.versions.encoders import encode
from pallas_kernels.records import RecordFormat

LAYOUT = RecordFormat("dense", 16, 4, "bfloat16")
RECORDS = np.arange(2 * 3 * 12 * 16, dtype=np.uint16).reshape(2, 3, 12, 16)
MATRIX = 4 * 16 * 2


@pytest.fixture(params=["in place", "updated by jax", "pieces"])
def build(request, monkeypatch):
    """The CPU's own way, that of devices whose pinned memory only jax can write, and that of
    transfers beside compute."""
    if request.param == "updated by jax":
        monkeypatch.setattr(store_module, "shares_memory", lambda device: False)
    kind = PinnedBuilder if request.param == "pieces" else StoreBuilder
    return lambda: kind(LAYOUT, 2, 3, jax.devices()[0])


def content(store: ExpertStore) -> np.ndarray:
    array = store.arrays["dense"]
    if isinstance(array, jax.Array):
        assert array.sharding.memory_kind == "pinned_host"
        return np.asarray(array)
    pieces = [array.of(layer, expert) for layer in range(2) for expert in range(3)]
    assert {p.sharding.memory_kind for each in pieces for p in each} == {"pinned_host"}
    return np.stack([np.concatenate(each) for each in pieces]).reshape(RECORDS.shape)


def jobs(cuts) -> list[tuple[int, int, int, int]]:
    edges = [0, *cuts, 12]
    pairs = [*itertools.pairwise(edges)]
    return [(layer, expert, a, b) for layer in range(2) for expert in range(3) for a, b in pairs]


@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cuts=st.lists(st.integers(1, 11), unique=True, max_size=4).map(sorted),
    order=st.randoms(use_true_random=False),
)
def test_records_come_in_any_order_of_pieces(build, cuts, order):
    """And the caller may use its buffer again."""
    builder, buffer, todo = build(), np.empty((1, 12, 16), np.uint16), jobs(cuts)
    order.shuffle(todo)
    for layer, expert, first, end in todo:
        piece = buffer[:, : end - first]
        piece[:] = RECORDS[layer, expert, first:end]
        builder.put(layer, expert, piece, first)
        piece[:] = 9999
    store = builder.finish()
    np.testing.assert_array_equal(content(store), RECORDS)
    assert store.nbytes == RECORDS.nbytes and store.layouts == {"dense": LAYOUT}
    store.delete()
    store.delete()
    with pytest.raises(RuntimeError, match="deleted"):
        content(store)
    with pytest.raises(dataclasses.FrozenInstanceError):
        store.arrays = {}  # pyright: ignore[reportAttributeAccessIssue]


def test_pieces_from_threads(build):
    builder = build()

    def fill(place):
        layer, expert, first, end = place
        with builder.piece(layer, expert, 1, first, end - first) as piece:
            piece[:] = RECORDS[layer, expert, first:end]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(fill, jobs([4, 8])))
    np.testing.assert_array_equal(content(builder.finish()), RECORDS)


def test_a_row_is_written_exactly_once_and_a_piece_that_fails_stays_missing(build):
    builder = build()
    builder.put(0, 0, RECORDS[0, :1, :4])
    with pytest.raises(ValueError, match=r"layer 0, experts 0\+3, rows 3\+2: written twice"):
        builder.put(0, 0, RECORDS[0, :, 3:5], 3)
    with pytest.raises(OSError, match="disk"), builder.piece(0, 0, 1, 4, 8):
        raise OSError("disk")
    with pytest.raises(ValueError, match="68 rows were never written, first: layer 0, expert 0, r"):
        builder.finish()
    builder.put(0, 0, RECORDS[0, :1, 4:], 4)
    builder.put(0, 1, RECORDS[0, 1:])
    builder.put(1, 0, RECORDS[1])
    np.testing.assert_array_equal(content(builder.finish()), RECORDS)
    with pytest.raises(ValueError, match="the store is finished"):
        builder.put(0, 0, RECORDS[0])
    with pytest.raises(ValueError, match="the store is finished"):
        builder.finish()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((0, 0, RECORDS[0].astype(np.int32)), r"must be uint16\[n, r, 16\], not int32\[3, 12, 16"),
        ((0, 0, RECORDS[0, 0]), r"must be uint16\[n, r, 16\]"),
        ((0, 0, RECORDS[0, :, :, :8]), r"must be uint16\[n, r, 16\]"),
        ((2, 0, RECORDS[0]), "outside of the store"),
        ((-1, 0, RECORDS[0]), "outside of the store"),
        ((0, 1, RECORDS[0]), r"experts 1\+3.*outside of the store \[2, 3, 12\]"),
        ((0, 0, RECORDS[0], 1), r"rows 1\+12.*outside"),
    ],
)
def test_what_has_no_place_is_refused(build, args, message):
    builder = build()
    with pytest.raises(ValueError, match=message):
        builder.put(*args)
    builder.close()
    builder.close()


def test_records_on_a_device(build):
    builder = build()
    for layer in range(2):
        builder.put(layer, 0, jax.numpy.asarray(RECORDS[layer]))
    with pytest.raises(ValueError, match="written twice"):
        builder.put(0, 0, jax.numpy.asarray(RECORDS[0, :1]))
    np.testing.assert_array_equal(content(builder.finish()), RECORDS)


@pytest.mark.parametrize("shared", [True, False])
def test_what_cannot_be_built_is_refused(shared, monkeypatch):
    monkeypatch.setattr(store_module, "shares_memory", lambda device: shared)
    with pytest.raises(MemoryError, match=r"cannot allocate 3145728\.0 GiB of pinned host memory"):
        StoreBuilder(RecordFormat("dense", 2**40, 4, "bfloat16"), 2, 64, jax.devices()[0])
    with pytest.raises(MemoryError):
        aligned_empty((2**62, 16), np.dtype(np.float32))


@pytest.mark.parametrize("chunk_bytes", [None, 1, MATRIX // 2, 3 * MATRIX])
def test_no_piece_has_rows_of_two_matrices(chunk_bytes):
    builder = PinnedBuilder(LAYOUT, 2, 3, jax.devices()[0], chunk_bytes=chunk_bytes)
    builder.put(0, 0, RECORDS[0])
    builder.put(1, 0, RECORDS[1])
    records = builder.finish().arrays["dense"]
    assert records.shape == records.absent.shape == RECORDS.shape
    assert max(records.sizes) <= max(min(chunk_bytes or MATRIX, MATRIX), 32)
    assert {0, 4, 8, 12} <= {*records.edges}


def test_no_copy_is_made():
    """Neither of what is finished nor of aligned memory that jax takes."""
    builder = StoreBuilder(LAYOUT, 2, 3, jax.devices()[0])
    with builder.piece(0, 0, 3, 0, 12) as piece:
        piece[:] = RECORDS[0]
        address = piece.ctypes.data
    builder.put(1, 0, RECORDS[1])
    assert builder.finish().arrays["dense"].unsafe_buffer_pointer() == address
    values = aligned_empty((3, 5), np.dtype(np.float32))
    array = jax.device_put(values, jax.devices("cpu")[0], may_alias=True)
    assert array.unsafe_buffer_pointer() == values.ctypes.data


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_the_device_sees_the_values_that_were_encoded(dtype):
    """Any bits, NaN payloads included; a 32-bit value is a pair, the low half first."""
    dtype = np.dtype(dtype)
    layout = RecordFormat("dense", 64, 4, dtype.name)
    bits = np.random.default_rng(0).bytes(12 * 64 * dtype.itemsize)
    weights = np.frombuffer(bits, dtype).reshape(12, 64)
    record = encode(weights[None], layout)[0]
    assert record.dtype == np.uint16 and record.shape == (layout.rows, 64)
    device = jnp.asarray(record).reshape(12, 64, -1)
    device = device[..., 0] if dtype.itemsize == 2 else device
    found = jax.lax.bitcast_convert_type(device, dtype)
    assert np.asarray(found).tobytes() == bits


@pytest.mark.aot
def test_update_is_in_place_at_full_size_on_an_h200():
    """54 GiB in host memory: the piece goes over the link, nothing else is copied or allocated."""
    from tests.aot.aot_h200 import compile_for_h200

    index, piece = jax.ShapeDtypeStruct((), jnp.int32), (1, 1, 768, 2048)
    compiled = compile_for_h200(
        update,
        jax.ShapeDtypeStruct((48, 128, 2304, 2048), jnp.uint16),
        jax.ShapeDtypeStruct(piece, jnp.uint16),
        index,
        index,
        index,
        donate_argnums=0,
        host_argnums=0,
    )
    nbytes = 48 * 128 * 2304 * 2048 * 2
    assert compiled.copies() == compiled.host_copies() == []
    assert [size for _, size in compiled.host_copies(to_host=True)] == [768 * 2048 * 2]
    assert compiled.memory.host_alias_bytes == nbytes
    assert compiled.memory.temp_bytes < 2**20 and compiled.memory.host_temp_bytes == 0


@pytest.mark.parametrize("shape", [(48, 40), (7, 5), (16, 1), (73, 130)])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("native", [True, False])
def test_transposed(shape, dtype, native, monkeypatch):
    if not native:
        monkeypatch.setattr(store_module, "transpose", lambda *arrays: False)
    matrix = np.arange(shape[0] * shape[1], dtype=dtype).reshape(shape)
    wide = np.zeros((shape[1], shape[0] + 3), dtype)
    copy_transposed(wide[:, 2:-1], matrix)  # a part of wider rows
    np.testing.assert_array_equal(wide[:, 2:-1], matrix.T)
    assert not wide[:, :2].any() and not wide[:, -1].any()

"""The pinned store: the bits of every record, in place, complete."""

import concurrent.futures
import dataclasses
import weakref

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from host_offload.memory import store as store_module
from host_offload.memory.store import (
    ExpertStore,
    StoreBuilder,
    aligned_empty,
    copy_transposed,
    update,
)
from host_offload.versions.encoders import NUMPY_DTYPES, encode
from pallas_kernels.records import RecordFormat

LAYOUT = RecordFormat("dense", 16, 4, "bfloat16")
RECORDS = np.arange(2 * 3 * 12 * 16, dtype=np.uint16).reshape(2, 3, 12, 16)


@pytest.fixture(autouse=True, params=["written in place", "updated by jax"])
def platform(request, monkeypatch):
    """The CPU's own way, and the way of devices whose pinned memory only jax can write."""
    if request.param == "updated by jax":
        monkeypatch.setattr(store_module, "shares_memory", lambda device: False)
    return request.param


def builder(layout=LAYOUT):
    return StoreBuilder(layout, 2, 3, jax.devices()[0])


def test_whole_layers():
    build = builder()
    for layer in (1, 0):
        build.put(layer, 0, RECORDS[layer])
    store = build.finish()
    array = store.arrays["dense"]
    np.testing.assert_array_equal(np.asarray(array), RECORDS)
    assert array.dtype == jnp.uint16 and array.sharding.memory_kind == "pinned_host"
    assert store.layouts == {"dense": LAYOUT}
    assert store.nbytes == RECORDS.nbytes


def test_pieces_in_any_order():
    build = builder()
    pieces = [
        (layer, expert, row) for layer in range(2) for expert in range(3) for row in (0, 4, 8)
    ]
    for i in np.random.default_rng(0).permutation(len(pieces)):
        layer, expert, row = pieces[i]
        build.put(layer, expert, RECORDS[layer, expert, row : row + 4][None], row)
    np.testing.assert_array_equal(np.asarray(build.finish().arrays["dense"]), RECORDS)


def test_no_copy_is_made(platform):
    build = builder()

    def address():
        if platform == "written in place":
            return build._memory.ctypes.data
        return build._array.unsafe_buffer_pointer()

    before = address()
    build.put(0, 0, RECORDS[0])
    with build.piece(1, 0, 3, 0, 12) as piece:
        piece[:] = RECORDS[1]
    assert address() == before
    array = build.finish().arrays["dense"]
    assert array.unsafe_buffer_pointer() == before
    np.testing.assert_array_equal(np.asarray(array), RECORDS)


def test_pieces_from_threads():
    build = builder()

    def fill(place):
        layer, expert, row = place
        with build.piece(layer, expert, 1, row, 4) as piece:
            piece[:] = RECORDS[layer, expert, row : row + 4]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        places = [
            (layer, expert, row) for layer in (1, 0) for expert in range(3) for row in (0, 4, 8)
        ]
        list(pool.map(fill, places))
    np.testing.assert_array_equal(np.asarray(build.finish().arrays["dense"]), RECORDS)


def test_piece_that_fails_stays_missing():
    build = builder()
    build.put(1, 0, RECORDS[1])
    with pytest.raises(OSError, match="disk"), build.piece(0, 0, 3, 0, 12):
        raise OSError("disk")
    with pytest.raises(ValueError, match="36 rows were never written"):
        build.finish()
    build.put(0, 0, RECORDS[0])
    build.finish()


def test_caller_may_reuse_its_buffer():
    build, buffer = builder(), np.empty((1, 12, 16), np.uint16)
    for layer in range(2):
        for expert in range(3):
            buffer[0] = RECORDS[layer, expert]
            build.put(layer, expert, buffer)
            buffer[:] = 9999
    np.testing.assert_array_equal(np.asarray(build.finish().arrays["dense"]), RECORDS)


def test_delete_frees_the_arrays():
    build = builder()
    build.put(0, 0, RECORDS[0])
    build.put(1, 0, RECORDS[1])
    store = build.finish()
    store.delete()
    assert store.arrays["dense"].is_deleted()
    with pytest.raises(dataclasses.FrozenInstanceError):
        store.arrays = {}  # pyright: ignore[reportAttributeAccessIssue]

    build = builder()
    held = weakref.ref(build._array if build._memory is None else build._memory)
    build.close()
    build.close()
    assert held() is None or held().is_deleted()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            (0, 0, RECORDS[0].astype(np.int32)),
            r"must be uint16\[n, r, 16\], not int32\[3, 12, 16\]",
        ),
        ((0, 0, RECORDS[0, 0]), r"must be uint16\[n, r, 16\]"),
        ((0, 0, RECORDS[0, :, :, :8]), r"must be uint16\[n, r, 16\]"),
        ((2, 0, RECORDS[0]), "outside of the store"),
        ((-1, 0, RECORDS[0]), "outside of the store"),
        ((0, 1, RECORDS[0]), r"experts 1\+3.*outside of the store \[2, 3, 12\]"),
        ((0, 0, RECORDS[0], 1), r"rows 1\+12.*outside"),
    ],
)
def test_put_refuses(args, message):
    with pytest.raises(ValueError, match=message):
        builder().put(*args)


def test_a_row_is_written_exactly_once():
    build = builder()
    build.put(0, 0, RECORDS[0, :1, :4])
    with pytest.raises(ValueError, match=r"layer 0, experts 0\+3, rows 3\+2: written twice"):
        build.put(0, 0, RECORDS[0, :, 3:5], 3)
    with pytest.raises(
        ValueError, match="68 rows were never written, first: layer 0, expert 0, row 4"
    ):
        build.finish()


def test_builder_is_used_up():
    build = builder()
    build.put(0, 0, RECORDS[0])
    build.put(1, 0, RECORDS[1])
    build.finish()
    with pytest.raises(ValueError, match="the store is finished"):
        build.put(0, 0, RECORDS[0])
    with pytest.raises(ValueError, match="the store is finished"):
        build.finish()


def test_more_than_the_machine_has():
    with pytest.raises(MemoryError, match=r"cannot allocate 3145728\.0 GiB of pinned host memory"):
        StoreBuilder(RecordFormat("dense", 2**40, 4, "bfloat16"), 2, 64, jax.devices()[0])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32])
def test_record(dtype):
    """gate, up and down^T rows, readable again through a view of the run's dtype."""
    rng = np.random.default_rng(1)
    dtype, (width, hidden) = np.dtype(dtype), (4, 16)
    gate, up = (rng.normal(size=(width, hidden)).astype(np.float32) for _ in range(2))
    down = rng.normal(size=(hidden, width)).astype(np.float32)
    layout = RecordFormat("dense", hidden, width, dtype.name)
    weights = np.concatenate([gate, up, down.T]).astype(dtype)
    record = encode(weights[None], layout)[0]
    assert record.dtype == np.uint16 and record.shape == (layout.rows, hidden)
    rows = record.view(dtype).reshape(3 * width, hidden)
    np.testing.assert_array_equal(rows[:4], gate.astype(dtype))
    np.testing.assert_array_equal(rows[4:8], up.astype(dtype))
    np.testing.assert_array_equal(rows[8:], down.T.astype(dtype))
    # The device sees the same values: a 32-bit value is a pair, the low half first.
    device = jnp.asarray(record).reshape(3 * width, hidden, -1)
    device = device[..., 0] if dtype.itemsize == 2 else device
    np.testing.assert_array_equal(np.asarray(jax.lax.bitcast_convert_type(device, dtype)), rows)


def test_rows_keep_bits():
    """No conversion touches bits that are already of the run's dtype, NaN payloads included."""
    bits = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    for dtype in ("bfloat16", "float16"):
        layout = RecordFormat("dense", 256, 256, dtype)
        weights = np.concatenate([bits, bits, bits.T]).view(NUMPY_DTYPES[dtype])
        record = encode(weights[None], layout)[0]
        np.testing.assert_array_equal(record, np.concatenate([bits, bits, bits.T]))


def test_store_of_several_versions():
    """Bytes and deletion cover all of them."""
    arrays = {"dense": jnp.zeros(4, jnp.uint16), "other": jnp.zeros(6, jnp.uint16)}
    store = ExpertStore({}, arrays)
    assert store.nbytes == 20
    store.delete()
    assert all(array.is_deleted() for array in arrays.values())


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


@pytest.mark.parametrize("shape", [(32, 64), (48, 40), (7, 5), (1, 3), (16, 1)])
@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_transposed(shape, dtype):
    matrix = np.arange(shape[0] * shape[1], dtype=dtype).reshape(shape)
    wide = np.zeros((shape[1], shape[0] + 3), dtype)
    copy_transposed(wide[:, 2:-1], matrix)  # a part of wider rows
    np.testing.assert_array_equal(wide[:, 2:-1], matrix.T)
    assert not wide[:, :2].any() and not wide[:, -1].any()


def test_aligned_memory_is_taken_without_a_copy():
    values = aligned_empty((3, 5), np.dtype(np.float32))
    values[:] = 7
    array = jax.device_put(values, jax.devices("cpu")[0], may_alias=True)
    assert array.unsafe_buffer_pointer() == values.ctypes.data
    with pytest.raises(MemoryError):
        aligned_empty((2**62, 16), np.dtype(np.float32))

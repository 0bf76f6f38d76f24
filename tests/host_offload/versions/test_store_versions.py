"""Stores of several versions: what they hold, and how records leave pinned memory."""

import jax
import ml_dtypes
import numpy as np
import pytest

from host_offload.memory import record_source
from host_offload.memory import store as store_module
from host_offload.memory.record_source import read_records
from host_offload.memory.store import StoreBuilder
from host_offload.versions import store_versions
from host_offload.versions.encoders import encode
from host_offload.versions.quantizers import mse
from host_offload.versions.store_versions import (
    VersionError,
    add_version,
    dense_weights,
    relative_error,
)
from pallas_kernels.records import RecordFormat
from tests.host_offload.versions.store_errors import relative_errors

LAYOUT = RecordFormat("dense", 32, 10, "bfloat16")
LAYERS, EXPERTS = 2, 5


@pytest.fixture(autouse=True, params=["views", "through the device"])
def platform(request, monkeypatch):
    """The CPU's own way, and the way of devices whose pinned memory only jax can touch."""
    if request.param == "through the device":
        for module in (store_module, record_source):
            monkeypatch.setattr(module, "shares_memory", lambda device: False)


def weights(seed=0):
    values = np.random.default_rng(seed).standard_normal((LAYERS, EXPERTS, 30, 32)) * 0.03
    return values.astype(ml_dtypes.bfloat16)


def dense_store(values):
    builder = StoreBuilder(LAYOUT, LAYERS, EXPERTS, jax.devices()[0])
    for layer in range(LAYERS):
        builder.put(layer, 0, values[layer].view(np.uint16))
    return builder.finish()


@pytest.mark.parametrize("version", ["int8", "int4", "int2", "lossless12"])
def test_a_version_is_the_encoder_s_work(version, monkeypatch):
    monkeypatch.setattr(store_versions, "WORKERS", 2)
    monkeypatch.setattr(store_versions, "_BATCH_BYTES", 0)  # batches of two, and of one
    values, calls = weights(), []
    store = add_version(dense_store(values), version, "bfloat16", mse, lambda *at: calls.append(at))
    assert list(store.layouts) == ["dense", version]
    layout, array = store.layouts[version], store.arrays[version]
    assert (layout.version, layout.dtype) == (version, "bfloat16")
    assert array.sharding.memory_kind == "pinned_host"
    expected = encode(values.reshape(-1, 30, 32), layout, mse)
    np.testing.assert_array_equal(np.asarray(array).reshape(expected.shape), expected)
    np.testing.assert_array_equal(np.asarray(store.arrays["dense"]), values.view(np.uint16))
    assert len(calls) == 6 and calls[-1] == (values.nbytes, values.nbytes)


def test_only_some_versions_are_kept():
    store = add_version(dense_store(weights()), "int4", "bfloat16")
    kept = store.only(("int4",))
    assert list(kept.layouts) == list(kept.arrays) == ["int4"]
    assert store.arrays["dense"].is_deleted() and not kept.arrays["int4"].is_deleted()
    assert kept.nbytes == LAYERS * EXPERTS * kept.layouts["int4"].nbytes
    with pytest.raises(KeyError):
        kept.only(("dense",))


def test_versions_that_cannot_be_added():
    store = add_version(dense_store(weights()), "int4", "bfloat16")
    with pytest.raises(VersionError, match="has version int4 already"):
        add_version(store, "int4", "bfloat16")
    with pytest.raises(ValueError, match="lossless12 holds bfloat16 weights, not float16"):
        add_version(store, "lossless12", "float16")
    with pytest.raises(VersionError, match="int8 is made from dense, which this store does not"):
        add_version(store.only(("int4",)), "int8", "bfloat16")


def test_the_expert_that_a_version_cannot_hold_is_named(monkeypatch):
    monkeypatch.setattr(store_versions, "_BATCH_BYTES", 0)
    monkeypatch.setattr(store_versions, "WORKERS", 2)
    values = weights()
    values[1, 3, 0, 0] = np.nan
    store = dense_store(values)
    with pytest.raises(VersionError, match="int4 cannot hold expert 3 of MoE layer 1: weights are"):
        add_version(store, "int4", "bfloat16")
    assert not store.arrays["dense"].is_deleted()


def test_records_are_read_from_pinned_memory(monkeypatch):
    monkeypatch.setattr(store_versions, "WORKERS", 2)
    monkeypatch.setattr(store_versions, "_BATCH_BYTES", 1)
    values = weights()
    store = dense_store(values)
    found = read_records(store.arrays["dense"], 1, 2, 3)
    np.testing.assert_array_equal(found, values[1, 2:5].view(np.uint16))
    parts = list(dense_weights(store, "bfloat16"))
    assert [(layer, first) for layer, first, _ in parts] == [
        (layer, first) for layer in (0, 1) for first in (0, 2, 4)
    ]
    together = np.concatenate([part.view(np.uint16) for _, _, part in parts])
    np.testing.assert_array_equal(together.reshape(values.shape), values.view(np.uint16))


def test_relative_errors():
    values = weights()
    values[0, 1] = 0
    store = add_version(dense_store(values), "int4", "bfloat16")
    errors = relative_errors(store, "int4", "bfloat16")
    assert errors.shape == (LAYERS, EXPERTS) and errors[0, 1] == 0
    assert (np.delete(errors.reshape(-1), 1) > 0.05).all() and (errors < 0.2).all()
    assert not relative_errors(store, "dense", "bfloat16").any()
    exact = np.array([[[3.0, 4.0]]], np.float32)
    found = relative_error(exact, np.array([[[3.0, 3.0]]], np.float32))
    np.testing.assert_allclose(found, [0.2], rtol=1e-6)

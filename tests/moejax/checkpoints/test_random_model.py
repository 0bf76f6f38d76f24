"""Random models have the sizes of the models that they are named after, and are repeatable."""

import jax
import numpy as np
import pytest

from host_offload.memory import store as store_module
from moejax.checkpoints import random_model as random_model_module
from moejax.checkpoints.random_model import random_model, shape


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_random_model_is_repeatable_and_its_experts_differ(dtype):
    config = shape("demo", layers=2)
    loaded, again = random_model(config, dtype, seed=3), random_model(config, dtype, seed=3)
    other = random_model(config, dtype, seed=4)
    store = np.asarray(loaded.store.arrays["dense"])
    assert store.shape == (2, 16, loaded.layout.rows, 128)
    assert np.array_equal(store, np.asarray(again.store.arrays["dense"]))
    assert not np.array_equal(store, np.asarray(other.store.arrays["dense"]))
    assert len({record.tobytes() for record in store.reshape(32, -1)}) == 32
    weights = store.view(loaded.params["embed"].dtype).astype(np.float32)
    assert np.isfinite(weights).all()
    assert weights.std() == pytest.approx(0.02, rel=0.05)
    for ours, theirs in zip(*map(jax.tree.leaves, (loaded.params, again.params)), strict=True):
        assert np.array_equal(np.asarray(ours), np.asarray(theirs))
    assert (np.asarray(loaded.params["runs"][0]["q_norm"]) == 1).all()
    assert loaded.dtype == dtype
    for model in (loaded, again, other):
        model.store.delete()


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_a_device_cuts_the_records_that_the_host_would(monkeypatch, dtype):
    config = shape("demo", layers=2)
    ours = random_model(config, dtype)
    for module in (random_model_module, store_module):
        monkeypatch.setattr(module, "shares_memory", lambda device: False)
    theirs = random_model(config, dtype)
    for a, b in zip(*map(jax.tree.leaves, (ours.params, theirs.params)), strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))
    assert np.array_equal(*(np.asarray(m.store.arrays["dense"]) for m in (ours, theirs)))
    for model in (ours, theirs):
        model.store.delete()

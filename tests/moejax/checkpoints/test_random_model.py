"""Random models have the sizes of the models that they are named after, and are repeatable."""

import jax
import numpy as np
import pytest

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

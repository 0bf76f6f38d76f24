"""The log of native ops: what ran, in its order, and nothing while nobody records."""

import ctypes
import time

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.cpu import spans
from pallas_kernels.cpu.spans import recorded
from pallas_kernels.rms_norm import rms_norm
from tests.pallas_kernels.contract import NATIVE

pytestmark = NATIVE


def norm():
    x = jnp.ones((2, 16), jnp.float32)
    jax.block_until_ready(rms_norm(x, jnp.ones((1, 16)), 0, eps=1e-6, implementation="cpu"))


def test_what_ran_is_recorded_and_only_while_it_is():
    norm()
    began = time.monotonic()
    with recorded() as ops:
        norm()
        norm()
    ended = time.monotonic()
    norm()
    assert [(op.op, op.layer) for op in ops] == [("rms_norm", None)] * 2
    times = [seconds for op in ops for seconds in (op.begin, op.end)]
    assert began <= times[0] and times == sorted(times) and times[-1] <= ended
    with recorded() as ops:
        pass
    assert ops == []


def test_more_than_the_log_has_room_for_is_an_error(monkeypatch):
    """The library says how many it dropped, which a test cannot make a million of."""
    take = spans._take

    def dropping(calls: ctypes.CDLL):
        found, dropped = take(calls)
        return found, dropped + 3

    monkeypatch.setattr(spans, "_take", dropping)
    with pytest.raises(RuntimeError, match="3 ops were not recorded"), recorded():
        norm()

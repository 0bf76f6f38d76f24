"""PreScope's AsyncIO over the native queue: two buffers on demand, two groups of prefetches, three
sub-transfers an expert, by threads and delays that nobody chose."""

from __future__ import annotations

import numpy as np
import pytest

from host_offload.policies.placement.buffers import DEMAND_BUFFERS, Buffers, Key
from host_offload.queue.native import Faults, NativeQueue
from host_offload.queue.transfer import DEMAND, Load, QueueError, Source, Transfer
from pallas_kernels.cpu.library import why_not_cpu

pytestmark = [
    pytest.mark.skipif(why_not_cpu() is not None, reason=f"cpu: {why_not_cpu()}"),
    pytest.mark.slow,  # nothing here depends on the version of Python or jax
]

LAYERS, EXPERTS, GROUP = 6, 8, 2
PARTS = ("gate", "up", "down")
SIZES = (3000, 3000, 2000)
STORE = np.random.default_rng(1).integers(256, size=(LAYERS, EXPERTS, sum(SIZES)), dtype=np.uint8)


class Engine:
    """Loads on demand and ahead through the buffers, which the queue fills, and reads them."""

    def __init__(self, queue: NativeQueue):
        self.queue, self.buffers = queue, Buffers.empty(GROUP)
        self.memory = np.zeros((DEMAND_BUFFERS + 2 * GROUP, sum(SIZES)), np.uint8)
        self.flying: dict[tuple[int, int], int] = {}
        """(layer, expert) → ticket, of parts that are not known to have landed."""

    def begun(self, key: Key, *, ahead: bool) -> bool:
        """Whether there was a buffer."""
        buffers = self.buffers.begun(key, ahead=ahead)
        if buffers is None:
            return False
        place = buffers.place(key)
        assert place is not None
        source = Source(address=STORE[key].ctypes.data)
        load = Load(SIZES, source, self.memory[place].ctypes.data)
        cause = "prefetch" if ahead else DEMAND
        # The queue refuses a second writer of a cell, so a buffer that was given too early shows.
        ticket = self.queue.submit(Transfer(*key, 0, place, cause, 0), load)
        self.buffers, self.flying[key] = buffers, ticket
        return True

    def landed(self, key: Key) -> None:
        ticket = self.flying.pop(key)
        for number, part in enumerate(PARTS):
            self.queue.wait(ticket, number)
            self.buffers = self.buffers.landed(key, part)
        self.queue.wait(ticket)

    def computed(self, key: Key, meanwhile) -> None:
        """Reads all of the expert, before and after `meanwhile`, which may begin other loads."""
        place = self.buffers.place(key)
        assert place is not None
        self.buffers = self.buffers.read_begun(key)
        np.testing.assert_array_equal(self.memory[place], STORE[key])
        meanwhile()
        np.testing.assert_array_equal(self.memory[place], STORE[key])
        self.buffers = self.buffers.read_ended(key)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_nobody_is_overwritten_before_the_last_read(threads, seed):
    """Layers of random experts, right and wrong prefetches, delays before and after each
    sub-transfer: each expert is read whole, and loads go on while others are read."""
    rng = np.random.default_rng(seed)
    loaded_beside = ahead_used = 0
    with NativeQueue(threads=threads, chunk_bytes=max(SIZES)) as queue:
        queue.inject(Faults(seed=seed, delay=2e-3))
        engine = Engine(queue)
        for layer in range(LAYERS):
            used = [(layer, int(e)) for e in rng.permutation(EXPERTS)[:5]]
            there = [key for key in used if engine.buffers.place(key) is not None]
            wanted = [key for key in used if key not in there]
            ahead = [(layer + 1, int(e)) for e in rng.permutation(EXPERTS)[:3]]
            ahead = ahead if layer + 1 < LAYERS else []
            ahead_used += len(there)

            def go_on(wanted=wanted, there=there, ahead=ahead) -> None:
                """Demands first, in the two buffers; then what comes ahead."""
                nonlocal loaded_beside
                while wanted and engine.begun(wanted[0], ahead=False):
                    there.append(wanted.pop(0))
                    loaded_beside += 1
                while not wanted and ahead and engine.begun(ahead[0], ahead=True):
                    ahead.pop(0)

            go_on()
            # What came for an earlier layer and was not used lands before its buffer is another's.
            for key in [key for key in engine.flying if key[0] < layer]:
                engine.landed(key)
            while there:
                key = there.pop(0)
                if key in engine.flying:
                    engine.landed(key)
                engine.computed(key, go_on)
                go_on()
            assert not wanted
            engine.buffers = engine.buffers.layer_ended(layer)
    assert loaded_beside > LAYERS and ahead_used > 0


def test_a_buffer_that_is_given_too_early_is_refused():
    """The queue is the second guard: a cell has one writer."""
    with NativeQueue(threads=1, chunk_bytes=max(SIZES), rate=1e5) as queue:
        engine = Engine(queue)
        assert engine.begun((0, 0), ahead=False)
        engine.buffers = Buffers.empty(GROUP)  # as if it had landed and been read
        with pytest.raises(QueueError):
            engine.begun((0, 1), ahead=False)

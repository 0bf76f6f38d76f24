"""`driver=stream,tiers=…`: the rates at which experts get from tiers into the window."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from host_offload.memory.arena import own_arena
from host_offload.memory.record_source import StackedRecords, locate_records
from host_offload.queue.native import NativeQueue
from pallas_kernels.cpu.arena import drain
from pallas_kernels.fill import Fills, fill
from pallas_kernels.fill.unpack import unpack
from pallas_kernels.records import decode

if TYPE_CHECKING:
    from moejax.step.step_parts import StepSpec

_PROBED = 32 << 20
"""Dense bytes that are moved to measure a rate."""


class TierRates(NamedTuple):
    """Dense bytes a second."""

    host: float
    """Rate over the link."""
    packed: float
    """Rate of decoding into the window."""


def measure_rates(steps: StepSpec, device: jax.Device) -> TierRates:
    """Returns the dense bytes a second that the queue of these steps brings from the store, and
    that it decodes out of the arena: each alone, the best of three. A link of stated rate is as
    fast as stated. Measured on records of zeros, which have no escapes. If jax's own copies bring
    experts, measures those copies and XLA's decoding."""
    if steps.separate:
        return _rates_of_copies(steps, device)
    wanted, formats = steps.queue, steps.formats
    assert wanted is not None and formats is not None
    dense, packed = (version.cell for version in formats)
    count = max(_PROBED // dense.nbytes, 1)
    memory = own_arena(count * dense.rows + packed.rows, dense.hidden)
    stores = tuple(
        jax.device_put(np.zeros((1, count, f.rows, f.hidden), np.uint16), device)
        for f in (dense, packed)
    )
    with NativeQueue(threads=wanted.threads, chunk_bytes=wanted.chunk_bytes) as queue:
        queue.keep_settled(False)
        ahead = queue.cause_number("prefetch")
        held = [*map(StackedRecords, (dense, packed), stores)]
        sources = locate_records(held, (None, None), 1, queue.file_number)
        memory.attach(queue.handle, sources, ahead=ahead, buffers=1)
        expert, none = jnp.arange(count), jnp.zeros(count, jnp.int32)
        row = expert * dense.rows

        def bring(arena):
            said = {"formats": formats, "ahead": True, "implementation": "cpu"}
            fills = Fills(expert, row, none, jnp.int32(count))
            return drain(fill(arena, stores, 0, fills, **said), row)

        def decode_all(arena):
            source = none + count * dense.rows
            return drain(
                unpack(arena, 0, expert, source, row, jnp.int32(count), packed=packed), row
            )

        arena, best = memory.on(device), []
        with jax.enable_x64(False):
            for program in map(jax.jit, (bring, decode_all)):

                def act(program=program) -> None:
                    nonlocal arena
                    arena, _ = jax.block_until_ready(program(arena))

                best.append(count * dense.nbytes / _seconds(act))
    memory.close()
    host, of_packed = best
    return TierRates(wanted.rate or host, of_packed)


def _rates_of_copies(steps: StepSpec, device: jax.Device) -> TierRates:
    formats = steps.formats
    assert formats is not None
    dense, packed = (version.cell for version in formats)
    count = min(max(_PROBED // dense.nbytes, 1), 16)  # on a CPU XLA takes its time to decode
    sharding = SingleDeviceSharding(device)
    pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
    records = jax.device_put([np.zeros((dense.rows, dense.hidden), np.uint16)] * count, pinned)
    cells = jax.device_put(np.zeros((count, packed.rows, packed.hidden), np.uint16), sharding)
    every = jax.jit(lambda cells: jax.lax.map(lambda record: decode(record, packed), cells))
    brought = _seconds(lambda: jax.block_until_ready(jax.device_put(records, sharding)))
    decoded = _seconds(lambda: jax.block_until_ready(every(cells)))
    return TierRates(count * dense.nbytes / brought, count * dense.nbytes / decoded)


def _seconds(act: Callable[[], object]) -> float:
    """Returns the seconds of the best of three calls, after one that compiles."""
    times = []
    for _ in range(4):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return min(times[1:])

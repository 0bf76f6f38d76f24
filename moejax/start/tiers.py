"""`--tiers`: where residents of the stream driver are, and how fast they get into the window."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from host_offload.memory.arena import own_arena
from host_offload.queue.native import NativeQueue
from host_offload.queue.sources import memory_sources
from host_offload.sizing.tiers import INTERVAL
from moejax.errors import UserError, user_errors
from pallas_kernels.cpu.arena import drain
from pallas_kernels.fill import Fills, fill
from pallas_kernels.fill.unpack import unpack
from pallas_kernels.option_text import Reader, one_of, parse_option, share, whole
from pallas_kernels.records import decode

if TYPE_CHECKING:
    from host_offload.policies.precision.names import Precision
    from moejax.start.options import Options
    from moejax.step.parts import StepSpec

NAMES = ("flux", "flux-direct")
BY = ("experts", "layers")
PLANNERS = ("live", "one-layer", "none")

PACKED_AS = "lossless12"

_PROBED = 32 << 20
"""Dense bytes that are moved to measure a rate."""


@dataclasses.dataclass(frozen=True)
class Tiers:
    """What `--tiers NAME,KEY=VALUE…` says. Shares are of each layer's experts, or with by="layers"
    of the layers, the first of which are in a tier whole."""

    name: str
    """One of NAMES."""
    dense: float = 0.0
    packed: float | None = None
    """None: as many as are decoded in the time in which the others come over the link."""
    by: str = "experts"
    planner: str = "live"
    """Who moves experts while requests run: FluxMoE's planner, one expert of every layer at a time
    ("live") or as many of one layer ("one-layer"); or nobody."""
    interval: int = INTERVAL
    """Steps between two of its moves."""

    @property
    def direct(self) -> bool:
        """Packed residents are computed as they are."""
        return self.name == "flux-direct"


class TierRates(NamedTuple):
    """Dense bytes a second."""

    host: float
    """Over the link."""
    packed: float
    """Decoded into the window."""


def tiers_of_options(options: Options, precision: Precision) -> Tiers | None:
    """Raises UserError for what there is not, and for what does not go with tiers."""
    if options.tiers is None:
        return None
    with user_errors():
        name, _, given = parse_option("tiers", options.tiers, dict.fromkeys(NAMES, _SETTINGS))
    if options.driver != "stream":
        raise UserError(
            f"tiers={name} is of experts that stream; use driver='stream', or leave it out"
        )
    if precision.versions != ("dense",) or options.store != "memory":
        raise UserError(
            f"tiers={name} packs dense experts of a store in memory, not precision "
            f"{precision.name} of store={options.store!r}; leave those out, or tiers"
        )
    if (options.chunk_bytes or 0) % 2:
        raise UserError(f"tiers={name} decodes whole values; use an even chunk_bytes")
    if given.get("by") == "layers" and given.setdefault("planner", "none") != "none":
        raise UserError("tiers by=layers stay as they begin; use planner=none")
    found = Tiers(name, **given)
    if found.dense + (found.packed or 0.0) > 1:
        raise UserError(f"dense={found.dense:g} and packed={found.packed:g} are more than all")
    return found


_SETTINGS: dict[str, Reader] = {
    "dense": share,
    "packed": share,
    "by": one_of(*BY),
    "planner": one_of(*PLANNERS),
    "interval": whole(1),
}


def measured_rates(steps: StepSpec, device: jax.Device) -> TierRates:
    """What the queue of these steps brings from the store and decodes out of the arena in a second,
    each alone, the best of three; a link of stated rate is as fast as it says. On records of zeros,
    which have no escapes. Where jax's own copies bring them: those, and XLA's decoding."""
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
        sources = memory_sources(stores, (dense, packed), 1, formats)
        memory.attach(queue.handle, sources, ahead=ahead, buffers=1)
        expert, none = jnp.arange(count), jnp.zeros(count, jnp.int32)
        row = expert * dense.rows

        def brought(arena):
            said = {"formats": formats, "ahead": True, "implementation": "cpu"}
            fills = Fills(expert, row, none, jnp.int32(count))
            return drain(fill(arena, stores, 0, fills, **said), row)

        def decoded(arena):
            source = none + count * dense.rows
            return drain(
                unpack(arena, 0, expert, source, row, jnp.int32(count), packed=packed), row
            )

        arena, best = memory.on(device), []
        with jax.enable_x64(False):
            for program in map(jax.jit, (brought, decoded)):

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
    """The best of three, after one that compiles."""
    times = []
    for _ in range(4):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return min(times[1:])

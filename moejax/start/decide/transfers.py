"""Whether transfers run beside compute, over a link of stated rate, and why they cannot."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from host_offload.control.rules import gives_away
from host_offload.memory.budget import format_bytes
from host_offload.memory.store import ExpertStore, StoreBuilder, StoredVersion
from host_offload.queue.cached import CacheSpec, least_records
from host_offload.queue.pinned import PinnedBuilder
from host_offload.queue.transfer import CHUNK_BYTES, QueueSpec
from moejax.checkpoints.loaded_model import LoadedModel
from moejax.errors import UserError, user_errors
from moejax.start.option_values import Driver
from moejax.start.options import BOTH_MEMORIES
from moejax.start.settings import Settings
from moejax.start.tiers import PACKED_AS
from moejax.step.step_parts import StepSpec, arena_ops
from moejax.step.transports.copies import DEMANDS
from pallas_kernels.cpu.library import why_not_cpu
from pallas_kernels.records.absent import AbsentRecords

THREADS = {False: 2, True: 4}
"""Whether a queue reads files → its threads. There one waits for the disk while another one
verifies what came."""


def queue_of(settings: Settings) -> QueueSpec | None:
    """The queue that was asked for; None: ops copy experts in their place, the fastest where
    nothing limits the link. Files are read by one, and layers stream through one."""
    transfer, in_files = settings.options.transfer, settings.options.memory.store.name == "file"
    wanted = transfer.transfers
    if wanted.name != "queue" and transfer.driver.name != "stream" and not in_files:
        return None
    return QueueSpec(
        rate=wanted.rate or 0.0,
        latency=wanted.latency or 0.0,
        threads=wanted.threads or THREADS[in_files],
        chunk_bytes=wanted.chunk_bytes or CHUNK_BYTES,
    )


def jax_copies(settings: Settings, platform: str) -> bool:
    """Whether transfers were asked for that jax's own copies carry out: on a GPU, or with ops that
    are not native."""
    every = set(arena_ops(False)) & set(arena_ops(True))
    native = all(settings.ops[op] in ("cpu", "auto") for op in every)
    native = native and platform == "cpu" and why_not_cpu() is None
    transfer = settings.options.transfer
    queued = transfer.transfers.name == "queue" or transfer.driver.name == "stream"
    return queued and not native


def cache_of(settings: Settings, platform: str) -> CacheSpec | None:
    """The cache of experts in files in pinned memory; None: there is none. Raises UserError where
    nothing says how large."""
    options, store = settings.options, settings.options.memory.store
    if store.name != "file" or not jax_copies(settings, platform):
        if store.host_memory is not None and options.memory.memory is not None:
            raise UserError(BOTH_MEMORIES)
        return None
    if store.host_memory is None:
        raise UserError(
            "store='file' is read through a cache in pinned host memory here: say how large, "
            "store='file,host_memory=SIZE' (--store file,host_memory=16GiB)"
        )
    queue = queue_of(settings)
    assert queue is not None
    return CacheSpec(store.host_memory, queue.threads, options.transfer.transfers.chunk_bytes)


def automatic(settings: Settings, platform: str) -> bool:
    """Whether the device's memory decides, not numbers."""
    options = settings.options
    given = options.memory.memory is not None
    if options.memory.store.host_memory is not None and cache_of(settings, platform) is None:
        given = True
    return not given and None in (options.memory.expert_budget, options.memory.kv_budget)


def _check_cache(settings: Settings, steps: StepSpec, platform: str) -> None:
    """Raises UserError for a cache that does not hold what is on its way at once."""
    if (cache := cache_of(settings, platform)) is None:
        return
    record = steps.layout.records[0].nbytes
    least = record * least_records(DEMANDS, cache)
    if cache.bytes < least:
        raise UserError(
            f"host_memory {format_bytes(cache.bytes)} is too small a cache of experts in files: "
            f"{DEMANDS} that a layer waits for and {cache.threads} ahead of need take "
            f"{format_bytes(least)} ({least} bytes); raise it"
        )


def new_builder(settings: Settings, platform: str) -> Callable[..., StoreBuilder]:
    """What makes the store of these settings: of separate pinned arrays where jax's own copies are
    to bring them beside compute, on a GPU or with ops that are not native, else of one array.

    Raises UserError where that was asked for and cannot be, whatever the model is.
    """
    options, precision = settings.options, settings.precision
    driver, transfers = options.transfer.driver.name, options.transfer.transfers
    if transfers.name == "ops":
        if driver == "stream":
            raise UserError(
                "driver='stream' loads layers by a queue of transfers; leave out transfers='ops'"
            )
        if options.memory.store.name == "file":
            raise UserError(
                "store='file' is read by a queue of transfers; leave out transfers='ops', or take "
                "store='memory'"
            )
    if not jax_copies(settings, platform):
        return StoreBuilder
    where = "on a GPU" if platform != "cpu" else "with ops that are not native"
    what = "driver='stream'" if driver == "stream" else "transfers='queue'"
    instead = "driver='device'" if driver == "stream" else "transfers='ops'"
    if settings.tiers is not None:
        _check_tiers(settings.tiers, where)
    if options.memory.store.name == "shared":
        raise UserError(
            f"{what} {where} keeps experts in pinned arrays of its own, not in memory "
            "that processes share: use store='memory'"
        )
    if driver == "device":
        raise UserError(
            f"{what} {where} is carried out between the parts of a layer, which "
            "driver='device' runs as one executable: use driver='host', or "
            "transfers='ops', which brings experts from inside of it"
        )
    if transfers.stated:
        raise UserError(
            "rate and latency of transfers='queue' are for a CPU with native ops, whose transfers "
            f"this library carries out; {where} jax's copies pass the link as it is: leave them out"
        )
    if precision.versions != ("dense",) or precision.mixed or precision.in_transit:
        raise UserError(
            f"{what} {where} brings dense experts, not precision {precision.name}: use "
            f"{instead} for it"
        )
    if settings.needs_costs:
        raise UserError(
            f"{what} {where}: what steps cost there is not measured, and these policies "
            f"or budgets need it; leave them out, or use {instead} (a placement takes stated ones: "
            "per_token=TIME,startup=TIME,load=TIME,accelerator=TIME,attention=TIME)"
        )
    # A second processor computes with a record as it lies.
    whole = gives_away(settings.policies)
    return functools.partial(PinnedBuilder, chunk_bytes=transfers.chunk_bytes, whole=whole)


def _check_tiers(tiers: Driver, where: str) -> None:
    """Raises UserError for tiers that only native ops serve."""
    if tiers.planner != "none":
        raise UserError(
            f"tiers={tiers.tiers} with planner={tiers.planner} moves residents of an arena that "
            f"the native library owns, not that of driver='stream' {where}: add planner=none, "
            "which keeps them where they begin"
        )


def stored_versions(settings: Settings, platform: str) -> tuple[str, ...]:
    """Those that the store is loaded with: where jax's own copies bring experts, packed residents
    are made of dense ones when they get their cells."""
    if settings.tiers is not None and jax_copies(settings, platform):
        return settings.precision.versions
    return settings.versions


def with_packed(loaded: LoadedModel, settings: Settings, platform: str) -> LoadedModel:
    """The model with the layout of packed records, none of which are in its store. Raises UserError
    for weights that have no such version."""
    if settings.tiers is None or stored_versions(settings, platform) == settings.versions:
        return loaded
    store = loaded.store
    with user_errors():
        packed = dataclasses.replace(loaded.layout, version=PACKED_AS)
    (records,) = store.arrays.values()
    shape = (*records.shape[:2], packed.rows, packed.hidden)
    versions = store.versions | {PACKED_AS: StoredVersion(packed, AbsentRecords(shape))}
    return dataclasses.replace(loaded, store=ExpertStore(versions))


def check_queue(settings: Settings, steps: StepSpec, platform: str) -> None:
    """Raises UserError where transfers beside compute were asked for and cannot be."""
    if steps.queue is None:
        return
    if steps.separate and new_builder(settings, platform) is not StoreBuilder:
        _check_cache(settings, steps, platform)
        return
    if steps.foreign_ops:
        op, name = next(iter(steps.foreign_ops.items()))
        raise UserError(
            f"transfers='queue' needs native CPU ops, which wait for transfers; op {op} is {name}: "
            "leave it out, or use ops='cpu' (`python -m pallas_kernels.cpu` builds them)"
        )
    if settings.precision.in_transit:
        raise UserError(
            f"precision {settings.precision.name} decodes experts on their way, which "
            "transfers='queue' does not; use another precision, or leave it out"
        )


def link_notes(queue: QueueSpec | None) -> list[str]:
    """What results must say of the link."""
    if queue is None or not (queue.rate or queue.latency):
        return []
    rate = f"{queue.rate / 1e9:.3g} GB/s" if queue.rate else "unlimited rate"
    return [f"experts pass a link of {rate}, {queue.latency * 1e6:.3g} us, beside compute"]

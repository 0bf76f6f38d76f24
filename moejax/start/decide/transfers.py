"""Places of experts without a cell, and how experts are moved."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from host_offload.control.rules import gives_away
from host_offload.memory.store import StoreBuilder, StoredVersion
from host_offload.queue.cached import CacheSpec
from host_offload.queue.pinned import PinnedBuilder
from host_offload.queue.transfer import CHUNK_BYTES, QueueSpec
from moejax.checkpoints.loaded_model import LoadedModel
from moejax.errors import user_errors
from moejax.start.choices import PACKED_AS, Settings
from moejax.step.step_parts import ARENA_OPS
from pallas_kernels.cpu.library import why_not_cpu
from pallas_kernels.records.absent import AbsentRecords

THREADS = {False: 2, True: 4}
"""Threads of a queue, by whether it reads files. With files, one thread waits for the disk while
another verifies what was read."""


def queue_of(settings: Settings) -> QueueSpec | None:
    """Returns the queue that the settings ask for. None: ops copy the experts themselves, which is
    fastest if nothing limits the link. Files and streamed layers need a queue."""
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
    """Whether jax's own copies carry out transfers: on a GPU, or with ops that are not native."""
    native = all(settings.ops[op] in ("cpu", "auto") for op in ARENA_OPS)
    native = native and platform == "cpu" and why_not_cpu() is None
    transfer = settings.options.transfer
    queued = transfer.transfers.name == "queue" or transfer.driver.name == "stream"
    return queued and not native


def reads_codes(settings: Settings, platform: str) -> bool:
    """Whether products read matrices in the codes of a quantized checkpoint."""
    native = settings.ops["linear"] in ("cpu", "auto")
    return native and platform == "cpu" and why_not_cpu() is None


def cache_of(settings: Settings, platform: str) -> CacheSpec | None:
    """Returns the cache in pinned memory of experts in files, or None without one."""
    options, store = settings.options, settings.options.memory.store
    queue = queue_of(settings)
    if store.name != "file" or queue is None or not jax_copies(settings, platform):
        return None
    assert store.host_memory is not None, "another size is refused"
    return CacheSpec(store.host_memory, queue.threads, options.transfer.transfers.chunk_bytes)


def automatic(settings: Settings, platform: str) -> bool:
    """Whether the device's memory decides sizes, not numbers of the user."""
    options = settings.options
    given = options.memory.memory is not None
    if options.memory.store.host_memory is not None and cache_of(settings, platform) is None:
        given = True
    return not given and None in (options.memory.expert_budget, options.memory.kv_budget)


def new_builder(settings: Settings, platform: str) -> Callable[..., StoreBuilder]:
    """Returns the builder of the store: separate pinned arrays if jax's own copies bring experts
    beside compute (on a GPU, or with ops that are not native), else one array."""
    if not jax_copies(settings, platform):
        return StoreBuilder
    # A second processor computes with a record as it lies.
    whole = gives_away(settings.policies)
    chunk_bytes = settings.options.transfer.transfers.chunk_bytes
    return functools.partial(PinnedBuilder, chunk_bytes=chunk_bytes, whole=whole)


def stored_versions(settings: Settings, platform: str) -> tuple[str, ...]:
    """Returns the versions that the store is loaded with. If jax's own copies move experts, packed
    residents are made from dense ones when they get their cells."""
    if settings.tiers is not None and jax_copies(settings, platform):
        return settings.precision.versions
    return settings.versions


def add_packed_layout(loaded: LoadedModel, settings: Settings, platform: str) -> LoadedModel:
    """Returns the model with the layout of packed records; its store has none of them. Raises
    UserError for weights that have no such version."""
    if settings.tiers is None or stored_versions(settings, platform) == settings.versions:
        return loaded
    store = loaded.store
    with user_errors():
        packed = dataclasses.replace(loaded.layout, version=PACKED_AS)
    (records,) = store.arrays.values()
    shape = (*records.shape[:2], packed.rows, packed.hidden)
    versions = store.versions | {PACKED_AS: StoredVersion(packed, AbsentRecords(shape))}
    return dataclasses.replace(loaded, store=dataclasses.replace(store, versions=versions))

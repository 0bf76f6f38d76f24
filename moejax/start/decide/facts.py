"""Plain facts about a model and a device that a start needs before it can decide."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import jax

from host_offload.memory.device_memory import FreeMemory, free_memory
from host_offload.memory.store import ExpertStore, StoredVersion
from moejax.checkpoints.load import LoadedModel
from moejax.errors import UserError
from moejax.models.config import ModelConfig
from moejax.start.tiers import TierRates
from pallas_kernels.cards import shared_class


@dataclasses.dataclass(frozen=True)
class ModelFacts:
    """The facts of a model that decisions depend on. Its weights are loaded before or after."""

    config: ModelConfig
    dtype: str
    store: ExpertStore
    """Which versions of which layers exist, without their arrays."""
    read_bytes: int
    """Bytes of parameters beside experts that a decode step of one row reads. Of the embeddings a
    step reads one row, so they count only if they are the head too."""
    param_bytes: int
    """Bytes of all parameters beside experts."""
    file_bytes: int = 0
    """Bytes of experts that stay in files."""
    verified: bool = False
    """Whether reads of experts in files are compared with checksums."""


def facts_of(loaded: LoadedModel) -> ModelFacts:
    """Returns the facts of a loaded model. Reads no array."""
    held = loaded.store.versions.items()
    store = ExpertStore({v: StoredVersion(each.layout, layers=each.layers) for v, each in held})
    verified = all(source.verify for source in loaded.store.files.values())
    sizes = *bytes_of(loaded.params), loaded.store.file_bytes
    return ModelFacts(loaded.config, loaded.dtype, store, *sizes, verified)


def bytes_of(params: dict) -> tuple[int, int]:
    """Returns ModelFacts.read_bytes and ModelFacts.param_bytes.

    - `params`: the params of LoadedModel, or their jax.ShapeDtypeStructs.
    """
    gathered = {"embed"} if "lm_head" in params else set()
    nbytes = {
        name: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(part))
        for name, part in params.items()
    }
    every = sum(nbytes.values())
    return every - sum(nbytes[name] for name in gathered), every


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """The facts of a device that decisions depend on."""

    platform: str
    kind: str
    runtime: str
    shared_kib: int
    """Shared memory of a program in KiB, as `pallas_kernels.cards.shared_class` rounds it."""
    memory: FreeMemory | None = None
    """Free memory; None: the device does not report it, and the user gave a limit."""
    declined: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Op whose kernel must not run here → why."""
    rates: TierRates | None = None
    """Rates of the backends that layers stream from, if tiers were asked for."""


def device_facts(device: jax.Device, *, automatic: bool) -> DeviceFacts:
    """Returns the facts of a device now.

    - `automatic`: whether the device's memory decides sizes, not numbers of the user.

    Raises UserError with `automatic` for a device that does not report its memory.
    """
    memory = None
    try:
        memory = free_memory(device)
    except RuntimeError as error:
        if automatic:
            raise UserError(str(error)) from error
    return DeviceFacts(
        platform=device.platform,
        kind=device.device_kind,
        runtime=device.client.platform_version,
        shared_kib=shared_class(device),
        memory=memory,
    )

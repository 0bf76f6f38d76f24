"""What a start has to know of a model and of a device before it can decide: plain facts."""

from __future__ import annotations

import dataclasses

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
    """What decisions depend on of a model whose weights are, or will be, loaded."""

    config: ModelConfig
    dtype: str
    store: ExpertStore
    """Which versions of which layers there are, without their arrays."""
    read_bytes: int
    """Bytes of parameters beside experts that a decode step of one row reads: all but the
    embeddings, of which it takes a row, unless they are the head too."""
    param_bytes: int
    """Bytes of all parameters beside experts."""
    file_bytes: int = 0
    """Bytes of experts that stay in files."""
    verified: bool = False
    """Reads of experts in files are compared with checksums."""


def facts_of(loaded: LoadedModel) -> ModelFacts:
    """The facts of a loaded model; no array is read."""
    held = loaded.store.versions.items()
    store = ExpertStore({v: StoredVersion(each.layout, layers=each.layers) for v, each in held})
    verified = all(source.verify for source in loaded.store.files.values())
    sizes = *bytes_of(loaded.params), loaded.store.file_bytes
    return ModelFacts(loaded.config, loaded.dtype, store, *sizes, verified)


def bytes_of(params: dict) -> tuple[int, int]:
    """ModelFacts.read_bytes and param_bytes. params: of LoadedModel, or their
    jax.ShapeDtypeStructs."""
    gathered = {"embed"} if "lm_head" in params else set()
    nbytes = {
        name: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(part))
        for name, part in params.items()
    }
    every = sum(nbytes.values())
    return every - sum(nbytes[name] for name in gathered), every


@dataclasses.dataclass(frozen=True)
class DeviceFacts:
    """What decisions depend on of a device."""

    platform: str
    kind: str
    runtime: str
    shared_kib: int
    """As pallas_kernels.cards.shared_class."""
    memory: FreeMemory | None = None
    """None: it does not say, and the user gave a limit."""
    rates: TierRates | None = None
    """How fast the backends are that layers stream from, where tiers were asked for."""


def device_facts(device: jax.Device, *, automatic: bool) -> DeviceFacts:
    """The facts of a device now. automatic: its memory decides, not numbers; then one that does not
    say what it has is refused with a UserError."""
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

"""A checkpoint in memory, and what every way of loading one needs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from host_offload.memory.budget import format_bytes
from host_offload.memory.device_memory import host_available_bytes
from host_offload.memory.store import ExpertStore, StoreBuilder
from moejax.checkpoints.shared_memory import SharedMemory
from moejax.device import require_pinned_memory
from moejax.errors import UserError, user_errors
from moejax.models.config import ModelConfig
from pallas_kernels.records import RecordFormat

log = logging.getLogger("moejax")

DTYPE_NAMES = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}
"""What the option dtype may be besides "auto" (vLLM's names) → the run's dtype."""


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A checkpoint in memory.

    dtype: the run's, "bfloat16", "float16" or "float32"; config.dtype is the checkpoint's.
    params: jax arrays on the device in the run's dtype (a family's wide_params in float32),
    matrices as [out, in]: "embed" [V, D], "final_norm" [D], "lm_head" [V, D] (absent if tied),
    biases where the family has them, and "runs", one dict for each of config.runs with leading axis
    n, its layers. Their names and shapes are the family's layer_params
    (docs/extending/add_a_model.md), of Qwen3-MoE "input_norm" [n, D], "qkv" [n, (H + 2·KH)·hd, D]
    (rows of q, k, v), "q_norm", "k_norm" [n, hd], "o" [n, D, H·hd], "post_norm" [n, D], "router"
    [n, E, D]. store: all experts, dense unless other versions were asked for. layout: of a dense
    record. seconds: how long the phases of loading took, as in
    moejax.engine.statistics.StartTimes. quantizers: how the store's versions besides the dense one
    were made.
    """

    config: ModelConfig
    dtype: str
    params: dict[str, Any]
    store: ExpertStore
    layout: RecordFormat
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    quantizers: dict[str, str] = dataclasses.field(default_factory=dict)
    shared: SharedMemory | None = None
    """Where the experts lie, if other processes use them too; to be closed with the model."""


def run_dtype(dtype: str, stored: str) -> str:
    """The run's dtype. dtype: as in load_checkpoint; "auto" is `stored`. Raises UserError for a
    dtype that is neither "auto" nor one of DTYPE_NAMES."""
    if dtype != "auto" and dtype not in DTYPE_NAMES:
        raise UserError(f"dtype {dtype!r} is unknown; choose auto, {', '.join(DTYPE_NAMES)}")
    return stored if dtype == "auto" else DTYPE_NAMES[dtype]


def require_host_memory(nbytes: int, source: str) -> None:
    """Raises UserError where host memory has less free: what is allocated is used only when weights
    are read into it, and then the process would be killed. source: the checkpoint's path."""
    available = host_available_bytes()
    if nbytes > available:
        raise UserError(
            f"{source}: its config.json asks for {format_bytes(nbytes)} of weights in host memory, "
            f"of which {format_bytes(available)} are free; use a machine with more, or look "
            "whether this is the model that you think it is"
        )


@contextlib.contextmanager
def new_store(
    layout: RecordFormat,
    layers: int,
    experts: int,
    device: jax.Device,
    source: str,
    new_builder: Callable[..., StoreBuilder] = StoreBuilder,
    shared: SharedMemory | None = None,
) -> Iterator[StoreBuilder]:
    """An empty store for the experts of so many layers, to be filled and finished inside of the
    `with`. Raises UserError where the device's pinned memory is too small for it.
    source: the checkpoint's path, for messages. new_builder: StoreBuilder, or another one with its
    arguments, such as of PinnedRecords. shared: where it lies; it may be full already."""
    require_pinned_memory(device, layers * experts * layout.nbytes)
    with user_errors(MemoryError, where=f"{source}: "):
        lies = {} if shared is None else {"memory": shared.array, "filled": shared.filled}
        builder = new_builder(layout, layers, experts, device, **lies)
    with contextlib.closing(builder):  # a traceback that is kept must not keep the store
        yield builder


def warn_nonfinite(source: str, nonfinite: Mapping[str, int]) -> None:
    """Says once that weights are NaN or infinite: such a model loads, and mostly answers NaN."""
    if nonfinite:
        (name, count), others = next(iter(nonfinite.items())), len(nonfinite) - 1
        more = f", and {others} other tensors have such values too" if others else ""
        log.warning("%s: %d values of tensor %s are NaN or infinite%s", source, count, name, more)


def count_progress(
    progress: Callable[[int, int], None] | None, total: int
) -> Callable[[int], None]:
    """advance(nbytes): calls progress with (bytes so far, total)."""
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    return advance

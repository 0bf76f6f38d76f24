"""A checkpoint in memory, and the parts that loading and random weights share."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax

from host_offload.memory.budget import format_bytes
from host_offload.memory.device_memory import host_available_bytes, shares_memory
from host_offload.memory.store import ExpertStore, StoreBuilder
from moejax.checkpoints.shared_memory import SharedMemory
from moejax.device import require_pinned_memory
from moejax.errors import NotPinned, UserError
from moejax.models.config import ModelConfig
from pallas_kernels.records import RecordFormat

DTYPE_NAMES = {
    "half": "float16",
    "float16": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "float32": "float32",
}
"""Value of the option dtype, except "auto" (vLLM's names) → the run's dtype."""


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A checkpoint in memory.

    - `dtype`: the run's, "bfloat16", "float16" or "float32"; config.dtype is the checkpoint's.
    - `params`: jax arrays on the device in the run's dtype (a family's wide_params in float32),
      matrices as [out, in]: "embed" [V, D], "final_norm" [D], "lm_head" [V, D] (absent if tied),
      biases where the family has them, and "runs", one dict for each of config.runs, whose arrays
      have the n layers of the run as first axis. Names and shapes in "runs" are the family's
      layer_params (docs/extending/add_a_model.md); Qwen3-MoE has "input_norm" [n, D], "qkv"
      [n, (H + 2·KH)·hd, D] (rows of q, k, v), "q_norm", "k_norm" [n, hd], "o" [n, D, H·hd],
      "post_norm" [n, D], "router" [n, E, D].
    - `store`: all experts, dense unless the run asked for other versions.
    - `layout`: of a dense record.
    - `seconds`: the time of each phase of loading, as in moejax.engine.statistics.StartTimes.
    - `quantizers`: version → how it was made, for the versions other than dense.
    """

    config: ModelConfig
    dtype: str
    params: dict[str, Any]
    store: ExpertStore
    layout: RecordFormat
    seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    quantizers: dict[str, str] = dataclasses.field(default_factory=dict)
    shared: SharedMemory | None = None
    """The memory of the experts, if processes share it. Close it with the model."""

    def delete(self) -> None:
        """Ends reading and frees the store."""
        self.store.delete()
        if self.shared is not None:
            self.shared.close()


def run_dtype(dtype: str, stored: str) -> str:
    """The run's dtype.

    - `dtype`: "auto" for `stored`, or one of DTYPE_NAMES.

    Raises UserError for any other dtype.
    """
    if dtype != "auto" and dtype not in DTYPE_NAMES:
        raise UserError(f"dtype {dtype!r} is unknown; choose auto, {', '.join(DTYPE_NAMES)}")
    return stored if dtype == "auto" else DTYPE_NAMES[dtype]


def require_host_memory(nbytes: int, source: str) -> None:
    """Raises UserError where host memory has fewer than `nbytes` free. Without this check the
    kernel would kill the process later, when weights are read into the memory.

    - `source`: the checkpoint's path, for the message.
    """
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
    """Yields the builder of an empty store, to be filled and finished inside the `with`.

    - `layers`, `experts`: how many MoE layers, and experts of each.
    - `source`: the checkpoint's path, for messages.
    - `new_builder`: StoreBuilder, or a function with its arguments, such as one that makes
      PinnedRecords.
    - `shared`: shared memory for the store, which another process may have filled already.

    Raises NotPinned where the device's pinned memory is too small for one array, and UserError
    where host memory is.
    """
    lies = {} if shared is None else {"memory": shared.array, "filled": shared.filled}
    try:
        if new_builder is StoreBuilder:
            require_pinned_memory(device, layers * experts * layout.nbytes)
        builder = new_builder(layout, layers, experts, device, **lies)
    except MemoryError as error:
        kind = UserError if shares_memory(device) else NotPinned
        raise kind(f"{source}: {error}") from error
    with contextlib.closing(builder):  # a traceback that is kept must not keep the store
        yield builder


def count_progress(
    progress: Callable[[int, int], None] | None, total: int
) -> Callable[[int], None]:
    """Returns advance(nbytes), which sums the bytes and calls progress with (sum, total)."""
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total)

    return advance

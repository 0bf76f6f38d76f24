"""What a trace holds: its header, its steps and transfers, and the arrays of a chunk.

docs/trace_format.md describes the files; host_offload.traces.reader reads them, trace_writer writes
them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

FORMAT, VERSION = "moejax-trace", 1
KINDS = ("prefill", "decode")
USES = (
    "kv_used",
    "kv_peak",
    "kv_pages",
    "kv_swapped",
    "running",
    "waiting",
    "waiting_tokens",
)
"""Columns of `step.use`."""

ALWAYS = ("token.ids", "token.user", "step.number", "step.tokens")
"""Columns that no trace lacks."""


class TraceError(ValueError):
    """A trace that cannot be written or read; the message says which file and what to do."""


@dataclasses.dataclass(frozen=True)
class TraceHeader:
    """What a trace says once. L = layers (MoE layers only), E = experts, k = top_k.

    config_digest: names the model's configuration. spec: sizes and settings that policies see.
    causes: columns of a step's bytes. weights: "float32" or "float16", how router weights are kept.
    probabilities: router probabilities of all experts are recorded. gate_input, embedding: width of
    the recorded router inputs and embeddings, 0 for none. absent: columns that the trace does not
    have, since no engine of ours ran: it was converted or generated.
    """

    layers: int
    experts: int
    top_k: int
    config_digest: str
    spec: Mapping[str, Any]
    machine: Mapping[str, Any]
    command: Sequence[str]
    created: str
    causes: Sequence[str] = ("fill", "read_through", "stage")
    weights: str = "float32"
    probabilities: bool = False
    gate_input: int = 0
    embedding: int = 0
    absent: Sequence[str] = ()

    def __post_init__(self):
        if self.weights not in ("float32", "float16"):
            raise ValueError(f"weights are kept as float32 or float16, not {self.weights!r}")
        if min(self.layers, self.experts, self.top_k) < 1 or self.experts > np.iinfo(np.int16).max:
            raise ValueError(
                f"a trace needs layers, top_k ≥ 1 and 1…32767 experts, not {self.layers}, "
                f"{self.top_k} and {self.experts}"
            )
        known = set(written_columns(self)) - set(ALWAYS)
        if unknown := set(self.absent) - known:
            raise ValueError(
                f"{', '.join(sorted(unknown))} cannot be absent; what can is {', '.join(known)}"
            )


class StepTrace(NamedTuple):
    """One step of N tokens (no padding), as it is written and as it is read back. What the header
    calls absent is None."""

    request: np.ndarray
    """int32[N]: number of the token's request."""
    user: np.ndarray
    """int32[N]: number of its session, −1 without one."""
    position: np.ndarray
    """int32[N]: place in its sequence."""
    phase: np.ndarray
    """uint8[N]: 0 prompt, 1 generated."""
    ids: np.ndarray
    """int16[N, L, k]: routed experts, ascending."""
    weights: np.ndarray
    """float32[N, L, k] or float16."""
    number: int
    kind: str
    """One of KINDS."""
    start_s: float
    """When it was dispatched, in seconds since the trace began."""
    read_s: float
    """When its results were on the host, likewise."""
    seconds: float
    """What it cost: steps overlap, so from its dispatch or the read before it to its read."""
    rows: int
    """Token rows of its executable, padding included."""
    compiled: bool
    """It was the first to run its executable."""
    hits: np.ndarray
    """int32[L]: active experts that were resident."""
    fills: np.ndarray
    """int32[L]: experts moved into a cell inside the step."""
    read_through: np.ndarray
    """int32[L]: experts computed from the store."""
    waves: np.ndarray
    """int16[L]: passes over the layer's experts."""
    missed: np.ndarray
    """bool[L, E]: active experts that were not resident."""
    bytes: np.ndarray
    """int64[causes]: bytes over the link, by the header's causes."""
    use: np.ndarray
    """int64[len(USES)]: state of KV and queue, −1 where it is not known."""
    finished: tuple[int, ...]
    """Numbers of requests that ended with this step's results."""
    probabilities: np.ndarray | None = None
    """float16[N, L, E], when the header says so."""
    gate_input: np.ndarray | None = None
    """float16[N, L, S]."""
    embedding: np.ndarray | None = None
    """float16[N, D]."""


class TransferTrace(NamedTuple):
    """An expert moved ahead of need. issued, published, first_use: step numbers; −1: never."""

    layer: int
    expert: int
    version: int
    bytes: int
    issued: int
    published: int
    first_use: int
    cause: str


class Mark(NamedTuple):
    """A named moment: before step `step`, `seconds` since the trace began."""

    step: int
    seconds: float
    name: str


class Budget(NamedTuple):
    """The line between experts and KV was moved, before step `step`."""

    step: int
    cells: tuple[int, ...]
    """Of each layer, from then on."""
    kv_pages: int
    settled: bool
    """Nothing is left to do of what a policy wanted."""
    by_hand: bool
    """No policy wanted it: the engine was idle, or KV was given slots since nothing could run."""


TRANSFER_TYPES = {
    "layer": np.int16,
    "expert": np.int16,
    "version": np.int8,
    "bytes": np.int64,
    "issued": np.int64,
    "published": np.int64,
    "first_use": np.int64,
    "cause": np.int32,
}


def columns(header: TraceHeader) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Arrays of a chunk that have a row per token or per step: name → (dtype, shape of a row)."""
    rows = written_columns(header)
    layers, experts = header.layers, header.experts
    if header.probabilities:
        rows["token.probabilities"] = np.float16, (layers, experts)
    if header.gate_input:
        rows["token.gate_input"] = np.float16, (layers, header.gate_input)
    if header.embedding:
        rows["token.embedding"] = np.float16, (header.embedding,)
    return {
        name: (np.dtype(dtype), shape)
        for name, (dtype, shape) in rows.items()
        if name not in header.absent
    }


def written_columns(header: TraceHeader) -> dict[str, tuple[Any, tuple[int, ...]]]:
    """The columns of every trace that our engine wrote."""
    layers, experts = header.layers, header.experts
    routed = (layers, header.top_k)
    return {
        "token.request": (np.int32, ()),
        "token.user": (np.int32, ()),
        "token.position": (np.int32, ()),
        "token.phase": (np.uint8, ()),
        "token.ids": (np.int16, routed),
        "token.weights": (header.weights, routed),
        "step.number": (np.int64, ()),
        "step.kind": (np.uint8, ()),
        "step.start_s": (np.float64, ()),
        "step.read_s": (np.float64, ()),
        "step.seconds": (np.float64, ()),
        "step.rows": (np.int32, ()),
        "step.compiled": (np.bool_, ()),
        "step.hits": (np.int32, (layers,)),
        "step.fills": (np.int32, (layers,)),
        "step.read_through": (np.int32, (layers,)),
        "step.waves": (np.int16, (layers,)),
        "step.missed": (np.uint8, (layers, -(-experts // 8))),
        "step.bytes": (np.int64, (len(header.causes),)),
        "step.use": (np.int64, (len(USES),)),
        "step.tokens": (np.int32, ()),
    }


def chunk_name(number: int) -> str:
    """File name of a chunk, counted from 0."""
    return f"chunk-{number:06d}.safetensors"

"""The content of a trace: its header, the arrays of a chunk, and other events.

docs/reference/trace_format.md describes the files; host_offload.traces.reader reads them, writer
writes them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.step_record import COLUMNS, USES

FORMAT, VERSION = "moejax-trace", 3

KINDS = ("prefill", "decode")
QUEUES = frozenset({"stages", "transitions"})
"""Fields of a decision that decisions.jsonl writes as "as before" if nothing changed."""

_SIZES = ("hidden", "page_bytes", "page_tokens", "slot_bytes", "kv_floor_bytes")
SAID = (*_SIZES, "stage_entries", "max_num_seqs", "driver", "seed")
"""Fields of the policies' Spec that a header's spec has under the same names."""

ALWAYS = ("token.ids", "token.user", "step.number", "step.tokens")
"""Columns that every trace has."""


BITS = ("missed", "placed", "rejected")
"""Fields of a StepRecord, bool[L, E], that chunks keep as bits."""


class TraceError(ValueError):
    """A trace that cannot be written or read. The message says which file and what to do."""


@dataclasses.dataclass(frozen=True)
class TraceHeader:
    """The header of a trace. L = layers (MoE layers only), E = experts, k = top_k.

    - `config_digest`: names the model's configuration.
    - `spec`: sizes and settings that policies see.
    - `causes`: columns of a step's bytes.
    - `probabilities`: whether router probabilities of all experts are recorded.
    - `gate_input`, `embedding`: width of the recorded router inputs and embeddings, 0 for none.
    - `placed`: whether the experts that a second processor computed are recorded.
    - `rejected`: whether those that rejected drafts chose are recorded. Older traces do not say.
    - `token`: whether input tokens are recorded, and tokens and experts of rejected drafts.
    - `absent`: columns that the trace does not have since it was converted or generated.
    - `uses`: columns of a step's use, of which older traces have fewer.
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
    probabilities: bool = False
    gate_input: int = 0
    embedding: int = 0
    placed: bool = False
    rejected: bool = False
    token: bool = False
    absent: Sequence[str] = ()
    uses: Sequence[str] = USES

    def __post_init__(self):
        if min(self.layers, self.experts, self.top_k) < 1 or self.experts > np.iinfo(np.int16).max:
            raise ValueError(
                f"a trace needs layers, top_k ≥ 1 and 1…32767 experts, not {self.layers}, "
                f"{self.top_k} and {self.experts}"
            )
        known = set(engine_columns(self)) - set(ALWAYS)
        if unknown := set(self.absent) - known:
            raise ValueError(
                f"{', '.join(sorted(unknown))} cannot be absent; what can is {', '.join(known)}"
            )

    @property
    def draft_token(self) -> bool:
        """Whether rows of rejected drafts are recorded."""
        return self.token

    draft_ids = draft_token


class TransferTrace(NamedTuple):
    """An expert moved ahead of need.

    - `issued`, `published`, `first_use`: step numbers; −1: never.
    """

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


class BudgetMove(NamedTuple):
    """A move of the line between experts and KV, before step `step`."""

    step: int
    cells: tuple[int, ...]
    """Cells of each layer from then on."""
    kv_pages: int
    settled: bool
    """Whether a policy's request is complete."""
    by_hand: bool
    """Whether no policy wanted the move: the engine was idle, or KV was given slots since nothing
    could run."""


def columns(header: TraceHeader) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Returns the arrays of a chunk: name → (dtype, shape of a row)."""
    rows = _columns(header, optional=False)
    rows["step.tokens"] = np.dtype(np.int32), ()
    rows |= _columns(header, optional=True)
    if header.draft_token:
        rows["step.drafts"] = np.dtype(np.int32), ()
    return {name: row for name, row in rows.items() if name not in header.absent}


def engine_columns(header: TraceHeader) -> list[str]:
    """Returns the columns of every trace that our engine wrote."""
    return [*_columns(header, optional=False), "step.tokens"]


def _columns(header: TraceHeader, optional: bool) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Returns columns of a StepRecord's fields: those of every trace, or those that a trace has on
    request."""
    axes = {name: int(getattr(header, name)) for name in ("layers", "experts", "top_k")}
    axes |= {"gate_input": header.gate_input, "embedding": header.embedding}
    axes |= {
        "causes": len(header.causes),
        "uses": len(header.uses),
        "experts/8": -(-header.experts // 8),
    }
    return {
        f"{column.per}.{field}": (
            np.dtype(column.dtype),
            tuple(axes[axis] for axis in column.row),
        )
        for field, column in COLUMNS.items()
        if column.optional == optional and (not optional or getattr(header, field))
    }


def chunk_name(number: int) -> str:
    """Returns the file name of a chunk, counted from 0."""
    return f"chunk-{number:06d}.safetensors"

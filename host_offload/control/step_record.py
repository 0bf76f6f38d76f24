"""What a step did. The engine makes a StepRecord, the controller shows it to policies, and a trace
keeps it: each field is written down once, here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np

NOT_SHOWN: Any = None
"""In a field of what policies see: they did not ask for it, or it is not known at that moment."""


class LinkUse(NamedTuple):
    """The queue of transfers and the second processor, both beside compute; without them all is
    0."""

    link_flying: int = 0
    """Transfers that have neither arrived nor failed."""
    link_bytes_left: int = 0
    """Bytes of those that have not arrived."""
    link_arrived: int = 0
    """Transfers that arrived so far, on demand and ahead of need."""
    link_failed: int = 0
    """Transfers that failed so far."""
    link_busy_us: int = 0
    """Microseconds so far with a chunk under way."""
    second_experts: int = 0
    """Experts that the second processor computed so far."""
    second_rows: int = 0
    """Rows of those."""
    second_us: int = 0
    """Microseconds in which it computed them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PageUse:
    """State of KV, queues and link (LinkUse) after a step. Policies see that of the last step read,
    None before there was one; between layers the link as it is at that moment."""

    kv_used: int = NOT_SHOWN
    """KV pages in use."""
    kv_peak: int = NOT_SHOWN
    """Most pages in use so far."""
    kv_pages: int = NOT_SHOWN
    """Pages of the KV budget."""
    kv_swapped: int = NOT_SHOWN
    """Pages in host memory."""
    running: int = NOT_SHOWN
    """Requests that run."""
    waiting: int = NOT_SHOWN
    """Requests that wait."""
    waiting_tokens: int = NOT_SHOWN
    """Prompt tokens of the waiting requests."""
    link_flying: int = NOT_SHOWN
    link_bytes_left: int = NOT_SHOWN
    link_arrived: int = NOT_SHOWN
    link_failed: int = NOT_SHOWN
    link_busy_us: int = NOT_SHOWN
    second_experts: int = NOT_SHOWN
    second_rows: int = NOT_SHOWN
    second_us: int = NOT_SHOWN


USES = tuple(field.name for field in dataclasses.fields(PageUse))
"""Columns of StepRecord.use."""


class Glance(NamedTuple):
    """What is known of a step once it was read, before its record is made."""

    decode: bool
    rows: int
    """Of its executable."""
    missed: int
    """Active experts that were not resident."""
    seconds: float
    """From the start until it was read."""
    compiled: bool
    ids: Callable[[], np.ndarray]
    """Returns StepRecord.ids."""
    kv_used: int
    """This and the next ones: of PageUse."""
    kv_pages: int
    kv_swapped: int
    running: int
    waiting: int
    waiting_tokens: int


class Column(NamedTuple):
    """How a trace keeps a field, and whether policies see it."""

    per: str
    """A row per `token`, per `step`, or per `draft`: a token of a rejected draft."""
    dtype: Any
    """In the trace."""
    row: tuple[str, ...] = ()
    """Axes of a row, see traces.schema.columns."""
    seen: str | None = None
    """Field of an Observation; None: policies do not see it."""
    optional: bool = False
    """The trace has it if its header's member of the same name is not 0."""


class StepRecord(NamedTuple):
    """A step of N real tokens (no padding) whose results were read; L MoE layers, E experts a
    layer, k experts a token. An Observation says more of what policies see. A trace that no engine
    wrote lacks some of it: None."""

    request: Annotated[np.ndarray, Column("token", np.int32, seen="request")]
    """int32[N]: number of the token's request."""
    user: Annotated[np.ndarray, Column("token", np.int32, seen="user")]
    """int32[N]: number of the request's session, −1 without one."""
    position: Annotated[np.ndarray, Column("token", np.int32, seen="position")]
    """int32[N]: place in the sequence."""
    phase: Annotated[np.ndarray, Column("token", np.uint8, seen="phase")]
    """uint8[N]: 0 prompt, 1 generated."""
    ids: Annotated[np.ndarray, Column("token", np.int16, ("layers", "top_k"), seen="ids")]
    """int16[N, L, k]: routed experts, ascending."""
    weights: Annotated[np.ndarray, Column("token", np.float32, ("layers", "top_k"), seen="weights")]
    """float32[N, L, k]: weights of the routed experts."""
    number: Annotated[int, Column("step", np.int64)]
    """Number of the step in the engine's life."""
    kind: Annotated[str, Column("step", np.uint8)]
    """`prefill` or `decode`; 0 or 1 in a trace."""
    start_s: Annotated[float, Column("step", np.float64)]
    """When the step was dispatched: time.perf_counter, in a trace seconds since its beginning."""
    read_s: Annotated[float, Column("step", np.float64)]
    """When the step's results were on the host, likewise."""
    seconds: Annotated[float, Column("step", np.float64)]
    """Duration, from the later of its dispatch and the previous read to its read, because steps
    overlap. Known in a trace only."""
    rows: Annotated[int, Column("step", np.int32, seen="bucket")]
    """Token rows of its executable, padding included."""
    compiled: Annotated[bool, Column("step", np.bool_, seen="compiled")]
    """The first step of its executable; leave it out of timings."""
    hits: Annotated[np.ndarray, Column("step", np.int32, ("layers",))]
    """int32[L]: active experts that were resident."""
    fills: Annotated[np.ndarray, Column("step", np.int32, ("layers",))]
    """int32[L]: experts moved into a cell inside the step."""
    read_through: Annotated[np.ndarray, Column("step", np.int32, ("layers",))]
    """int32[L]: experts computed from the store."""
    waves: Annotated[np.ndarray, Column("step", np.int16, ("layers",))]
    """int16[L]: passes over the layer's experts."""
    missed: Annotated[np.ndarray, Column("step", np.uint8, ("layers", "experts/8"), seen="missed")]
    """bool[L, E]: active experts that were not resident; a trace has them as bits."""
    bytes: Annotated[np.ndarray, Column("step", np.int64, ("causes",))]
    """int64[causes]: bytes over the link, by the causes of a trace's header."""
    use: Annotated[np.ndarray, Column("step", np.int64, ("uses",))]
    """int64[len(USES)]: a PageUse; −1: not known."""
    finished: tuple[int, ...]
    """Numbers of requests that ended with this step's results."""
    probabilities: Annotated[
        np.ndarray | None,
        Column("token", np.float16, ("layers", "experts"), seen="probs", optional=True),
    ] = None
    """float16[N, L, E], where the step returned it, as the next two: the router's scores of all
    experts, before corrections, groups and normalization."""
    gate_input: Annotated[
        np.ndarray | None,
        Column("token", np.float16, ("layers", "gate_input"), seen="gate_input", optional=True),
    ] = None
    """float16[N, L, D]: the router's input, the normalized hidden state."""
    embedding: Annotated[
        np.ndarray | None,
        Column("token", np.float16, ("embedding",), seen="embedding", optional=True),
    ] = None
    """float16[N, D]: embedding of the input token."""
    token: Annotated[np.ndarray | None, Column("token", np.int32, seen="token", optional=True)] = (
        None
    )
    """int32[N]: the input token; −1: not known, as of a request that was aborted."""
    draft_token: Annotated[
        np.ndarray | None, Column("draft", np.int32, seen="draft_token", optional=True)
    ] = None
    """int32[D]: tokens of rejected drafts."""
    draft_ids: Annotated[
        np.ndarray | None,
        Column("draft", np.int16, ("layers", "top_k"), seen="draft_ids", optional=True),
    ] = None
    """int16[D, L, k]: experts that they chose."""
    placed: Annotated[
        np.ndarray | None, Column("step", np.uint8, ("layers", "experts/8"), optional=True)
    ] = None
    """bool[L, E]: missed experts that a second processor computed, where there was one; a trace has
    them as bits."""
    rejected: Annotated[
        np.ndarray | None, Column("step", np.uint8, ("layers", "experts/8"), optional=True)
    ] = None
    """bool[L, E]: experts that rows of rejected drafts chose, where steps verify drafts. These rows
    are not among the tokens, but their experts are among hits, misses and bytes; a trace has them
    as bits."""
    staged: np.ndarray | None = None
    """int32[S]: 1 for each entry of the step's stage list that was carried out; None without one,
    and in a trace."""
    ahead: np.ndarray | None = None
    """int32[n, 4]: transfers that the step chose itself: layer, expert, cell, and 1 for those
    carried out; None in a step that chooses none, and in a trace, which has them as transfers."""


class StepRows(NamedTuple):
    """What is known of a step's rows before its layers run, as the fields of its StepRecord."""

    request: np.ndarray
    user: np.ndarray
    position: np.ndarray
    phase: np.ndarray
    embedding: np.ndarray | None = None
    token: np.ndarray | None = None
    draft_token: np.ndarray | None = None
    """int32[D]: tokens of all drafts, none of which is rejected yet."""


class LayerRouting(NamedTuple):
    """What a step has routed in one layer, as the fields of a StepRecord of that layer alone."""

    ids: np.ndarray
    """int[N, 1, k]"""
    weights: np.ndarray | None
    """float32[N, 1, k]"""
    probabilities: np.ndarray | None = None
    gate_input: np.ndarray | None = None


COLUMNS: dict[str, Column] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(StepRecord, include_extras=True).items()
    if hasattr(hint, "__metadata__")
}
"""Field of a StepRecord → how it is kept."""

SEEN: dict[str, str] = {column.seen: name for name, column in COLUMNS.items() if column.seen}
"""Field of an Observation → that of the StepRecord."""

"""The policy interface: what a policy may see, what it may decide, and when it is asked.

A policy is a frozen dataclass of plain numbers. It takes and returns numpy arrays, holds no device
array and reads no clock. So the same object runs in the engine and over a recorded trace, and equal
observations give equal decisions. docs/extending/write_a_policy.md is the tutorial.

Shapes: L MoE layers, E experts a layer, V versions, N real token rows of a step (no padding),
k experts a token.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from enum import IntEnum
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from host_offload.control.step_record import NOT_SHOWN, PageUse
from host_offload.memory.placement import ResidentSpec
from pallas_kernels.cpu.wanted import Queue


class Moment(IntEnum):
    """When a policy is asked. EMBEDDED, and LAYER_BEGIN to TRANSFER, exist only with
    driver="host"."""

    STEP_BEGIN = 0
    """Before a step is dispatched. Nothing is known about it, so there are no rows."""
    LAYER_BEGIN = 1
    """Before the router of a layer."""
    ROUTED = 2
    """After the router of a layer."""
    EXPERTS_BEGIN = 3
    """Before the experts of a layer are filled and computed."""
    TRANSFER = 4
    """Transfers that a policy asked for between layers were carried out or skipped."""
    STEP_END = 5
    """A step's results were read."""
    INTERVAL = 6
    """The policy's `interval` passed with the step just read; after its STEP_END."""
    TURN_END = 7
    """A request (one turn) ended with the step just read; once for each request."""
    EMBEDDED = 8
    """The tokens of a step were embedded, before its first layer."""


class State(IntEnum):
    """Where an expert is, in Observation.state."""

    ABSENT = 0
    RESIDENT = 1
    ARRIVING = 2
    """Absent, with a transfer in flight."""
    PROMOTING = 3
    """Resident, with a version of more bytes in flight."""
    DEMOTING = 4
    """Resident, with a version of at most as many bytes in flight."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """Measured costs on this machine."""

    fill: np.ndarray
    """float64[2]: latency in seconds, seconds per byte, at the queue depth used."""
    stage: np.ndarray
    """float64[2]: the same as fill, for staged transfers."""
    gpu_expert: np.ndarray
    """float64[n, 2]: (tokens of one expert, seconds)."""
    cpu_expert: np.ndarray
    """float64[2]: seconds per expert, seconds per token."""
    step_s: dict[int, float]
    """Rows of a decode executable → seconds of a step with everything resident."""
    attention_s: float
    """Seconds of one layer, for one row and 64 tokens of its context."""
    prefill_s_per_token: float
    """Seconds of one more prompt token in a prefill step, everything resident."""
    kv_swap_s_per_byte: float
    """Seconds a byte, one way, to the host or back (the mean of both)."""
    recompute_s_per_token: float = 0.0
    """Seconds for each token of a prompt that is computed again: a prefill step's time over its
    tokens (WiSP's r)."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """Facts that are known before the first step. Sizes are in bytes."""

    layers: int
    """L"""
    experts: int
    """E"""
    top_k: int
    hidden: int
    page_bytes: int
    page_tokens: int
    budget_bytes: int
    """The arena: experts and KV together."""
    kv_floor_bytes: int
    """KV of one sequence of max_model_len tokens: no decision may leave KV less."""
    staging_bytes: int
    """Most bytes of staged transfers in flight at a time."""
    seed: int
    driver: str
    """`device` or `host`."""
    version_bytes: dict[str, np.ndarray]
    """Version → int64[L]: bytes of one expert in a cell. A version's number in tables and decisions
    is its place in this dict."""
    min_cells: np.ndarray
    """int32[L]: fewest cells that a layer may have."""
    cell_bound: int
    """C, the most cells of a layer."""
    stage_entries: int
    """Most transfers that one step carries out beside its misses."""
    capacity: tuple[int, ...] | None = None
    """By version number: how many experts of all layers together fit the arena in that version,
    without spare cells; None: cells belong to layers."""
    slot_bytes: int | None = None
    """Bytes of a slot, which holds either cells or pages; None: a record's."""
    resident: ResidentSpec | None = None
    """The layout if every expert always has a complete version in the arena; None: experts are
    paged."""
    router: np.ndarray | None = None
    """float32[L, D, E]: the routers' weights, for policies that need `router`."""
    costs: Costs | None = None
    """None: nothing was measured, and a policy that needs `costs` is refused."""
    moved_bytes: dict[str, np.ndarray] | None = None
    """Version → int64[L]: bytes of one expert over the link; None: version_bytes."""
    max_num_seqs: int | None = None
    """Most sequences that run at once; executables may have more rows. None: unknown."""

    second_processor: bool = False
    """Whether there is a second processor, to which a policy can give missed experts
    (`execute`)."""
    link: tuple[float, float] | None = None
    """The stated link: (latency in seconds, seconds per byte); None: no link is stated."""

    @property
    def link_bytes(self) -> dict[str, np.ndarray]:
        """Version → int64[L]: bytes of one expert over the link; fewer than version_bytes if
        experts are decoded in transit."""
        return self.moved_bytes or self.version_bytes

    @property
    def has_all_versions(self) -> np.ndarray:
        """bool[L]: whether a layer has all versions. In the others, which are smaller as they are
        than in the last version, the last one stands for them as they are."""
        sizes = [*self.version_bytes.values()]
        return (sizes[0] > sizes[-1]) | (len(sizes) == 1)


class Stage(NamedTuple):
    """An expert that a policy wants in a cell before it is needed."""

    layer: int
    expert: int
    version: int = 0
    cause: str = "prefetch"
    """Label for statistics and traces, which count bytes by cause."""


class Stages(tuple[Stage, ...]):
    """Many stages with one cause, also as an array: between two layers, there is no time to look at
    hundreds one by one."""

    columns: np.ndarray
    """int64[n, 3]: layer, expert and version of each."""
    cause: str


def stages_at(layers: np.ndarray | int, experts: np.ndarray, cause: str) -> Stages:
    """Returns the transfers of the experts int[n] of layers int[n], or of one layer, the most
    urgent first."""
    cause = sys.intern(cause)  # equal queues are equal in a pickle too
    columns = np.zeros((len(experts), 3), np.int64)
    columns[:, 0], columns[:, 1] = layers, experts
    made: Any = ()
    if len(columns) and columns.min() < 0:  # which is refused by name
        made = (Stage(layer, expert, version, cause) for layer, expert, version in columns.tolist())
    elif len(columns):
        most = columns.max(axis=0).tolist()
        shape = tuple(1 << number.bit_length() for number in most[:2])
        places = columns[:, 0] * shape[1] + columns[:, 1]
        made = map(_every_stage(*shape, cause).__getitem__, places.tolist())
    found = Stages(made)
    found.columns, found.cause = columns, cause
    return found


def stages_of_queue(queue: Queue, shape: tuple[int, ...], cause: str) -> Stages:
    """Returns the transfers of a queue of experts of L layers with E experts, shape (L, E)."""
    cause = sys.intern(cause)
    every = _every_stage(*shape, cause)
    found = Stages([every[place] for place in queue.places])
    found.columns, found.cause = queue.columns, cause
    return found


@functools.lru_cache(maxsize=64)
def _every_stage(layers: int, experts: int, cause: str) -> tuple[Stage, ...]:
    """The transfers of all experts: making one takes longer than finding it here."""
    return tuple(Stage(layer, e, 0, cause) for layer in range(layers) for e in range(experts))


class Transition(NamedTuple):
    """A version that a policy wants in place of the resident one."""

    layer: int
    expert: int
    version: int


@dataclasses.dataclass(frozen=True)
class MapSearch:
    """How compiled decode steps search a store of expert maps and fetch the predicted experts
    (moejax/step/map_search.py)."""

    capacity: int
    """Places of the store (C)."""
    distance: int
    """How many layers ahead maps predict (d)."""
    pooled: bool = False
    """Whether fetched experts may take cells of other layers."""
    most: int | None = None
    """Most transfers after a layer, those of the largest probability over distance among all layers
    to come; None: each layer's when its map is found."""

    def nbytes(self, layers: int, experts: int, hidden: int) -> int:
        """Bytes of the store on the device: float16, and the lengths of prefixes in float32."""
        return self.capacity * (2 * hidden + layers * (2 * experts + 4))


class MapRows(NamedTuple):
    """Rows of the store of expert maps."""

    place: np.ndarray
    """int32[n]: different places of the store."""
    embeddings: np.ndarray
    """float16[n, D], of length 1."""
    maps: np.ndarray
    """float16[n, L, E]: each layer sums to 1."""


class StagedTransfer(NamedTuple):
    """A staged transfer, from its issue on. Steps are numbers of engine steps."""

    layer: int
    expert: int
    version: int
    cell: int
    bytes: int
    cause: str
    issued: int
    """The step whose list has it."""
    published: int = -1
    """The step that carried it out, visible from the next step on; −1: in flight, or skipped."""
    first_use: int = -1
    """The first step that used the resident expert; −1: none so far."""
    skipped: bool = False
    """Whether the step skipped it, because it no longer fitted the tables."""


@dataclasses.dataclass(frozen=True)
class Observation(PageUse):
    """What a policy sees. The first seven fields are always set. Any other field, also of PageUse,
    is None unless the policy `needs` it and the moment has it. Arrays are read-only.

    At STEP_END, INTERVAL and TURN_END, rows (request to gate_input) are those of the step just
    read, with M = L layers. From EMBEDDED to EXPERTS_BEGIN they are those of the step in progress:
    request, user, position, phase, token, draft_token and embedding; at ROUTED and EXPERTS_BEGIN
    also ids, weights, counts, probs and gate_input of the one layer (M = 1).
    """

    moment: Moment
    step: int
    """Number of the step just read; at STEP_BEGIN and between layers, of the step in progress."""
    age: int
    """Steps that were dispatched after the observed one: 1 with driver="device", where the host
    reads a step while the next one runs; 0 between layers with driver="host"."""
    interval: int
    """How many intervals of this policy have passed; 0 without an interval."""
    turn: int
    """At TURN_END the request that ended, otherwise −1."""
    layer: int
    """From LAYER_BEGIN to TRANSFER the layer that comes next or was routed, otherwise −1."""
    seconds: float
    """Time from the first step's dispatch until the step was read, as the trace records it."""

    request: np.ndarray = NOT_SHOWN
    """int32[N]: number of the row's request."""
    user: np.ndarray = NOT_SHOWN
    """int32[N]: number of its session; −1: no session."""
    position: np.ndarray = NOT_SHOWN
    """int32[N]: place of the token in its sequence."""
    phase: np.ndarray = NOT_SHOWN
    """uint8[N]: 0 prompt, 1 generated."""
    ids: np.ndarray = NOT_SHOWN
    """int16[N, M, k]: routed experts, ascending."""
    weights: np.ndarray = NOT_SHOWN
    """float32[N, M, k]"""
    counts: np.ndarray = NOT_SHOWN
    """int32[L, E]: rows routed to each expert in the step; at INTERVAL, since the last interval."""
    missed: np.ndarray = NOT_SHOWN
    """bool[L, E]: experts that the step needed and that were not resident."""
    probs: np.ndarray = NOT_SHOWN
    """float16[N, M, E]: the router's scores of all experts, from which it chooses."""
    gate_input: np.ndarray = NOT_SHOWN
    """float16[N, M, S]: the router's input, the normalised hidden state (S = D)."""
    embedding: np.ndarray = NOT_SHOWN
    """float16[N, D]: embedding of the input token."""
    token: np.ndarray = NOT_SHOWN
    """int32[N]: the input token; −1: not known."""
    draft_token: np.ndarray = NOT_SHOWN
    """int32[D]: tokens of drafts: between layers, all that the step verifies beside the rows; once
    it was read, the rejected ones."""
    draft_ids: np.ndarray = NOT_SHOWN
    """int16[D, L, k]: experts that rejected drafts chose."""

    version: np.ndarray = NOT_SHOWN
    """int8[L, E]: resident version; −1: absent."""
    state: np.ndarray = NOT_SHOWN
    """int8[L, E], see State."""
    last_used: np.ndarray = NOT_SHOWN
    """int32[L, E]: the layer's clock when the resident expert was last used; −1: absent."""
    clock: np.ndarray = NOT_SHOWN
    """int32[L]: references of each layer so far."""
    frequency: np.ndarray = NOT_SHOWN
    """int32[L, E]: how many references have needed the expert so far."""
    cells: np.ndarray = NOT_SHOWN
    """int32[L]: number of cells of each layer."""
    fill_version: np.ndarray = NOT_SHOWN
    """int32[L, E]: the version in which a miss brings each expert."""
    capacity: int = NOT_SHOWN
    """If every expert is resident: how many experts fit in version 0, like Spec.capacity. It
    changes with the slots of experts."""

    finished: tuple[StagedTransfer, ...] = NOT_SHOWN
    """Transfers carried out or skipped since the policy last saw this moment."""
    retired: tuple[StagedTransfer, ...] = NOT_SHOWN
    """Transfers that, since then, were first used or evicted unused."""
    in_flight: tuple[StagedTransfer, ...] = NOT_SHOWN
    """Transfers whose step has not been read."""

    kv_refs: np.ndarray = NOT_SHOWN
    """int64[R, 2]: at TURN_END the KV pages of the turn, each once: (session, or −1 − request
    without a session; place in the sequence)."""
    bucket: int = NOT_SHOWN
    """Token rows of the step's executable, padding included."""
    compiled: bool = NOT_SHOWN
    """Whether the step was the first to run its executable, so that its time says little."""
    costs: Costs = NOT_SHOWN


ALWAYS = frozenset({"moment", "step", "age", "interval", "turn", "layer", "seconds"})
"""Fields of an Observation that are always set."""

NEEDS = frozenset(f.name for f in dataclasses.fields(Observation)) - ALWAYS | {"router"}
"""Names that a policy may use in `needs`; `router` is in the Spec."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a policy wants; None: unchanged. A decision takes effect with the next dispatched
    step."""

    victim_weights: np.ndarray | None = None
    """int32[3]: weights of recency, log frequency and prior in pallas_kernels.plan.victim_key."""
    prior: np.ndarray | None = None
    """int32[L, E]: a score of each expert in units of 1/LOG2_UNIT; the smallest key is evicted."""
    stages: tuple[Stage, ...] | None = None
    """The whole wanted queue, the most urgent first. An entry that is no longer named is cancelled,
    unless it is in flight. An entry stays until its expert is resident."""
    pause_stages: bool | None = None
    """True: hand out no transfers until a decision says False."""
    fill_version: np.ndarray | None = None
    """int8[L, E]: version that a miss fills; −1 − v: no cell, read version v through. An expert
    without a free cell is read through in the version that it would have filled."""
    transitions: tuple[Transition, ...] | None = None
    """The whole queue of version changes, like stages; they come before stages. If every expert is
    resident, a change without a free cell waits, with later ones that want the same version."""
    cells: np.ndarray | None = None
    """int32[L]: wanted cells of each layer, carried out before a step. If KV is in the way, the
    change waits and counts as deferred."""
    kv_pages: int | None = None
    """Wanted pages of KV, carried out like cells."""
    execute: np.ndarray | None = None
    """int8[a]: which processor computes each of the layer's active experts, ascending by id: 0: the
    accelerator, 1: the second processor, from the store (ignored for residents). At ROUTED and
    EXPERTS_BEGIN (PreScope)."""
    load_order: np.ndarray | None = None
    """int16[a]: at the same moments, the place of each of these experts in the order of loads; of
    equal places the lower id comes first."""
    max_running: int | None = None
    """Most sequences that run at once."""
    map_rows: MapRows | None = None
    """Rows for the store of expert maps that steps search, from a policy with `search`."""
    note: str | None = None
    """Why, in one line for people: the log and the trace have it."""

    if not TYPE_CHECKING:

        def __init__(self, **decided: Any):
            """The class has what is not decided: setting each field took longer than most
            decisions."""
            if not WRITES.issuperset(decided):
                name = min(decided.keys() - WRITES)
                raise TypeError(f"Decision() got an unexpected keyword argument {name!r}")
            self.__dict__.update(decided)


WRITES = frozenset(f.name for f in dataclasses.fields(Decision))
"""Names that a policy may use in `writes`."""


class Policy(Protocol):
    """The members of a policy, a frozen dataclass.

    More attributes are optional:

    - `interval`: for INTERVAL: "4096 tokens", "16 steps" or "0.5 seconds".
    - `victim_weights`: three integers, in force from the start. With empty moments the policy
      consists of them and costs nothing at run time.
    - `pool`: True: the cells of all layers are one pool, and the expert of least value among all
      layers, by the same key, is evicted. Only with driver="host".
    - `pools(state)`: whether it wants the pool now; without it, always. Else each layer has an even
      share of the cells.
    - `search`: a MapSearch: decode steps choose transfers themselves, by expert maps that the
      policy writes. Only with driver="device".
    - `active(state)`: those of its moments at which it wants to be asked now; without it, all.
    - `learn(state, seen)`: the state after STEP_END. `policy="auto"` asks for it also while other
      arms run, and predicts from it on: it gives that state to the policy's field `begun`.
    - `rests(state, glance)`: the state after a step of which a step_record.Glance tells it all, or
      None to be asked. Where every policy rests, steps cost little.
    - `skips(state)` and `skipped(state, steps, misses)`, beside `rests`: how many decode steps, and
      misses of which each step counts as one at least, may pass before it is asked again, while as
      many requests run and none waits; and the state after them.
    """

    @property
    def moments(self) -> frozenset[Moment]:
        """The moments at which `decide` is called."""
        ...

    @property
    def needs(self) -> frozenset[str]:
        """Fields of the Observation that it reads."""
        ...

    @property
    def writes(self) -> frozenset[str]:
        """Fields of the Decision that it may set. Two policies may not name the same field."""
        ...

    def init(self, spec: Spec) -> Any:
        """The state before the first observation."""
        ...

    def decide(self, state: Any, observation: Observation, /) -> tuple[Any, Decision]:
        """The next state and the decision. Pure: neither argument is changed."""
        ...


def routed_counts(ids: np.ndarray, experts: int) -> np.ndarray:
    """int64[M, E]: how many rows of ids int[N, M, k] were routed to each expert of M layers."""
    layers = ids.shape[1]
    flat = ids + (np.arange(layers, dtype=np.int32) * experts)[:, None]
    return np.bincount(flat.ravel(), minlength=layers * experts).reshape(layers, experts)

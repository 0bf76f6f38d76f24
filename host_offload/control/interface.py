"""The policy interface: what a policy may see, what it may decide, and when it is asked.

A policy is a frozen dataclass of plain numbers. It gets numpy arrays and returns numpy arrays; it
holds no device array and reads no clock, so the same object runs in the engine and over a recorded
trace, and equal observations give equal decisions. docs/extending/write_a_policy.md is the
tutorial.

Shapes: L MoE layers, E experts a layer, V versions, N real token rows of a step (no padding),
k experts a token.
"""

from __future__ import annotations

import dataclasses
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

import numpy as np

from host_offload.control.step_record import NOT_SHOWN, PageUse
from host_offload.memory.placement import ResidentSpec


class Moment(IntEnum):
    """When a policy is asked. EMBEDDED and LAYER_BEGIN to TRANSFER are driver="host"'s alone."""

    STEP_BEGIN = 0
    """Before a step is dispatched; nothing is known of it, so there are no rows to see."""
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
    """The policy's `interval` passed with the step just read; comes after its STEP_END."""
    TURN_END = 7
    """A request (one turn) ended with the step just read; once for each."""
    EMBEDDED = 8
    """The tokens of a step were embedded; before its first layer."""


class State(IntEnum):
    """Where an expert is, in Observation.state."""

    ABSENT = 0
    RESIDENT = 1
    ARRIVING = 2
    """Absent, with a transfer in flight."""
    PROMOTING = 3
    """Resident, with a transfer of a version of more bytes in flight."""
    DEMOTING = 4
    """Resident, with a transfer of a version of no more bytes in flight."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """What things cost on this machine, measured."""

    fill: np.ndarray
    """float64[2]: latency in seconds, seconds per byte, at the queue depth used."""
    stage: np.ndarray
    """float64[2], as fill."""
    gpu_expert: np.ndarray
    """float64[n, 2]: tokens of one expert, seconds."""
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
    """Seconds a token of a prompt that is computed again: all of its prefill step's time by its
    tokens (WiSP's r)."""


@dataclasses.dataclass(frozen=True)
class Spec:
    """What is known before the first step. Sizes in bytes."""

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
    """KV of one sequence of max_model_len tokens: no decision may go below."""
    staging_bytes: int
    """Most bytes of staged transfers in flight at a time."""
    seed: int
    driver: str
    """`device` or `host`."""
    version_bytes: dict[str, np.ndarray]
    """Version → int64[L]: bytes of one expert in a cell. A version's number in tables and decisions
    is its place in this dict."""
    min_cells: np.ndarray
    """int32[L]: the least cells a layer may have."""
    cell_bound: int
    """C, the most cells a layer can have."""
    stage_entries: int
    """Most transfers that one step can carry out beside its misses."""
    capacity: tuple[int, ...] | None = None
    """By version number: experts of all layers together that the arena has room for in that
    version at once, spare cells left out; None: cells belong to layers."""
    slot_bytes: int | None = None
    """A slot, which holds cells or pages and changes sides whole; None: as large as a record."""
    resident: ResidentSpec | None = None
    """Where every expert always has a complete version in the arena; None: experts are paged."""
    router: np.ndarray | None = None
    """float32[L, D, E]: the routers' weights, for policies that need `router`."""
    costs: Costs | None = None
    """None where nothing was measured; a policy that needs `costs` is then refused."""
    moved_bytes: dict[str, np.ndarray] | None = None
    """As version_bytes, of one expert over the link; None: the same."""
    max_num_seqs: int | None = None
    """Most sequences that run at once; executables may have more rows. None: not known."""

    second_processor: bool = False
    """A processor beside the weights computes missed experts that a policy gives it (`execute`)."""
    link: tuple[float, float] | None = None
    """Stated of the link: latency in seconds, seconds per byte. None: nothing is."""

    @property
    def link_bytes(self) -> dict[str, np.ndarray]:
        """Version → int64[L]: bytes of one expert over the link. Fewer than version_bytes where
        experts are decoded in transit."""
        return self.moved_bytes or self.version_bytes


class Stage(NamedTuple):
    """An expert wanted in a cell ahead of need."""

    layer: int
    expert: int
    version: int = 0
    cause: str = "prefetch"
    """For statistics and traces: bytes are counted by cause."""


class Transition(NamedTuple):
    """A version wanted in place of the one that is resident."""

    layer: int
    expert: int
    version: int


@dataclasses.dataclass(frozen=True)
class MapSearch:
    """How compiled decode steps search a store of expert maps, and fetch what those say
    (moejax/step/map_search.py)."""

    capacity: int
    """Places of the store (C)."""
    distance: int
    """Layers ahead (d)."""

    def nbytes(self, layers: int, experts: int, hidden: int) -> int:
        """Bytes of the store on the device: float16, and the lengths of prefixes in float32."""
        return self.capacity * (2 * hidden + layers * (2 * experts + 4))


class MapRows(NamedTuple):
    """Rows of the store of expert maps."""

    place: np.ndarray
    """int32[n], each once."""
    embeddings: np.ndarray
    """float16[n, D], of length 1."""
    maps: np.ndarray
    """float16[n, L, E], each layer's sum is 1."""


@dataclasses.dataclass(frozen=True)
class StagedTransfer:
    """A staged copy from its issue on. Steps are numbers of engine steps."""

    layer: int
    expert: int
    version: int
    cell: int
    bytes: int
    cause: str
    issued: int
    """The step that was given it."""
    published: int = -1
    """The step that carried it out: visible from the next one on. −1: in flight, or skipped."""
    first_use: int = -1
    """The first step that found the expert resident and used it; −1: never (so far)."""
    skipped: bool = False
    """The step found that it no longer fitted the tables, and moved nothing."""


@dataclasses.dataclass(frozen=True)
class Observation(PageUse):
    """What a policy sees. The first seven fields are always there; any other one, a PageUse's
    too, is None unless the policy `needs` it and the moment has it. Arrays are read-only.

    Rows (request to gate_input) are those of the step just read: at STEP_END, INTERVAL and
    TURN_END with M = L layers. Those of the step that is made: request, user, position, phase and
    embedding from EMBEDDED to EXPERTS_BEGIN; ids, weights, counts, probs and gate_input at ROUTED
    and EXPERTS_BEGIN, of the one layer (M = 1).
    """

    moment: Moment
    step: int
    """Number of the step just read; at STEP_BEGIN and between layers of the one that is made."""
    age: int
    """Steps dispatched after the one observed: 1 with driver="device", where the host reads a step
    while the next one runs, and 0 between layers with driver="host"."""
    interval: int
    """Intervals of this policy that have passed; 0 without any."""
    turn: int
    """At TURN_END the request that ended, else −1."""
    layer: int
    """From LAYER_BEGIN to TRANSFER the layer that comes next or was routed, else −1."""
    seconds: float
    """From the first step's dispatch to when the step was read, as the trace records it."""

    request: np.ndarray = NOT_SHOWN
    """int32[N]: number of the row's request."""
    user: np.ndarray = NOT_SHOWN
    """int32[N]: number of its session, −1 without one."""
    position: np.ndarray = NOT_SHOWN
    """int32[N]: place of the token in its sequence."""
    phase: np.ndarray = NOT_SHOWN
    """uint8[N]: 0 prompt, 1 generated."""
    ids: np.ndarray = NOT_SHOWN
    """int16[N, M, k]: routed experts, ascending."""
    weights: np.ndarray = NOT_SHOWN
    """float32[N, M, k]"""
    counts: np.ndarray = NOT_SHOWN
    """int32[L, E]: rows routed to each expert in the step; at INTERVAL since the last interval."""
    missed: np.ndarray = NOT_SHOWN
    """bool[L, E]: experts that the step needed and did not find resident."""
    probs: np.ndarray = NOT_SHOWN
    """float16[N, M, E]: the router's scores of all experts, from which it chooses."""
    gate_input: np.ndarray = NOT_SHOWN
    """float16[N, M, S]: what the router saw, the normalised hidden state (S = D)."""
    embedding: np.ndarray = NOT_SHOWN
    """float16[N, D]: of the token fed in."""

    version: np.ndarray = NOT_SHOWN
    """int8[L, E]: version that is resident; −1: absent."""
    state: np.ndarray = NOT_SHOWN
    """int8[L, E], see State."""
    last_used: np.ndarray = NOT_SHOWN
    """int32[L, E]: the layer's clock when the resident expert was last used; −1: absent."""
    clock: np.ndarray = NOT_SHOWN
    """int32[L]: references of each layer so far."""
    frequency: np.ndarray = NOT_SHOWN
    """int32[L, E]: references so far that needed the expert."""
    cells: np.ndarray = NOT_SHOWN
    """int32[L]: cells that each layer has."""
    capacity: int = NOT_SHOWN
    """Experts that there is room for in version 0, as Spec.capacity, where every expert is
    resident: it changes with the slots that experts have."""

    finished: tuple[StagedTransfer, ...] = NOT_SHOWN
    """Transfers carried out or skipped since the policy last saw this moment."""
    retired: tuple[StagedTransfer, ...] = NOT_SHOWN
    """Those carried out that were, since then, first used or evicted without use."""
    in_flight: tuple[StagedTransfer, ...] = NOT_SHOWN
    """Transfers whose step has not been read."""

    kv_refs: np.ndarray = NOT_SHOWN
    """int64[R, 2]: at TURN_END the KV pages that the turn had, each once: (session, or −1 −
    request without one; place in the sequence)."""
    bucket: int = NOT_SHOWN
    """Token rows of the step's executable, padding included."""
    compiled: bool = NOT_SHOWN
    """The step was the first to run its executable, so its time says little."""
    costs: Costs = NOT_SHOWN


ALWAYS = frozenset({"moment", "step", "age", "interval", "turn", "layer", "seconds"})
"""Fields of an Observation that no policy has to ask for."""

NEEDS = frozenset(f.name for f in dataclasses.fields(Observation)) - ALWAYS | {"router"}
"""What a policy may name in `needs`; `router` is in the Spec."""


@dataclasses.dataclass(frozen=True)
class Decision:
    """What a policy wants. None: unchanged. A decision takes effect with the next step made."""

    victim_weights: np.ndarray | None = None
    """int32[3]: weights over recency, log frequency and prior of pallas_kernels.plan.victim_key."""
    prior: np.ndarray | None = None
    """int32[L, E]: a score per expert in units of 1/LOG2_UNIT; the smallest key is evicted."""
    stages: tuple[Stage, ...] | None = None
    """The whole wanted queue, the most urgent first: one that is no longer named is cancelled,
    unless it is already in flight. An entry stays until it is resident."""
    pause_stages: bool | None = None
    """True: hand out no transfers until it is False again."""
    fill_version: np.ndarray | None = None
    """int8[L, E]: version that a miss fills; −1 − v: do not cache, read version v through. What
    finds no cell is read through in the version it would have filled."""
    transitions: tuple[Transition, ...] | None = None
    """The whole queue of version changes, as stages; they go before stages. Where every expert is
    resident one that finds no cell waits, with those behind it that want the same version."""
    cells: np.ndarray | None = None
    """int32[L]: cells that each layer should have. Carried out before a step; what is not possible
    yet, since KV is in the way, waits and counts as deferred."""
    kv_pages: int | None = None
    """Pages that KV should have; as cells."""
    execute: np.ndarray | None = None
    """int8[a]: who computes each of the layer's active experts, ascending by id: 0 the accelerator,
    1 the second processor, from the store in place, which those that are resident ignore. At ROUTED
    and EXPERTS_BEGIN (PreScope)."""
    load_order: np.ndarray | None = None
    """int16[a]: at the same moments the place of each of them in the order of loads; of equal ones
    the lower id comes first."""
    max_running: int | None = None
    """Most sequences that run at once."""
    map_rows: MapRows | None = None
    """Rows of the store of expert maps that steps search: of a policy with `search`."""


WRITES = frozenset(f.name for f in dataclasses.fields(Decision))
"""What a policy may name in `writes`."""


class Policy(Protocol):
    """What the controller asks of a policy: a frozen dataclass with these.

    Four more attributes are optional. `interval`: for INTERVAL, "4096 tokens", "16 steps" or
    "0.5 seconds". `victim_weights`: three integers that hold from the start; with empty moments
    they are all there is, and the policy costs nothing at run time. `pool`: True makes the cells of
    all layers one pool, where whoever is worth least of all layers by the same key makes room;
    driver="host" alone. `search`, a MapSearch: decode steps choose transfers themselves, by expert
    maps that the policy writes; driver="device" alone, and no simulation.
    """

    @property
    def moments(self) -> frozenset[Moment]:
        """When `decide` is called."""
        ...

    @property
    def needs(self) -> frozenset[str]:
        """Fields of the Observation that it reads."""
        ...

    @property
    def writes(self) -> frozenset[str]:
        """Fields of the Decision that it may set; no two policies may name the same."""
        ...

    def init(self, spec: Spec) -> Any:
        """The state before the first observation."""
        ...

    def decide(self, state: Any, observation: Observation, /) -> tuple[Any, Decision]:
        """The next state and the decision. Pure: neither argument is changed."""
        ...


def routed_counts(ids: np.ndarray, experts: int) -> np.ndarray:
    """int64[M, E] of ids int[N, M, k]: how many rows were routed to each expert of M layers."""
    layers = ids.shape[1]
    flat = ids + (np.arange(layers, dtype=np.int32) * experts)[:, None]
    return np.bincount(flat.ravel(), minlength=layers * experts).reshape(layers, experts)

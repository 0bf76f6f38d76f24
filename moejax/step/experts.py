"""What the layers of a step share, and the third part of each: plan, fill, compute and combine its
experts."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from host_offload.control.window import PACKED_VERSION
from host_offload.memory.tables import Tables, hand_over, seat_absent
from pallas_kernels import Ops
from pallas_kernels.combine import combine
from pallas_kernels.cpu.arena import OwnedArena
from pallas_kernels.expert_ffn import (
    Epilogue,
    ExpertBatch,
    ExpertOptions,
    ExpertPlaces,
    expert_ffn,
    sorted_pairs,
)
from pallas_kernels.fill import Fills, fill
from pallas_kernels.fill.unpack import unpack
from pallas_kernels.fill_ffn import fill_ffn
from pallas_kernels.kv_write import KVPage
from pallas_kernels.plan import Plan, plan, plan_counts, routed_to
from pallas_kernels.plan.record import active_experts, bits, counts_size
from pallas_kernels.records import RecordFormat
from pallas_kernels.records.absent import AbsentRecords
from pallas_kernels.records.versions import Formats
from pallas_kernels.stage import Entries, stage


class DeviceMemory(NamedTuple):
    """What steps change in place: donated, and in the carry of a scan over layers."""

    arena: Any
    """uint16[rows, D], or an OwnedArena."""
    tables: Tables


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertContext:
    """What the experts of every layer of a step have in common; all but the stores is static."""

    stores: tuple[jax.Array, ...]
    """By version number uint16[L, E, rows, D], in pinned host memory."""
    ops: Ops
    activation: str
    row_tile: int
    """Rows of one matrix product."""
    waves: int = 1
    """Passes over a layer's experts."""
    formats: Formats | None = None
    """By version number, see VersionFormats; None: one version, dense."""
    in_place: bool = False
    """Every expert is resident in the store: none is missed, filled or moved."""
    packed: RecordFormat | None = None
    """Residents in cells of this format stream too, decoded into the window; None: there are none,
    or they are computed as they are."""

    def places(self, tables: Tables, layer: jax.Array | int) -> ExpertPlaces:
        """Where a layer's experts are by the tables."""
        return ExpertPlaces(self.stores, layer, tables.address, tables.version)

    def expert_options(self, implementation: str) -> ExpertOptions:
        """Those of expert_ffn or fill_ffn."""
        return ExpertOptions(
            activation=self.activation,
            row_tile=self.row_tile,
            formats=self.formats,
            implementation=implementation,
            shared_kib=self.ops.shared_kib,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepContext(ExpertContext):
    """What all layers of a step have in common."""

    page: KVPage
    window: bool = False
    """Experts stream through a window of two layers: all of a layer's are there before it runs."""
    resident: bool = False
    """Every expert has a cell and is in it, which who dispatches the step knows."""
    queued: bool = False
    """A queue fills the arena, which is owned, so that steps say how many writes they made."""
    arrays: frozenset[str] = frozenset()
    """The TRACE_ARRAYS that the step gives out."""
    cache_aware: float | None = None
    """StepSpec.cache_aware where some experts may be missing; None: routers ignore residency."""


class Paging(NamedTuple):
    """Counts of one layer in one step, int32: active = hits + fills + read_through, and what a
    second processor computed."""

    active: jax.Array
    hits: jax.Array
    fills: jax.Array
    read_through: jax.Array


class Elsewhere(NamedTuple):
    """What a second processor computes of a layer, and in which order the others are loaded; arrays
    of the host, or in programs."""

    beside: Any
    """bool[E]: absent experts that get no cell and are not computed here."""
    order: Any
    """int32[E]: place among the loads; of equal ones the lower id comes first."""


def page_and_compute(
    y: jax.Array,
    x: jax.Array,
    ids: jax.Array,
    memory: DeviceMemory,
    layer: jax.Array,
    context: ExpertContext,
    elsewhere: Elsewhere | None = None,
) -> tuple[jax.Array, DeviceMemory, jax.Array]:
    """Every active expert of one MoE layer on its tokens, in waves over the experts.

    y float32[T·K, D]: zero_outputs, or what the layer before made of the same tokens: the
    pairs of padding keep their rows, all others get theirs.
    x [T, D]: normalised hidden states. ids int32[T, K]: ascending, E for padding. A wave pages in
    its share of the active experts (ranges of ids) without evicting what it needs itself; what
    gets no cell is read through. Where all are resident in the store (context.in_place), none has a
    cell and all are hits. More waves fill more; the bits are the same. elsewhere: experts whose
    rows of y stay zero; they count as active and as missing, and nowhere else.

    Returns (y, memory, counts int32[4 + ⌈E/32⌉]: the fields of Paging and, one
    bit each, the experts that were missing; one array, since a scan copies each of its outputs by
    a kernel of its own. With V > 1 versions 2·V more: fills and experts read through of each. See
    moejax.step.results.Results).
    """
    stores, waves = context.stores, context.waves
    experts, implementation = memory.tables.address.shape[1], context.ops.expert_ffn
    pairs = sorted_pairs(ids, experts, row_tile=context.row_tile, implementation=implementation)
    if pairs is None:
        active = active_experts(ids, jnp.ones(experts, bool))
    else:
        active = pairs.first[1:] > pairs.first[:-1]
    planned = plan_wave
    if elsewhere is not None:
        planned = functools.partial(plan_elsewhere, elsewhere=elsewhere)

    def page_in(wave, carry):
        y, (arena, tables), counts = carry
        _, missing, tables, work = planned(ids, active, tables, layer, wave, context)
        if not context.in_place:
            arena = fill_planned(arena, layer, work, context)
        batch = ExpertBatch(work.active, work.active_count, ids, x, pairs)
        y = compute(y, arena, batch, context.places(tables, layer), context)
        if context.in_place:
            # An expert without a cell is a hit here: the first two fields of Paging.
            counts += jnp.where(jnp.arange(counts.size) < 2, work.active_count, 0)
        else:
            beside = elsewhere is not None and elsewhere.beside
            counts += plan_counts(work, missing, tables, layer, len(stores), beside)
        return y, DeviceMemory(arena, tables), counts

    counts = jnp.zeros(counts_size(experts, len(stores)), jnp.int32)
    # A loop, because written out one after the other XLA sees that a wave's fill does not depend
    # on what the wave before it read, and copies the arena (seen on CPU).
    y, memory, counts = lax.fori_loop(0, waves, page_in, (y, memory, counts))
    if elsewhere is not None:  # the plans do not count them
        counts = counts.at[0].add(jnp.sum(active & elsewhere.beside, dtype=jnp.int32))
    return lax.optimization_barrier(y), memory, counts


def compute_planned(
    y: jax.Array,
    x: jax.Array,
    ids: jax.Array,
    memory: DeviceMemory,
    layer: jax.Array,
    work: Plan,
    context: ExpertContext,
    epilogue: Epilogue | None = None,
) -> tuple[Any, DeviceMemory]:
    """Fills and computes a layer whose plan `work` the tables have already. epilogue: what the last
    kernel does too (expert_ffn). Returns (y, memory) like page_and_compute."""
    arena, tables = memory
    batch = ExpertBatch(work.active, work.active_count, ids, x)
    places = context.places(tables, layer)
    if context.ops.fuses_fill:
        options = context.expert_options(context.ops.fill_ffn)
        with jax.named_scope("expert_ffn"):
            arena, y = fill_ffn(y, arena, batch, places, work.fills, options, epilogue)
    else:
        arena = fill_planned(arena, layer, work, context)
        y = compute(y, arena, batch, places, context, epilogue)
    return lax.optimization_barrier(y), DeviceMemory(arena, tables)


def fill_planned(
    arena: jax.Array, layer: jax.Array, work: Plan, context: ExpertContext
) -> jax.Array:
    """The arena with what a plan moves into cells."""
    with jax.named_scope("fill"):
        return fill(
            arena,
            context.stores,
            layer,
            work.fills,
            formats=context.formats,
            implementation=context.ops.fill,
        )


def plan_wave(
    ids: jax.Array,
    active: jax.Array,
    tables: Tables,
    layer: jax.Array,
    wave: jax.Array,
    context: ExpertContext,
) -> tuple[jax.Array, jax.Array, Tables, Plan]:
    """(due bool[E]: the active experts that the wave computes, those of them that are not resident
    before it, tables after it, its plan). ids: int32[T, K], E for padding. active: bool[E], of all
    waves."""
    waves, experts = context.waves, active.shape[0]
    with jax.named_scope("plan"):
        if waves == 1:
            due, missing = routed_to(tables, layer, ids)
        else:
            due = active & (jnp.arange(experts) * waves // experts == wave)
            # Together, since plan changes the addresses in place: read later they would be copied.
            due, missing = lax.optimization_barrier((due, due & (tables.address[layer] < 0)))
        tables, work = plan(tables, layer, due, implementation=context.ops.plan)
    return due, missing, tables, work


def plan_elsewhere(
    ids: jax.Array,
    active: jax.Array,
    tables: Tables,
    layer: jax.Array,
    wave: jax.Array,
    context: ExpertContext,
    elsewhere: Elsewhere,
) -> tuple[jax.Array, jax.Array, Tables, Plan]:
    """As plan_wave, of a layer some of whose experts are computed elsewhere: the plan has none of
    them among the active ones or those read through, and loads in the order that was asked for."""
    wanted, own = tables.fill_version, tables.fill_version[layer]
    here = tables._replace(
        fill_version=wanted.at[layer].set(jnp.where(elsewhere.beside & (own >= 0), -1 - own, own))
    )
    due, missing, tables, work = plan_wave(ids, active, here, layer, wave, context)
    keep = due & ~elsewhere.beside
    count = jnp.sum(keep, dtype=jnp.int32)
    place = jnp.where(
        work.fill_expert < 0, jnp.iinfo(jnp.int32).max, elsewhere.order[work.fill_expert]
    )
    first = jnp.argsort(place, stable=True)
    work = work._replace(
        active=jnp.argsort(~keep, stable=True).astype(jnp.int32),
        active_count=count,
        fill_expert=work.fill_expert[first],
        fill_row=work.fill_row[first],
        fill_version=work.fill_version[first],
        read_through=work.read_through - (work.active_count - count),
    )
    return due, missing, tables._replace(fill_version=wanted), work


def zero_outputs(pairs: int, hidden: int) -> jax.Array:
    """y float32[T·K, D] of page_and_compute before any layer."""
    return jnp.zeros((pairs, hidden), jnp.float32)


def compute(
    y: jax.Array,
    arena: Any,
    batch: ExpertBatch,
    places: ExpertPlaces,
    context: ExpertContext,
    epilogue: Epilogue | None = None,
) -> Any:
    """y with the rows of the batch's experts. arena: of a DeviceMemory."""
    with jax.named_scope("expert_ffn"):
        options = context.expert_options(context.ops.expert_ffn)
        return expert_ffn(y, arena, batch, places, options, epilogue)


def materialize(
    memory: DeviceMemory, layer: jax.Array, after: jax.Array, context: ExpertContext
) -> DeviceMemory:
    """Remaps the window to a layer and begins to load it: FluxMoE's Algorithm 1, `materialize`.

    The layer takes the cells of the one two before it, cyclic, and its absent experts own them;
    their records are queued and nobody waits. So the ring follows the running count of layers, and
    with an odd number of them a layer has the other half in each pass. after: what was made from
    all that read those cells (write-after-read); that a record is there before it is read is the
    reader's to wait for, part by part (expert_ffn).
    """
    layers, experts = memory.tables.address.shape
    with jax.named_scope("materialize"):
        ring = jnp.arange(memory.tables.cell_row.shape[1]) >= experts
        tables = hand_over(memory.tables, (layer - 2) % layers, layer, ring)
        tables, expert, row, count = seat_absent(tables, layer, experts)
        row = row + zero_after(after)
        return load(DeviceMemory(memory.arena, tables), layer, expert, row, count, context)


def seat(tables: Tables, giver: jax.Array, taker: jax.Array) -> Tables:
    """Tables in which the ring's cells, of one half, went on from a layer to another one, whose
    absent experts own them: `materialize` where the host brings their records."""
    experts = tables.address.shape[1]
    ring = jnp.arange(tables.cell_row.shape[1]) >= experts
    return seat_absent(hand_over(tables, giver, taker, ring), taker, experts)[0]


def load_seated(memory: DeviceMemory, layer: int, context: ExpertContext) -> DeviceMemory:
    """Begins to load the experts that own a layer's cells of the ring, the first of those, between
    two steps."""
    tables, experts = memory.tables, memory.tables.address.shape[1]
    owner, row = tables.owner[layer, experts:], tables.cell_row[layer, experts:]
    count = jnp.sum(owner >= 0, dtype=jnp.int32)
    return load(memory, jnp.int32(layer), owner, row, count, context)


def load(
    memory: DeviceMemory,
    layer: jax.Array,
    expert: jax.Array,
    row: jax.Array,
    count: jax.Array,
    context: ExpertContext,
) -> DeviceMemory:
    """Queues the first `count` of int32[A] experts of a layer into dense cells at arena rows
    int32[A]: over the link, but those with a packed cell of their own out of that; both at once, as
    FluxMoE loads from its two backends (section 4.3)."""
    arena, tables = memory
    of_link, packed = jnp.arange(expert.shape[0]) < count, None
    if context.packed is not None:
        own = jnp.maximum(expert, 0)
        held = tables.owner[layer, own] == expert
        packed = of_link & held & (tables.cell_version[layer, own] == PACKED_VERSION)
        of_link &= ~packed
    first = jnp.argsort(~of_link, stable=True)
    fills = Fills(
        expert[first], row[first], jnp.zeros_like(expert), jnp.sum(of_link, dtype=jnp.int32)
    )
    arena = fill(
        arena,
        context.stores,
        layer,
        fills,
        formats=context.formats,
        ahead=True,
        implementation=context.ops.fill,
    )
    if packed is not None and context.packed is not None:
        first = jnp.argsort(~packed, stable=True)
        source = tables.cell_row[layer, jnp.maximum(expert, 0)][first]
        number = jnp.sum(packed, dtype=jnp.int32)
        assert isinstance(arena, OwnedArena)
        operands = arena, layer, expert[first], source, row[first], number
        arena = unpack(*operands, packed=context.packed)
    return DeviceMemory(arena, tables)


def compute_materialized(
    y: jax.Array,
    x: jax.Array,
    ids: jax.Array,
    memory: DeviceMemory,
    layer: jax.Array,
    context: ExpertContext,
) -> tuple[jax.Array, DeviceMemory, jax.Array]:
    """Every expert of a layer in the window on its tokens; arguments and results as of
    page_and_compute. All experts are listed as active, so all are there afterwards, used or not,
    and none is on its way when the layer's cells go on. An active expert is a hit where it has a
    cell; one whose bytes did not come in an earlier step has none, and is read through. Where
    records come in pieces (AbsentRecords) nothing flies into cells: those are listed that are used
    and there, and the rows of the others are zeros."""
    tables, experts = memory.tables, memory.tables.address.shape[1]
    expert = jnp.arange(experts)
    active = active_experts(ids, jnp.ones(experts, bool))
    absent = active & (tables.address[layer] < 0)
    listed, count = expert, jnp.int32(experts)
    if isinstance(context.stores[0], AbsentRecords) and context.stores[0].pieces:
        due = active & ~absent
        listed = jnp.argsort(~due, stable=True).astype(jnp.int32)
        count = jnp.sum(due, dtype=jnp.int32)
    batch = ExpertBatch(listed, count, ids, x)
    y = compute(y, memory.arena, batch, context.places(tables, layer), context)
    counts = _window_counts(active, absent, len(context.stores))
    return lax.optimization_barrier(y), memory, counts


def stage_layer(
    memory: DeviceMemory,
    layer: jax.Array,
    entries: Entries,
    context: ExpertContext,
    ahead: jax.Array | int = 0,
) -> tuple[DeviceMemory, jax.Array]:
    """A stage list's entries of one MoE layer, as the op; int32[S] 1 for each carried out. ahead: 1
    before the layer's plan, when what the last step used may go; its clock is then read as that of
    the coming reference."""
    arena, tables = memory
    with jax.named_scope("stage"):
        arena, tables, done = stage(
            arena,
            move_clock(tables, layer, ahead),
            context.stores,
            layer,
            entries,
            formats=context.formats,
            implementation=context.ops.stage,
        )
    return DeviceMemory(arena, move_clock(tables, layer, -ahead)), done


def move_clock(tables: Tables, layer: jax.Array, by: jax.Array | int) -> Tables:
    """The tables with a layer's clock so many references later."""
    if isinstance(by, int) and by == 0:
        return tables
    return tables._replace(clock=tables.clock.at[layer].add(by))


def zero_after(value: jax.Array) -> jax.Array:
    """An int32 zero that waits for `value`: added to what decides about a later write of the arena,
    it keeps XLA from thinking that the write could come before what made `value` has read it, and
    from copying the arena."""
    # Nothing exceeds infinity, which XLA does not see.
    return (value.reshape(-1)[0] > jnp.inf).astype(jnp.int32)


def missed_bits(counts, experts: int):
    """bool[L, E]: active experts that were not resident when their layer began, of counts
    int32[L, counts_size] on the host or in a step."""
    words = counts[:, len(Paging._fields) : counts_size(experts)]
    bits = (words[:, :, None] >> np.arange(32, dtype=np.int32)) & 1
    return bits.reshape(counts.shape[0], -1)[:, :experts] > 0


def _window_counts(active: jax.Array, absent: jax.Array, versions: int) -> jax.Array:
    """The counts of a layer in the window; active, absent: bool[E]."""
    experts = active.shape[0]
    used, missed = (jnp.sum(mask, dtype=jnp.int32) for mask in (active, absent))
    paging = Paging(used, used - missed, jnp.int32(0), missed)
    counts = jnp.concatenate([jnp.stack(paging), bits(absent)])
    return jnp.pad(counts, (0, counts_size(experts, versions) - counts.size))


def add_experts(x: jax.Array, y: jax.Array, weights: jax.Array, ops: Ops) -> jax.Array:
    """x [T, D] + Σ_k weights[:, k]·y[t·K + k] in the order of k. y [T·K, D]."""
    with jax.named_scope("combine"):
        y = y.reshape(*weights.shape, -1)
        return lax.optimization_barrier(combine(x, y, weights, implementation=ops.combine))

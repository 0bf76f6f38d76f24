"""Plans, fills, computes and combines the experts of a layer, in every kind of step."""

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
from moejax.step.buddies import Buddies
from pallas_kernels import Ops
from pallas_kernels.combine import combine
from pallas_kernels.cpu.arena import OwnedArena
from pallas_kernels.expert_ffn import (
    Activation,
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
    """The memory that steps change in place: donated, and carried by the scan over layers."""

    arena: Any
    """uint16[rows, D], or an OwnedArena."""
    tables: Tables


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertContext:
    """The settings that the experts of all layers of a step share. All but the stores is static."""

    stores: tuple[jax.Array, ...]
    """uint16[L, E, rows, D] in pinned host memory, by version number."""
    ops: Ops
    activation: Activation
    row_tile: int
    """Rows of one matrix product."""
    waves: int = 1
    """Passes over a layer's experts."""
    formats: Formats | None = None
    """VersionFormats, by version number; None: one dense version."""
    in_place: bool = False
    """Every expert is resident in the store: none is missed, filled or moved."""
    packed: RecordFormat | None = None
    """The format of packed residents that are decoded into the window; None: there are none, or
    they are computed in their packed form."""

    def places(self, tables: Tables, layer: jax.Array | int) -> ExpertPlaces:
        """Returns where the tables have a layer's experts."""
        return ExpertPlaces(self.stores, layer, tables.address, tables.version)

    def expert_options(self, implementation: str) -> ExpertOptions:
        """Returns the options of expert_ffn or fill_ffn."""
        return ExpertOptions(
            activation=self.activation,
            row_tile=self.row_tile,
            formats=self.formats,
            implementation=implementation,
            arithmetic=self.ops.arithmetic,
            shared_kib=self.ops.shared_kib,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepContext(ExpertContext):
    """The settings that all layers of a step share."""

    page: KVPage
    window: bool = False
    """Experts stream through a window of two layers: all experts of a layer are in it before the
    layer runs."""
    resident: bool = False
    """The caller guarantees that every expert is in a cell."""
    queued: bool = False
    """A queue fills an owned arena, so steps return how many writes they made."""
    arrays: frozenset[str] = frozenset()
    """The TRACE_ARRAYS that the step returns."""
    cache_aware: float | None = None
    """StepSpec.cache_aware if some experts may be missing; None: routers ignore residency."""
    buddies: Buddies | None = None
    """StepSpec.buddies, likewise."""
    drafts: bool = False
    """StepSpec.drafts."""
    hidden: bool = False
    """StepSpec.hidden."""


class Paging(NamedTuple):
    """Counts of one layer in one step, int32. `active` is the sum of hits, fills, read_through and
    the experts that a second processor computed."""

    active: jax.Array
    hits: jax.Array
    fills: jax.Array
    read_through: jax.Array


class Elsewhere(NamedTuple):
    """Names the experts that a second processor computes of a layer, and the order in which the
    others are loaded. Fields are arrays of the host, or traced arrays in programs."""

    beside: Any
    """bool[E]: absent experts that get no cell and that the device does not compute."""
    order: Any
    """int32[E]: each expert's place among the loads; of equal places the lower id comes first."""


def page_and_compute(
    y: jax.Array,
    x: jax.Array,
    ids: jax.Array,
    memory: DeviceMemory,
    layer: jax.Array,
    context: ExpertContext,
    elsewhere: Elsewhere | None = None,
) -> tuple[jax.Array, DeviceMemory, jax.Array]:
    """Computes every active expert of one MoE layer on its tokens, in waves over the experts.

    A wave pages in its share of the active experts (a range of ids) and evicts none that it needs
    itself. An expert that gets no cell is read through. If all experts are resident in the store
    (context.in_place), none has a cell and all are hits. More waves fill more cells; the bits are
    the same.

    - `y`: float32[T·K, D], zero_outputs or the layer before's y of the same tokens. Rows of padding
      are kept, all others are overwritten.
    - `x`: [T, D], normalised hidden states.
    - `ids`: int32[T, K], ascending, E for padding.
    - `elsewhere`: experts of a second processor. Their rows of y stay zero; they count as active
      and as missing, and nowhere else.

    Returns (y, memory, counts). `counts` is int32[4 + ⌈E/32⌉]: the fields of Paging, then one bit
    for each missing expert; with V > 1 versions 2·V more, the fills and experts read through of
    each version (moejax.step.results.Results). It is one array because a scan copies each of its
    outputs by a kernel of its own.
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
    # A loop: if the waves were written out, XLA would see that a wave's fill does not depend on
    # the reads of the wave before it, and would copy the arena (seen on CPU).
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
    """Fills and computes a layer whose plan is already in the tables.

    - `work`: the plan.
    - `epilogue`: extra work of the last kernel (expert_ffn).

    Returns (y, memory) as page_and_compute does.
    """
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
    """Returns the arena after the fills of a plan."""
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
    """Plans one wave of a layer.

    - `ids`: int32[T, K], E for padding.
    - `active`: bool[E], the active experts of all waves.

    Returns (due, missing, tables, plan): bool[E], the active experts that the wave computes;
    bool[E], those of them that were not resident before it; the tables after it; its plan.
    """
    waves, experts = context.waves, active.shape[0]
    with jax.named_scope("plan"):
        if waves == 1:
            due, missing = routed_to(tables, layer, ids)
        else:
            due = active & (jnp.arange(experts) * waves // experts == wave)
            # Both behind one barrier: plan changes the addresses in place, and XLA would copy the
            # table for a later read.
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
    """Does the same as plan_wave for a layer that shares its experts with a second processor. The
    plan leaves out the second processor's experts and loads the others in `elsewhere.order`."""
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
    """Returns the y float32[T·K, D] that page_and_compute takes before the first layer."""
    return jnp.zeros((pairs, hidden), jnp.float32)


def compute(
    y: jax.Array,
    arena: Any,
    batch: ExpertBatch,
    places: ExpertPlaces,
    context: ExpertContext,
    epilogue: Epilogue | None = None,
) -> Any:
    """Returns y with the rows of the batch's experts.

    - `arena`: DeviceMemory.arena.
    """
    with jax.named_scope("expert_ffn"):
        options = context.expert_options(context.ops.expert_ffn)
        return expert_ffn(y, arena, batch, places, options, epilogue)


def materialize(
    memory: DeviceMemory, layer: jax.Array, after: jax.Array, context: ExpertContext
) -> DeviceMemory:
    """Remaps the window to a layer and begins to load it: FluxMoE's Algorithm 1, `materialize`.

    The layer takes over the cells of the layer two before it (cyclically) for its absent experts.
    Their records are queued, without a wait. So the ring follows the running count of layers, and
    with an odd number of layers a layer has the other half in each pass. The kernel that reads a
    record waits for it, part by part (expert_ffn).

    - `after`: an array that depends on every read of those cells (write-after-read).
    """
    layers, experts = memory.tables.address.shape
    with jax.named_scope("materialize"):
        ring = jnp.arange(memory.tables.cell_row.shape[1]) >= experts
        tables = hand_over(memory.tables, (layer - 2) % layers, layer, ring)
        tables, expert, row, count = seat_absent(tables, layer, experts)
        row = row + zero_after(after)
        return load(DeviceMemory(memory.arena, tables), layer, expert, row, count, context)


def seat(tables: Tables, giver: jax.Array, taker: jax.Array) -> Tables:
    """Hands one half of the ring from a layer to another, whose absent experts get its cells. It is
    `materialize` for a host that brings the records itself. Returns the tables."""
    experts = tables.address.shape[1]
    ring = jnp.arange(tables.cell_row.shape[1]) >= experts
    return seat_absent(hand_over(tables, giver, taker, ring), taker, experts)[0]


def load_seated(memory: DeviceMemory, layer: int, context: ExpertContext) -> DeviceMemory:
    """Begins to load the experts that own a layer's cells of the ring, between two steps."""
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
    """Queues experts of a layer into dense cells.

    Experts with a packed cell are decoded out of that cell, all others come over the link. Both go
    on at once, as FluxMoE loads from its two backends (section 4.3).

    - `expert`: int32[A].
    - `row`: int32[A], arena rows of the cells.
    - `count`: how many of the A entries are loaded, from the first on.
    """
    arena, tables = memory
    of_link, packed = jnp.arange(expert.shape[0]) < count, None
    own = jnp.maximum(expert, 0)
    if context.packed is not None:
        held = tables.owner[layer, own] == expert
        packed = of_link & held & (tables.cell_version[layer, own] == PACKED_VERSION)
        of_link &= ~packed
    first = jnp.argsort(~of_link, stable=True)
    fills = Fills(
        expert[first],
        row[first],
        tables.version[layer, own][first],
        jnp.sum(of_link, dtype=jnp.int32),
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
    """Computes the experts of a layer in the window on its tokens. Arguments and results are those
    of page_and_compute.

    All experts are listed as active, used or not, so that the kernel waits for all of them and no
    transfer is under way when the layer's cells are handed on. An active expert with a cell is a
    hit; an expert whose bytes did not come in an earlier step has no cell and is read through.

    If records come in pieces (AbsentRecords), no transfer writes to cells. Then only active experts
    with a cell are listed, and the rows of the others are zeros.
    """
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
    """Carries out the entries of a stage list that belong to one MoE layer.

    - `ahead`: 1 if the layer's plan is still to come. Then experts that the last step used may be
      replaced, and the layer's clock is read as that of its next reference.

    Returns (memory, int32[S]: 1 for each entry that was carried out).
    """
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
    """Returns the tables with a layer's clock moved by so many references."""
    if isinstance(by, int) and by == 0:
        return tables
    return tables._replace(clock=tables.clock.at[layer].add(by))


def zero_after(value: jax.Array) -> jax.Array:
    """Returns an int32 zero that depends on `value`.

    Add it to an index of a later write to the arena. Otherwise XLA may order that write before the
    reads that `value` depends on, and then copies the arena.
    """
    # XLA does not know that no value exceeds infinity.
    return (value.reshape(-1)[0] > jnp.inf).astype(jnp.int32)


def missed_bits(counts, experts: int):
    """Returns bool[L, E], the active experts that were not resident when their layer began.

    - `counts`: int32[L, counts_size], on the host or traced.
    """
    words = counts[:, len(Paging._fields) : counts_size(experts)]
    bits = (words[:, :, None] >> np.arange(32, dtype=np.int32)) & 1
    return bits.reshape(counts.shape[0], -1)[:, :experts] > 0


def _window_counts(active: jax.Array, absent: jax.Array, versions: int) -> jax.Array:
    """Returns the counts of a layer in the window.

    - `active`, `absent`: bool[E].
    """
    experts = active.shape[0]
    used, missed = (jnp.sum(mask, dtype=jnp.int32) for mask in (active, absent))
    paging = Paging(used, used - missed, jnp.int32(0), missed)
    counts = jnp.concatenate([jnp.stack(paging), bits(absent)])
    return jnp.pad(counts, (0, counts_size(experts, versions) - counts.size))


def add_experts(x: jax.Array, y: jax.Array, weights: jax.Array, ops: Ops) -> jax.Array:
    """Returns x + Σ_k weights[:, k]·y[t·K + k], summed in the order of k.

    - `x`: [T, D].
    - `y`: [T·K, D].
    - `weights`: float32[T, K].
    """
    with jax.named_scope("combine"):
        y = y.reshape(*weights.shape, -1)
        return lax.optimization_barrier(combine(x, y, weights, implementation=ops.combine))

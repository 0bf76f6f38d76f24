"""plan as one Triton-lowered kernel of one program."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import plgpu
from pallas_kernels.plan.listing import count, places
from pallas_kernels.plan.record import TOTALS
from pallas_kernels.plan.victim import victim_key
from pallas_kernels.triton import scalar, triton_call

UPDATED = ("owner", "last_used", "address", "version", "frequency", "clock")
"""The tables that a plan changes, in place."""

READ = ("cell_row", "cell_version", "fill_version", "prior", "victim_weights")

LISTS = 8
"""Fields of a Plan."""


@dataclasses.dataclass(frozen=True)
class Config:
    block: int
    """Cells (or experts) that are compared with all others at a time."""
    num_warps: int
    num_stages: int


def configuration(cells: int, experts: int) -> Config:
    """Comparisons of block × max(C, E), 8 a thread, so that nothing spills. Few experts take two
    warps: with four or more, ptxas uses only 48 registers and spills."""
    widest = pl.next_power_of_2(max(cells, experts))
    warps = 2 if widest <= 16 else 8
    return Config(block=max(8 * warps * 32 // widest, 1), num_warps=warps, num_stages=1)


def plan(tables, layer, active):
    tables, _, parts = call_plan(plan_kernel, tables, layer, (active,))
    return tables, parts


def plan_routed(tables, layer, ids, weights, records, *, versions):
    kernel = functools.partial(_plan_routed, versions=versions)
    routing = ids.reshape(-1), weights.reshape(-1)
    tables, (records, *_), parts = call_plan(kernel, tables, layer, routing, records)
    return tables, records, parts


def call_plan(kernel, tables, layer, active, records=None, *, name="plan", more=()):
    """Calls a plan kernel. Returns (tables, (records, active experts, *more) or nothing, plan).

    - `kernel`: takes `config`, and refs to the layer, `active`, READ and the results.
    - `active`: operands that say which experts are active.
    - `more`: further results, jax.ShapeDtypeStructs, before the LISTS.
    """
    cells, experts = tables.owner.shape[1], tables.address.shape[1]
    config = configuration(cells, experts)
    one, listed = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((experts,), jnp.int32)
    updated = [getattr(tables, name) for name in UPDATED]
    in_place = updated if records is None else [*updated, records]
    operands = [scalar(layer), *active, *(getattr(tables, name) for name in READ), *in_place]
    results = triton_call(
        functools.partial(kernel, config=config),
        name=name,
        grid=(1,),
        out_shape=(
            *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in in_place),
            *(() if records is None else (listed, *more)),
            *(listed, one, listed, listed, listed, one, one, one),
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        aliases={len(operands) - len(in_place) + i: i for i in range(len(in_place))},
    )(*operands)
    changed = dict(zip(UPDATED, results[: len(UPDATED)], strict=True))
    return tables._replace(**changed), results[len(UPDATED) : -LISTS], results[-LISTS:]


class _Cells(NamedTuple):
    """Some cells of the layer; cells past C count as not granted."""

    row: jax.Array
    owner: jax.Array
    current: jax.Array
    """Whether the owner's address points here."""
    pinned: jax.Array


class _Candidates(NamedTuple):
    """The same cells as victims."""

    candidate: jax.Array
    version: jax.Array
    order: tuple[jax.Array, ...]
    """Fields of a lexicographic order: free first, then key, last use, owner, index."""


class _Decided(NamedTuple):
    """Decisions about each expert: bool, and int32 the version in which a missing expert is filled
    or read."""

    active: jax.Array
    hit: jax.Array
    fills: jax.Array
    version: jax.Array


def _plan_routed(layer, ids, weights, *refs, config, versions):
    """plan_kernel. Before it, makes the mask of active experts from `ids` int32[P]; after it,
    writes the layer's record.

    Writes: one program. Threads with the same id write the same 1 into `active`, which is result
    and scratch; barriers separate its zeros, its ones and its reads. Each element of the record has
    one writer.
    """
    *others, records, active = refs[:-LISTS]
    experts, pairs = active.shape[0], ids.shape[0]
    expert, pair = (jnp.arange(pl.next_power_of_2(n)) for n in (experts, pairs))
    inside = pair < pairs
    plgpu.store(active.at[expert], jnp.zeros_like(expert), mask=expert < experts)
    plgpu.debug_barrier()
    routed = plgpu.load(ids.at[pair], mask=inside, other=experts)
    plgpu.store(active.at[routed], jnp.ones_like(routed), mask=routed < experts)
    plgpu.debug_barrier()

    def put(place, value, mask):
        plgpu.store(records.at[layer[0], place], value, mask=mask)

    count_into = counting_into(records, layer[0], pairs, experts, versions)

    def record(decided):
        put(pair, routed, inside)
        weight = plgpu.load(weights.at[pair], mask=inside, other=0.0)
        put(pairs + pair, lax.bitcast_convert_type(weight, jnp.int32), inside)
        count_into(decided)

    plan_kernel(layer, active, *others, *refs[-LISTS:], config=config, record=record)


def counting_into(records, layer, pairs, experts, versions):
    """Makes the function that writes a layer's counts into its record, after the ids and weights of
    `pairs` pairs, from what was decided. Writes: each element once."""

    def count_into(decided):
        missing = decided.active & ~decided.hit
        through = missing & ~decided.fills
        totals = [count(m) for m in (decided.active, decided.hit, decided.fills, through)]
        if versions > 1:
            of_version = [decided.version == v for v in range(versions)]
            totals += [count(m & v) for m in (decided.fills, through) for v in of_version]
        words = pl.cdiv(experts, 32)
        for i, total in enumerate(totals):  # counts by version come after the bits
            place = 2 * pairs + i + (words if i >= TOTALS else 0)
            records[layer, place] = total
        expert = jnp.arange(pl.next_power_of_2(experts))
        bit = jnp.where(missing, jnp.int32(1) << expert % 32, 0)
        bit = jnp.sum(bit.reshape(-1, min(32, expert.size)), axis=1)
        word = jnp.arange(bit.size)
        place = records.at[layer, 2 * pairs + TOTALS + word]
        plgpu.store(place, bit, mask=word < words)

    return count_into


def plan_kernel(layer, active, *refs, config, record=None):
    """The whole plan in one program: loads, arithmetic on values, a barrier, stores.

    - `record`: called at the end with the decisions about each expert.

    Writes: one program. Within it every element has one writer: a table's element by index, a
    list's by a permutation. The barrier separates the loads of tables from the writes by other
    threads.
    """
    read, updated = refs[: len(READ)], refs[-LISTS - len(UPDATED) : -LISTS]
    tables = dict(zip(READ, read, strict=True)) | dict(zip(UPDATED, updated, strict=True))
    active_list, active_count, fill_expert, fill_row, fill_version, *counts = refs[-LISTS:]
    layer = layer[0]
    cells, experts = tables["owner"].shape[1], tables["address"].shape[1]
    cell, expert = (jnp.arange(pl.next_power_of_2(n)) for n in (cells, experts))
    clock = tables["clock"][layer] + 1
    weights = tuple(tables["victim_weights"][i] for i in range(3))

    def at(name, index, mask, other):
        return plgpu.load(tables[name].at[layer, index], mask=mask, other=other)

    def is_active(index, mask):
        nobody = False if active.dtype == jnp.bool_ else 0
        return plgpu.load(active.at[index], mask=mask, other=nobody).astype(jnp.bool_)

    def cells_at(index):
        inside = index < cells
        row = at("cell_row", index, inside, -1)
        owner = at("owner", index, inside, -1)
        owned = owner >= 0
        address = at("address", jnp.where(owned, owner, 0), owned, -1)
        current = owned & (row == address)
        return _Cells(row, owner, current, current & is_active(jnp.where(owned, owner, 0), owned))

    def candidates_at(index, some):
        owned = some.owner >= 0
        owner = jnp.where(owned, some.owner, 0)
        last_used = at("last_used", index, index < cells, 0)
        frequency, prior = (at(name, owner, owned, 0) for name in ("frequency", "prior"))
        key = victim_key(clock - last_used, frequency, prior, weights)
        order = owned.astype(jnp.int32), key * owned, last_used * owned, some.owner, index
        version = at("cell_version", index, index < cells, -1)
        return _Candidates((some.row >= 0) & ~some.pinned, version, order)

    def missing_at(index):
        """(experts that want a cell, its version)."""
        inside = index < experts
        version = at("fill_version", index, inside, -1)
        absent = at("address", index, inside, -1) < 0
        return is_active(index, inside) & absent & (version >= 0), version

    def blocks(body, carry, size):
        """body(indices of the block, carry) over blocks of a range of this size."""
        block = min(config.block, size)
        return lax.fori_loop(
            0, size // block, lambda i, c: body(i * block + jnp.arange(block), c), carry
        )

    def assign():
        """Gives the n-th miss of a version the n-th candidate cell of that version. Returns (new
        owner of each cell, cell row of each filled expert, whether each expert is evicted)."""
        mine = candidates_at(cell, cells_at(cell))
        wants, wanted = missing_at(expert)

        def rank_missing(index, rank):
            others, version = missing_at(index)
            same = others[:, None] & (version[:, None] == wanted[None, :])
            earlier = index[:, None] < expert[None, :]
            return rank + jnp.sum((same & earlier).astype(jnp.int32), axis=0)

        miss_rank = blocks(rank_missing, jnp.zeros_like(expert), expert.size)

        def match(index, carry):
            new_owner, new_row, evicted = carry
            some = cells_at(index)
            candidate, version, order = candidates_at(index, some)
            rivals = mine.candidate[None, :] & (version[:, None] == mine.version[None, :])
            before = precedes(mine.order, order)
            rank = jnp.sum((rivals & before).astype(jnp.int32), axis=1)
            matched = (
                (candidate[:, None] & wants[None, :])
                & (version[:, None] == wanted[None, :])
                & (rank[:, None] == miss_rank[None, :])
            )
            taker = jnp.max(jnp.where(matched, expert[None, :], -1), axis=1)
            row = jnp.max(jnp.where(matched, some.row[:, None], -1), axis=0)
            leaves = jnp.where((taker >= 0) & some.current, some.owner, -1)
            gone = jnp.max((leaves[:, None] == expert[None, :]).astype(jnp.int32), axis=0)
            here = index[:, None] == cell[None, :]
            owner = jnp.max(jnp.where(here, taker[:, None], -1), axis=0)
            return (
                jnp.maximum(new_owner, owner),
                jnp.maximum(new_row, row),
                jnp.maximum(evicted, gone),
            )

        return blocks(match, nothing(), cell.size)

    def nothing():
        return jnp.full_like(cell, -1), jnp.full_like(expert, -1), jnp.zeros_like(expert)

    inside = expert < experts
    needed = is_active(expert, inside)
    hit = needed & (at("address", expert, inside, -1) >= 0)
    wants, wanted = missing_at(expert)
    pinned = cells_at(cell).pinned
    frequency = at("frequency", expert, inside, 0)
    # Nothing is missing in most steps of a warm layer.
    new_owner, new_row, evicted = lax.cond(count(wants) > 0, assign, nothing)
    taken, fills = new_owner >= 0, new_row >= 0

    plgpu.debug_barrier()

    def put(name, index, value, mask):
        plgpu.store(tables[name].at[layer, index], value, mask=mask)

    put("owner", cell, new_owner, taken)
    put("last_used", cell, jnp.full_like(cell, clock), taken | pinned)
    put("address", expert, new_row, fills | (evicted > 0))
    # A missing expert is computed in the version that it would fill, with or without a cell.
    version = jnp.where(wanted >= 0, wanted, -1 - wanted)
    put("version", expert, version, needed & ~hit)
    put("frequency", expert, frequency + 1, needed)
    tables["clock"][layer] = clock

    def put_list(ref, place, mask, value):
        plgpu.store(ref.at[place], jnp.where(mask, value, -1), mask=inside)

    put_list(active_list, places(needed), needed, expert)
    place = places(fills)
    put_list(fill_expert, place, fills, expert)
    put_list(fill_row, place, fills, new_row)
    put_list(fill_version, place, fills, wanted)
    totals = (fills, hit, needed & ~hit & ~fills)
    active_count[...] = count(needed)
    for ref, mask in zip(counts, totals, strict=True):
        ref[...] = count(mask)
    if record is not None:
        record(_Decided(needed, hit, fills, version))


def precedes(a, b):
    """bool[M, N]: whether element n of a comes before element m of b. a and b are tuples of fields
    [N] and [M], compared lexicographically."""
    *fields, last = zip(a, b, strict=True)
    less = last[0][None, :] < last[1][:, None]
    for x, y in reversed(fields):
        x, y = x[None, :], y[:, None]
        less = (x < y) | ((x == y) & less)
    return less

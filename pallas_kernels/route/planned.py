"""route and plan_routed as one Triton-lowered kernel with one program, for the rows of small decode
steps. It saves a launch and a way through memory."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import plgpu
from pallas_kernels.plan.pallas_triton import (
    LISTS,
    call_plan,
    counting_into,
    plan_kernel,
)
from pallas_kernels.plan.pallas_triton import configuration as plan_configuration
from pallas_kernels.route.pallas_triton import chosen, why_not_pallas
from pallas_kernels.route.rule import RouteRule
from pallas_kernels.triton import scalar

MOST_ROWS = 16
"""Most rows: with more, one program takes longer than several programs and a launch."""

MOST_SCORES = 16
"""Most scores of the tile that a thread holds without spilling."""


def rows_of(tokens: int, cells: int, experts: int, rule: RouteRule) -> int | None:
    """Rows of the program's tile, at least one for each warp, so that no reduction crosses warps;
    None: too many tokens, or too many scores for registers."""
    warps = plan_configuration(cells, experts).num_warps
    rows = pl.next_power_of_2(max(tokens, warps))
    fits = rows * pl.next_power_of_2(experts) <= MOST_SCORES * 32 * warps
    return rows if tokens <= MOST_ROWS and fits and rule.groups == 1 else None


def route_planned(logits, operands, tables, layer, records, *, rule, versions):
    """route_and_plan of the api."""
    if reason := why_not_pallas(rule):
        raise ValueError(f"route 'pallas': {reason}; 'xla' takes it")
    (tokens, experts), top_k = logits.shape[-2:], rule.top_k
    rows = rows_of(tokens, tables.owner.shape[1], experts, rule)
    valid, correction, i = operands
    given = [logits.astype(jnp.float32), valid]
    given += [] if correction is None else [scalar(i), correction]
    kernel = functools.partial(_kernel, rows=rows, rule=rule, given=len(given), versions=versions)
    tables, (records, _, ids, weights), parts = call_plan(
        *(kernel, tables, layer, given, records),
        name="route_plan",
        more=(
            jax.ShapeDtypeStruct((tokens, top_k), jnp.int32),
            jax.ShapeDtypeStruct((tokens, top_k), jnp.float32),
        ),
    )
    return ids, weights, tables, records, parts


def _kernel(layer, *refs, config, rows, rule, given, versions):
    """Routes the rows, finds the active experts, then runs plan_kernel.

    Writes: one program. Elements of ids, weights and record have one writer each, as in `route` and
    `plan`. `active` is result and scratch, with one element for each expert, and a barrier
    separates its stores from its loads.
    """
    (logits, valid, *correction), refs = refs[:given], refs[given:]
    *others, records, active, ids, weights = refs[:-LISTS]
    tokens, experts = logits.shape[-2:]
    row = jnp.arange(rows)
    found = chosen(logits, valid, correction, row, rule)
    used = jnp.max((found.listed & found.real).astype(jnp.int32), axis=0)
    expert = jnp.arange(used.size)
    plgpu.store(active.at[expert], used, mask=expert < experts)

    place = row[:, None], found.rank
    plgpu.store(ids.at[place], found.ids, mask=found.listed)
    plgpu.store(weights.at[place], found.weights, mask=found.listed)
    pair, pairs = row[:, None] * rule.top_k + found.rank, tokens * rule.top_k
    bits = lax.bitcast_convert_type(found.weights, jnp.int32)
    for first, value in ((0, found.ids), (pairs, bits)):
        plgpu.store(records.at[layer[0], first + pair], value, mask=found.listed)
    plgpu.debug_barrier()

    record = counting_into(records, layer[0], pairs, experts, versions)
    plan_kernel(layer, active, *others, *refs[-LISTS:], config=config, record=record)

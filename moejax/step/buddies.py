"""Substitutes missing experts by their buddies: a choice that changes outputs (BuddyMoE,
arXiv:2511.10054)."""

from __future__ import annotations

import dataclasses
import functools
import os
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.sizing.coactivation_counts import pair_counts
from host_offload.traces.reader import read_trace
from host_offload.traces.schema import TraceError
from pallas_kernels.option_text import parse_option, share, whole

MOST = 8
"""Buddies of an expert."""

COVER = 0.5
"""Share of an expert's co-activations that its buddies have, the paper's threshold of cumulative
frequency."""

SPREAD = 0.9
"""Least entropy of a token's weights, over the largest possible one, at which its experts are
substituted: tokens that one expert dominates are sensitive."""


@dataclasses.dataclass(frozen=True)
class Buddies:
    """Who stands in for whom, and for which tokens."""

    said: str
    """The option."""
    table: tuple[tuple[tuple[int, ...], ...], ...]
    """[L][E]: the buddies of each expert, the most alike first; −1 after the last."""
    spread: float = SPREAD


class StandIns(NamedTuple):
    """A layer's buddies in a step."""

    table: Any
    """int32[E, B]"""
    missing: Any
    """bool[E]: experts without a cell."""
    spread: float


def read_buddies(text: str, layers: int, experts: int) -> Buddies:
    """Reads buddies=TRACE,KEY=VALUE… and learns the buddies from the trace's routing: the experts
    of the layer that the same tokens choose most often, up to a share of all of these.

    - `layers`, `experts`: the model's MoE layers, and the experts of each.

    Raises ValueError as parse_option, and TraceError for a trace of another model.
    """
    settings = {"most": whole(1), "cover": share, "spread": share}
    _, path, given = parse_option(
        "cache_aware_routing", text, {"buddies": settings}, paths=("buddies",)
    )
    if path is None:
        raise ValueError("buddies are learned from a trace: buddies=TRACE")
    trace = read_trace(path)
    if (trace.header.layers, trace.header.experts) != (layers, experts):
        raise TraceError(
            f"{path} has {trace.header.layers} layers of {trace.header.experts} experts, and the "
            f"model {layers} of {experts}"
        )
    written = os.stat(trace.directory / "trace.json").st_mtime_ns
    table = _learn(path, written, given.get("most", MOST), given.get("cover", COVER))
    return Buddies(text, table, given.get("spread", SPREAD))


@functools.lru_cache(maxsize=2)
def _learn(path: str, written: int, most: int, cover: float) -> tuple[Any, ...]:
    """Returns the table of a trace, which a start asks for several times.

    - `written`: when; another trace at the same path is read anew.
    """
    trace = read_trace(path)
    ids, experts = trace.array("token.ids"), trace.header.experts
    return tuple(_alike(ids[:, layer], experts, most, cover) for layer in range(ids.shape[1]))


def _alike(ids: np.ndarray, experts: int, most: int, cover: float) -> tuple[tuple[int, ...], ...]:
    """Returns the buddies of a layer's experts.

    - `ids`: int[N, k].
    """
    counts = pair_counts(ids, ids, experts)
    np.fill_diagonal(counts, 0)
    found = []
    for row in counts:
        order = np.argsort(-row, kind="stable")
        before = np.cumsum(row[order]) - row[order]
        kept = order[(row[order] > 0) & (before < cover * row.sum())][:most].tolist()
        found.append((*kept, *(-1,) * (most - len(kept))))
    return tuple(found)


def stand_ins(buddies: Buddies, address: jax.Array, layer: jax.Array) -> StandIns:
    """Returns a layer's buddies.

    - `address`: int32[L, E], of the tables.
    """
    table = jnp.asarray(np.array(buddies.table, np.int32))[layer]
    return StandIns(table, address[layer] < 0, buddies.spread)


def substitute(ids: jax.Array, weights: jax.Array, by: StandIns) -> tuple[jax.Array, jax.Array]:
    """Replaces a token's missing experts by their first buddies that have a cell and that the token
    did not choose. A buddy has its expert's weight. An expert without such a buddy stays, and so do
    all experts of a token whose weights are less spread than `spread`.

    - `ids`: int32[T, K], ascending, E for padding.
    - `weights`: float32[T, K].

    Returns both in ascending order of ids.
    """
    experts, chosen = by.missing.shape[0], ids.shape[1]
    share_of = weights / jnp.sum(weights, axis=1, keepdims=True)
    entropy = -jnp.sum(jnp.where(share_of > 0, share_of * jnp.log(share_of), 0), axis=1)
    gives = entropy >= by.spread * np.log(max(chosen, 2))
    for place in range(chosen):
        own = ids[:, place]
        known = jnp.minimum(own, experts - 1)
        choices = by.table[known]
        there = (choices >= 0) & ~by.missing[jnp.maximum(choices, 0)]
        there &= ~jnp.any(choices[:, :, None] == ids[:, None, :], axis=2)
        first = jnp.take_along_axis(choices, jnp.argmax(there, axis=1)[:, None], axis=1)[:, 0]
        swaps = gives & (own < experts) & by.missing[known] & jnp.any(there, axis=1)
        ids = ids.at[:, place].set(jnp.where(swaps, first, own))
    order = jnp.argsort(ids, axis=1, stable=True)
    return jnp.take_along_axis(ids, order, axis=1), jnp.take_along_axis(weights, order, axis=1)

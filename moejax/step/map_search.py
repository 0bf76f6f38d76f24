"""Searches expert maps inside a compiled decode step, and fetches the experts that they predict,
without the host (fMoE, arXiv:2502.05370, sections 4.2 to 4.5).

Shapes: C places of the store, L MoE layers, E experts a layer, D hidden size, R rows of the step, S
entries of a list. Rules and rounding are those of
host_offload.policies.prefetch.expert_map.map_store, so a simulation finds the same maps.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from host_offload.control.interface import MapSearch
from host_offload.memory.tables import HandOvers, Tables, hand_over_cells
from host_offload.policies.prefetch.expert_map.in_step import (
    entries_of_list,
    most_urgent,
    pool_entries,
    prior_of,
)
from host_offload.policies.prefetch.expert_map.map_store import (
    NONE,
    FoundMaps,
    MapStore,
    Trajectory,
    prefix_lengths,
)
from moejax.step.experts import DeviceMemory, ExpertContext, stage_layer, zero_after
from pallas_kernels.plan.victim import victim_key
from pallas_kernels.stage import Entries

WRITTEN = 64
"""Places of the store that one call of `write_maps` writes, a compiled shape."""


def map_shapes(
    search: MapSearch, layers: int, experts: int, hidden: int
) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Returns the shape and dtype of each field of a MapStore on the device."""
    return {
        "embeddings": ((search.capacity, hidden), jnp.float16),
        "maps": ((layers, search.capacity, experts), jnp.float16),
        "lengths": ((layers, search.capacity), jnp.float32),
    }


def write_rows(
    arrays: MapStore, place: jax.Array, embeddings: jax.Array, maps: jax.Array
) -> MapStore:
    """Returns the store with some rows replaced.

    - `place`: int32[n], where each row goes; rows with a place of C or more are not written.
    - `embeddings`: float16[n, D].
    - `maps`: float16[n, L, E].
    """
    by_layer = maps.swapaxes(0, 1)
    lengths = prefix_lengths(by_layer.astype(jnp.float32), jnp)
    return MapStore(
        arrays.embeddings.at[place].set(embeddings, mode="drop"),
        arrays.maps.at[:, place].set(by_layer, mode="drop"),
        arrays.lengths.at[:, place].set(lengths, mode="drop"),
    )


def wanted_experts(probabilities: jax.Array, score: jax.Array, top_k: int) -> jax.Array:
    """Chooses the experts that a map predicts (equations 6 to 8).

    Of each row these are the fewest likeliest experts whose probabilities sum to at least
    clip(1 − score, 0, 1), and no fewer than `top_k`. An expert is chosen if fewer than `top_k`
    experts are likelier, or if the sum of the likelier ones is too small. So nothing is sorted.

    - `probabilities`: float32[R, E].
    - `score`: float32[R], similarity of the map that was found.

    Returns bool[R, E].
    """
    expert = jnp.arange(probabilities.shape[1])
    p, other = probabilities[:, :, None], probabilities[:, None, :]
    before = (p > other) | ((p == other) & (expert[:, None] < expert))  # [R, before, expert]
    rank = jnp.sum(before, axis=1)
    mass = jnp.sum(jnp.where(before, p, 0.0), axis=1)
    return (rank < top_k) | (mass < jnp.clip(1 - score, 0, 1)[:, None])


def list_entries(
    tables: Tables, layer: jax.Array, wanted: jax.Array, due: jax.Array, size: int
) -> Entries:
    """Lists the transfers of a layer that the step has yet to compute.

    Absent experts come in the order of their probability. They replace, in this order: empty cells,
    experts that are not wanted (by plan's victim key), experts with a lower probability than the
    one that comes.

    - `wanted`: float32[E], probability of each wanted expert; 0: the expert is not wanted.
    - `due`: bool[E], those that may come now.
    - `size`: entries of the list, S.
    """

    def at(table):
        return lax.dynamic_index_in_dim(table, layer, keepdims=False)

    cell_row, owner, last_used, address = map(
        at, (tables.cell_row, tables.owner, tables.last_used, tables.address)
    )
    expert, cell = jnp.arange(address.shape[0]), jnp.arange(owner.shape[0])
    owned = owner >= 0
    owns = (owner[:, None] == expert) & owned[:, None]

    def of_owner(values):
        return jnp.sum(jnp.where(owns, values, 0), axis=1)

    worth = of_owner(wanted)
    # plan would compute the age at the layer's next reference, so at the next value of its clock.
    age = at(tables.clock) + 1 - last_used
    prior, frequency = of_owner(at(tables.prior)), of_owner(at(tables.frequency))
    key = victim_key(age, frequency, prior, tables.victim_weights)
    kind = owned.astype(jnp.int32) + (worth > 0)
    order = kind, worth, key * owned, last_used * owned, owner, cell
    place = jnp.arange(size)[:, None]
    cells = (cell_row >= 0) & (_ranks(order, cell_row >= 0) == place)  # [S, C]
    absent = due & (wanted > 0) & (address < 0)
    experts = absent & (_ranks((-wanted, expert), absent) == place)  # [S, E]

    def of(taken, values):
        return jnp.sum(jnp.where(taken, values, 0), axis=1)

    both = jnp.any(cells, axis=1) & jnp.any(experts, axis=1)
    fits = both & (of(experts, wanted) > of(cells, worth))
    listed = layer, of(experts, expert), 0, of(cells, cell)
    return Entries._make(jnp.where(fits, value, -1).astype(jnp.int32) for value in listed)


def take_from_pool(
    tables: Tables,
    layer: jax.Array,
    now: jax.Array,
    near: int,
    wanted: jax.Array,
    due: jax.Array,
    size: int,
) -> tuple[Tables, Entries]:
    """Lists the transfers of list_entries, if cells of all layers are one pool (in_step.
    pool_entries), and hands the cells over that come from other layers.

    Returns (tables, the list).
    """
    found = pool_entries(tables, layer, now, near, wanted, due, size, jnp)
    goes = found.fits & found.comes
    moves = (found.giver, found.place, found.owner, jnp.broadcast_to(layer, (size,)), found.cell)
    tables = hand_over_cells(tables, HandOvers(*(jnp.where(goes, each, -1) for each in moves)))
    listed = layer, found.expert, 0, found.cell
    fits = found.fits
    return tables, Entries._make(jnp.where(fits, each, -1).astype(jnp.int32) for each in listed)


class Foreseen(NamedTuple):
    """A search between layers."""

    trajectory: Trajectory
    wanted: jax.Array | None
    """float32[L, E]: probabilities of the experts that layers to come want (search.most); 0: not
    wanted. None: none waits."""


@dataclasses.dataclass(frozen=True)
class Lookahead:
    """Fetches experts ahead of the layers of the running step, by the maps of earlier steps."""

    arrays: MapStore
    search: MapSearch
    top_k: int
    valid: jax.Array
    """bool[R]: the rows that hold a token."""
    context: ExpertContext

    def begin(self, x: jax.Array, memory: DeviceMemory) -> tuple[DeviceMemory, Foreseen, jax.Array]:
        """Searches by embedding, before the first layer, and fetches for the first `distance`
        layers.

        - `x`: [R, D], the embeddings.

        Returns (memory, what is foreseen, int32[distance, 4, S], as `fetch` gives them).
        """
        found, now = self.arrays.nearest_embedding(x.astype(jnp.float16), jnp), jnp.int32(-1)
        targets = jnp.arange(self.search.distance)
        seen = Foreseen(self.arrays.trajectory(x.shape[0], jnp), None)

        def foresee(tables, target):
            return self.foresee(tables, target, found)

        def fetch(memory, target):
            tables, wanted = self.foresee(memory.tables, target, found)
            return self.fetch(memory._replace(tables=tables), target, now, wanted, True, x)

        with jax.named_scope("lookahead"):
            if self.search.most is None:
                memory, entries = lax.scan(fetch, memory, targets)
                return memory, seen, entries
            tables, first = lax.scan(foresee, memory.tables, targets)
            wanted = jnp.zeros(tables.address.shape, jnp.float32)
            seen = seen._replace(wanted=wanted.at[: len(targets)].set(first))
            memory, entries = self._fetch_urgent(memory._replace(tables=tables), seen, now, x)
            return memory, seen, entries

    def after_layer(
        self,
        memory: DeviceMemory,
        seen: Foreseen,
        layer: jax.Array,
        probabilities: jax.Array,
        x: jax.Array,
    ) -> tuple[DeviceMemory, Foreseen, jax.Array]:
        """Searches by the router's probabilities, after a layer's experts, and fetches for the
        layer `distance` further on, or of all layers to come what is most urgent.

        - `probabilities`: float16[R, E], of the layer.
        - `x`: [R, D], output of the layer.

        Returns (memory, what is foreseen, int32[·, 4, S], as `fetch` gives them).
        """
        with jax.named_scope("lookahead"):
            trajectory, found = self.arrays.nearest_map(seen.trajectory, layer, probabilities, jnp)
            target = layer + self.search.distance
            tables, wanted = self.foresee(memory.tables, target, found)
            memory, seen = memory._replace(tables=tables), seen._replace(trajectory=trajectory)
            if seen.wanted is None:
                memory, ahead = self.fetch(memory, target, layer, wanted, True, x)
                return memory, seen, ahead[None]
            seen = seen._replace(wanted=seen.wanted.at[target].set(wanted, mode="drop"))
            memory, ahead = self._fetch_urgent(memory, seen, layer, x)
            return memory, seen, ahead

    def foresee(
        self, tables: Tables, target: jax.Array, found: FoundMaps
    ) -> tuple[Tables, jax.Array]:
        """Makes the probabilities of the found maps the prior of a layer to come, by which it
        evicts. Of several rows the largest probability of each expert counts. Nothing happens past
        the last layer, or while the store is empty.

        Returns (tables, float32[E]: probabilities of the experts that the layer wants; 0: not
        wanted).
        """
        layer = jnp.minimum(target, len(self.arrays.lengths) - 1)
        known = self.valid & (found.score > NONE) & (target < len(self.arrays.lengths))
        likely = self.arrays.maps[layer, found.place].astype(jnp.float32)
        likely = jnp.where(known[:, None], likely, 0)
        chosen = wanted_experts(likely, found.score, self.top_k) & known[:, None]
        prior = prior_of(jnp.max(likely, axis=0), jnp)
        prior = jnp.where(jnp.any(known), prior, tables.prior[layer])
        tables = tables._replace(prior=tables.prior.at[layer].set(prior))
        return tables, jnp.max(jnp.where(chosen, likely, 0), axis=0)

    def fetch(
        self,
        memory: DeviceMemory,
        target: jax.Array,
        now: jax.Array,
        wanted: jax.Array,
        due: jax.Array | bool,
        after: jax.Array,
    ) -> tuple[DeviceMemory, jax.Array]:
        """Carries out the transfers to a layer to come. Nothing happens past the last layer.

        - `target`: the layer.
        - `now`: the layer that was computed last; −1: none.
        - `wanted`: float32[E], of the layer; 0: not wanted.
        - `due`: bool[E], those that may come now.
        - `after`: an array that depends on every read of the arena so far.

        Returns (memory, int32[4, S]: layer, expert and cell of each entry, −1 without one, and
        whether the entry was carried out).
        """
        layers, (arena, tables) = len(self.arrays.lengths), memory
        layer, size = jnp.minimum(target, layers - 1), self.entries
        due = jnp.broadcast_to(due & (target < layers), wanted.shape)
        if self.search.pooled:
            near = self.search.distance
            tables, entries = take_from_pool(tables, layer, now, near, wanted, due, size)
        else:
            entries = list_entries(tables, layer, wanted, due, size)
        given = entries._replace(layer=entries.layer + zero_after(after))
        memory, done = stage_layer(DeviceMemory(arena, tables), layer, given, self.context, ahead=1)
        return memory, jnp.stack([entries.layer, entries.expert, entries.cell, done])

    def _fetch_urgent(
        self, memory: DeviceMemory, seen: Foreseen, now: jax.Array, after: jax.Array
    ) -> tuple[DeviceMemory, jax.Array]:
        """Carries out the most urgent transfers, for the nearest layer first.

        Returns (memory, int32[distance, 4, S], as `fetch` gives them).
        """
        wanted, most = seen.wanted, self.search.most
        assert wanted is not None and most is not None
        due = most_urgent(wanted, memory.tables.address, now, most, jnp)

        def fetch(memory, target):
            layer = jnp.minimum(target, len(wanted) - 1)
            return self.fetch(memory, target, now, wanted[layer], due[layer], after)

        return lax.scan(fetch, memory, now + 1 + jnp.arange(self.search.distance))

    @property
    def entries(self) -> int:
        """How many entries a list has, S."""
        return entries_of_list(self.search, self.arrays.maps.shape[2])


def _ranks(order: tuple[jax.Array, ...], candidate: jax.Array) -> jax.Array:
    """Counts the candidates that come before each element, by the fields of `order` in turn.
    Returns int32[n]."""
    less, equal = jnp.zeros((), bool), jnp.ones((), bool)
    for field in order:
        a, b = field[:, None], field[None, :]
        less, equal = less | (equal & (a < b)), equal & (a == b)
    return jnp.sum(less & candidate[:, None], axis=0)

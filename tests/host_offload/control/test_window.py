"""The window's ring in tables: who has which cells while layers pass, against plain Python."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from host_offload.control.window import (
    DENSE,
    HOST,
    PACKED,
    PACKED_VERSION,
    WindowSpec,
    tiers_of,
)
from host_offload.memory.tables import Tables, empty_tables, hand_over, seat_absent, with_contents
from moejax.step.experts import seat

EXPERTS, SLOT_ROWS = 5, 7


def window(layers: int, residents: int = 0, seed: int = 0) -> WindowSpec:
    """A window in which each layer has so many residents, others in each layer."""
    random = np.random.default_rng(seed)
    tier = np.full((layers, EXPERTS), HOST, np.int8)
    for layer in tier:
        layer[random.permutation(EXPERTS)[:residents]] = DENSE
    return WindowSpec(tier, SLOT_ROWS, SLOT_ROWS)


def opened(spec: WindowSpec) -> Tables:
    return with_contents(empty_tables(spec.layers, EXPERTS, spec.cell_bound), spec.contents())


def materialized(tables: Tables, layer: int) -> tuple[Tables, list[tuple[int, int]]]:
    """The tables after a layer took its cells, and (expert, row) of what has to come."""
    ring = jnp.arange(tables.cell_row.shape[1]) >= EXPERTS
    tables = hand_over(tables, (layer - 2) % tables.clock.size, layer, ring)
    tables, expert, row, count = seat_absent(tables, layer, EXPERTS)
    listed = np.stack([expert, row], axis=1)[: int(count)]
    return tables, [tuple(pair) for pair in listed.tolist()]


def by_parity(tables: Tables, layer: int) -> tuple[Tables, list[tuple[int, int]]]:
    """A mistake: the half of the ring follows the layer's own number, so that with an odd number of
    layers the last one and the first one collide at the wrap."""
    layers = tables.clock.size
    held = np.flatnonzero(np.max(np.asarray(tables.cell_row)[:, EXPERTS:], axis=1) >= 0)
    giver = next((int(h) for h in held if h % 2 == layer % 2), (layer - 2) % layers)
    ring = jnp.arange(tables.cell_row.shape[1]) >= EXPERTS
    tables = hand_over(tables, giver, layer, ring)
    tables, expert, row, count = seat_absent(tables, layer, EXPERTS)
    return tables, [*zip(expert.tolist(), row.tolist(), strict=True)][: int(count)]


def broken(spec: WindowSpec, step, passes: int) -> list[str]:
    """What is wrong with the ring over so many passes: each layer must be loaded whole into the
    half that the running count says, while the layer before it keeps its own."""
    tables, wrong = opened(spec), []
    half = {0: [int(row) for row in spec.contents()["cell_row"][0, EXPERTS:] if row >= 0]}
    last = spec.contents()["cell_row"][-1, EXPERTS:]
    half[1] = [int(row) for row in last if row >= 0]
    for count in range(1, passes * spec.layers):
        layer, before = count % spec.layers, (count - 1) % spec.layers
        tables, listed = step(tables, layer)
        absent = np.flatnonzero(spec.streams[layer]).tolist()
        if listed != list(zip(absent, half[count % 2], strict=True)):
            wrong.append(f"load {count} is {listed}")
        address = np.asarray(tables.address)
        for there in (layer, before):
            if np.any(address[there] < 0):
                wrong.append(f"layer {there} is not whole while {before} computes")
        mapped = address[address >= 0].tolist()
        if len(set(mapped)) < len(mapped) or len(mapped) != spec.slots:
            wrong.append(f"{len(mapped)} experts are mapped to {len(set(mapped))} cells")
        cells = np.asarray(tables.cell_row)
        if np.sum(cells >= 0) != spec.slots:
            wrong.append(f"{np.sum(cells >= 0)} cells")
        owned = np.asarray(tables.owner)
        seen = np.where(owned >= 0, np.take_along_axis(address, owned.clip(0), axis=1), -1)
        if not np.array_equal(seen, np.where(owned >= 0, cells, -1)):
            wrong.append("a cell's owner is elsewhere")
    return wrong


@pytest.mark.parametrize("residents", [0, 2])
@pytest.mark.parametrize("layers", [3, 4, 5])
def test_layers_take_turns_in_the_ring_by_the_running_count(layers, residents):
    assert not broken(window(layers, residents), materialized, passes=3)


@functools.cache
def mistakes():
    def the_layer_that_computes(tables: Tables, layer: int):
        """Its cells are taken although nothing has been computed with them."""
        layers = tables.clock.size
        ring = jnp.arange(tables.cell_row.shape[1]) >= EXPERTS
        tables = hand_over(tables, (layer - 1) % layers, layer, ring)
        tables, expert, row, count = seat_absent(tables, layer, EXPERTS)
        return tables, [*zip(expert.tolist(), row.tolist(), strict=True)][: int(count)]

    def addresses_that_stay(tables: Tables, layer: int):
        """The page of who gave its cells stays mapped."""
        after, listed = materialized(tables, layer)
        stays = jnp.where(after.address < 0, tables.address, after.address)
        return after._replace(address=stays), listed

    return {"the half of its parity": by_parity} | {
        f.__name__: f for f in (the_layer_that_computes, addresses_that_stay)
    }


@pytest.mark.parametrize("mistake", mistakes())
def test_a_ring_with_a_mistake_is_found(mistake):
    assert broken(window(3), mistakes()[mistake], passes=3)


def test_cells_that_are_not_granted_stay_and_only_what_goes_is_absent():
    """Of the giver's cells one is its own, one is not granted and one holds nobody."""
    tables = empty_tables(3, 3, 4)
    address = np.full((3, 3), -1, np.int32)
    address[0] = [10, -1, 30]
    tables = tables._replace(
        cell_row=jnp.int32([[10, -1, 30, 40], [-1, 70, -1, -1], [-1] * 4]),
        owner=jnp.int32([[0, -1, 2, -1], [-1, 1, -1, -1], [-1] * 4]),
        address=jnp.asarray(address),
        cell_version=jnp.int32([[0, 0, 1, 1], [0] * 4, [0] * 4]),
    )
    after = hand_over(tables, 0, 1, jnp.array([False, False, True, True]))
    np.testing.assert_array_equal(after.cell_row, [[10, -1, -1, -1], [-1, 70, 30, 40], [-1] * 4])
    np.testing.assert_array_equal(after.owner, [[0, -1, -1, -1], [-1, 1, -1, -1], [-1] * 4])
    np.testing.assert_array_equal(after.address, [[10, -1, -1], [-1] * 3, [-1] * 3])
    np.testing.assert_array_equal(after.cell_version[1], [0, 0, 1, 1])
    for name in ("last_used", "frequency", "clock", "version"):
        np.testing.assert_array_equal(getattr(after, name), getattr(tables, name))


def test_experts_have_the_bytes_of_two_layers_and_their_residents():
    for residents in range(EXPERTS + 1):
        spec = window(4, residents)
        assert spec.slots == spec.cells == 4 * residents + 2 * (EXPERTS - residents)
        rows = spec.contents()["cell_row"]
        assert sorted(rows[rows >= 0]) == [slot * SLOT_ROWS for slot in range(spec.slots)]


@pytest.mark.parametrize("layers", [3, 4])
@pytest.mark.parametrize("residents", [0, 2, EXPERTS])
def test_a_ring_of_one_half_goes_on_with_every_layer(layers, residents):
    """In the tables each layer has it in turn, and its experts are where `seats` says; nothing of
    another layer is mapped but residents."""
    spec = dataclasses.replace(window(layers, residents), halves=1)
    tables, holder = opened(spec), layers - 1
    assert spec.cells == layers * residents + EXPERTS - residents == spec.slots
    assert np.sum(np.asarray(tables.address) >= 0) == layers * residents
    for count in range(2 * layers + 1):
        layer = count % layers
        tables, holder = seat(tables, jnp.int32(holder), jnp.int32(layer)), layer
        address = np.asarray(tables.address)
        assert [(e, int(address[layer, e])) for e, _ in spec.seats(layer)] == spec.seats(layer)
        assert np.all(address[layer] >= 0)
        mapped = address[address >= 0].tolist()
        assert len(mapped) == len(set(mapped)) == spec.cells
        assert np.sum(np.asarray(tables.cell_row) >= 0) == spec.cells


def test_a_window_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="holds all 2 layers of experts, so nothing would stream"):
        window(2)


@pytest.mark.parametrize("direct", [False, True])
def test_packed_residents_have_cells_of_their_own_size(direct):
    """One after the other without a gap, the last expert of every layer at the end; decoded into
    the window they stream as well, computed as they are they do not."""
    spec = WindowSpec(tiers_of(np.tile([1, 2, 2], (4, 1))), 8, 7, 5, direct=direct)
    tables = spec.contents()
    packed = tables["cell_version"] == PACKED_VERSION
    sizes = np.where(packed, 5, 7)[tables["cell_row"] >= 0]
    rows = tables["cell_row"][tables["cell_row"] >= 0]
    order = np.argsort(rows)
    assert rows[order].tolist() == [0, *np.cumsum(sizes[order])[:-1].tolist()]
    assert spec.rows == sizes.sum() == 2 * (2 if direct else 4) * 7 + 4 * 7 + 8 * 5
    assert spec.slots == -(-spec.rows // 8) and spec.cells == len(rows)
    assert (
        np.array_equal(packed[:, :EXPERTS], spec.tier == PACKED) and not packed[:, EXPERTS:].any()
    )
    # Who goes first when the last packed expert of every layer is given back.
    last = tables["cell_row"][:, 2]
    assert last.min() == spec.rows - 4 * 5
    less = WindowSpec(tiers_of(np.tile([1, 1, 3], (4, 1))), 8, 7, 5, direct=direct)
    if not direct:
        stay = less.contents()["cell_row"] >= 0
        assert np.array_equal(less.contents()["cell_row"][stay], tables["cell_row"][stay])
    seated = tables["owner"][0, EXPERTS:]
    assert seated[seated >= 0].tolist() == ([3, 4] if direct else [1, 2, 3, 4])
    own = tables["address"][:, 1:3]
    assert np.all(tables["version"][:, 1:3] == direct)
    assert np.all(own == tables["cell_row"][:, 1:3]) if direct else np.all(own[1:] == -1)


def test_packed_residents_without_a_size_are_refused():
    with pytest.raises(ValueError, match="packed residents need a size"):
        WindowSpec(tiers_of(np.tile([0, 1, 4], (4, 1))), 8, 7)

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


def two_before(tables: Tables, layer: int) -> int:
    """Whose cells a layer takes."""
    return (layer - 2) % tables.clock.size


def materialized(
    tables: Tables, layer: int, giver=two_before
) -> tuple[Tables, list[tuple[int, int]]]:
    """The tables after a layer took its cells, and (expert, row) of what has to come."""
    ring = jnp.arange(tables.cell_row.shape[1]) >= EXPERTS
    tables = hand_over(tables, giver(tables, layer), layer, ring)
    tables, expert, row, count = seat_absent(tables, layer, EXPERTS)
    listed = np.stack([expert, row], axis=1)[: int(count)]
    return tables, [tuple(pair) for pair in listed.tolist()]


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


def by_parity(tables: Tables, layer: int) -> int:
    """A mistake: the half of the ring follows the layer's own number, so that with an odd number of
    layers the last one and the first one collide at the wrap."""
    held = np.flatnonzero(np.max(np.asarray(tables.cell_row)[:, EXPERTS:], axis=1) >= 0)
    return next((int(h) for h in held if h % 2 == layer % 2), two_before(tables, layer))


def test_a_ring_with_a_mistake_is_found():
    assert broken(window(3), functools.partial(materialized, giver=by_parity), passes=3)


@pytest.mark.parametrize("layers", [3, 4])
@pytest.mark.parametrize("residents", [0, 2, EXPERTS])
def test_a_ring_of_one_half_goes_on_with_every_layer(layers, residents):
    """In the tables each layer has it in turn, and its experts are where `seats` says; nothing of
    another layer is mapped but residents."""
    spec = dataclasses.replace(window(layers, residents), halves=1)
    tables, holder = opened(spec), layers - 1
    assert np.array_equal(spec.residents()[0] < 0, spec.streams)
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
    with pytest.raises(ValueError, match="packed residents need a size"):
        WindowSpec(tiers_of(np.tile([0, 1, 4], (4, 1))), 8, 7)

"""move: cells and what they hold elsewhere, tables that say so, nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from host_offload.memory.tables import empty_tables
from pallas_kernels.move import Moves, api
from pallas_kernels.move.specs import SPECS, Spec
from tests.memory_faults import memory_faults
from tests.pallas_kernels import contract
from tests.pallas_kernels.contract import Contract, Mutant, compiled


def place_rows(spec: Spec) -> int:
    """What a place in the arena spans."""
    return max(spec.record_rows) + 1


@st.composite
def states(draw, spec: Spec):
    """Each cell of a layer: (its place or none, its owner or none, whether the address points to
    it); then the entries, some of them nonsense. Places are distinct, those of entries too."""
    count = spec.layers * spec.cells
    places = draw(st.permutations(range(count + spec.entries)))
    granted = draw(st.lists(st.booleans(), min_size=count, max_size=count))
    versions = draw(
        st.lists(st.integers(0, len(spec.record_rows) - 1), min_size=count, max_size=count)
    )
    owners = [
        draw(st.permutations([*range(spec.experts), *[-1] * spec.cells]))[: spec.cells]
        for _ in range(spec.layers)
    ]
    pointed = draw(st.lists(st.integers(0, 9), min_size=count, max_size=count))
    mostly = st.sampled_from([0] * 8 + [-1, spec.layers])
    entries = [
        (
            draw(st.integers(0, spec.layers - 1)) + draw(mostly),
            draw(st.sampled_from([*range(spec.cells)] * 3 + [-1, spec.cells])),
            draw(st.sampled_from([places[count + i] * place_rows(spec) + 1] * 8 + [-1, 10**6])),
        )
        for i in range(spec.entries)
    ]
    return places[:count], granted, versions, owners, pointed, entries


def check(spec: Spec, implementation: str, state) -> None:
    places, granted, versions, owners, pointed, entries = state
    rng = np.random.default_rng(0)
    stores = [
        rng.integers(0, contract.POISON, (spec.layers, spec.experts, r, spec.hidden), np.uint16)
        for r in spec.record_rows
    ]
    # Rows of every place differ, so that a copy that is too long shows.
    size = (len(places) + spec.entries) * place_rows(spec) + 2, spec.hidden
    arena = rng.integers(0, contract.POISON, size, np.uint16)
    tables = jax.tree.map(np.array, empty_tables(spec.layers, spec.experts, spec.cells))
    for layer in range(spec.layers):
        for cell in range(spec.cells):
            i = layer * spec.cells + cell
            tables.cell_version[layer, cell] = versions[i]
            if not granted[i]:
                continue
            row = tables.cell_row[layer, cell] = places[i] * place_rows(spec) + 1
            owner = owners[layer][cell]
            if owner < 0:
                continue
            tables.owner[layer, cell] = owner
            record = stores[versions[i]][layer, owner]
            arena[row : row + len(record)] = record
            if pointed[i]:  # otherwise the address is a copy elsewhere
                tables.address[layer, owner], tables.version[layer, owner] = row, versions[i]
            else:
                tables.owner[layer, cell] = -1
    want, rows = jax.tree.map(np.array, tables), np.array(arena)
    done, seen = [], set()
    for layer, cell, row in entries:
        exists = (
            0 <= layer < spec.layers and 0 <= cell < spec.cells and want.cell_row[layer, cell] >= 0
        )
        fits = exists and 0 <= row < len(arena) and (layer, cell) not in seen
        seen.add((layer, cell))
        done.append(int(fits))
        if not fits:
            continue
        old, size = tables.cell_row[layer, cell], spec.record_rows[tables.cell_version[layer, cell]]
        rows[row : row + size] = arena[old : old + size]
        want.cell_row[layer, cell], owner = row, want.owner[layer, cell]
        if owner >= 0:
            want.address[layer, owner] = row
    op = compiled(api.move, record_rows=spec.record_rows, implementation=implementation)
    moves = Moves(*(np.int32(field) for field in zip(*entries, strict=True)))
    got_arena, got, got_done = op(jnp.array(arena), jax.tree.map(jnp.array, tables), moves)
    np.testing.assert_array_equal(got_done, done)
    for name, a, b in zip(got._fields, jax.device_get(got), want, strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name, strict=True)
    np.testing.assert_array_equal(got_arena, rows, strict=True)
    assert not any(memory_faults(got_arena, got, stores))


def refused(sizes, options):
    moves = Moves(*(jnp.zeros(size, jnp.int32) for size in sizes))
    arena = jnp.zeros((9, 8), jnp.uint16)
    return api.move(arena, empty_tables(1, 2, 2), moves, **{"record_rows": (3,), **options})


CONTRACTS = (
    Contract(
        "move",
        api.IMPLEMENTATIONS,
        SPECS,
        check,
        histories=states,
        mutant=Mutant(lambda a: {"target": a["target"] + 1}, SPECS[0]),
        refused=refused,
        refusals=(
            ([2, 3, 2], {}, r"the entries' fields are all int32\[S\], not"),
            ([2, 2, 2], {"record_rows": ()}, "move needs the rows of at least one version"),
            ([2, 2, 2], {"implementation": "cuda"}, "op 'move' has no implementation 'cuda'"),
        ),
    ),
)

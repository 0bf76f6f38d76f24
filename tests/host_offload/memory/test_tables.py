"""Tables: the cold start, and what survives a change of cells."""

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.memory.tables import Tables, empty_tables, regrant, with_contents
from host_offload.policies.eviction.names import EVICTION

LFU = {"victim_weights": EVICTION["lfu"]}


def resident() -> Tables:
    """Two layers of four cells: three granted, of which experts 5, 2 hold two in layer 0 and
    expert 0 one in layer 1."""
    tables = empty_tables(2, 6, 4)
    address = np.full((2, 6), -1, np.int32)
    address[0, [5, 2]], address[1, 0] = [0, 20], 50
    return tables._replace(
        cell_row=jnp.int32([[0, 10, 20, -1], [40, 50, 60, -1]]),
        owner=jnp.int32([[5, -1, 2, -1], [-1, 0, -1, -1]]),
        last_used=jnp.int32([[3, 0, 7, 0], [0, 2, 0, 0]]),
        address=jnp.asarray(address),
        frequency=jnp.full((2, 6), 4, jnp.int32),
        clock=jnp.int32([7, 2]),
    )


def test_empty_tables():
    tables = empty_tables(2, 6, 4, (0, 1, 0))
    assert all(table.dtype == jnp.int32 for table in tables)
    for name in ("cell_row", "owner"):
        np.testing.assert_array_equal(getattr(tables, name), np.full((2, 4), -1))
    for name in ("cell_version", "last_used"):
        np.testing.assert_array_equal(getattr(tables, name), np.zeros((2, 4)))
    np.testing.assert_array_equal(tables.address, np.full((2, 6), -1))
    for name in ("version", "frequency", "fill_version", "prior"):
        np.testing.assert_array_equal(getattr(tables, name), np.zeros((2, 6)))
    np.testing.assert_array_equal(tables.clock, [0, 0])
    np.testing.assert_array_equal(tables.victim_weights, [0, 1, 0])


def equal_except(got: Tables, want: Tables, **changed) -> None:
    for name, a, b in zip(Tables._fields, got, want._replace(**changed), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


def test_regrant_of_the_same_cells_changes_nothing():
    tables = resident()
    equal_except(regrant(tables, tables.cell_row), tables)


def test_regrant_grows():
    tables = resident()
    cell_row = jnp.int32([[0, 10, 20, 30], [40, 50, 60, 70]])
    equal_except(regrant(tables, cell_row), tables, cell_row=cell_row)


def test_regrant_drops_who_loses_the_cell_and_keeps_the_others():
    """Cell 0 of layer 0 is taken, cell 2 moves, an empty one is taken; layer 1 keeps its own."""
    tables = resident()
    cell_row = jnp.int32([[-1, -1, 30, -1], [40, 50, -1, -1]])
    equal_except(
        regrant(tables, cell_row),
        tables,
        cell_row=cell_row,
        owner=[[-1, -1, -1, -1], [-1, 0, -1, -1]],
        address=np.where(np.arange(12).reshape(2, 6) == 6, 50, -1),
    )


def test_regrant_to_nothing_and_back():
    tables = resident()
    none = regrant(tables, jnp.full((2, 4), -1, jnp.int32))
    equal_except(
        regrant(none, tables.cell_row),
        tables,
        owner=np.full((2, 4), -1),
        address=np.full((2, 6), -1),
    )


def test_regrant_keeps_the_current_copy_when_an_older_one_goes():
    """Expert 2 of layer 0 is in cell 1 too, in another version, and its address says cell 2."""
    tables = resident()
    tables = tables._replace(
        owner=tables.owner.at[0, 1].set(2), cell_version=tables.cell_version.at[0, 1].set(1)
    )
    cell_row = tables.cell_row.at[0, 1].set(-1)
    after = regrant(tables, cell_row)
    equal_except(after, tables, cell_row=cell_row, owner=tables.owner.at[0, 1].set(-1))


def test_budgets_are_contents_so_nothing_recompiles():
    # A function of its own: jax shares the cache of one function between its jits.
    move = jax.jit(lambda *args: regrant(*args))
    tables = jax.device_put(resident(), jax.devices()[0])  # committed, as the engine's are
    for granted in (0, 2, 4):
        cell_row = jnp.where(jnp.arange(4) < granted, tables.cell_row, -1)
        tables = move(tables, cell_row)
        tables = with_contents(tables, LFU)
    assert move._cache_size() == 1


def test_other_victim_weights():
    tables = resident()
    equal_except(with_contents(tables, LFU), tables, victim_weights=[0, 1, 0])

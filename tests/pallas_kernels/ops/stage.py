"""stage against plain Python, over histories of references, stages and regrants."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from host_offload.memory.tables import empty_tables, regrant
from pallas_kernels.cpu.library import why_not_cpu
from pallas_kernels.fill import fill
from pallas_kernels.plan import plan
from pallas_kernels.stage import Entries, api
from pallas_kernels.stage.specs import SPECS, Spec
from tests.memory_faults import memory_faults
from tests.pallas_kernels.contract import POISON, Contract, Mutant, compiled, stored
from tests.pallas_kernels.encoded import formats, recode, records
from tests.pallas_kernels.pager import INT
from tests.pallas_kernels.staged_memory import Memory


def histories(spec: Spec):
    """(version of each cell, actions). Lists are full of entries for one layer and of duplicates,
    and have entries for no layer, of experts, versions and cells that do not exist, too."""
    versions, place = len(spec.record_rows), st.sampled_from([0, 0, 0, 0, 1, -1])
    layer, version, expert = (
        st.integers(0, size - 1) for size in (spec.layers, versions, spec.experts)
    )

    def mostly(size: int):
        """An index, sometimes one that does not exist."""
        return st.sampled_from([*range(size)] * (1 + 12 // size) + [-1, size])

    entry = st.tuples(
        st.sampled_from([0] * 10 + [-1, spec.layers - 1]),
        mostly(spec.experts),
        mostly(versions),
        mostly(spec.cells),
    )
    # Strategies that are one object would count once.
    stages = [st.tuples(st.just("stage"), _list(entry, spec.entries)) for _ in range(4)]
    action = st.one_of(
        st.tuples(st.just("reference"), layer, st.frozensets(expert, max_size=3)),
        st.tuples(st.just("regrant"), layer, _list(place, spec.cells)),
        st.tuples(st.just("fill_version"), layer, expert, version),
        *stages,
    )
    return st.tuples(_list(version, spec.cells), st.lists(action, min_size=4, max_size=12))


def _list(values, size: int):
    return st.lists(values, min_size=size, max_size=size)


def check(spec: Spec, implementation: str, history) -> None:
    """Arena, tables and what was carried out are right after every action, and nothing is stale."""
    cell_versions, actions = history
    rng = np.random.default_rng(0)
    stores = [
        rng.integers(0, POISON, (spec.layers, spec.experts, rows, spec.hidden), np.uint16)
        for rows in spec.record_rows
    ]
    memory = Memory(spec, cell_versions, stores)
    # Committed to the device like what comes out of an op, or that would be another program.
    on_device = functools.partial(jax.device_put, device=jax.devices()[0])
    arena, tables = on_device((memory.arena, memory.tables))
    op = compiled(api.stage, implementation=implementation)
    pinned, here = (
        tuple(stored(store, name) for store in stores) for name in ("xla", implementation)
    )
    for kind, *action in actions:
        if kind == "stage":
            (entries,) = action
            lists = Entries(*map(INT, zip(*entries, strict=True)))
            for layer in range(spec.layers):
                want = memory.stage(layer, entries)
                arena, tables, done = op(arena, tables, here, INT(layer), lists)
                np.testing.assert_array_equal(done, INT(want), strict=True)
        elif kind == "reference":
            layer, active = action
            memory.reference(layer, active)
            mask = np.isin(np.arange(spec.experts), list(active))
            # The one that compiles fast: the pager says what is expected of either.
            native = "xla" if why_not_cpu() else "cpu"
            tables, work = compiled(plan, implementation=native)(tables, INT(layer), mask)
            arena = compiled(fill)(arena, pinned, INT(layer), work.fills)
        elif kind == "regrant":
            memory.regrant(*action)
            tables = compiled(regrant)(tables, memory.tables.cell_row)
        else:
            layer, expert, version = action
            memory.pagers[layer].fill_version[expert] = version
            tables = tables._replace(fill_version=on_device(memory.tables.fill_version))
        got = jax.device_get(tables)
        for name, a, b in zip(tables._fields, got, memory.tables, strict=True):
            np.testing.assert_array_equal(a, b, err_msg=name, strict=True)
        np.testing.assert_array_equal(arena, memory.arena, strict=True)
        assert not any(memory_faults(arena, tables, pinned))


def one_layer(**changes):
    """Tables of one layer of 4 experts with 3 cells of versions 0, 0, 1, its clock at 7."""
    tables = empty_tables(1, 4, 3)._replace(
        cell_row=INT([[0, 3, 6]]), cell_version=INT([[0, 0, 1]]), clock=INT([7])
    )
    return tables._replace(**{name: INT([row]) for name, row in changes.items()})


def run(implementation, tables, *entries):
    """The tables' rows after entries (expert, version, cell), and what was carried out."""
    store = np.zeros((1, 4, 3, 2), np.uint16)
    spare = 6 - len(entries)  # one length, so that all tests have one program
    layers = [0] * len(entries) + [-1] * spare
    lists = Entries(INT(layers), *map(INT, zip(*entries, *[(0, 0, 0)] * spare, strict=True)))
    op = compiled(api.stage, implementation=implementation)
    stores = (stored(store, implementation),) * 2
    _, tables, done = op(jnp.zeros((9, 2), jnp.uint16), tables, stores, INT(0), lists)
    assert not done[len(entries) :].any()
    return tables, done[: len(entries)].tolist()


def what_this_step_used_is_not_overwritten(implementation):
    """Not even where another entry has just made the cell free by promoting its owner."""
    resident = one_layer(owner=[1, 0, -1], last_used=[7, 6, 7], address=[3, 0, -1, -1])
    tables, done = run(implementation, resident, (2, 0, 0), (1, 1, 2), (3, 0, 0), (2, 0, 1))
    assert done == [0, 1, 0, 1]
    np.testing.assert_array_equal(tables.owner, [[-1, 2, 1]])
    np.testing.assert_array_equal(tables.address, [[-1, 6, 3, -1]])
    np.testing.assert_array_equal(tables.version, [[0, 1, 0, 0]])


def entries_are_admitted_as_they_are_carried_out(implementation):
    """By admit_entries, all but the copies, and the rows where those belong."""
    tables = one_layer(owner=[1, 0, -1], last_used=[7, 6, 7], address=[3, 0, -1, -1])
    tables = tables._replace(cell_version=INT([[0, 0, 0]]))
    entries = [(2, 0, 0), (2, 0, 1), (3, 0, 1), (3, 0, 2), (4, 0, 2), (0, 0, 2)]
    want, done = run(implementation, tables, *entries)
    lists = Entries(INT([0] * 6), *map(INT, zip(*entries, strict=True)))
    got, rows = jax.jit(api.admit_entries)(tables, INT(0), lists)
    assert done == [0, 1, 0, 1, 0, 0] and rows.tolist() == [-1, 3, -1, 6, -1, -1]
    for field, ours, theirs in zip(want._fields, got, want, strict=True):
        np.testing.assert_array_equal(ours, theirs, err_msg=field)


def stores_that_lack_layers(implementation):
    """A version in transit, whose store lacks layer 1, and dense, whose store has that one alone:
    an entry of what a store lacks is skipped."""
    places = ((0, -1, 1), (-1, 0, -1))
    of_versions = formats((("dense", "lossless12"), "dense"), 40, 10, "bfloat16", places)
    kept = [records(np.random.default_rng(v), 8, f.store) for v, f in enumerate(of_versions)]
    stores = kept[0].reshape(2, 4, -1, 40), kept[1][:4].reshape(1, 4, -1, 40)
    here = tuple(stored(store, implementation) for store in stores)
    tables = jax.tree.map(np.array, empty_tables(3, 4, 2))
    tables.cell_row[:] = [0, 30]
    tables.cell_version[:] = [0, 1]
    op = compiled(api.stage, formats=of_versions, implementation=implementation)
    first, second = recode(stores[0][1:, 3], of_versions[0])[0], stores[1][0, 2]
    for layer, record, row, done, address in (
        (1, second, 30, [0, 1], [-1, -1, 30, -1]),
        (2, first, 0, [1, 0], [-1, -1, -1, 0]),
    ):
        entries = Entries(INT([layer, layer]), INT([3, 2]), INT([0, 1]), INT([0, 1]))
        arena = np.zeros((60, 40), np.uint16)
        got, after, carried_out = op(jnp.array(arena), tables, here, INT(layer), entries)
        arena[row : row + len(record)] = record
        np.testing.assert_array_equal(got, arena)
        assert carried_out.tolist() == done and after.address[layer].tolist() == address


def refused(stores, sizes, options):
    stores = tuple(jnp.zeros(shape, jnp.uint16) for shape in stores)
    entries = Entries(*(jnp.zeros(size, jnp.int32) for size in sizes))
    return api.stage(jnp.zeros((9, 8), jnp.uint16), one_layer(), stores, 0, entries, **options)


CONTRACTS = (
    Contract(
        "stage",
        api.IMPLEMENTATIONS,
        SPECS,
        check,
        histories=histories,
        examples=10,
        facts=(
            what_this_step_used_is_not_overwritten,
            entries_are_admitted_as_they_are_carried_out,
            stores_that_lack_layers,
        ),
        mutant=Mutant(
            lambda a: {"entries": a["entries"]._replace(layer=a["entries"].layer.at[-1].set(-1))},
            SPECS[0],
        ),
        refused=refused,
        refusals=(
            ([], [2] * 4, {}, "stage needs at least one store"),
            ([(1, 4, 3)], [2] * 4, {}, r"a store is \[L, E, rows, 8\], not \(1, 4, 3\)"),
            ([(1, 4, 3, 9)], [2] * 4, {}, r"is \[L, E, rows, 8\], not \(1, 4, 3, 9\)"),
            ([(1, 5, 3, 8)], [2] * 4, {}, r"a store of \(1, 5\), tables of \(1, 4\)"),
            ([(1, 4, 3, 8)], [2, 2, 3, 2], {}, r"the entries' fields are all int32\[S\], not"),
            ([(1, 4, 3, 8)], [2] * 4, {"implementation": "cuda"}, "op 'stage' has no impl"),
        ),
    ),
)

"""Searches for expert maps inside a step against those of the store in numpy, and the step compiled
for an H200."""

from __future__ import annotations

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from host_offload.control.interface import MapSearch
from host_offload.memory.pager import rank_cells
from host_offload.memory.tables import Residency, Tables
from host_offload.policies.prefetch.expert_map import in_step
from host_offload.policies.prefetch.expert_map.map_store import (
    FoundMaps,
    MapStore,
    empty_store,
    select_experts,
    store_rows,
)
from host_offload.simulate.simulated_engine import PagerDevice
from moejax.checkpoints.random_model import shape
from moejax.step.map_search import (
    list_entries,
    map_shapes,
    take_from_pool,
    wanted_experts,
    write_rows,
)
from moejax.step.programs import ProgramKey
from pallas_kernels import resolve_ops
from pallas_kernels.plan.victim import MAX_PRIOR, log2_fixed
from tests.aot.ptxas import compile_kernels
from tests.moejax.step.test_constant_memory import DECODE, GiB, MiB, abstract_programs, nbytes

C, L, E, D, R, TOP_K = 40, 5, 16, 24, 3, 4
LAUNCHES = {"stage": 2, "fill": 2, "linear": 3, "linear_parts": 2}
"""Kernels of ours that such a step has more than others: a list's two in each layer and in the
semantic search, the router once more for its probabilities."""


def distributions(rng: np.random.Generator, *shape: int) -> np.ndarray:
    scores = np.exp(2 * rng.normal(size=shape))
    return (scores / scores.sum(axis=-1, keepdims=True)).astype(np.float16)


@pytest.mark.parametrize(
    ("sizes", "rows"),
    [((40, 5, 16, 24), 3), pytest.param((300, 4, 128, 2048), 1, marks=pytest.mark.slow)],
)
def test_numpy_finds_what_a_step_finds_to_the_bit(sizes, rows):
    """Of random rows, of stored ones, and of maps that are there twice: places, scores, lengths,
    what is wanted and its prior."""
    places, layers, experts, hidden = sizes
    search, rng = MapSearch(places, 2), np.random.default_rng(places)
    outliers = rng.normal(size=(places, hidden)) * rng.exponential(size=(1, hidden)) ** 2
    outliers[places // 2 :] = outliers[: places - places // 2]
    maps = distributions(rng, places, layers, experts)
    filled = rng.permutation(places)[: places - places // 4]
    kept = store_rows(outliers[filled], maps[filled]).rows_at(np.arange(len(filled)))
    given = kept._replace(place=filled.astype(np.int32))
    held = empty_store(layers, experts, hidden, places)
    held.write(given)
    shapes = map_shapes(search, layers, experts, hidden)
    empty = MapStore(**{name: jnp.zeros(*shape) for name, shape in shapes.items()})
    arrays = jax.jit(write_rows)(empty, *given)
    assert np.array_equal(arrays.lengths, held.lengths)
    walk, nearest = (
        jax.jit(_walked),
        jax.jit(lambda arrays, fed: arrays.nearest_embedding(fed, jnp)),
    )
    for each in range(8):
        near = rng.choice(filled, rows)
        fed = outliers[near] * rng.exponential() + (each % 2) * rng.normal(size=(rows, hidden))
        fed = fed.astype(np.float16)
        same_bits(nearest(arrays, fed), held.nearest_embedding(fed))
        said = distributions(rng, layers, rows, experts) if each % 2 else maps[near].swapaxes(0, 1)
        found, wanted, priors = walk(arrays, said)
        trajectory = held.trajectory(rows)
        for layer in range(layers):
            trajectory, theirs = held.nearest_map(trajectory, layer, said[layer])
            same_bits(FoundMaps(found.place[layer], found.score[layer]), theirs)
            prior, worth = in_step.wanted_of(held, theirs, layer, TOP_K) or (None, None)
            assert np.array_equal(wanted[layer], worth)
            assert np.array_equal(priors[layer], prior)


def _walked(arrays: MapStore, said: jax.Array):
    """What a step finds after each layer's router, wants of that layer, and its prior."""

    def layer(trajectory, layer_and_said):
        i, probabilities = layer_and_said
        trajectory, found = arrays.nearest_map(trajectory, i, probabilities, jnp)
        likely = arrays.maps[i, found.place].astype(jnp.float32)
        chosen = wanted_experts(likely, found.score, TOP_K)
        worth = jnp.max(jnp.where(chosen, likely, 0), axis=0)
        return trajectory, (found, worth, in_step.prior_of(jnp.max(likely, axis=0), jnp))

    begun = arrays.trajectory(said.shape[1], jnp)
    return jax.lax.scan(layer, begun, (jnp.arange(len(said)), said))[1]


def same_bits(found: FoundMaps, theirs: FoundMaps) -> None:
    assert np.array_equal(found.place, theirs.place)
    assert np.array_equal(np.asarray(found.score), theirs.score)


def test_wanted_experts_are_those_that_the_host_selects():
    rng = np.random.default_rng(3)
    rows = distributions(rng, 400, E).astype(np.float32)
    rows[:20] = 1 / E  # ties go to the lowest place
    scores = rng.uniform(-0.2, 1.1, 400).astype(np.float32)
    found = np.asarray(jax.jit(wanted_experts, static_argnums=2)(rows, scores, TOP_K))
    assert np.array_equal(found, select_experts(rows, scores, TOP_K))
    assert found.sum(axis=1).min() == TOP_K and found.sum(axis=1).max() > TOP_K + 3


def random_tables(
    rng: np.random.Generator, cells: int, layers: tuple[int, ...] = (1,)
) -> Residency:
    """Some layers of L in use: some cells are not granted, some free."""
    cell_row = np.full((L, E), -1, np.int32)
    owner, last_used = cell_row.copy(), np.zeros((L, E), np.int32)
    address = np.full((L, E), -1, np.int32)
    for layer in layers:
        granted = np.sort(rng.permutation(E)[:cells])
        cell_row[layer, granted] = 100 * layer + granted
        held = granted[rng.random(cells) < 0.8]
        experts = rng.permutation(E)[: len(held)]
        owner[layer, held], last_used[layer, held] = experts, rng.integers(1, 9, len(held))
        address[layer, experts] = cell_row[layer, held]
    return Residency(
        cell_row=cell_row,
        cell_version=np.zeros((L, E), np.int32),
        owner=owner,
        last_used=last_used,
        address=address,
        version=np.zeros((L, E), np.int32),
        frequency=rng.integers(0, 5, (L, E)).astype(np.int32),
        fill_version=np.zeros((L, E), np.int32),
        prior=rng.integers(-MAX_PRIOR, 0, (L, E)).astype(np.int32),
        clock=np.full(L, 9, np.int32),
        victim_weights=np.array([0, 1, 1], np.int32),
    )


def test_entries_are_those_of_a_brute_force():
    """Likeliest absent experts first, into free cells, then those of whom nobody wants in the order
    of the host's staging, then those of whoever is wanted less."""
    listed = jax.jit(list_entries, static_argnums=4)
    for seed in range(60):
        check_entries(listed, np.random.default_rng(seed))


def check_entries(listed, rng: np.random.Generator) -> None:
    tables = random_tables(rng, int(rng.integers(0, E + 1)))
    wanted = np.where(rng.random(E) < 0.6, rng.random(E), 0).astype(np.float32)
    room = rank_cells(tables, 1, 0)
    worth = {cell: 0.0 if owner < 0 else float(wanted[owner]) for cell, owner in room}
    cells = [cell for cell, _ in room if worth[cell] == 0]
    cells += sorted((cell for cell, _ in room if worth[cell] > 0), key=worth.__getitem__)
    due = rng.random(E) < 0.8
    likely = np.argsort(-wanted, kind="stable")
    absent = [e for e in likely if wanted[e] and due[e] and tables.address[1, e] < 0]
    expected = [
        (1, int(e), 0, int(c)) for e, c in zip(absent, cells, strict=False) if wanted[e] > worth[c]
    ][:6]
    given = jax.tree.map(jnp.asarray, Tables(**tables._asdict()))
    found = np.array(listed(given, jnp.int32(1), jnp.asarray(wanted), jnp.asarray(due), 6)).T
    assert [tuple(entry) for entry in found.tolist() if entry[0] >= 0] == expected
    assert np.all(found[len(expected) :] == -1)
    simulated = in_step.entries_of(tables, 1, wanted, due, 6)
    assert [tuple(entry) for entry in simulated] == expected


def test_the_most_urgent_are_the_likeliest_over_distance():
    """Of all layers to come; those of a layer that is past expire, and what is there is left
    out."""
    urgent = jax.jit(in_step.most_urgent, static_argnums=(3, 4))
    rng, mixed = np.random.default_rng(5), 0
    for now in range(-1, L):
        address = np.where(rng.random((L, E)) < 0.3, 7, -1).astype(np.int32)
        wanted = (rng.random((L, E)) < 0.6) * rng.integers(1, 2048, (L, E)) / np.float32(2048)
        wanted = wanted.astype(np.float32)
        waits = [(i, e) for i in range(now + 1, L) for e in range(E) if wanted[i, e]]
        waits = [place for place in waits if address[place] < 0]
        waits.sort(key=lambda place: (-(float(wanted[place]) / (place[0] - now)), place))
        for most in (1, 7, 24):
            due = in_step.most_urgent(wanted, address, now, most, np)
            assert {*zip(*np.nonzero(due), strict=True)} == {*waits[:most]}
            assert np.array_equal(urgent(wanted, address, now, most, jnp), due)
        mixed += waits[:7] != sorted(waits[:7])
    assert mixed > 2  # not layer by layer


def test_of_a_pool_the_cells_of_least_value_are_taken():
    """Of all layers but the near ones, for which experts were just fetched: expert by expert, in a
    step and in the simulator alike."""
    taken = jax.jit(take_from_pool, static_argnums=(3, 6))
    rng, moved = np.random.default_rng(8), 0
    for layer, now, near in ((0, -1, 1), (2, -1, 3), (3, 0, 3), (4, 1, 3), (1, 0, 3)) * 8:
        tables = random_tables(rng, int(rng.integers(2, E - 3)), tuple(range(L)))
        wanted = np.where(rng.random(E) < 0.6, rng.random(E), 0).astype(np.float32)
        due = rng.random(E) < 0.9
        expected = take_by_hand(tables.copy(), layer, now, near, wanted, due)
        given = jax.tree.map(jnp.asarray, Tables(**tables._asdict()))
        made = taken(given, jnp.int32(layer), jnp.int32(now), near, wanted, due, 6)
        after, listed = jax.tree.map(np.asarray, made)
        device = PagerDevice(tables.copy(), np.ones((1, L), np.int64))
        entries = device._take_from_pool(layer, now, near, wanted, due, 6)
        assert [(e.expert, e.cell) for e in entries] == [(e, c) for e, c, _ in expected]
        assert [tuple(entry) for entry in np.array(listed).T.tolist() if entry[0] >= 0] == [
            (layer, expert, 0, cell) for expert, cell, _ in expected
        ]
        rows = [int(after.cell_row[layer, cell]) for _, cell, _ in expected]
        assert rows == [row for _, _, row in expected]
        assert sorted(after.cell_row[after.cell_row >= 0]) == sorted(
            tables.cell_row[tables.cell_row >= 0]
        )
        moved += sum(row // 100 != layer for row in rows)
    assert moved > 30


def take_by_hand(
    tables: Residency, layer: int, now: int, near: int, wanted: np.ndarray, due: np.ndarray
):
    """(expert, cell, row) of the first six transfers."""
    worth = []
    for (of, cell), row in np.ndenumerate(tables.cell_row):
        if row < 0 or (of != layer and now < of <= now + near):
            continue
        owner = int(tables.owner[of, cell])
        if owner < 0:
            worth.append((int(of != layer), 0.0, 0, 0, of, 0, cell, row))
            continue
        mine = float(wanted[owner]) if of == layer else 0.0
        key = int(log2_fixed(tables.frequency[of, owner] + 1) + tables.prior[of, owner])
        used = int(tables.last_used[of, cell])
        worth.append((2 + (mine > 0), mine, key, used, of, owner, cell, row))
    likely = np.argsort(-wanted, kind="stable")
    absent = [e for e in likely if wanted[e] and due[e] and tables.address[layer, e] < 0]
    free = [c for c in range(E) if tables.cell_row[layer, c] < 0]
    found = []
    for expert, (_, mine, *_, of, _, cell, row) in zip(absent, sorted(worth), strict=False):
        if wanted[expert] > mine:
            found.append((int(expert), cell if of == layer else free.pop(0), int(row)))
    return found[:6]


@pytest.mark.aot
@pytest.mark.nightly
@pytest.mark.parametrize("search", [MapSearch(1000, 3), MapSearch(1000, 3, most=24)], ids=str)
def test_step_of_kernels_that_searches(search):
    """48 layers of 128 experts, 64 rows: the pinned store is read in place, arena, tables and maps
    are not copied, and a layer launches the kernels below."""
    ops = resolve_ops("pallas", platform="gpu", dtype="bfloat16")
    limits = {"rows": 64, "max_model_len": 4096, "max_num_batched_tokens": 8192}
    programs = abstract_programs(
        shape("qwen3-30b-a3b"), 40 * GiB, ops=ops, waves=8, bucketed=True, **limits
    )
    maps = programs.maps(search)
    assert nbytes(maps) == search.nbytes(48, 128, 2048)
    assert nbytes(maps.maps) == 1000 * 48 * 128 * 2  # the paper's map store: 12 MB

    program = programs.program(DECODE._replace(maps=search))
    host = tuple(i for i, arg in enumerate(program.args) if arg is programs.stores)
    compiled, kernels = compile_kernels(
        program.function, *program.args, donate_argnums=program.donated, host_argnums=host
    )
    assert compiled.copies(MiB) == []
    assert compiled.host_copies(1) == compiled.host_copies(1, to_host=True) == []
    assert compiled.memory.alias_bytes == nbytes((programs.arena, programs.tables))
    assert compiled.memory.temp_bytes < 20 * MiB
    launches = collections.Counter(compiled.kernels())
    assert {kernel: launches[kernel] for kernel in LAUNCHES} == LAUNCHES
    # Two more loops' worth: the semantic search runs its body `distance` times a step.
    assert sum(launches.values()) <= 110
    assert all(kernel.spill_bytes == 0 for kernel in kernels.values())

    program = programs.program(ProgramKey("write_maps", maps=search))
    compiled, _ = compile_kernels(program.function, *program.args, donate_argnums=program.donated)
    assert compiled.copies(1 << 10) == []
    assert compiled.memory.alias_bytes == nbytes(maps)

"""LRU and LFU as the plan op carries them out, against their textbook definitions.

The op itself is held to its contract in tests/pallas_kernels/test_plan.py.
"""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from host_offload.memory.tables import empty_tables, with_contents
from host_offload.policies.eviction.names import EVICTION
from pallas_kernels.plan import plan

EXPERTS, STEPS, LARGEST = 16, 60, 4


def zipf(rng):
    """Sets of 1 … LARGEST experts, a few of them popular."""
    popularity = 1 / np.arange(1, EXPERTS + 1)
    for _ in range(STEPS):
        size = rng.integers(1, LARGEST + 1)
        yield rng.choice(EXPERTS, size, replace=False, p=popularity / popularity.sum())


def drifting(rng):
    """A working set that moves through the experts."""
    for step in range(STEPS):
        yield (step // 6 + rng.integers(0, 6, LARGEST)) % EXPERTS


def cyclic(rng):
    """LRU's worst case: a loop over all experts."""
    for step in range(STEPS):
        yield np.arange(3 * step, 3 * step + 3) % EXPERTS


def uniform(rng):
    for _ in range(STEPS):
        yield rng.permutation(EXPERTS)[:LARGEST]


TRACES = pytest.mark.parametrize("trace", [zipf, drifting, cyclic, uniform])


def sets_of(trace, seed=0) -> list[set[int]]:
    return [set(map(int, active)) for active in trace(np.random.default_rng(seed))]


@functools.cache
def replayer():
    """(tables, active bool[STEPS, E]) -> (tables, fills [STEPS], read-throughs [STEPS])."""

    def step(tables, active):
        tables, work = plan(tables, 0, active)
        return tables, (work.fill_count, work.read_through)

    return jax.jit(lambda tables, active: lax.scan(step, tables, active))


def replay(sets, capacity, eviction):
    tables = empty_tables(1, EXPERTS, EXPERTS, EVICTION[eviction])
    cell_row = jnp.where(jnp.arange(EXPERTS) < capacity, jnp.arange(EXPERTS), -1)
    active = np.array([[e in s for e in range(EXPERTS)] for s in sets])
    tables, (fills, read_through) = replayer()(
        tables._replace(cell_row=cell_row[None].astype(jnp.int32)), active
    )
    return tables, np.asarray(fills), np.asarray(read_through)


def reuse_distances(sets) -> list[float]:
    """Of every access: the experts used more recently, as the list stood when the step began, in
    the order (step, id); infinite at first sight. (papers.md 1.3, equation 3)"""
    last: dict[int, tuple[int, int]] = {}
    distances = []
    for step, active in enumerate(sets):
        for e in active:
            newer = sum(other > last[e] for other in last.values()) if e in last else np.inf
            distances.append(newer)
        last.update({e: (step, e) for e in active})
    return distances


@TRACES
def test_lru_misses_are_those_of_the_reuse_distances(trace):
    """Exactly, for every capacity that holds the largest set; every such miss is a fill."""
    sets = sets_of(trace)
    distances = np.array(reuse_distances(sets))
    misses = []
    for capacity in range(max(map(len, sets)), EXPERTS + 1):
        _, fills, read_through = replay(sets, capacity, "lru")
        assert fills.sum() == np.sum(distances >= capacity) and not read_through.any()
        misses.append(int(fills.sum()))
    assert misses == sorted(misses, reverse=True)
    assert misses[-1] == len(set.union(*sets))


def test_distances_of_single_accesses_would_be_wrong():
    """Treating a step's set as a sequence of accesses is another curve: the test can tell."""
    sets = sets_of(zipf)
    singles = np.array(reuse_distances([{e} for s in sets for e in sorted(s)]))
    _, fills, _ = replay(sets, 6, "lru")
    assert fills.sum() != np.sum(singles >= 6)


@TRACES
def test_lfu_is_exact(trace):
    """The least often active goes, of equals the least recently used, of these the lowest id."""
    sets = sets_of(trace)
    for capacity in (LARGEST, 7, 11):
        resident: set[int] = set()
        frequency: Counter[int] = Counter()
        last: dict[int, int] = {}
        want = []
        for step, active in enumerate(sets):
            missing = active - resident
            for e in sorted(missing):
                if len(resident) == capacity:
                    idle = resident - active
                    resident.remove(min(idle, key=lambda e: (frequency[e], last[e], e)))
                resident.add(e)
            frequency.update(active)
            last.update(dict.fromkeys(active, step))
            want.append(len(missing))
        tables, fills, _ = replay(sets, capacity, "lfu")
        np.testing.assert_array_equal(fills, want)
        assert set(np.flatnonzero(tables.address[0] >= 0)) == resident


@TRACES
@pytest.mark.parametrize("eviction", ["lru", "lfu"])
@pytest.mark.parametrize("capacity", [0, 1, 2, 3])
def test_below_the_largest_set_the_rest_is_read_through(trace, eviction, capacity):
    """A step never fills more than it has cells, and what is active is filled, hit or read."""
    sets = sets_of(trace)
    tables, fills, read_through = replay(sets, capacity, eviction)
    sizes = np.array([len(s) for s in sets])
    assert np.all(fills <= capacity) and np.all(fills + read_through <= sizes)
    assert np.all(read_through >= sizes - capacity)
    assert np.sum(tables.address >= 0) == min(capacity, len(set.union(*sets)))
    np.testing.assert_array_equal(
        tables.frequency[0], [sum(e in s for s in sets) for e in range(EXPERTS)]
    )


def test_the_policy_changes_without_recompilation():
    """Expert 0 is frequent, expert 1 recent: LFU drops 1, LRU drops 0."""
    op = jax.jit(plan)
    dropped = {}
    for eviction in ("lru", "lfu"):
        tables = empty_tables(1, 4, 2)._replace(cell_row=jnp.int32([[0, 1]]))
        tables = jax.device_put(tables, jax.devices()[0])  # committed, as the engine's are
        for e in (0, 0, 0, 1):
            tables, _ = op(tables, jnp.int32(0), jnp.arange(4) == e)
        tables = with_contents(tables, {"victim_weights": EVICTION[eviction]})
        tables, _ = op(tables, jnp.int32(0), jnp.arange(4) == 2)
        dropped[eviction] = [e for e in (0, 1) if tables.address[0, e] < 0]
    assert dropped == {"lru": [0], "lfu": [1]}
    assert op._cache_size() == 1

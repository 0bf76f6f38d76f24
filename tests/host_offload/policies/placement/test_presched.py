"""PreSched's rules against brute force, the equations' edges (docs/explanation/prescope.md), and
its rivals."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_offload.policies.placement.presched import (
    LayerPlan,
    LayerWork,
    PlacementCosts,
    Work,
    accelerator_queue,
    accelerator_seconds,
    count_overlapped,
    merge_queues,
    on_demand,
    prefetches,
    presched,
    queue_of,
)
from host_offload.policies.placement.rivals import (
    AFTER_EXPERTS,
    AHEAD,
    SCHEDULERS,
    capped,
    dali,
    fate,
    fiddler,
    fiddler_code,
    greedy,
    greedy_split,
    hybrimoe,
    hybrimoe_code,
    klotski,
)

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

UNIT = 1 / 64
"""Seconds that floats add without rounding."""

units = st.integers(1, 64).map(lambda n: n * UNIT)
alphas = st.integers(0, 64).map(lambda n: n * UNIT)
all_costs = st.builds(PlacementCosts, units, units, units, units, units)
loads = st.lists(st.integers(0, 30), min_size=1, max_size=12)


def queue(layer: int, tokens: list[int]):
    return queue_of(layer, np.array(tokens), np.zeros(len(tokens), bool))


@given(loads, loads, all_costs, alphas)
def test_the_accelerators_queue_is_a_suffix_and_the_first_one_that_qualifies(
    here, next_, costs, alpha
):
    every = merge_queues(queue(0, here), queue(1, next_))
    tokens = [work.tokens for work in every]
    assert tokens == sorted(tokens) and set(every) == {*queue(0, here), *queue(1, next_)}

    n = len(every)
    qualifies = [
        alpha + (n - i) * costs.load + costs.accelerator
        < sum(costs.per_token * w.tokens + costs.startup for w in every[: i + 1]) + costs.attention
        for i in range(n)
    ]
    assert qualifies == sorted(qualifies)  # a suffix: no later one fails
    assert accelerator_queue(every, costs, alpha) == n - sum(qualifies)


@given(loads, loads, all_costs, alphas)
def test_the_first_load_is_the_smallest_index_that_qualifies(here, next_, costs, alpha):
    current = queue(0, here)
    every = merge_queues(current, queue(1, next_))
    wanted = every[accelerator_queue(every, costs, alpha) :]
    n = len(current)
    found = [
        i
        for i in range(n)
        if current[i] in wanted
        and alpha + (n - i) * costs.load + costs.accelerator
        < sum(costs.per_token * w.tokens + costs.startup for w in current[:i])
    ]
    assert on_demand(current, wanted, costs, alpha) == min(found, default=n)


def test_of_equal_ones_the_current_layer_is_the_heavier_one():
    assert [w.layer for w in merge_queues(queue(3, [2, 2]), queue(4, [2, 1]))] == [4, 4, 3, 3]
    assert merge_queues((), queue(4, [1, 1])) == queue(4, [1, 1])


def test_a_queue_has_who_is_missing_and_used_ascending():
    found = queue_of(2, np.array([3, 0, 1, 3, 9]), np.array([0, 0, 0, 0, 1], bool))
    assert found == (Work(1, 2, 2), Work(3, 2, 0), Work(3, 2, 3))


# ---- Q2 and Q3


def test_how_many_prefetches_fit_is_counted_from_the_last_load():
    costs = PlacementCosts(1.0, 2.0, 4.0, 1.0, 6.0)
    current = queue(0, [1, 2, 5])
    # CPU: (1 + 2) + (2 + 2) = 7; one load of 4 s, α = 1: a gap of 2 s, and 6 s of attention.
    assert count_overlapped(current, 2, costs, 1.0) == 2.0
    assert count_overlapped(current, 0, costs, 1.0) == (0 - 1 - 12 + 6) / 4


@given(st.floats(-5, 12), st.integers(0, 8), st.floats(0, 1))
def test_the_critical_prefetch_is_issued_where_it_pays(f, most, hit):
    count = min(max(round(f + 1e-12), 0), most)
    if abs(f % 1 - 0.5) < 1e-6:
        return  # both neighbours are nearest
    found = prefetches(f, most, hit)
    assert found in {count, max(count - 1, 0)}
    pays = hit * (f - count + 1) - (1 - hit) * (count - f)
    assert found == (count if count == 0 or pays > 0 else count - 1)


# ---- Algorithm 1


@given(loads, loads, all_costs, alphas, st.floats(0, 1))
def test_a_plan_has_each_miss_once_and_the_heaviest_of_the_next_layer(
    here, next_, costs, alpha, hit
):
    current, ahead = queue(0, here), queue(1, next_)
    plan = presched(LayerWork(current, [ahead], costs, alpha, hit))
    assert plan.cpu + plan.load == current
    assert plan.prefetch == ahead[::-1][: len(plan.prefetch)]  # heaviest first
    every = merge_queues(current, ahead)
    if not set(every[accelerator_queue(every, costs, alpha) :]) & set(ahead):
        assert plan.prefetch == ()


def test_the_last_layer_and_a_layer_without_misses():
    costs = PlacementCosts(1.0, 0.0, 2.0, 1.0, 4.0)
    assert presched(LayerWork((), (), costs, 0.0, 1.0)) == LayerPlan((), ())
    plan = presched(LayerWork((), [queue(1, [9, 8, 7])], costs, 0.0, 1.0))
    assert [w.tokens for w in plan.prefetch] == [9, 8]  # attention has room for two


def test_where_the_next_layer_wants_nobody_the_one_after_it_is_asked():
    costs = PlacementCosts(1.0, 0.0, 8.0, 1.0, 8.0)
    light, heavy = queue(1, [1]), queue(2, [40, 30])
    plan = presched(LayerWork((), [light, heavy], costs, 0.0, 1.0))
    assert plan.distance == 2 and [w.tokens for w in plan.prefetch] == [40]
    near = presched(LayerWork((), [queue(1, [20]), heavy], costs, 0.0, 1.0))
    assert near.distance == 1 and [w.tokens for w in near.prefetch] == [20]


@given(st.integers(0, 6), all_costs, alphas)
def test_the_accelerator_computes_experts_as_they_land(loads, costs, alpha):
    """One after the other, also where computing takes longer than landing."""
    seconds = 0.0
    for n in range(1, loads + 1):
        seconds = max(seconds, alpha + n * costs.load) + costs.accelerator
    assert accelerator_seconds(loads, costs, alpha) == seconds


# ---- rivals


@given(loads, all_costs, alphas)
def test_greedy_minimises_the_slower_processor(here, costs, alpha):
    current = queue(0, here)

    def slower(first: int) -> float:
        return max(
            costs.on_cpu(current[:first]), accelerator_seconds(len(current) - first, costs, alpha)
        )

    first = greedy_split(current, costs, alpha)
    best = min(slower(i) for i in range(len(current) + 1))
    assert slower(first) == best
    assert all(slower(i) > best for i in range(first + 1, len(current) + 1))
    plan = greedy(LayerWork(current, [queue(1, [2, 5])], costs, alpha, 1.0))
    assert plan.load == current[first:] and [w.tokens for w in plan.prefetch] == [5, 2]
    late = hybrimoe(LayerWork(current, [queue(1, [2, 5])], costs, alpha, 1.0))
    assert late == plan._replace(after_experts=True) != plan


def test_both_readings_of_fiddler_a_cap_and_fate():
    costs = PlacementCosts(1.0, 0.0, 2.0, 1.0, 3.0)
    current, ahead = queue(0, [1, 9, 10, 11, 40]), [queue(1, [3, 7])]
    seen = LayerWork(current, ahead, costs, 0.0, 1.0)
    assert fiddler(seen) == LayerPlan(current, ())
    # 7 a token against 70: ten tokens are as dear as a load, which is then taken.
    assert fiddler_code(seen) == LayerPlan(current[:2], current[2:])
    assert capped(seen, uploads=1).load == current[4:]
    assert capped(seen, uploads=9).cpu == ()
    assert fate(seen) == LayerPlan((), current, ahead[0][::-1])


def test_fiddlers_code_is_its_enumeration():
    tokens = [3, 9, 10, 11, 30]
    costs = np.array([[7 * t, 70] for t in tokens])
    best = min(  # as its loop: of equal sums the first configuration, whose bits are CPUs
        range(1 << len(tokens)),
        key=lambda c: (sum(costs[e, 0 if c >> e & 1 else 1] for e in range(len(tokens))), c),
    )
    plan = fiddler_code(LayerWork(queue(0, tokens), (), PlacementCosts(1, 1, 1, 1, 1), 0.0, 1.0))
    assert [bool(best >> e & 1) for e in range(len(tokens))] == [
        w in plan.cpu for w in queue(0, tokens)
    ]


def experts(works) -> list[int]:
    return [work.expert for work in works]


def test_hybrimoe_s_two_queues_take_from_both_ends():
    # Accelerator 1, load 4, CPU 1 a row and 2 once. Expert 3 is resident.
    costs = PlacementCosts(1.0, 2.0, 4.0, 1.0, 0.0)
    resident, current = (Work(5, 0, 3),), queue(0, [1, 2, 9])
    plan = hybrimoe_code(LayerWork(current, (), costs, 0.0, 1.0, resident))
    # 3: accelerator at 1 against CPU at 3 (expert 0, start included): resident first. Then expert
    # 2, loaded at 4, computed at 5, against 0 on the CPU at 3: the CPU. Then 2 at 5 against 1 at
    # 3 + 2 = 5: of equal ones the accelerator. Then 1, loaded at 8, at 9 against 5: the CPU.
    assert experts(plan.cpu) == [0, 1] and experts(plan.load) == [2]


def test_hybrimoe_s_loads_fly_while_the_accelerator_computes():
    # The miss lands at 4, while a resident is computed to 10: at 20 against 22 on the CPU.
    costs = PlacementCosts(1.0, 0.0, 4.0, 10.0, 0.0)
    plan = hybrimoe_code(LayerWork(queue(0, [22]), (), costs, 0.0, 1.0, (Work(30, 0, 1),)))
    assert experts(plan.load) == [0]
    # Where both take equally long the accelerator has it.
    assert experts(hybrimoe_code(LayerWork(queue(0, [14]), (), costs, 0.0, 1.0)).load) == [0]


def test_hybrimoe_s_cpu_may_take_residents():
    costs = PlacementCosts(1.0, 0.0, 90.0, 10.0, 0.0)
    resident = queue(0, [2, 3, 20])
    plan = hybrimoe_code(LayerWork((), (), costs, 0.0, 1.0, resident))
    assert experts(plan.cpu) == [0, 1] and plan.load == ()


def test_klotski_loads_everybody_and_the_hot_ones_during_attention():
    costs = PlacementCosts(0.0, 0.0, 1.0, 1.0, 1.0)
    plan = klotski(LayerWork(queue(0, [3, 1, 2]), [queue(1, [7, 9, 8])], costs, 0.0, 1.0))
    assert plan.cpu == () and experts(plan.load) == [0, 2, 1]
    assert experts(plan.prefetch) == [1, 2] and plan.after_experts
    assert klotski(LayerWork(queue(0, [3]), (), costs, 0.0, 1.0)).prefetch == ()
    wide = klotski(LayerWork((), [queue(1, [7, 9, 8])], costs, 0.0, 1.0), hot=3)
    assert experts(wide.prefetch) == [1, 2, 0]


def test_dali_gives_each_expert_to_the_processor_that_is_done_earlier():
    """The heaviest first, so that loads need not be the heaviest ones: not a suffix."""
    costs = PlacementCosts(1.0, 0.0, 6.0, 1.0, 0.0)
    current, resident = queue(0, [2, 5, 6, 8]), (Work(9, 0, 7), Work(9, 0, 8))
    plan = dali(LayerWork(current, (), costs, 0.0, 1.0, resident))
    # 8 rows: a load at 7 against 8. 6: a load at 13 against 6. 5: at 13 against 11. 2: 13, 13.
    assert experts(plan.load) == [3, 0] and experts(plan.cpu) == [1, 2]
    # Where the link is busy for long, or residents are, the CPU computes all.
    assert dali(LayerWork(current, (), costs, 20.0, 1.0)).load == ()
    assert dali(LayerWork(current, (), costs, 0.0, 1.0, resident * 20)).load == ()


def test_who_prefetches_is_listed():
    costs = PlacementCosts(1.0, 0.0, 2.0, 1.0, 9.0)
    for name, scheduler in SCHEDULERS.items():
        plan = scheduler(LayerWork(queue(0, [1]), [queue(1, [30, 40])], costs, 0.0, 1.0, ()))
        assert bool(plan.prefetch) == (name in AHEAD or name == "hybrimoe-code"), name
        assert plan.after_experts == (name in AFTER_EXPERTS), name


def test_only_who_belongs_on_the_accelerator_is_loaded_on_demand():
    """Equation (5) is of E_cur ∩ GPU_Q: cheap loads alone load nobody."""
    current = tuple(Work(tokens, 0, tokens) for tokens in (4, 5, 6))
    costs = PlacementCosts(1.0, 1.0, 0.1, 0.1, 1.0)
    assert on_demand(current, current, costs, 0.0) == 1
    assert on_demand(current, current[2:], costs, 0.0) == 2
    assert on_demand(current, (), costs, 0.0) == 3

"""Rules of rivals whose code or description says more than a comparison of two numbers."""

import pytest

from host_offload.policies.placement.presched import LayerWork, PlacementCosts, Queue, Work
from host_offload.policies.placement.rivals import (
    AFTER_EXPERTS,
    AHEAD,
    SCHEDULERS,
    hybrimoe_code,
    klotski,
)

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax


def queue(layer: int, *tokens: int) -> Queue:
    """Expert i of a layer has tokens[i]; ascending by them."""
    return tuple(sorted(Work(m, layer, e) for e, m in enumerate(tokens)))


def experts(works) -> list[int]:
    return [work.expert for work in works]


def test_hybrimoe_s_two_queues_take_from_both_ends():
    # Accelerator 1, load 4, CPU 1 a row and 2 once. Expert 3 is resident.
    costs = PlacementCosts(1.0, 2.0, 4.0, 1.0, 0.0)
    resident, current = (Work(5, 0, 3),), queue(0, 1, 2, 9)
    plan = hybrimoe_code(LayerWork(current, (), costs, 0.0, 1.0, resident))
    # 3: accelerator at 1 against CPU at 3 (expert 0, start included): resident first. Then expert
    # 2, loaded at 4, computed at 5, against 0 on the CPU at 3: the CPU. Then 2 at 5 against 1 at
    # 3 + 2 = 5: of equal ones the accelerator. Then 1, loaded at 8, at 9 against 5: the CPU.
    assert experts(plan.cpu) == [0, 1] and experts(plan.load) == [2]


def test_hybrimoe_s_loads_fly_while_the_accelerator_computes():
    # The miss lands at 4, while a resident is computed to 10: at 20 against 22 on the CPU.
    costs = PlacementCosts(1.0, 0.0, 4.0, 10.0, 0.0)
    plan = hybrimoe_code(LayerWork(queue(0, 22), (), costs, 0.0, 1.0, (Work(30, 0, 1),)))
    assert experts(plan.load) == [0]
    # Where both take equally long the accelerator has it.
    assert experts(hybrimoe_code(LayerWork(queue(0, 14), (), costs, 0.0, 1.0)).load) == [0]


def test_hybrimoe_s_cpu_may_take_residents():
    costs = PlacementCosts(1.0, 0.0, 90.0, 10.0, 0.0)
    resident = queue(0, 2, 3, 20)
    plan = hybrimoe_code(LayerWork((), (), costs, 0.0, 1.0, resident))
    assert experts(plan.cpu) == [0, 1] and plan.load == ()


def test_hybrimoe_s_start_of_the_cpu_counts_once_a_layer():
    costs = PlacementCosts(1.0, 5.0, 11.0, 1.0, 0.0)
    plan = hybrimoe_code(LayerWork(queue(0, 1, 1, 1, 1), (), costs, 0.0, 1.0))
    # 6, 7, 8 and 9 on the CPU, each before 12 on the accelerator; with the start each time the
    # third would be at 18.
    assert len(plan.cpu) == 4


def test_klotski_loads_everybody_and_the_hot_ones_during_attention():
    costs = PlacementCosts(0.0, 0.0, 1.0, 1.0, 1.0)
    plan = klotski(LayerWork(queue(0, 3, 1, 2), [queue(1, 7, 9, 8)], costs, 0.0, 1.0))
    assert plan.cpu == () and experts(plan.load) == [0, 2, 1]
    assert experts(plan.prefetch) == [1, 2] and plan.after_experts
    assert klotski(LayerWork(queue(0, 3), (), costs, 0.0, 1.0)).prefetch == ()
    wide = klotski(LayerWork((), [queue(1, 7, 9, 8)], costs, 0.0, 1.0), hot=3)
    assert experts(wide.prefetch) == [1, 2, 0]


def test_who_prefetches_is_listed():
    costs = PlacementCosts(1.0, 0.0, 2.0, 1.0, 9.0)
    for name, scheduler in SCHEDULERS.items():
        plan = scheduler(LayerWork(queue(0, 1), [queue(1, 30, 40)], costs, 0.0, 1.0, ()))
        assert bool(plan.prefetch) == (name in AHEAD or name == "hybrimoe-code"), name
        assert plan.after_experts == (name in AFTER_EXPERTS), name

"""The model of step time: against what the probes measured, and its parts."""

import dataclasses

import pytest

from moejax.models.config import parse_config
from pallas_kernels.fill_ffn.pallas_triton import COPIES, LATE
from tests.aot.step_time import (
    COMBINED,
    DEAD,
    GAP,
    LAST,
    LAUNCH,
    LINK,
    LISTING,
    MERGING,
    SQUARES,
    Launch,
    Load,
    Work,
    floor_seconds,
    launches,
    step_seconds,
    step_work,
)
from tests.moejax.models.test_published_configs import PUBLISHED

pytestmark = pytest.mark.slow

QWEN = parse_config(PUBLISHED["Qwen3-30B-A3B"].raw)

LAYER = """\
001: kCopy         [source       | next=002 (1)] kCopy
002: kWhile        [prev=001 (1) | next=007 (1)]
condition:
    003: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1] threads: [1, 1, 1]  \
shared_memory: 0 bytes
  body:
    004: kDynamicSliceFusion [source       | next=006 (1)] params=1, results=1
        005: kCopy [source | sink] kCopy
    006: kCustomKernel       [prev=004 | sink] linear__1 grid: [1, 160, 1] threads: [128, 1, 1]  \
shared_memory: 73728 bytes
007: kCustomKernel [prev=002 (1) | sink] rms_norm__1 grid: [16, 1, 1] threads: [128, 1, 1]  \
shared_memory: 16 bytes
"""


def test_the_layers_of_a_turn_count_as_one():
    two = "".join(
        f"    00{i}: kCustomKernel [source] {name} grid: [1, 1, 1] threads: [32, 1, 1]  "
        "shared_memory: 0 bytes\n"
        for i, name in enumerate(("linear", "combine", "linear__2", "combine__1"), 4)
    )
    loop, _, rest = LAYER.partition("    004:")
    after = rest[rest.index("007:") :]
    condition, *layer = [launch for launch in launches(loop + two + after) if launch.in_layer]
    assert condition.name == "loop_compare_fusion" and condition.layers == 2
    assert [(launch.name, launch.layers) for launch in layer] == [("linear", 1), ("combine", 1)]
    seconds = step_seconds(QWEN, [Work(condition, 1, 0)])
    assert seconds == pytest.approx((24 + 1) * (LAUNCH + GAP))
    combined = launches((loop + two + after).replace("combine", COMBINED))
    assert [launch.name for launch in combined if launch.in_layer][1:] == ["linear", COMBINED]
    with pytest.raises(ValueError, match="the layers of a turn differ"):
        launches(loop + two.replace("linear__2", "rms_norm") + after)


GRAPH = """\
001: kCustomKernel [source       | next=004 (3)] a grid: [1, 1, 1] threads: [32, 1, 1]  \
shared_memory: 0 bytes
002: kCustomKernel [source       | next=003 (1)] b grid: [1, 1, 1] threads: [32, 1, 1]  \
shared_memory: 0 bytes
003: kCustomKernel [prev=002 (1) | sink        ] c grid: [1, 1, 1] threads: [32, 1, 1]  \
shared_memory: 0 bytes
004: kCustomKernel [prev=003 (1) | sink        ] d grid: [1, 1, 1] threads: [32, 1, 1]  \
shared_memory: 0 bytes
"""


def test_launches_of_a_graph_that_need_not_wait_run_at_once():
    found = launches(GRAPH)
    assert [each.order for each in found] == [(1, None), (2, None), (3, 2), (4, 3)]
    one = LAUNCH + GAP

    def seconds(kept):
        return step_seconds(QWEN, [Work(each, 1, 0) for each in kept])

    assert seconds(found[:2]) == pytest.approx(one)
    assert seconds(found[:3]) == pytest.approx(2 * one)
    assert seconds(found) == pytest.approx(2 * one)  # d waits for b, but c is nobody's
    serial = [dataclasses.replace(each, order=None) for each in found]
    assert seconds(serial) == pytest.approx(4 * one)
    # A layer waits for all before it, and all behind it wait for the layer.
    layer = dataclasses.replace(found[0], in_layer=True, layers=48)
    assert seconds([*found[:2], layer, *found[:2]]) == pytest.approx(3 * one)


def step(*named, threads=128, shared=73728):
    """Launches of a layer of these names and grids."""
    return [Launch(name, grid, threads, shared, True, name) for name, grid in named]


def test_launches_of_a_list():
    found = launches(LAYER)
    names = [(launch.name, launch.in_layer) for launch in found]
    inside = [("loop_compare_fusion", True), ("copy", True), ("linear", True)]
    assert names == [("copy", False), *inside, ("rms_norm", False)]
    assert found[3] == Launch("linear", (1, 160, 1), 128, 73728, True, "linear__1")
    assert found[3].programs == 160 and found[3].resident == 132 * 3


@pytest.mark.parametrize(
    ("name", "grid", "tokens", "measured"),
    [
        ("expert_gate_up", (1, 12, 8), 1, 15.6e-6),  # probe9, as all but the next
        ("expert_gate_up", (1, 12, 128), 10**6, 202e-6),  # probe6: every expert active
        ("expert_down", (1, 32, 8), 1, 9.1e-6),
        ("linear", (1, 160, 1), 1, 7.8e-6),
        ("decode_attention_merge", (1, 32, 1), 1, 1.8e-6),
    ],
)
def test_a_kernel_takes_what_a_probe_measured(name, grid, tokens, measured):
    load = Load(tokens, 1024)
    (work,) = step_work(QWEN, load, step((name, grid)), {})
    if tokens > 1:  # the weights alone: the probe had few tokens for all experts
        work = dataclasses.replace(work, nbytes=load.active(QWEN) * 4 * 2048 * 768)
    assert work.seconds == pytest.approx(measured, rel=0.1)


def test_the_kernels_of_a_layer_that_probe9_measured_take_its_time():
    """75 µs at one token: nine small kernels of XLA, and gaps, beside ours."""
    ours = step(
        ("linear", (1, 160, 1)),
        ("kv_write", (1, 10, 1)),
        ("decode_attention_split", (1, 4, 4)),
        ("decode_attention_merge", (1, 32, 1)),
        ("linear", (1, 128, 1)),
        ("route", (1, 1, 1)),
        ("expert_gate_up", (1, 12, 8)),
        ("expert_down", (1, 32, 8)),
    )
    small = step(*[("loop_add_fusion", (1, 1, 1))] * 9)
    work = step_work(QWEN, Load(1, 1024), ours + small, {})
    assert sum(w.seconds + GAP for w in work) == pytest.approx(75e-6, rel=0.1)


def test_a_norm_within_the_routers_product_saves_most_of_its_launch():
    """At few tokens: a launch and a gap less, and squares of tiles of 16 columns added up first."""
    others = ("linear", (1, 160, 1)), ("linear", (1, 128, 1))
    grid = (1, 8, 8)
    apart = step(*others, ("rms_norm", (4, 1, 1)), ("linear_parts", grid), shared=32768)
    within = step(*others, ("norm_linear_parts", grid), shared=32768)
    before, after = (step_work(QWEN, Load(1, 1024), launches, {}) for launches in (apart, within))
    # What is normalised is written.
    assert after[-1].nbytes - before[-1].nbytes == 2 * 2048 + 4 * 2048 // 16
    less = sum(w.seconds + GAP for w in before) - sum(w.seconds + GAP for w in after)
    assert less == pytest.approx(LAUNCH + GAP - SQUARES, abs=0.01e-6)


def test_attention_that_writes_reads_what_both_kernels_read_and_takes_less():
    load = Load(1, 1024)
    ours = [("kv_write", (1, 10, 1)), ("decode_attention_split", (1, 4, 4))]
    apart = step_work(QWEN, load, step(*ours), {})
    (fused,) = step_work(QWEN, load, step(("decode_attention_write", (1, 4, 4))), {})
    assert fused.live == apart[1].live == 16
    # A split's queries, 32 heads for each of four, and the new token read and written.
    assert fused.nbytes - apart[1].nbytes == 2 * 128 * (4 * 32 + 4 * 4)
    assert fused.seconds < sum(w.seconds for w in apart) - 1e-6


def test_splits_merged_by_the_last_one_save_most_of_a_launch():
    for tokens in (1, 8, 32):
        load, grid = Load(tokens, 1024), (tokens, 4, 4)
        ours = ("decode_attention_write", grid), ("decode_attention_merge", (tokens, 32, 1))
        apart = step_work(QWEN, load, step(*ours), {})
        (within,) = step_work(QWEN, load, step((MERGING, grid)), {})
        assert within.live == apart[0].live
        assert within.nbytes == sum(w.nbytes for w in apart)
        less = sum(w.seconds + GAP for w in apart) - within.seconds - GAP
        assert less == pytest.approx(0.8e-6, abs=0.1e-6)


def test_experts_listed_by_the_last_program_save_the_dead_ones():
    load = Load(32, 1024)
    steps = []
    for name in ("route_record", LISTING):
        ours = (name, (8, 1, 1)), ("expert_gate_up", (1, 12, 128)), (COMBINED, (1, 32, 128))
        steps.append(step_work(QWEN, load, step(*ours), {}))
    apart, listed = steps
    assert listed[0].seconds == pytest.approx(apart[0].seconds + LAST + 0.5e-6)
    assert all(w.live_first for w in listed[1:]) and not any(w.live_first for w in apart[1:])


def test_dead_programs_cost_least_behind_the_live():
    (first,) = step_work(QWEN, Load(1, 1024), step(("expert_gate_up", (1, 12, 128))), {})
    (mixed,) = step_work(QWEN, Load(1, 1024), step(("expert_gate_up", (1, 128, 12))), {})
    assert first.live == mixed.live == 96 and first.live_first and not mixed.live_first
    dead = (1536 - 96) / first.launch.resident * DEAD
    assert mixed.seconds == pytest.approx(first.seconds + dead)


def test_experts_that_combine_save_most_of_a_launch():
    """And read no more than combine did; the last program's tokens are few."""
    for tokens, microseconds in ((1, 1.3), (8, 1.2), (32, 1.1)):
        load, down = Load(tokens, 1024), ((1, 32, 128),)
        apart = step(("expert_down", *down), ("combine", (tokens, 8, 1)))
        apart = step_work(QWEN, load, apart, {})
        (within,) = step_work(QWEN, load, step((COMBINED, *down)), {})
        assert within.live == apart[0].live
        assert within.nbytes == sum(w.nbytes for w in apart) + 4 * tokens * 2048
        less = sum(w.seconds + GAP for w in apart) - within.seconds - GAP
        assert less == pytest.approx(microseconds * 1e-6, abs=0.15e-6)


def test_misses_cross_the_link_in_fill():
    load = Load(8, 1024, cells=64)
    (fill,) = step_work(QWEN, load, step(("fill", (512, 1, 1)), shared=0), {})
    assert load.filled(QWEN) == load.missing(QWEN)  # 26 of 52 active ones, 38 cells to choose from
    record = 3 * 2048 * 768 * 2
    assert load.active(QWEN) == pytest.approx(128 * (1 - (1 - 8 / 128) ** 8))
    assert fill.link_bytes == pytest.approx(load.active(QWEN) / 2 * record)
    assert fill.seconds == pytest.approx(LAUNCH + fill.link_bytes / LINK)
    assert floor_seconds(QWEN, [fill])[1] == pytest.approx(48 * fill.link_bytes / LINK)
    (resident,) = step_work(QWEN, Load(8, 1024), step(("fill", (512, 1, 1)), shared=0), {})
    assert resident.link_bytes == resident.live == 0


PRODUCTS = (
    ("expert_gate_up_hits", (1, COPIES[227] + 128 * 12, 1)),
    ("expert_gate_up_filled", (1, COPIES[227] + LATE, 1)),
    ("expert_down", (1, 32, 128)),
)


def test_what_misses_arrives_beside_what_is_there():
    """The link or the product, whichever is longer; of launches one after the other both."""
    load, record = Load(1, 1024, cells=64), 3 * 2048 * 768 * 2
    hits, filled, down = step_work(QWEN, load, step(*PRODUCTS, shared=110592), {})
    crossing = load.missing(QWEN) * record / LINK
    assert hits.link_bytes == pytest.approx(2 * filled.link_bytes) and down.link_bytes == 0
    assert hits.seconds + filled.seconds == pytest.approx(2 * LAUNCH + crossing)
    assert hits.live == 4 * 12 and filled.live == LATE and down.live == 8 * 32
    apart = step(("fill", (512, 1, 1)), ("expert_gate_up", (1, 12, 128)), shared=110592)
    before = sum(w.seconds for w in step_work(QWEN, load, apart, {}))
    assert before - hits.seconds - filled.seconds == pytest.approx(13.7e-6, abs=0.5e-6)


def test_where_nothing_misses_a_launch_is_as_short_as_the_fill_that_it_replaces():
    work = step_work(QWEN, Load(1, 1024), step(*PRODUCTS, shared=110592), {})
    hits, filled, _ = work
    apart = step(("fill", (512, 1, 1)), ("expert_gate_up", (1, 12, 128)), shared=110592)
    fill, gate_up = step_work(QWEN, Load(1, 1024), apart, {})
    assert hits.waiting == COPIES[227] and hits.live == gate_up.live and filled.live == 0
    assert hits.seconds == pytest.approx(
        gate_up.seconds + COPIES[227] / hits.launch.resident * DEAD
    )
    assert hits.seconds + filled.seconds < fill.seconds + gate_up.seconds + 0.1e-6


def test_what_gets_no_cell_crosses_the_link_in_the_products():
    load, record = Load(8, 1024, cells=16), 3 * 2048 * 768 * 2
    work = step_work(QWEN, load, step(*PRODUCTS, shared=110592), {})
    through = load.missing(QWEN) - load.filled(QWEN)
    hits = load.active(QWEN) - load.missing(QWEN)
    assert load.filled(QWEN) == pytest.approx(16 - hits) and through > 30
    assert work[2].link_bytes == pytest.approx(through * record / 3)
    total = sum(w.link_bytes for w in work)
    assert total == pytest.approx(load.missing(QWEN) * record)
    assert floor_seconds(QWEN, work)[1] == pytest.approx(48 * total / LINK)


def test_a_layers_launches_count_once_a_layer():
    launch = Launch("wrapped_add", (1,), 128, 0, True, "wrapped_add")
    once = dataclasses.replace(launch, in_layer=False)
    seconds = step_seconds(QWEN, [Work(launch, 1, 0), Work(once, 1, 0)])
    assert seconds == pytest.approx(49 * (LAUNCH + GAP))


def test_instructions_bound_a_kernel():
    launch = Launch("expert_down", (132,), 128, 0, True, "expert_down")
    work = Work(launch, 132, 0, instructions=80_000)
    assert work.seconds == pytest.approx(3.0e-6 + 4 * 80_000 / 8e9)

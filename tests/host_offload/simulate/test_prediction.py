"""Predictions are arithmetic on a trace and costs, and follow both."""

import dataclasses
import functools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host_offload.control.interface import Decision, Moment, Stage
from host_offload.control.paging import PagedSpec
from host_offload.simulate.prediction import predict
from host_offload.simulate.simulator import simulate
from host_offload.simulate.timeline import Link
from host_offload.sizing.cost_model import CostError
from tests.host_offload.control.policy_runs import scripted
from tests.host_offload.sizing.cost_models import LOW, MODEL
from tests.host_offload.traces.traces_of import random_routing
from tests.host_offload.traces.traces_of import write_trace as write_trace_with_positions

EXPERTS = 4

write_trace = functools.partial(write_trace_with_positions, absent=("token.position",))
"""Each row attends to one span."""


def one_token(*layers):
    """A token's experts in each layer, int[1, L, k]."""
    return np.array([layers])


STEPS = [
    one_token([0, 1], [0, 1]),
    one_token([0, 1], [0, 2]),
    one_token([0, 1], [2, 3]),
    one_token([2, 3], [2, 3]),
]
"""From cold with two cells a layer under LRU: fills (2, 2), (0, 1), (0, 1), (2, 0)."""

BASE = 1000 + 10 + 1 + 4 * 100
"""A decode step of one row with four active experts."""


def test_a_trace_by_hand(tmp_path):
    trace = write_trace(tmp_path / "t", STEPS, EXPERTS)
    found = predict(trace, MODEL, cells=2)
    moves = [14 + 14, 10, 10, 14]
    assert found.simulation.fills.tolist() == [[2, 2], [0, 1], [0, 1], [2, 0]]
    assert found.compute_s.tolist() == [BASE] * 4
    assert found.stall_s.tolist() == moves
    total = 4 * BASE + sum(moves)
    assert found.tokens_per_s == 4 / total
    assert found.stall_share == sum(moves) / total
    assert found.mean_s() == total / 4
    assert np.isnan(found.mean_s("prefill"))
    # 8 experts of 100 bytes at 0.05 s a byte fit beside the computing.
    assert found.bytes == 800 and found.stall_bound_share == 0
    placed = write_trace_with_positions(tmp_path / "p", STEPS, EXPERTS)
    spans = [(position + 1) / 64 for position in range(4)]
    assert predict(placed, MODEL, cells=2).compute_s.tolist() == [BASE - 1 + s for s in spans]
    slow = predict(trace, dataclasses.replace(MODEL, link_per_byte=10.0), cells=2)
    assert slow.stall_bound_share == pytest.approx((8000 - 4 * BASE) / 8000)


def test_a_prefill_step_counts_chunks_spans_tiles_and_experts(tmp_path):
    # 130 tokens of one request, at positions 0…129: chunks of 64, 64 and 2, which attend to
    # 1 + 2 + 3 spans. All tokens need experts 0 and 1: 130 rows are 3 tiles of 64 each.
    ids = np.repeat(one_token([0, 1], [0, 1]), 130, axis=0)
    trace = write_trace_with_positions(tmp_path / "t", [ids, STEPS[0]], EXPERTS, waves=[2, 1])
    found = predict(trace, MODEL, cells=4)
    compute = 5000 + 3 * 500 + 6 * 20 + 4 * 200 + (3 - 1) * 4 * 100
    assert found.seconds[0] == compute + 4 * 40  # all cold
    assert found.of_kind("prefill").tolist() == [True, False]
    assert found.mean_s("prefill") == found.seconds[0]
    assert found.tokens.tolist() == [130, 1]
    assert found.tokens_per_s == 1 / found.seconds.sum()


def test_it_moves_what_simulate_moves_and_repeats_itself(tmp_path):
    routed = random_routing(np.random.default_rng(3), 12, 2, EXPERTS, 2)
    trace = write_trace(tmp_path / "t", routed, EXPERTS)
    for options in ({"eviction": "lfu"}, {"prefetch": "random"}, {"eviction": "fifo"}):
        one, other = (predict(trace, MODEL, cells=2, **options) for _ in range(2))
        plain = simulate(trace, cells=2, costs=MODEL.costs(), **options)
        assert np.array_equal(one.seconds, other.seconds)
        assert np.array_equal(one.simulation.transfers, plain.transfers)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), factor=st.floats(1, 50), cells=st.integers(0, 4))
def test_a_slower_link_is_never_faster(tmp_path_factory, seed, factor, cells):
    routed = random_routing(np.random.default_rng(seed), 6, 2, EXPERTS, 2)
    trace = write_trace(tmp_path_factory.mktemp("t") / "t", routed, EXPERTS)
    moved = ("filling", "fill", "reading", "read")
    decode = {
        rows: dataclasses.replace(cost, **{name: getattr(cost, name) * factor for name in moved})
        for rows, cost in MODEL.decode.items()
    }
    slow = dataclasses.replace(MODEL, link_per_byte=MODEL.link_per_byte * factor, decode=decode)
    options = {"cells": cells, "prefetch": "random"} if seed % 2 else {"cells": cells}
    fast, late = predict(trace, MODEL, **options), predict(trace, slow, **options)
    assert (late.seconds >= fast.seconds).all()
    assert late.stall_bound_share >= fast.stall_bound_share


def test_another_models_trace_is_refused(tmp_path):
    trace = write_trace(tmp_path / "t", STEPS, EXPERTS)
    with pytest.raises(CostError, match=r"2 MoE layers, 4 experts and top-2.*of 3, 4 and top-2"):
        predict(trace, dataclasses.replace(MODEL, layers=3), cells=2)
    wide = [np.repeat(STEPS[0], 20, axis=0)]
    with pytest.raises(CostError, match="at most 16 rows, not 20"):
        predict(write_trace(tmp_path / "wide", wide, EXPERTS), MODEL, cells=2)


# ---- beside a link

LINK = Link(rate=1.0, chunk_bytes=100)
"""An expert takes as long as computing with one in a decode step."""


def test_misses_travel_beside_computing_and_hits_hide_them(tmp_path):
    trace = write_trace(tmp_path / "t", STEPS, EXPERTS)
    found = predict(trace, MODEL, cells=2, link=LINK, draw=True)
    plain = predict(trace, MODEL, cells=2)
    assert np.array_equal(found.simulation.transfers, plain.simulation.transfers)
    assert found.compute_s.tolist() == [BASE] * 4
    # Step 1 misses one of two experts of layer 1, which travels while the other is computed. In
    # step 0 both miss: gate and up of the first (33 and 33 of 100 bytes, a byte a second) are there
    # at 66, the second's when the first was computed with.
    assert found.stall_s.tolist() == pytest.approx([2 * 66, 0, 0, 66])
    assert {e.track for e in found.events} == {"device", "link"}
    assert predict(trace, MODEL, cells=2, link=LINK).events == ()


@pytest.mark.parametrize("link", [None, Link(rate=100.0)])
def test_looking_between_layers_costs_each_layer(tmp_path, link):
    """Two steps of two layers; one list, of which the link knows when it comes."""
    script = {(Moment.ROUTED, 0): Decision(stages=(Stage(1, 2),))}
    policy = scripted(script, moments={Moment.ROUTED}, writes={"stages"})
    trace = write_trace(tmp_path / "t", [one_token([0, 1], [2, 3])] * 2, EXPERTS)
    options = {"cells": 4, "driver": "host", "link": link, "policies": [policy]}
    free = predict(trace, MODEL, **options)
    costly = dataclasses.replace(MODEL, look=1000.0)
    found = predict(trace, costly, **options, draw=True)
    assert (found.compute_s - free.compute_s).tolist() == [2000, 2000]
    # The first step's misses wait for the link while its policies look at its layers.
    more = found.seconds - free.seconds
    assert more.tolist() == pytest.approx([2000, 2000])
    looks = [e for e in found.events if e.name == "policies" and e.end - e.begin == 1000]
    assert [e.layer for e in looks] == [0, 1, 0, 1]
    if link:
        moved = next(e for e in found.events if e.name.startswith("prefetch 1.2"))
        assert looks[0].end <= moved.begin  # it is queued when policies have looked
    plain = predict(trace, costly, cells=4, driver="host", link=link)
    assert plain.seconds.tolist() == predict(trace, MODEL, cells=4, link=link).seconds.tolist()


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), rate=st.floats(0.01, 100), cells=st.integers(0, 4))
def test_with_a_link_steps_lie_between_the_larger_and_the_sum(tmp_path_factory, seed, rate, cells):
    rng = np.random.default_rng(seed)
    routed = random_routing(rng, 6, 2, EXPERTS, 2)
    trace = write_trace(tmp_path_factory.mktemp("t") / "t", routed, EXPERTS)
    options = {"cells": cells, "prefetch": "random"} if seed % 2 else {"cells": cells}
    found = predict(trace, MODEL, link=Link(rate, chunk_bytes=100), **options)
    compute, moved = found.compute_s.sum(), found.bytes / rate
    assert found.seconds.sum() <= compute + moved + 1e-6
    ahead = found.simulation.staged.sum() * MODEL.expert_bytes / rate  # may come after the end
    assert found.seconds.sum() >= max(compute, moved - ahead) - 1e-6
    assert predict(trace, MODEL, link=Link(rate, chunk_bytes=100), **options).seconds.tolist() == (
        found.seconds.tolist()
    )


# ---- several versions


BOTH = {"dense": MODEL, "int4": LOW}
LOW_BASE = 800 + 10 + 1 + 4 * 40
"""BASE with all four experts low."""


def paged_trace(directory, routed=STEPS, **spec):
    """Each layer has a high and a low cell; experts 0 and 1 are wanted high, 2 and 3 low."""
    paged = PagedSpec(np.ones((2, 2), np.int64), np.array([[0, 0, 1, 1]] * 2, np.int8))
    said = {"version_bytes": {"dense": 100, "int4": 25}, "paged": paged.said, **spec}
    return write_trace(directory, routed, EXPERTS, spec=said)


def test_two_versions_by_hand(tmp_path):
    found = predict(paged_trace(tmp_path / "t"), BOTH)
    # 0 and 1 want the one high cell: 0 gets it, 1 is read through, each time. Then the low cell
    # of layer 1 gets 2, and 3 is read through; at last layer 0's gets 2 as well.
    assert found.simulation.fills.tolist() == [[1, 1], [0, 1], [0, 0], [1, 0]]
    assert found.simulation.read_through.tolist() == [[1, 1], [1, 0], [1, 1], [1, 1]]
    fixed = 1000 + 10 + 1  # the dense one's, which is more than the low one's
    mixed = [fixed + 3 * 100 + 40, fixed + 2 * 100 + 2 * 40]
    assert found.compute_s.tolist() == [BASE, *mixed, LOW_BASE]
    # Filled and read through: high 10 and 8, low 4 and 2.
    assert found.stall_s.tolist() == [2 * (10 + 8), 8 + 4, 8 + 2, (4 + 2) + 2]
    assert found.bytes == 4 * 100 + (100 + 25) + (100 + 25) + 3 * 25
    assert found.link_per_byte == 0.05
    plain = write_trace(tmp_path / "u", STEPS, EXPERTS)
    assert predict(plain, LOW, cells=2).bytes == 8 * 25  # the costs' version moves its own bytes
    assert PagedSpec(np.ones((2, 2), np.int64), np.zeros((2, 4), np.int8)).capacity == (2, 2)


def test_what_has_no_price_is_refused(tmp_path):
    mixed = paged_trace(tmp_path / "t")
    cases = [
        (MODEL, "the run mixes dense and int4.*costs are of one version.*--precision VERSION"),
        ({"dense": MODEL}, "no costs of version int4: measure them with `moejax calibrate"),
        (
            BOTH | {"int4": MODEL},
            "the costs of int4 are of experts of 100 bytes, the run's have 25",
        ),
        (
            BOTH | {"int4": dataclasses.replace(LOW, chunk=32)},
            "dense and int4 are of different shapes; calibrate all",
        ),
        (
            BOTH | {"int4": dataclasses.replace(LOW, decode={8: LOW.decode[8]})},
            "different shapes",
        ),
    ]
    for costs, message in cases:
        with pytest.raises(CostError, match=message):
            predict(mixed, costs)
    unsaid = write_trace(tmp_path / "u", STEPS, EXPERTS, spec={"version_bytes": {}})
    with pytest.raises(CostError, match="does not say its versions; give the costs of one"):
        predict(unsaid, BOTH, cells=2)


FIDDLER = "fiddler,per_token=30.0,startup=80.0,load=10.0,accelerator={},attention={}"
"""What is missed and has no cell to be filled is computed beside: 110 s for one row."""


@pytest.mark.parametrize("link", [None, Link(rate=1e9, chunk_bytes=100)])
def test_a_second_processor_computes_beside_the_device(tmp_path, link):
    """An expert takes the device 100 s, and a layer what the later of both takes."""
    options = {"cells": 2, "driver": "host", "link": link, "draw": True}
    trace = write_trace(tmp_path / "t", STEPS, EXPERTS)
    found = predict(trace, MODEL, placement=FIDDLER.format(0, 0), **options)
    assert found.simulation.fills.tolist() == [[2, 2], [0, 0], [0, 0], [0, 0]]
    assert found.simulation.placed.tolist() == [[0, 0], [0, 1], [0, 2], [2, 2]]
    assert found.bytes == 4 * 100
    fixed = BASE - 400 + MODEL.control
    beside = [max(200, 0) + max(100, 110), 200 + 220, 220 + 220]
    assert found.seconds[1:].tolist() == pytest.approx([fixed + s for s in beside])
    drawn = [event for event in found.events if event.track == "cpu"]
    assert [round(each.end - each.begin) for each in drawn] == [110, 220, 220, 220]
    if link is not None:  # what is computed beside does not cross it
        crossed = {each.name.split(" part")[0] for each in found.events if each.track == "link"}
        assert crossed == {"demand 0.0", "demand 0.1", "demand 1.0", "demand 1.1"}
    # t_g is the least of an expert, t_attn of what is between two layers.
    slow = predict(trace, MODEL, placement=FIDDLER.format(150, 0), **options)
    late = [300 + max(150, 110), 300 + 220, 220 + 220]
    assert slow.seconds[1:].tolist() == pytest.approx([fixed + s for s in late])
    apart = predict(trace, MODEL, placement=FIDDLER.format(0, 5000), **options)
    assert (apart.seconds > found.seconds + 4000).all() and (apart.seconds < 7000).all()


def test_a_second_processor_without_costs_is_refused(tmp_path):
    beside = Decision(execute=np.ones(2, np.int8), load_order=np.zeros(2, np.int16))
    script, moments = {(Moment.EXPERTS_BEGIN, 0): beside}, {Moment.EXPERTS_BEGIN}
    away = scripted(script, moments=moments, writes={"execute", "load_order"})
    trace = write_trace(tmp_path / "t", STEPS, EXPERTS)
    late = f"{FIDDLER.format(0, 0)},defer=1"
    with pytest.raises(CostError, match="defers experts is measured, not predicted"):
        predict(trace, MODEL, cells=2, driver="host", placement=late)
    with pytest.raises(CostError, match="name the placement with its costs"):
        predict(trace, MODEL, cells=2, driver="host", policies=[away])

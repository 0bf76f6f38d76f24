"""The policy interface and what is refused of it."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from host_offload.control.interface import (
    WRITES,
    Decision,
    Moment,
    Stage,
    Transition,
)
from host_offload.control.rules import (
    PolicyError,
    check_decision,
    check_policies,
    parse_interval,
)
from pallas_kernels.plan.victim import MAX_PRIOR, MAX_WEIGHT
from tests.host_offload.control.policy_runs import EXPERTS, LAYERS, scripted, spec


class Thawed:
    moments = needs = writes = frozenset()


@dataclasses.dataclass(frozen=True)
class Half:
    moments: frozenset = frozenset()


@dataclasses.dataclass(frozen=True)
class Other(type(scripted())):
    pass


@pytest.mark.parametrize(
    ("policies", "driver", "match"),
    [
        ([scripted()], "tape", "unknown driver 'tape'; known: device, host, stream"),
        ([type(scripted())], "device", r"Scripted is a class; give an object, Scripted\(\)"),
        ([Thawed()], "device", "Thawed must be decorated with @dataclasses.dataclass.frozen=True"),
        ([Half()], "device", "Half lacks needs, writes, init, decide"),
        (
            [dataclasses.replace(scripted(), needs=["ids"])],
            "device",
            "Scripted: needs must be a frozenset",
        ),
        ([scripted(moments={"STEP_END"})], "device", "'STEP_END' is no Moment; known: STEP_BEGIN"),
        ([scripted(needs={"id"})], "device", "unknown name 'id' in needs; known: .*ids"),
        ([scripted(needs={"step"})], "device", "'step' is always given; take it out of needs"),
        (
            [scripted(writes={"priors"})],
            "device",
            "unknown name 'priors' in writes; known: .*prior",
        ),
        (
            [scripted(moments={Moment.ROUTED})],
            "device",
            "Scripted asks for ROUTED, which driver='device' lacks; driver='host' has it",
        ),
        (
            [scripted(needs={"kv_refs"})],
            "host",
            "needs 'kv_refs', which its moments do not have; add one of TURN_END",
        ),
        (
            [scripted(writes={"execute"})],
            "host",
            "writes 'execute', of a layer's experts; add one of ROUTED, EXPERTS_BEGIN",
        ),
        (
            [scripted(moments={Moment.STEP_BEGIN}, needs={"ids"})],
            "device",
            "needs 'ids', which its moments do not have; add one of STEP_END, INTERVAL, TURN_END",
        ),
        (
            [scripted(writes={"prior", "stages"}), Other(writes=frozenset({"prior"}))],
            "device",
            "policies Scripted and Other both write 'prior'; leave one out",
        ),
        ([scripted(moments={Moment.INTERVAL})], "device", "INTERVAL and the attribute `interval`"),
        ([scripted(interval="4 steps")], "device", "INTERVAL and the attribute `interval`"),
        (
            [scripted(moments={Moment.INTERVAL}, interval="4 miles")],
            "device",
            "interval '4 miles' is not a number of steps, tokens, seconds",
        ),
        ([scripted(moments=(), writes={"stages"})], "device", "no moments, so it is never asked"),
        (
            [scripted(victim_weights=(1, 0, 0))],
            "device",
            "victim_weights, which its `writes` lacks",
        ),
        (
            [scripted(victim_weights=(1, 0, 2000), writes={"victim_weights"})],
            "device",
            "Scripted at start: victim_weights must lie in -1024…1024, not 0…2000",
        ),
    ],
)
def test_policies_that_cannot_run_are_refused(policies, driver, match):
    with pytest.raises(PolicyError, match=match):
        check_policies(policies, driver)


def test_each_policy_may_say_why():
    notes = frozenset({"note"})
    check_policies([scripted(writes=notes), Other(writes=notes)], "device")


@pytest.mark.parametrize(
    "text", ["", "steps", "4", "0 steps", "-1 tokens", "1.5 steps", "inf seconds", "nan tokens"]
)
def test_intervals_that_mean_nothing(text):
    with pytest.raises(PolicyError, match=r"policy P: interval .* such as '4096 tokens'"):
        parse_interval(text, "P")


def grid(value, *shape):
    return np.full(shape or (LAYERS, EXPERTS), value)


@pytest.mark.parametrize(
    ("decision", "match"),
    [
        (None, r"decide must return \(state, Decision\), not NoneType"),
        (Decision(prior=grid(0.0)), r"prior must be int32\[2, 8\], not float64\[2, 8\]"),
        (Decision(prior=grid(0, 2, 7)), r"prior must be int32\[2, 8\], not int64\[2, 7\]"),
        (Decision(prior=grid(MAX_PRIOR + 1)), f"prior must lie in -{MAX_PRIOR}…{MAX_PRIOR}"),
        (Decision(victim_weights=grid(MAX_WEIGHT + 1, 3)), "victim_weights must lie in -1024…1024"),
        (Decision(fill_version=grid(2)), "fill_version must lie in -2…1, not 2…2"),
        (Decision(stages=Stage(0, 0)), "stages must be a tuple of Stage, not Stage"),
        (Decision(stages=((0, 0),)), r"stages has \(0, 0\), which is no Stage"),
        (Decision(stages=(Stage(2, 0),)), "stages has layer 2, which must lie in 0…1"),
        (Decision(stages=(Stage(0, -1),)), "stages has expert -1, which must lie in 0…7"),
        (Decision(stages=(Stage(0, 0, 2),)), "stages has version 2, which must lie in 0…1"),
        (Decision(stages=(Stage(0, 1.0),)), "stages has 1.0 where an integer belongs"),
        (Decision(transitions=(Transition(0, 0, -1),)), "transitions has version -1"),
        (
            Decision(stages=(Stage(0, 0, cause=3),)),
            "stages has the cause 3, which must be a string",
        ),
        (Decision(pause_stages=1), "pause_stages must be True or False, not 1"),
        (Decision(cells=grid(9, 2)), "cells must lie in 0…8, not 9…9"),
        (Decision(cells=grid(0, 2)), "cells is below min_cells in layer 1"),
        (
            Decision(cells=np.array([8, 8])),
            "cells takes 640 bytes; the arena less the least KV has 550",
        ),
        (Decision(kv_pages=4), "kv_pages must lie in 5…60, not 4"),
        (Decision(kv_pages=True), "kv_pages must be an integer, not True"),
        (Decision(load_order=grid(0, 1)), "it set 'load_order', which its `writes` lacks"),
    ],
)
def test_decisions_that_mean_nothing_are_refused(decision, match):
    policy = scripted(writes=WRITES - {"load_order"})
    limits = spec(min_cells=np.array([0, 1]), budget_bytes=600)
    with pytest.raises(PolicyError, match=f"policy Scripted at STEP_END of step 7: {match}"):
        check_decision(decision, policy, limits, "STEP_END of step 7")


def test_a_field_that_no_decision_has_is_named():
    wrong: Any = {"note": "why", "typo": 1}
    with pytest.raises(TypeError, match=r"Decision\(\) got an unexpected keyword argument 'typo'"):
        Decision(**wrong)


def test_a_decision_is_copied_into_the_interfaces_types():
    prior = grid(3)
    stages = [Stage(np.int64(1), np.int32(2)), Stage(0, 1, 0, "hot"), Stage(1, 2, 1)]
    given = Decision(prior=prior, fill_version=grid(-1), stages=tuple(stages), kv_pages=np.int64(6))
    got = check_decision(given, scripted(writes=WRITES), spec(), "start")
    prior[:] = 0
    assert got.prior.dtype == np.int32 and (got.prior == 3).all()
    assert got.fill_version.dtype == np.int8
    # Named twice, an expert counts where it was named first.
    assert got.stages == (Stage(1, 2), Stage(0, 1, 0, "hot"))
    assert all(type(x) is int for entry in got.stages for x in entry[:3])
    assert got.kv_pages == 6 and got.cells is None

"""The contracts of ops with the PTX that XLA makes of their kernels, run by the interpreter.

A contract's operands, references and tolerances are those of tests/pallas_kernels.
"""

import pytest
from hypothesis import Phase, given, settings

from pallas_kernels.combine.specs import SPECS as COMBINE
from pallas_kernels.expert_ffn.specs import SPECS as EXPERT_FFN
from pallas_kernels.expert_ffn.specs import VERSIONED
from pallas_kernels.fill.specs import SPECS as FILL
from pallas_kernels.fill.specs import TRANSIT_SPECS
from pallas_kernels.fill_ffn.specs import SPECS as FILL_FFN
from pallas_kernels.head_linear.specs import SPECS as HEAD_LINEAR
from pallas_kernels.kv_write.specs import SPECS as KV_WRITE
from pallas_kernels.latent_write.specs import SPECS as LATENT_WRITE
from pallas_kernels.layer_norm.specs import SPECS as LAYER_NORM
from pallas_kernels.linear.specs import SPECS as LINEAR
from pallas_kernels.move.specs import SPECS as MOVE
from pallas_kernels.paged_attention.specs import (
    DECODE_SPECS,
    LATENT_DECODE_SPECS,
    LATENT_PREFILL_SPECS,
    PREFILL_SPECS,
)
from pallas_kernels.plan.specs import SPECS as PLAN
from pallas_kernels.rms_norm.specs import SPECS as RMS_NORM
from pallas_kernels.route.specs import PLANNED_SPECS
from pallas_kernels.route.specs import SPECS as ROUTE
from pallas_kernels.stage.specs import SPECS as STAGE
from pallas_kernels.truncate.specs import SPECS as TRUNCATE
from tests.aot.aot_h200 import CARDS
from tests.pallas_kernels import (
    test_combine,
    test_combined_experts,
    test_decode_attention,
    test_expert_ffn,
    test_expert_ffn_versions,
    test_fill,
    test_fill_ffn,
    test_head_linear,
    test_kv_write,
    test_latent_write,
    test_layer_norm,
    test_linear,
    test_move,
    test_norm_route_and_list,
    test_plan,
    test_prefill_attention,
    test_rms_norm,
    test_route,
    test_route_and_list,
    test_route_and_plan,
    test_stage,
    test_truncate,
    test_write_and_attend,
)
from tests.ptx.program import patched

pytestmark = pytest.mark.aot

DECODE = {
    "fill": (test_fill, test_fill.check, FILL),
    "route": (test_route, test_route.check, ROUTE),
    "route_and_plan": (test_route_and_plan, test_route_and_plan.check, PLANNED_SPECS),
    "route_and_list": (test_route_and_list, test_route_and_list.check, PLANNED_SPECS),
    "norm_route_and_list": (
        test_norm_route_and_list,
        test_norm_route_and_list.check,
        test_norm_route_and_list.SPECS,
    ),
    "combine": (test_combine, test_combine.check, COMBINE),
    "combine_and_count": (test_combine, test_combine.check_count, test_combine.COUNTED),
    "combine_with_squares": (test_combine, test_combine.check_squares, test_combine.COUNTED),
    "tile_squares": (
        *(test_rms_norm, test_rms_norm.check_tile_squares, test_rms_norm.SQUARES_SPECS),
    ),
    "linear": (test_linear, test_linear.check, LINEAR),
    "linear_parts": (test_linear, test_linear.check_parts, test_linear.PARTS_SPECS),
    "rms_norm": (test_rms_norm, test_rms_norm.check, RMS_NORM),
    "layer_norm": (test_layer_norm, test_layer_norm.check, LAYER_NORM),
    "norm_linear": (test_linear, test_linear.check_normed, test_linear.NORM_SPECS),
    "norm_linear_parts": (
        *(test_linear, test_linear.check_normed_parts, test_linear.NORM_PARTS_SPECS),
    ),
    "norm_linear by squares": (
        *(test_linear, test_linear.check_normed_by_squares, test_linear.NORM_SPECS),
    ),
    "norm_linear_parts by squares": (
        *(test_linear, test_linear.check_normed_parts_by_squares, test_linear.NORM_PARTS_SPECS),
    ),
    "linear_with_squares": (test_linear, test_linear.check_squares, test_linear.SQUARES_SPECS),
    "residual": (test_linear, test_linear.check_residual, test_linear.RESIDUAL_SPECS[:-1]),
    "kv_write": (test_kv_write, test_kv_write.check, KV_WRITE),
    "latent_write": (test_latent_write, test_latent_write.check, LATENT_WRITE),
    "head_linear": (test_head_linear, test_head_linear.check, HEAD_LINEAR),
    "attention": (test_decode_attention, test_decode_attention.check, DECODE_SPECS),
    "writing": (
        test_write_and_attend,
        test_write_and_attend.check,
        test_write_and_attend.WRITING_SPECS,
    ),
    "writing bits": (
        test_write_and_attend,
        test_write_and_attend.check_bits,
        test_write_and_attend.WRITING_SPECS,
    ),
    "latent_attention": (test_decode_attention, test_decode_attention.check, LATENT_DECODE_SPECS),
    "expert_ffn": (test_expert_ffn, test_expert_ffn.check, EXPERT_FFN),
    "versions": (test_expert_ffn_versions, test_expert_ffn_versions.check, VERSIONED),
    "fill_ffn": (test_fill_ffn, test_fill_ffn.check, FILL_FFN),
    "fill_ffn bits": (test_fill_ffn, test_fill_ffn.check_bits, FILL_FFN),
    "combined experts": (
        test_combined_experts,
        test_combined_experts.check,
        test_combined_experts.COMBINED_SPECS,
    ),
    "combined filled": (
        test_combined_experts,
        test_combined_experts.check_filled,
        test_combined_experts.COMBINED_SPECS,
    ),
    "truncate": (test_truncate, test_truncate.check, TRUNCATE),
    "in_transit": (test_fill, test_fill.check_in_transit, TRANSIT_SPECS),
}
"""Name → the module of the contract, the contract of (spec, implementation), specs."""

PREFILL = {
    "prefill_attention": (test_prefill_attention, test_prefill_attention.check, PREFILL_SPECS),
    "latent_prefill": (test_prefill_attention, test_prefill_attention.check, LATENT_PREFILL_SPECS),
}

QUICK = {
    "fill": (0, 3),
    "route": (0, 1),
    "route_and_plan": (0,),
    "route_and_list": (0, 4),
    "norm_route_and_list": (0,),
    "combine": (0,),
    "combine_and_count": (1,),
    "linear": (0, 17),
    "linear_parts": (1,),
    "norm_linear": (1, 2),
    "norm_linear_parts": (0, 2, 5),
    "combine_with_squares": (1,),
    "tile_squares": (1,),
    "norm_linear by squares": (2, 4),
    "norm_linear_parts by squares": (0, 5),
    "linear_with_squares": (0, 1),
    "residual": (0,),
    "rms_norm": (0,),
    "kv_write": (3,),
    "attention": (4, -2),
    "writing": (1,),
    "writing bits": (3, 6),
    "expert_ffn": (4, 21),
    "versions": (6,),
    "fill_ffn": (0, 4),
    "fill_ffn bits": (7,),
    "combined experts": (0, -1),
    "combined filled": (0,),
    "head_linear": (2,),
    "latent_write": (0,),
    "latent_attention": (0,),
    "truncate": (3,),
}
"""Specs of .ci/run by their place."""


def of_kernels(table, only=None):
    """[(name, place)] of specs that a kernel takes: `only` those, or all."""
    found = []
    for name, (_, _, specs) in table.items():
        for i, spec in enumerate(specs):
            chosen = only is None or i in {p % len(specs) for p in only.get(name, ())}
            if chosen and getattr(spec, "dtype", "") != "float32":
                found.append((name, i))
    return found


def check(name, place, card="h200", copies="late"):
    module, contract, specs = (DECODE | PREFILL)[name]
    with patched(module, card=card, launch={"copies": copies}):
        contract(specs[place], "pallas")


@pytest.mark.parametrize(("name", "place"), of_kernels(DECODE, QUICK))
def test_contract(name, place):
    check(name, place)


def test_attention_has_equal_bits_with_programs_for_longer_contexts():
    bits = test_decode_attention.test_bits_are_independent_of_the_width_of_the_block_table
    with patched(test_decode_attention, card="h200"):
        bits("pallas", "bfloat16")


@pytest.mark.nightly
def test_parts_of_logits_and_of_a_row():
    with patched(test_linear, card="h200"):
        test_linear.check_parts_of_a_row("pallas", "bfloat16")
    with patched(test_route, card="h200"):
        test_route.check_parts("pallas")


@pytest.mark.nightly
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize(("name", "place"), of_kernels(DECODE))
def test_every_decode_configuration(name, place, card):
    check(name, place, card, "random")


@pytest.mark.nightly
@pytest.mark.parametrize("copies", ["early", "random"])
@pytest.mark.parametrize(("name", "place"), of_kernels(DECODE, QUICK))
def test_copies_at_other_times(name, place, copies):
    check(name, place, copies=copies)


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "place"), of_kernels(PREFILL))
def test_prefill(name, place):
    check(name, place)


HISTORIES = {
    "plan": (test_plan, test_plan.check, test_plan.histories, PLAN),
    "plan_routed": (test_plan, test_plan.check_routed, test_plan.histories, PLAN),
    "stage": (test_stage, test_stage.check, test_stage.histories, STAGE),
    "move": (test_move, test_move.check, test_move.states, MOVE),
}
"""Ops whose contract takes a history: module, contract, histories of a spec, specs."""


def check_histories(name, place, examples, card="h200"):
    module, contract, histories, specs = HISTORIES[name]

    @settings(max_examples=examples, phases=[Phase.generate], database=None)
    @given(history=histories(specs[place]))
    def each(history):
        contract(specs[place], "pallas", history)

    with patched(module, card=card):
        each()


@pytest.mark.parametrize("name", ["stage", "move"])  # plan has its own in test_mutations
def test_histories(name):
    check_histories(name, 0, 2)


@pytest.mark.nightly
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("name", HISTORIES)
def test_more_histories(name, place, card):
    check_histories(name, place, 10, card)

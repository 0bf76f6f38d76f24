"""Experts in other versions: which bits change, which do not, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from host_offload.policies.budget.layer_cells import LayerCells
from moejax import LLM, UserError
from moejax.start.decide.start_plan import _result_notes, check_arithmetic, name_products
from moejax.start.options import Config
from moejax.start.precision import precision_stats
from moejax.start.settings import parse_precision
from pallas_kernels import resolve_ops
from pallas_kernels.records import RecordFormat
from pallas_kernels.records.versions import VersionFormats

SMALL = dict(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=256, progress=False)


def started(**options) -> LLM:
    return LLM("demo", **{**SMALL, **options})


def test_a_map_of_another_model_is_refused(tmp_path):
    np.save(tmp_path / "map.npy", np.zeros((4, 8), int))
    with pytest.raises(
        UserError, match="the map is of 4 layers × 8 experts, this model has 4 × 16"
    ):
        started(precision=f"map={tmp_path / 'map.npy'}")


def test_integer_products_of_experts_without_integers_are_refused():
    ops = resolve_ops("xla", arithmetic="int8")
    fp8, int4 = (RecordFormat(name, 128, 32, "bfloat16") for name in ("fp8-128x128-f32", "int4"))
    for formats, found in ((None, "dense"), ((VersionFormats(fp8, fp8),), fp8.version)):
        with pytest.raises(UserError, match=f"these, {found}, have none; add precision int8"):
            check_arithmetic(ops, formats)
    check_arithmetic(ops, (VersionFormats(fp8, fp8), VersionFormats(int4, int4)))


@pytest.mark.parametrize(
    ("linear", "dtype", "experts_only"),
    [
        ("cpu", "bfloat16", False),
        ("cpu", "float32", False),
        ("cpu", "float16", True),
        ("xla", "bfloat16", True),
    ],
)
def test_results_say_which_products_are_of_integers(linear, dtype, experts_only):
    ops = SimpleNamespace(arithmetic="int8", linear=linear)
    unused = dict.fromkeys(("queue", "second", "cache_aware_routing"))
    steps: Any = SimpleNamespace(ops=ops, dtype=dtype, **unused)
    (note,) = _result_notes(steps)
    assert ("with weights of experts (other matrices" in note) == experts_only
    assert ("dtype float32 rounds nothing else" in note) == ((linear, dtype) == ("cpu", "bfloat16"))
    which = "experts" if experts_only else "weights"
    exact = f"exact, of {dtype} numbers"
    assert name_products(steps) == f"int8 with {which} in integer codes, all others {exact}"
    ops.arithmetic = "exact"
    assert name_products(steps) == exact


def test_stats_without_control_say_what_was_asked_for():
    plan = parse_precision(Config.of("", precision="int4"))
    ops = SimpleNamespace(arithmetic="exact")
    engine: Any = SimpleNamespace(runner=SimpleNamespace(steps=SimpleNamespace(ops=ops)))
    made = {"quantizers": {"int4": "rtn"}, "arithmetic": "exact"}
    assert precision_stats(plan, None, engine, {"int4": "rtn"}) == plan.report() | made
    counts = {"precision": {"promotions": 3}}
    assert precision_stats(plan, counts, engine, {})["promotions"] == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int3"}, "unknown precision 'int3', did you mean 'int8'"),
        ({"precision": "int4,hi=dense"}, "precision 'int4' has no setting 'hi=dense'"),
        ({"precision": "dynaexq,interval=4 bytes"}, "interval '4 bytes' is not a number of"),
        ({"precision": "dynaexq", "cells": "marginal"}, "precision dynaexq and cells do not go"),
        (
            {"precision": "dynaexq,paged=true", "cells": "marginal"},
            "precision dynaexq and cells do not go",
        ),
        ({"precision": "dynaexq,paged=true,spares=2"}, "spares does not apply with paged=true"),
        ({"precision": "int4,paged=true"}, "precision 'int4' has no setting 'paged=true'"),
        ({"precision": "dynaexq,paged=maybe"}, "paged='maybe' is not true or false"),
        ({"precision": "dynaexq,spares=0"}, "spares='0' is not a whole number, 1 or more"),
        ({"precision": "int4,quantizer=best"}, "quantizer 'best' is unknown; choose rtn"),
    ],
)
def test_options_that_mean_nothing_are_refused_before_loading(options, message):
    with pytest.raises(UserError, match=message):
        LLM("/no/such/model", **options)


PAGED = "dynaexq,paged=true"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_budget": "1MiB"}, "precision dynaexq: 64 experts in int4 and 1 spare of each"),
        ({"expert_budget": "1MiB"}, "or page them .paged=true, such as --precision dynaexq,paged"),
        (
            {"expert_budget": "3MiB", "precision": "dynaexq,hi_share=0.5"},
            "hi_share and expert_budget both say how",
        ),
        ({"prefetch": "random"}, "writes 'stages', and every expert is resident"),
        ({"dtype": "float32", "precision": "dynaexq,hi=lossless12"}, "lossless12"),
        ({"precision": PAGED, "policies": [LayerCells()]}, "writes 'cells', and ce"),
        ({"precision": PAGED, "resize": "mv_wsa"}, "cells of two versions are laid ou"),
    ],
)
def test_what_does_not_fit_together_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        started(**{"precision": "dynaexq", "expert_budget": "6MiB"} | options)

"""The kernels that a model's steps call are those that its start checks, in every class of GPU."""

import functools
import itertools

import jax
import pytest

from moejax.checkpoints.random_model import shape
from moejax.start.kernels import kernel_shapes
from pallas_kernels import resolve_ops
from pallas_kernels.cards import CLASSES
from pallas_kernels.verification import FEW_ROWS, checks
from pallas_kernels.verification.check import argument_shapes
from tests.moejax.step.test_constant_memory import DECODE, PREFILL, STAGED, GiB, abstract_programs
from tests.pallas_kernels.test_cards import kernel_calls, kernels_in

CONFIG = shape("qwen3-30b-a3b")


def ops_of(kib):
    return resolve_ops("auto", platform="gpu", dtype="bfloat16", shared_kib=kib)


def kernels_of_steps(kib):
    limits = {"rows": 64, "max_model_len": 4096, "max_num_batched_tokens": 8192}
    programs = abstract_programs(
        CONFIG, 40 * GiB, ops=ops_of(kib), waves=8, bucketed=True, **limits
    )
    found = set()
    for key in (STAGED, PREFILL):
        program = programs.program(key)
        found |= kernels_in(jax.make_jaxpr(program.function)(*program.args).jaxpr)
    return found


def checks_of(kib):
    """But for those with another width of addresses, which have the same rows and stages."""
    for of_window in kernel_shapes(CONFIG, "bfloat16", CONFIG.slot_layout(2)):
        yield from (check for check in checks(of_window, ops_of(kib)) if not check.wide)


def kernels_of_checks(kib):
    found = set()
    for check in checks_of(kib):
        run, operands = functools.partial(check.run, "pallas"), argument_shapes(check)
        found |= kernels_in(jax.make_jaxpr(run)(*operands).jaxpr)
    return found


@pytest.mark.parametrize(
    "kib", [pytest.param(kib, marks=[pytest.mark.nightly] * (kib != 99)) for kib in CLASSES]
)
def test_every_kernel_of_a_step_is_checked_with_its_stages(kib):
    ran = kernels_of_steps(kib)
    assert ("expert_gate_up_hits", 4, 3 if kib == 99 else 4) in ran and len(ran) > 12
    assert ran <= kernels_of_checks(kib)


BY_ROW = {"decode_attention_write", "decode_attention_write_merge", "decode_attention_merge"}
"""Whose programs have a row each: they are the same for any number."""


@pytest.mark.slow
def test_every_kernel_of_a_small_step_is_checked_at_its_rows():
    """What is masked in a tile of 16 is another kernel for each number of rows."""
    checked = {}
    for check in checks_of(227):
        jaxpr = jax.make_jaxpr(functools.partial(check.run, "pallas"))(*argument_shapes(check))
        for name, rows in rows_in(jaxpr.jaxpr):
            checked.setdefault(name, set()).update(rows)
    limits = {"rows": 16, "max_model_len": 2048, "max_num_batched_tokens": 512}
    programs = abstract_programs(
        CONFIG, 40 * GiB, ops=ops_of(227), waves=8, bucketed=True, **limits
    )
    buckets = programs.steps.shapes.buckets
    assert buckets == (*FEW_ROWS, 16)
    for rows, resident in itertools.product(buckets, (False, True)):
        program = programs.program(DECODE._replace(rows=rows, resident=resident))
        ran = rows_in(jax.make_jaxpr(program.function)(*program.args).jaxpr)
        names = {name for name, _ in ran}
        assert len(names) > 7
        assert {name for name in names if rows not in checked[name]} <= BY_ROW


def rows_in(jaxpr) -> list[tuple[str, set[int]]]:
    """Name and leading dimensions of what it reads and writes, of every kernel call."""
    return [
        (equation.params["name"], {v.aval.shape[0] for v in values if v.aval.ndim})
        for equation in kernel_calls(jaxpr)
        for values in [(*equation.invars, *equation.outvars)]
    ]


def test_checks_of_one_class_are_not_those_of_another():
    (found,) = {len(keys(kib)) for kib in CLASSES}
    shared = keys(99) & keys(227)
    assert {key.split()[0] for key in keys(99) - shared} == {
        "linear",
        "expert_ffn",
        "fill_ffn",
        "paged_attention",
        "route",  # behind the router's product
    }
    assert len(shared) < found


def keys(kib):
    (of_window,) = kernel_shapes(CONFIG, "bfloat16", CONFIG.slot_layout(2))
    return {check.key for check in checks(of_window, ops_of(kib))}

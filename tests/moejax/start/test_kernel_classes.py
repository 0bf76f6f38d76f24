"""The kernels that a model's steps call are those that its start checks, in every class of GPU."""

import functools

import jax
import pytest

from moejax.checkpoints.random_model import shape
from moejax.start.kernels import kernel_shapes
from pallas_kernels import resolve_ops
from pallas_kernels.cards import CLASSES
from pallas_kernels.verification import checks
from pallas_kernels.verification.check import argument_shapes
from tests.moejax.step.test_constant_memory import PREFILL, STAGED, GiB, abstract_programs
from tests.pallas_kernels.test_cards import kernels_in

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


def checks_of(kib, config=CONFIG):
    """But for those with another width of addresses, which have the same rows and stages."""
    for of_window in kernel_shapes(config, "bfloat16", config.slot_layout(2)):
        yield from (check for check in checks(of_window, ops_of(kib)) if not check.wide)


def kernels_of_checks(kib):
    found = set()
    for check in checks_of(kib):
        run, operands = functools.partial(check.run, "pallas"), argument_shapes(check)
        found |= kernels_in(jax.make_jaxpr(run)(*operands).jaxpr)
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "kib", [pytest.param(kib, marks=[pytest.mark.nightly] * (kib != 99)) for kib in CLASSES]
)
def test_every_kernel_of_a_step_is_checked_with_its_stages(kib):
    ran = kernels_of_steps(kib)
    assert ("expert_gate_up_hits", 4, 3 if kib == 99 else 4) in ran and len(ran) > 12
    assert ran <= kernels_of_checks(kib)


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

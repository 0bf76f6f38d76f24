"""The kernels that a model's steps call are those that its start checks, in every class of GPU."""

import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from moejax.checkpoints.random_model import shape
from moejax.models.attention.mamba import unit_rms
from moejax.models.config import parse_config
from moejax.start.decide.shapes import without_kernel
from moejax.start.kernels import kernel_shape, without_mosaic
from pallas_kernels import resolve_ops
from pallas_kernels.cards import CLASSES
from pallas_kernels.expert_ffn import ClampedSwiGLU
from pallas_kernels.records.versions import VersionFormats
from pallas_kernels.verification import FEW_ROWS, checks
from pallas_kernels.verification.check import argument_shapes
from tests.moejax.models.families import config_of
from tests.moejax.models.test_published_configs import PUBLISHED
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


def checks_of(kib, config=CONFIG):
    """But for those with another width of addresses, which have the same rows and stages."""
    shape = kernel_shape(config, "bfloat16", config.slot_layout(2))
    return (check for check in checks(shape, ops_of(kib)) if not check.wide)


def unchecked(kernels, kib):
    """Those of these that no check runs."""
    for check in checks_of(kib):
        if not kernels:
            break
        run, operands = functools.partial(check.run, "pallas"), argument_shapes(check)
        kernels = kernels - kernels_in(jax.make_jaxpr(run)(*operands).jaxpr)
    return kernels


@pytest.mark.slow
@pytest.mark.parametrize(
    "kib", [pytest.param(kib, marks=[pytest.mark.nightly] * (kib != 99)) for kib in CLASSES]
)
def test_every_kernel_of_a_step_is_checked_with_its_stages(kib):
    ran = kernels_of_steps(kib)
    assert ("expert_gate_up_hits", 4, 3 if kib == 99 else 4) in ran and len(ran) > 12
    assert unchecked(ran, kib) == set()


BY_ROW = {
    *("decode_attention_write", "decode_attention_write_merge", "decode_attention_merge"),
    *("decode_attention_latent_split", "decode_attention_latent_merge", "latent_write"),
    *("combine", "fill"),
}
"""Whose programs have a row or a record each: they are the same for any number."""


@pytest.mark.nightly  # every kernel of a step, with its stages: the test above
@pytest.mark.parametrize("name", ["Qwen3-30B-A3B", "DeepSeek-V2-Lite"])
def test_every_kernel_of_a_decode_step_is_checked_with_its_operands(name):
    """What is masked in a tile of 16 is another kernel for each number of rows, and so is what
    reads one operand more."""
    config = parse_config(PUBLISHED[name].raw)
    assert without_kernel(config) == {}
    ops = ops_of(227)
    checked = {}
    for check in checks_of(227, config):
        run = functools.partial(check.run, "pallas")
        for kernel, arrays in operands_of(run, argument_shapes(check)):
            checked.setdefault(kernel, set()).add(arrays)
    limits = {"rows": 32, "max_model_len": 2048, "max_num_batched_tokens": 512}
    programs = abstract_programs(config, 40 * GiB, ops=ops, waves=8, bucketed=True, **limits)
    assert programs.steps.shapes.buckets == (*FEW_ROWS, 16, 32)
    keys = [DECODE, DECODE._replace(resident=True), STAGED]
    for rows, key in itertools.product(programs.steps.shapes.buckets, keys):
        program = programs.program(key._replace(rows=rows))
        ran = operands_of(program.function, program.args)
        assert len({kernel for kernel, _ in ran} - BY_ROW) > 4
        for kernel, arrays in ran:
            found = any(same_kernel(arrays, other) for other in checked[kernel])
            assert found or kernel in BY_ROW, (kernel, rows, key, arrays)


def operands_of(function, args) -> list[tuple[str, tuple]]:
    """Name, and shape and dtype of what it reads and writes, of every kernel call."""
    return [
        (
            equation.params["name"],
            tuple((v.aval.shape, v.aval.dtype.name) for v in (*equation.invars, *equation.outvars)),
        )
        for equation in kernel_calls(jax.make_jaxpr(function)(*args).jaxpr)
    ]


def same_kernel(ran: tuple, checked: tuple) -> bool:
    """Whether these operands are the same but for what a kernel reads as a number or as a stride:
    layers, experts, the arena's rows, and how often it has 16 rows."""
    if len(ran) != len(checked):
        return False
    for (size, dtype), (other, other_dtype) in zip(ran, checked, strict=True):
        if dtype != other_dtype or len(size) != len(other):
            return False
        many = bool(size) and size[0] > 24 and size[0] != 32  # no rows of a step
        if dtype == "int32" and (len(size) < 2 or many):
            continue  # lists and tables
        if len(size) == 4 and dtype != "float32":  # stores, and weights of heads
            size, other = size[2:], other[2:]
        elif many or (size and {size[0], other[0]} == {16, 32}):
            size, other = size[1:], other[1:]
        if size != other:
            return False
    return True


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
    shape = kernel_shape(CONFIG, "bfloat16", CONFIG.slot_layout(2))
    return {check.key for check in checks(shape, ops_of(kib))}


def test_models_whose_experts_mosaic_does_not_compute_are_told_why():
    def why(config, versions=("dense",), **changes):
        layout = config.slot_layout(2, versions, "bfloat16")
        formats = tuple(VersionFormats(record, record) for record in layout.records)
        layout = dataclasses.replace(layout, **changes)
        return without_mosaic(config, "bfloat16", layout, formats if len(versions) > 1 else None)

    assert why(CONFIG) == {}
    found = [
        why(dataclasses.replace(CONFIG, moe_intermediate_size=96)),
        why(CONFIG, ("dense", "int4")),
        why(CONFIG, slot_rows=2306),
        why(dataclasses.replace(CONFIG, expert_bias=True)),
        why(dataclasses.replace(CONFIG, ungated=True)),
        why(dataclasses.replace(CONFIG, swiglu=ClampedSwiGLU(7, 1.702))),
    ]
    assert [one["expert_ffn"].removeprefix("its Mosaic kernel") for one in found] == [
        " takes widths that are multiples of 128, not 96",
        "s read dense experts of one version",
        "s read cells at multiples of 8 rows, not of 2306",
        "s add no biases",
        "s read experts of three matrices",
        "s do not clamp",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["pallas", "mosaic"])
def test_a_norm_in_float32_has_no_kernel(implementation):
    x = np.random.default_rng(0).normal(size=(5, 2, 96)).astype(np.float32)
    same = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(unit_rms(x, 1e-5, implementation), same, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["GraniteMoeHybridForCausalLM", "JambaForCausalLM"])
def test_norms_of_layers_with_state_are_checked(architecture):
    config = parse_config(config_of(architecture))
    limits = {"rows": 4, "max_model_len": 64, "max_num_batched_tokens": 64}
    program = abstract_programs(config, GiB, ops=ops_of(99), **limits).program(DECODE)
    calls = kernel_calls(jax.make_jaxpr(program.function)(*program.args).jaxpr)
    norms = (call.outvars[0].aval for call in calls if call.params["name"] == "rms_norm")
    shape = kernel_shape(config, "bfloat16", config.slot_layout(2))
    assert {norm.shape[-1] for norm in norms} <= {shape.hidden, *shape.other_norms}

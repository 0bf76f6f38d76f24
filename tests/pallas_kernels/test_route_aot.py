"""route's kernel compiled for an H200 at the sizes of real models."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.plan.record import record_size
from pallas_kernels.route import RouteRule, route, route_and_plan
from pallas_kernels.route.specs import RULES
from tests.aot.models import DECODE_ROWS, MODELS, NAMES, PREFILL_ROWS
from tests.aot.ptxas import compile_kernels
from tests.pallas_kernels.test_plan_aot import nbytes, tables_of

pytestmark = pytest.mark.aot

Array = jax.ShapeDtypeStruct


def compile_route(rows, experts, rule, correction=None):
    return compile_kernels(
        lambda *operands: route(*operands, rule=rule, implementation="pallas"),
        Array((rows, experts), jnp.float32),
        Array((rows,), bool),
        correction,
        Array((), jnp.int32),
    )


@pytest.mark.parametrize("name", NAMES)
def test_real_sizes(name):
    model, instructions = MODELS[name], set()
    for rows in (*DECODE_ROWS, PREFILL_ROWS):
        rule = RouteRule(model.top_k, normalize=True)
        program, kernels = compile_route(rows, model.experts, rule)
        assert program.kernels() == ["route"]
        check(kernels["route"], 40)
        instructions.add(kernels["route"].ptx.count("\n"))
    # The number of rows is a bound in the code and the grid, nothing else.
    assert max(instructions) - min(instructions) <= 4


@pytest.mark.parametrize(("experts", "top_k"), [(60, 4), (512, 10)])
def test_other_numbers_of_experts(experts, top_k):
    """Qwen1.5-MoE and Qwen3-Next."""
    check(compile_route(16, experts, RouteRule(top_k, normalize=True))[1]["route"], 128)


@pytest.mark.parametrize(
    ("name", "experts", "corrected"),
    [
        pytest.param("deepseek-v2", 160, False, marks=pytest.mark.nightly),
        ("deepseek-v3", 256, True),
        pytest.param("moonlight", 64, True, marks=pytest.mark.nightly),
        pytest.param("ernie", 64, True, marks=pytest.mark.nightly),
        pytest.param("phi-3.5", 16, False, marks=pytest.mark.nightly),
    ],
)
def test_other_rules(name, experts, corrected):
    correction = Array((3, experts), jnp.float32) if corrected else None
    program, kernels = compile_route(16, experts, RULES[name], correction)
    assert program.kernels() == ["route"] and program.copies() == []
    check(kernels["route"], 128)


@pytest.mark.parametrize(
    ("rows", "experts", "rule", "corrected"),
    [
        (4, 128, "top8-normalized", False),
        (16, 128, "top8-normalized", False),
        (16, 8, "phi-3.5", False),
        pytest.param(4, 512, "top8-normalized", False, marks=pytest.mark.nightly),
        pytest.param(16, 60, "top4", False, marks=pytest.mark.nightly),
        pytest.param(16, 64, "moonlight", True, marks=pytest.mark.nightly),
        pytest.param(16, 256, "moonlight", True, marks=pytest.mark.nightly),
    ],
)
def test_route_and_plan_in_one_launch(rows, experts, rule, corrected):
    """Inside a scan over the layers, as in a step; logits in parts."""
    layers, rule = 48, RULES[rule]

    def steps(tables, records, logits, valid, correction):
        def layer(carry, i):
            operands = logits, valid, correction, i, carry[0], i, carry[1]
            ids, _, *carry, work = route_and_plan(*operands, rule=rule, implementation="pallas")
            return tuple(carry), (ids, work.fill_count)

        return jax.lax.scan(layer, (tables, records), jnp.arange(layers))

    tables = tables_of(layers, experts, experts)
    records = Array((layers, record_size(rows * rule.top_k, experts)), jnp.int32)
    program, kernels = compile_kernels(
        steps,
        *(tables, records, Array((8, rows, experts), jnp.float32), Array((rows,), bool)),
        Array((layers, experts), jnp.float32) if corrected else None,
        donate_argnums=(0, 1),
    )
    assert program.kernels().count("route_plan") == 1
    assert not {"route", "plan"} & set(program.kernels())
    assert program.memory.alias_bytes == nbytes(tables) + 4 * records.size
    assert program.copies(4 * layers * experts) == []
    kernel = kernels["route_plan"]
    assert kernel.spill_bytes == 0
    assert kernel.registers <= 168 and kernel.shared_bytes <= 16 * 1024


def check(kernel, registers):
    assert kernel.spill_bytes == 0
    assert kernel.registers <= registers and kernel.shared_bytes <= 8 * 1024

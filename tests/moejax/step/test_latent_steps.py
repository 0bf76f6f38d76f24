"""The whole steps of DeepSeek-V2-Lite with every op a kernel, compiled for an H200: its list of
launches, and that nothing is copied. As test_kernel_steps, where attention reads latent pages:
.ci/run compiles those kernels one by one (test_latent_attention_aot)."""

from __future__ import annotations

import collections

import jax
import pytest

from moejax.models.config import parse_config
from moejax.start.decide.shapes import decodes_in_buckets, ops_in_use, without_kernel
from moejax.step.programs import ProgramKey
from pallas_kernels import resolve_ops
from tests.aot.ptxas import compile_kernels
from tests.moejax.models.test_published_configs import PUBLISHED
from tests.moejax.step.test_constant_memory import (
    DECODE,
    PREFILL,
    STAGED,
    GiB,
    MiB,
    abstract_programs,
    nbytes,
)
from tests.pallas_kernels.test_cards import kernel_calls

pytestmark = pytest.mark.aot

DENSE = {
    "linear": 5,  # queries, latent, output; gate and up, down
    "rms_norm": 2,
    "latent_write": 1,
    "head_linear": 2,
}
"""A layer without experts, but for attention."""
EXPERTS = {
    "linear": 5,  # queries, latent, output; gate and up, down of the shared experts
    "rms_norm": 1,
    "latent_write": 1,
    "head_linear": 2,
}
KERNELS = {
    "decode": {
        "decode_attention_latent_split": 2,
        "decode_attention_latent_merge": 2,
        "expert_gate_up_hits": 1,
        "expert_gate_up_filled": 1,
        "expert_down_combine": 1,
    },
    "prefill": {
        "prefill_attention_latent": 2,
        "fill": 1,
        "expert_gate_up_sorted": 1,
        "expert_down_sorted": 1,
        "combine": 1,
    },
}
MANY = {"route": 1, "plan": 1, "rms_norm": 1}  # and the router's product
FEW = {"route_plan": 1, "norm_linear_parts": 1}
"""As in test_kernel_steps."""
LOGITS = {"linear": 1, "rms_norm": 1}

TEMP = {"decode": 48 * MiB, "prefill": 1100 * MiB}
"""Scratch beside arguments, as in test_kernel_steps. Decode: 33.6 MB of splits' sums."""

LARGEST_COPY = {"decode": 0, "prefill": 33 * MiB}
"""A prefill step cuts the queries' two parts out of one product."""


def programs_of_kernels():
    config = parse_config(PUBLISHED["DeepSeek-V2-Lite"].raw)
    without = without_kernel(config)
    ops = resolve_ops("pallas", platform="gpu", dtype="bfloat16", no_kernel=without)
    assert set(ops_in_use(config, ops).values()) == {"pallas"} and decodes_in_buckets(config, ops)
    limits = {"rows": 64, "max_model_len": 4096, "max_num_batched_tokens": 8192}
    return abstract_programs(config, 20 * GiB, ops=ops, waves=8, bucketed=True, **limits)


@pytest.mark.parametrize("resident", [False, True])
def test_only_the_output_gives_squares(resident):
    """The router's product reads those; several products read what comes before attention, so a
    kernel normalises it, which reads none."""
    program = programs_of_kernels().program(DECODE._replace(rows=4, resident=resident))
    made = collections.defaultdict(set)
    for call in kernel_calls(jax.make_jaxpr(program.function)(*program.args).jaxpr):
        made[call.params["name"]].add(len(call.outvars))
    assert "tile_squares" not in made
    assert made["linear"] == {1, 2}
    assert made["expert_down_combine"] == {4}  # y, the sum, index, counters


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(k, marks=pytest.mark.nightly)
        for k in (DECODE, ProgramKey("decode", 16), STAGED, PREFILL)
    ],
    ids=str,
)
def test_step_of_kernels(key):
    programs = programs_of_kernels()
    program = programs.program(key)
    host = tuple(i for i, arg in enumerate(program.args) if arg is programs.stores)
    compiled, kernels = compile_kernels(
        program.function, *program.args, donate_argnums=program.donated, host_argnums=host
    )
    kind = key.kind

    assert [size for _, size in compiled.copies(MiB) if size > LARGEST_COPY[kind]] == []
    assert compiled.host_copies(1) == compiled.host_copies(1, to_host=True) == []
    memory = compiled.memory
    assert memory.alias_bytes == nbytes((programs.arena, programs.tables))
    assert memory.host_temp_bytes == memory.host_output_bytes == 0
    assert memory.temp_bytes < TEMP[kind]

    launches = collections.Counter(compiled.kernels())
    wanted = collections.Counter(DENSE) + collections.Counter(EXPERTS)
    wanted += collections.Counter(KERNELS[kind]) + collections.Counter(LOGITS)
    few = kind == "decode" and programs.tokens(key) <= 16
    wanted += collections.Counter(FEW if few else MANY)
    if not few:
        wanted["linear_parts" if kind == "decode" else "linear"] += 1
    if key.staged:
        # The copy of what was admitted; the index is read behind it.
        wanted += collections.Counter({"stage": 1, "fill": 1, "expert_down": 1, "combine": 1})
        del wanted["expert_down_combine"]
    own = {kernel: n for kernel, n in launches.items() if kernel in wanted}
    assert own == dict(wanted)
    for kernel in kernels.values():
        assert kernel.spill_bytes == 0, kernel.name

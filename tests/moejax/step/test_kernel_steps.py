"""The whole steps with every op a kernel, compiled for an H200 at the sizes of known models.

Each kernel's own registers, spills and load widths are in tests/pallas_kernels/test_*_aot.py; here
they are asserted again in the program that runs, with the list of launches and the copies.
"""

from __future__ import annotations

import collections
import re

import pytest

from moejax.checkpoints.random_model import shape
from moejax.step.programs import ProgramKey
from moejax.step.runner import compiler_options
from pallas_kernels import resolve_ops
from pallas_kernels.fill_ffn.pallas_triton import COPIES, LATE
from tests.aot.aot_h200 import compile_for
from tests.aot.ptxas import compile_kernels
from tests.aot.step_time import launches as launch_list
from tests.moejax.step.test_constant_memory import (
    DECODE,
    PREFILL,
    GiB,
    MiB,
    abstract_programs,
    nbytes,
)

pytestmark = pytest.mark.aot

MODELS = ("qwen3-30b-a3b", "mixtral-8x7b", "olmoe")

KERNELS = {
    "decode": {
        "linear": 2,  # output; logits
        "linear_parts": 1,  # router
        "rms_norm": 2,  # before experts; before logits
        "decode_attention_write": 1,  # kv_write too
        "decode_attention_merge": 1,
        "expert_gate_up_hits": 1,  # copies gate and up of the missing
        "expert_gate_up_filled": 1,  # copies their down
        "expert_down": 1,
        "combine": 1,
    },
    "prefill": {
        "linear": 4,  # the router too
        "rms_norm": 3,
        "kv_write": 1,
        "prefill_attention": 1,
        "route": 1,
        "plan": 1,
        "fill": 1,
        "expert_gate_up_sorted": 1,
        "expert_down_sorted": 1,
        "combine": 1,
    },
}
"""Our kernels in each program; all but the logits' two are once a layer."""

MANY = {"route": 1, "plan": 1, "linear": 3, "rms_norm": 3}
FEW = {"route_plan": 1, "norm_linear": 1}
"""Beside those, in a decode step with more than 16 rows, and with as many: before attention x is
normalised by rms_norm, or within the product of q, k and v."""

XLA_LAUNCHES = {"decode": 18, "prefill": 36}
"""Most kernels of XLA's own (masks, trace rows, sums, indices), in the layer and around it: what
reads the trace (which tokens missed experts, counts by name) runs once a step."""

LAYER = 14
"""Launches of a decode layer with more than 16 rows, two less with as many: our 11 and the loop's
condition. (Published OLMoE has five more, with norms of q and k and the parts of qkv:
docs/results/step_time.md.)"""

WAVE = 11
"""Launches of one of a prefill layer's waves over its experts: plan, fill, gate_up and down, five
of XLA's that cut what is due into tiles, the loop's index and its condition. The pairs are sorted
before, once a layer."""

SHORT = ProgramKey("decode", 16, context=64)
"""Of 1024 tokens, where there may be 4096."""

STREAMING = (
    *("linear", "norm_linear", "fill"),
    *("expert_gate_up_hits", "expert_gate_up_filled", "expert_down"),
)
"""Kernels that read weights."""

TEMP = {"decode": 20 * MiB, "prefill": 1100 * MiB}
"""Scratch beside arguments: decode at 64 rows; a prefill step of 8192 tokens, mostly the experts'
float32 outputs [8192, k, D] (512 MiB for top-8 of 2048) and hidden rows."""


@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=[pytest.mark.nightly] * (m != MODELS[0])) for m in MODELS]
)
@pytest.mark.parametrize(
    "key",
    [SHORT, pytest.param(DECODE, marks=pytest.mark.nightly), PREFILL],
    ids=str,
)
def test_step_of_kernels(model, key):
    ops = resolve_ops("pallas", platform="gpu", dtype="bfloat16")
    config = shape(model)
    limits = {"rows": 64, "max_model_len": 4096, "max_num_batched_tokens": 8192}
    programs = abstract_programs(config, 40 * GiB, ops=ops, waves=8, bucketed=True, **limits)
    program = programs.program(key)
    host = tuple(i for i, arg in enumerate(program.args) if arg is programs.stores)
    compiled, kernels = compile_kernels(
        program.function,
        *program.args,
        donate_argnums=program.donated,
        host_argnums=host,
        compiler_options=compiler_options("gpu", key),
    )
    kind = key.kind

    assert compiled.copies(MiB) == []
    assert compiled.host_copies(1) == compiled.host_copies(1, to_host=True) == []
    memory = compiled.memory
    assert memory.alias_bytes == nbytes((programs.arena, programs.tables))
    assert memory.host_temp_bytes == memory.host_output_bytes == 0
    assert memory.temp_bytes < TEMP[kind]

    launches = collections.Counter(compiled.kernels())
    wanted = KERNELS[kind]
    if kind == "decode":
        wanted = wanted | (FEW if programs.tokens(key) <= 16 else MANY)
    own = {kernel: n for kernel, n in launches.items() if kernel in wanted}
    assert own == wanted
    assert sum(launches.values()) - sum(own.values()) <= XLA_LAUNCHES[kind]
    if kind == "decode":
        layer = [launch for launch in launch_list(compiled.thunks) if launch.in_layer]
        assert len(layer) == LAYER - 2 * (programs.tokens(key) <= 16)
        (split,) = (launch for launch in layer if launch.name == "decode_attention_write")
        tokens = (key.context or programs.steps.shapes.blocks) * programs.page.block_size
        assert split.grid == (programs.tokens(key), config.kv_heads, -(-tokens // 256))
        assert key.context in (None, *programs.steps.shapes.contexts)
        assert "copy" not in {launch.name for launch in layer}
        # A graph's loop waits for its body by what the condition launches.
        assert any("compare" in launch.name for launch in layer)
        assert compiled.graphs() == [True]  # launched once, the loop over layers within
        assert "dynamic-slice(" not in compiled.hlo
        # Experts are the last axis: a device starts those that are there first.
        slots = min(config.num_experts, programs.tokens(key) * config.num_experts_per_tok)
        hits, filled, down = (launch for launch in layer if launch.name.startswith("expert_"))
        assert down.grid[2] == slots
        tiles = -(-config.moe_intermediate_size // 64)
        copies = COPIES[ops.shared_kib]
        assert hits.grid == (1, copies + slots * tiles, 1)
        assert filled.grid == (1, copies + LATE, 1)
        # Programs that copy take the place of one that computes, whose shared memory is as much
        # as without them: three or, of more than 16 rows, four tiles of 36 KiB.
        rows = programs.tokens(key)
        assert hits.shared_bytes == filled.shared_bytes == (3 if rows <= 16 else 4) * 36 * 1024
    else:
        # Within the loop over layers one more step to the right: what each wave launches.
        wave = re.findall(r"^ {8}\d+: k\w+ .*?\] (\S+) grid:", compiled.thunks, re.M)
        assert {"plan", "fill", "expert_down_sorted"} < set(wave) and len(wave) == WAVE
        # A counting sort, whose only scatter is beside no other in the layer.
        names = [launch.name for launch in launch_list(compiled.thunks)]
        assert not any("sort" in name.replace("_sorted", "") for name in names)
        assert sum("scatter" in name for name in names) == 1
        assert not any("scatter" in name for name in wave)
    for kernel in kernels.values():
        assert kernel.spill_bytes == 0, kernel.name
        if kernel.name.partition(".")[0] in STREAMING:
            assert kernel.load_bits()[128] > 0, kernel.name


SAMPLED = 57
"""Launches from logits to sampled tokens: two searches of 24, of which XLA makes three a pass; the
likeliest token, the distribution, its mass and the draw."""


@pytest.mark.slow
# The other bucket differs in the rows that are padded.
@pytest.mark.parametrize("rows", [pytest.param(4, marks=pytest.mark.nightly), 64])
def test_sampling_is_few_launches(rows):
    limits = {"rows": 64, "max_model_len": 4096, "max_num_batched_tokens": 8192}
    ops = resolve_ops("pallas", platform="gpu", dtype="bfloat16")
    programs = abstract_programs(shape(MODELS[0]), 40 * GiB, ops=ops, waves=8, **limits)
    key = ProgramKey("sample", rows)
    program = programs.program(key)
    compiled = compile_for(
        "h200", program.function, *program.args, compiler_options=compiler_options("gpu", key)
    )
    launches = launch_list(compiled.thunks)
    assert not any(launch.in_layer for launch in launches)  # no loop
    assert len(launches) <= SAMPLED + 2  # the tokens of other rows, the results
    # Nothing is larger than the arrays of logits, draws and what is kept of them.
    assert compiled.memory.temp_bytes < 6 * 64 * 151936 * 4


def test_only_decode_steps_are_one_graph_and_the_user_may_say_otherwise(monkeypatch):
    graphs = "xla_gpu_enable_command_buffer"
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert "WHILE" in compiler_options("gpu", DECODE)[graphs]
    assert graphs not in compiler_options("gpu", PREFILL) | compiler_options("cpu", DECODE)
    monkeypatch.setenv("XLA_FLAGS", f"--{graphs}=")
    assert graphs not in compiler_options("gpu", DECODE)

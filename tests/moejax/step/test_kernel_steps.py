"""The whole steps with every op a kernel, compiled for an H200 at the sizes of known models.

Each kernel's own registers, spills and load widths are in tests/pallas_kernels/test_*_aot.py; here
they are asserted again in the program that runs, with the list of launches and the copies.
"""

from __future__ import annotations

import collections
import re

import pytest

from moejax.checkpoints.random_model import shape
from moejax.step.drivers.device import LAYERS_A_TURN
from moejax.step.programs import ProgramKey
from moejax.step.runner import compiler_options
from pallas_kernels import resolve_ops
from pallas_kernels.fill_ffn.pallas_triton import COPIES, LATE
from pallas_kernels.linear.pallas_triton import NORMED_ROWS
from pallas_kernels.paged_attention.writing import MOST_MERGED
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
        "rms_norm": 1,  # before logits
        "expert_gate_up_hits": 1,  # copies gate and up of the missing
        "expert_gate_up_filled": 1,  # copies their down
        "expert_down_combine": 1,
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

NORMED = {"norm_linear": 1, "norm_linear_parts": 1, "tile_squares": 1}
APART = {"linear": 3, "rms_norm": 3, "linear_parts": 1}
"""Beside those, in a decode step of up to NORMED_ROWS, and of more: before attention and before
experts x is normalised within the products of q, k and v and of the router, or by rms_norm. The
squares of tiles that those products read come with x, but for those of the embedding."""

ATTENTION = (
    {"decode_attention_write": 1, "decode_attention_merge": 1},
    {"decode_attention_write_merge": 1},
)
"""Beside those, in a decode step of a long context, and of one whose splits the last one merges;
with kv_write."""

PLANNED, ROUTED = {"route_plan": 1}, {"route": 1, "plan": 1}
"""As well, with up to 16 rows, and with more."""

XLA_LAUNCHES = {"decode": 18, "prefill": 36}
"""Most kernels of XLA's own (masks, trace rows, sums, indices), in the layer and around it: what
reads the trace (which tokens missed experts, counts by name) runs once a step."""

LAYER = 13
"""Launches of a decode layer of a long context with more than 32 rows, two less with as many, three
less with 16, and one less of a short one: our 12 and the loop's condition. (Published OLMoE has
five more, with norms of q and k and the parts of qkv: docs/results/step_time.md.)"""

WAVE = 11
"""Launches of one of a prefill layer's waves over its experts: plan, fill, gate_up and down, five
of XLA's that cut what is due into tiles, the loop's index and its condition. The pairs are sorted
before, once a layer."""

PAGING = {"route_plan", "route", "plan", "expert_gate_up_hits", "expert_gate_up_filled"}
"""What plans and copies: no launch of a step where every expert is in its cell."""

SHORT = ProgramKey("decode", 16, context=64)
TWO_TILES = ProgramKey("decode", 32, context=64)
"""Of 1024 tokens, where there may be 4096."""

STREAMING = (
    *("linear", "norm_linear", "norm_linear_parts", "norm_route_list", "fill"),
    *("expert_gate_up_hits", "expert_gate_up_filled", "expert_down_combine"),
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
    [
        SHORT,
        SHORT._replace(resident=True),
        pytest.param(TWO_TILES, marks=pytest.mark.nightly),
        pytest.param(DECODE, marks=pytest.mark.nightly),
        pytest.param(DECODE._replace(resident=True), marks=pytest.mark.nightly),
        PREFILL,
    ],
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

    listed = launch_list(compiled.thunks)
    launches = collections.Counter(launch.name for launch in listed)
    wanted = KERNELS[kind]
    rows = programs.tokens(key)
    tokens = (key.context or programs.steps.shapes.blocks) * programs.page.block_size
    splits = -(-tokens // 256)
    few, merged = rows <= 16, kind == "decode" and splits <= MOST_MERGED
    if kind == "decode":
        wanted = wanted | (PLANNED if few else ROUTED) | (ATTENTION[merged])
        wanted = wanted | (NORMED if rows <= NORMED_ROWS else APART)
    if key.resident:
        wanted = {name: n for name, n in wanted.items() if name not in PAGING}
        wanted |= {"expert_gate_up": 1, "norm_route_list" if few else "route_list_last": 1}
        if few:  # the last program of the router's product routes
            del wanted["norm_linear_parts"]
    own = {kernel: n for kernel, n in launches.items() if kernel in wanted}
    assert own == wanted and not (key.resident and PAGING & launches.keys())
    assert sum(launches.values()) - sum(own.values()) <= XLA_LAUNCHES[kind] + 2 * key.resident
    if kind == "decode":
        layer = [launch for launch in listed if launch.in_layer]
        # Of what plans and copies, filled gate_up goes; and with many rows plan, with few route.
        fewer = few + 2 * (rows <= NORMED_ROWS) + 2 * key.resident
        assert len(layer) == LAYER - fewer - merged
        turn = [launch for launch in listed if launch.layers > 1]
        assert [launch.layers for launch in turn] == [LAYERS_A_TURN[key.resident]]
        assert "tile_squares" not in {launch.name for launch in layer}
        normed = [launch for launch in layer if launch.name.startswith("norm_")]
        assert rows > NORMED_ROWS or all(n.programs <= n.resident for n in normed)  # one wave
        attention = next(iter(ATTENTION[merged]))
        (split,) = (launch for launch in layer if launch.name == attention)
        assert split.grid == (programs.tokens(key), config.kv_heads, splits)
        assert key.context in (None, *programs.steps.shapes.contexts)
        assert "copy" not in {launch.name for launch in layer}
        # A graph's loop waits for its body by what the condition launches.
        assert any("compare" in launch.name for launch in layer)
        assert compiled.graphs() == [True]  # launched once, the loop over layers within
        assert "dynamic-slice(" not in compiled.hlo
        # Experts are the last axis: a device starts those that are there first.
        slots = min(config.num_experts, programs.tokens(key) * config.num_experts_per_tok)
        *gate_up, down = (launch for launch in layer if launch.name.startswith("expert_"))
        assert down.grid[2] == slots
        if key.resident:
            (alone,) = gate_up
            assert alone.grid[2] == slots
            gate_up = []
        tiles = -(-config.moe_intermediate_size // 64)
        copies = COPIES[ops.shared_kib]
        items = slots * tiles, LATE
        assert [launch.grid for launch in gate_up] == [
            (1, copies + n, 1) for n in items[: len(gate_up)]
        ]
        # Programs that copy take the place of one that computes, whose shared memory is as much
        # as without them: three tiles of weights, 32 KiB, and of x.
        tiles = 3 * (32 + max(rows, 16) // 4) * 1024
        assert all(launch.shared_bytes == tiles for launch in gate_up)
    else:
        # Within the loop over layers one more step to the right: what each wave launches.
        wave = re.findall(r"^ {8}\d+: k\w+ .*?\] (\S+) grid:", compiled.thunks, re.M)
        assert {"plan", "fill", "expert_down_sorted"} < set(wave) and len(wave) == WAVE
        # A counting sort, whose only scatter is beside no other in the layer.
        names = [launch.name for launch in listed]
        assert not any("sort" in name.replace("_sorted", "") for name in names)
        assert sum("scatter" in name for name in names) == 1
        assert not any("scatter" in name for name in wave)
    for kernel in kernels.values():
        assert kernel.spill_bytes == 0, kernel.name
        if kernel.name.partition(".")[0] in STREAMING:
            assert kernel.load_bits()[128] > 0, kernel.name


SAMPLED = {"sample_all": 6, "sample": 25}
"""Launches from logits to sampled tokens: the likeliest token, the distribution, its mass and the
draw; where tokens are left out two searches of 8 passes, each a launch."""


@pytest.mark.slow
@pytest.mark.parametrize("rows", [pytest.param(4, marks=pytest.mark.nightly), 64])
@pytest.mark.parametrize("kind", SAMPLED)
def test_sampling_is_few_launches(kind, rows):
    limits = {"rows": 64, "max_model_len": 4096, "max_num_batched_tokens": 8192}
    ops = resolve_ops("pallas", platform="gpu", dtype="bfloat16")
    programs = abstract_programs(shape(MODELS[0]), 40 * GiB, ops=ops, waves=8, **limits)
    key = ProgramKey(kind, rows)
    program = programs.program(key)
    compiled = compile_for(
        "h200", program.function, *program.args, compiler_options=compiler_options("gpu", key)
    )
    launches = launch_list(compiled.thunks)
    assert not any(launch.in_layer for launch in launches)  # no loop
    # The tokens of other rows, the results; of what kernels take, the parameters of fewer rows.
    assert len(launches) <= SAMPLED[kind] + 2 + 2 * (rows < 64)
    # Nothing is larger than the arrays of logits, draws and what is kept of them.
    assert compiled.memory.temp_bytes < 6 * 64 * 151936 * 4


def test_only_decode_steps_are_one_graph_and_the_user_may_say_otherwise(monkeypatch):
    graphs = "xla_gpu_enable_command_buffer"
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert "WHILE" in compiler_options("gpu", DECODE)[graphs]
    assert graphs not in compiler_options("gpu", PREFILL) | compiler_options("cpu", DECODE)
    monkeypatch.setenv("XLA_FLAGS", f"--{graphs}=")
    assert graphs not in compiler_options("gpu", DECODE)

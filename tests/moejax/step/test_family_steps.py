"""The steps of published models of every family, compiled for an H200 with the ops that run there:
kernels where the family can use them, references elsewhere. Nothing of the arena is copied."""

from __future__ import annotations

import pytest

from moejax.models.config import parse_config
from moejax.start.decide.shapes import without_kernel
from pallas_kernels import resolve_ops
from tests.aot.aot_h200 import compile_for_h200
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

pytestmark = [pytest.mark.aot, pytest.mark.nightly]

MODELS = (
    "Mixtral-8x7B",
    "OLMoE-1B-7B",
    "Qwen1.5-MoE-A2.7B",
    "Phi-3.5-MoE",
    "DeepSeek-V2-Lite",
    "Moonlight-16B-A3B",
)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("key", [DECODE, STAGED, PREFILL], ids=str)
def test_step_copies_nothing_of_the_arena(model, key):
    config = parse_config(PUBLISHED[model].raw)
    ops = resolve_ops("auto", platform="gpu", dtype="bfloat16", no_kernel=without_kernel(config))
    limits = {"rows": 64, "max_model_len": 4096, "max_num_batched_tokens": 2048}
    programs = abstract_programs(config, 20 * GiB, ops=ops, waves=8, bucketed=True, **limits)
    program = programs.program(key)
    compiled = compile_for_h200(
        program.function,
        *program.args,
        donate_argnums=program.donated,
        host_argnums=tuple(i for i, arg in enumerate(program.args) if arg is programs.stores),
    )
    # A reference cuts out one layer's weights; Phi's qkv, 48 MiB, is the largest.
    assert [size for _, size in compiled.copies(MiB) if size > 64 * MiB] == []
    assert compiled.host_copies(1, to_host=True) == []
    assert compiled.memory.alias_bytes == nbytes((programs.arena, programs.tables))
    assert compiled.memory.host_temp_bytes == 0

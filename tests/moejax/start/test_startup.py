"""What a start decides from the model and the ops, before anything is allocated."""

import dataclasses

import numpy as np
import pytest

from moejax.models.config import parse_config
from moejax.start.decide.shapes import (
    decodes_in_buckets,
    is_native,
    prefills_in_buckets,
    step_shapes,
    without_kernel,
)
from moejax.step.programs import StepKeys
from pallas_kernels import resolve_ops
from pallas_kernels.records.versions import why_no_kernel
from tests.moejax.models.families import config_of


def gpu_ops(config, ops="auto"):
    options = {"platform": "gpu", "dtype": "bfloat16"}
    return resolve_ops(ops, no_kernel=without_kernel(config), **options)


@pytest.mark.parametrize(
    ("architecture", "ops", "expected"),
    [
        ("MixtralForCausalLM", "auto", True),
        ("MixtralForCausalLM", "linear=xla", False),
        ("MixtralForCausalLM", "paged_attention=xla", False),
        ("DeepseekV3ForCausalLM", "auto", True),
        ("DeepseekV3ForCausalLM", "head_linear=xla", False),
    ],
)
def test_decode_has_fewer_rows_only_where_every_product_is_a_kernel(architecture, ops, expected):
    config = parse_config(config_of(architecture))
    assert decodes_in_buckets(config, gpu_ops(config, ops)) is expected
    assert prefills_in_buckets(config, gpu_ops(config, ops)) is expected


@pytest.mark.parametrize(
    ("architecture", "latent"), [("GptOss", 0), ("NemotronH", 0), ("NemotronH", 16)]
)
def test_kernels_compute_experts_with_biases_and_of_two_matrices(architecture, latent):
    config = parse_config(config_of(f"{architecture}ForCausalLM"))
    config = dataclasses.replace(config, latent_width=latent)
    found = why_no_kernel(("dense", "fp4-32-e8m0"), config.beyond_kernels)
    assert ("expert_ffn" in found) == bool(latent) == (found != {})


@pytest.mark.parametrize(
    ("ops", "expected"), [("auto", True), ("linear=xla", False), ("head_linear=xla", False)]
)
def test_a_cpu_prefills_few_chunks_where_every_product_is_native(ops, expected):
    config = parse_config(config_of("DeepseekV3ForCausalLM"))
    chosen = resolve_ops(ops, platform="cpu", dtype="bfloat16")
    assert prefills_in_buckets(config, chosen) is is_native(config, chosen) is expected
    assert not decodes_in_buckets(config, chosen)


def shapes_of(rows, max_model_len, bucketed=True, batched=512, native=False):
    config = parse_config(config_of("MixtralForCausalLM"))
    limits = dict(rows=rows, max_model_len=max_model_len, max_num_batched_tokens=batched, waves=1)
    buckets = {"bucketed": bucketed, "prefill_bucketed": bucketed, "native": native}
    return step_shapes(config.slot_layout(2), **limits, **buckets)


def test_contexts_and_rows_that_decode_is_compiled_for():
    def tokens(max_model_len):
        shapes = shapes_of(4, max_model_len)
        assert shapes.contexts[-1] == shapes.blocks
        return [16 * pages for pages in shapes.contexts]

    assert tokens(4095) == [1024, 4096] and tokens(4096) == [1024, 4096]
    assert tokens(4000) == [4032] and tokens(100) == [128]  # whole spans
    assert tokens(32768) == [2048, 8192, 32768] and tokens(10000) == [2560, 10048]
    few = 1, 2, 4, 8, 16
    assert [shapes_of(n, 128).buckets for n in (1, 40)] == [few, (*few, 32, 48)]
    plain = shapes_of(40, 32768, bucketed=False)
    assert (plain.buckets, plain.contexts) == ((48,), (plain.blocks,))
    native = [shapes_of(n, 32768, bucketed=False, native=True) for n in (1, 5, 8, 40)]
    assert [each.buckets for each in native] == [(1,), (1, 5), (1, 8), (1, 8, 32, 48)]
    assert {each.contexts for each in native} == {(plain.blocks,)}


def test_a_step_takes_the_least_program_of_contexts_and_rows():
    keys = StepKeys(shapes_of(40, 32768), block_size=16, prefill_buckets=True)

    def key(**positions):
        given = np.full(48, -1, np.int32)
        for row, position in positions.items():
            given[int(row[1:])] = position
        return str(keys.decode(given))

    assert key() == key(r0=2047) == "decode_pages128@1" and key(r1=0) == "decode_pages128@2"
    assert key(r0=0, r3=2047) == "decode_pages128@4" and key(r6=0) == "decode_pages128@8"
    assert key(r2=2048) == key(r3=8191) == "decode_pages512@4"
    assert key(r0=8192, r8=1) == "decode@16" and key(r47=32767) == "decode"
    assert key(r47=0) == "decode_pages128"
    every = [str(step) for step in keys.decodes]
    assert len(every) == 21 and every[0] == "decode_pages128@1" and every[-1] == "decode"


def test_a_prefill_step_takes_the_fewest_chunks_that_hold_its_own():
    shapes = shapes_of(40, 4096, batched=8192)
    assert shapes.prefills == (8, 32, 128) and shapes.prefill_chunks == 128
    keys = StepKeys(shapes, block_size=16, prefill_buckets=True)
    steps = [str(keys.prefill("prefill", n)) for n in (1, 8, 9, 32, 33, 128)]
    assert steps == ["prefill@8"] * 2 + ["prefill@32"] * 2 + ["prefill"] * 2
    assert [*map(str, keys.prefills)] == ["prefill@8", "prefill@32", "prefill"]
    # What scores targets, and drivers that walk through layers, have all chunks.
    assert str(keys.prefill("score", 1)) == "score"
    walked = StepKeys(shapes, block_size=16, prefill_buckets=False)
    assert [*map(str, walked.prefills)] == ["prefill"]

    def chunks(tokens, bucketed=True):
        return shapes_of(40, 4096, bucketed, tokens).prefills

    assert chunks(31 * 64) == (31,) and chunks(32 * 64) == (8, 32) and chunks(100 * 64) == (25, 100)
    assert chunks(8192, bucketed=False) == (128,) and chunks(8) == (1,)
    assert shapes_of(16, 4096, batched=2048, native=True).prefills == (2, 8, 32)

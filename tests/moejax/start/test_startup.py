"""What a start decides from the model and the ops, before anything is allocated."""

import pytest

from moejax.models.config import parse_config
from moejax.start.decide.shapes import decodes_in_buckets, without_kernel
from moejax.start.kernels import kernel_shapes
from pallas_kernels import resolve_ops
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
        # head_linear has no kernel.
        ("DeepseekV3ForCausalLM", "auto", False),
    ],
)
def test_decode_has_fewer_rows_only_where_every_product_is_a_kernel(architecture, ops, expected):
    config = parse_config(config_of(architecture))
    assert decodes_in_buckets(config, gpu_ops(config, ops)) is expected


@pytest.mark.parametrize(
    ("architecture", "fields", "by_head", "others"),
    [
        ("Qwen3MoeForCausalLM", {}, True, ()),
        ("MixtralForCausalLM", {}, False, ()),
        ("OlmoeForCausalLM", {}, False, (32,)),
        ("OlmoeForCausalLM", {"num_key_value_heads": 4}, False, ()),
        ("DeepseekV3ForCausalLM", {}, False, (24,)),
        ("DeepseekV2ForCausalLM", {}, False, ()),
    ],
)
def test_norms_whose_kernels_are_checked(architecture, fields, by_head, others):
    config = parse_config(config_of(architecture, **fields))
    for shape in kernel_shapes(config, "bfloat16", config.slot_layout(2)):
        assert (shape.qk_norm, shape.other_norms) == (by_head, others)

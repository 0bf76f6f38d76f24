"""What a start decides from the model and the ops, before anything is allocated."""

import pytest

from moejax.models.config import parse_config
from moejax.start.decide.shapes import decodes_in_buckets, ops_in_use, without_kernel
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
        ("DeepseekV3ForCausalLM", "auto", True),
        ("DeepseekV3ForCausalLM", "head_linear=xla", False),
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
        ("Glm4MoeForCausalLM", {}, False, (20,)),
        ("Glm4MoeForCausalLM", {"partial_rotary_factor": 1.0}, True, ()),
        ("Ernie4_5_MoeForCausalLM", {}, False, ()),
    ],
)
def test_norms_whose_kernels_are_checked(architecture, fields, by_head, others):
    config = parse_config(config_of(architecture, **fields))
    for shape in kernel_shapes(config, "bfloat16", config.slot_layout(2)):
        assert (shape.qk_norm, shape.other_norms) == (by_head, others)


def test_what_latent_attention_checks():
    config = parse_config(config_of("DeepseekV3ForCausalLM"))
    (shape,) = kernel_shapes(config, "bfloat16", config.slot_layout(2))
    assert (shape.head_dim, shape.latent, shape.up_projection) == (40, 32, (16, 24))
    assert shape.interleave
    config = parse_config(config_of("MixtralForCausalLM"))
    (shape,) = kernel_shapes(config, "bfloat16", config.slot_layout(2))
    assert (shape.latent, shape.up_projection, shape.interleave) == (0, (0, 0), False)


def test_every_op_of_latent_attention_is_a_kernel_on_a_gpu():
    config = parse_config(config_of("DeepseekV3ForCausalLM"))
    assert without_kernel(config) == {}
    assert set(ops_in_use(config, gpu_ops(config)).values()) == {"pallas"}
    config = parse_config(config_of("DeepseekV3ForCausalLM", kv_lora_rank=520))
    assert list(without_kernel(config)) == ["paged_attention"]
    assert gpu_ops(config).paged_attention == "xla"

"""The config of a model in a GGUF file: its metadata as transformers' config.json would say it.

Keys are those that llama.cpp's converters write. A key of the architecture that is not read here is
refused by its name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from moejax.errors import UserError, shown
from moejax.models.gguf_header import GgufHeader, GgufTensor
from moejax.models.json_values import is_integer
from moejax.models.quantization import Quantization
from pallas_kernels.records.format import MATRICES, join_names

FORMATS: dict[str, str] = {
    "Q8_0": "q8_0",
    "Q4_0": "q4_0",
    "Q4_1": "q4_1",
    "Q5_0": "q5_0",
    "Q5_1": "q5_1",
    "Q4_K": "q4_k",
    "Q5_K": "q5_k",
    "Q6_K": "q6_k",
    "IQ4_NL": "iq4_nl",
    "MXFP4": "fp4-32-e8m0",
}
"""ggml type that experts may be in → the record format that holds its codes."""

FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""ggml type that is not quantized → its dtype."""

_COMMON: dict[str, str | None] = {
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.key_length": "head_dim",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_used_count": "num_experts_per_tok",
    "vocab_size": None,
}
"""Key after the architecture → the field of config.json; None: it says nothing that the tensors do
not."""

_REQUIRED = (
    "context_length",
    "embedding_length",
    "block_count",
    "attention.head_count",
    "attention.layer_norm_rms_epsilon",
    "expert_used_count",
)
"""Keys that llama.cpp requires too: config.json's defaults would be another model's."""

_ROPE = {
    "rope.freq_base": "rope_theta",
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_attn_factor": "attention_factor",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}

_READ_HERE = (
    "attention.value_length",
    "attention.key_length_mla",
    "attention.value_length_mla",
    "expert_gating_func",
    "expert_shared_feed_forward_length",
    "nextn_predict_layers",
    "rope.dimension_count",
    "rope.scaling.finetuned",
    "rope.scaling.yarn_log_multiplier",
)
"""Keys that the functions of this file read, or that change nothing."""

_SOFTMAX, _SIGMOID = 1, 2
"""Values of expert_gating_func."""


class _File:
    """The metadata and tensors of a model's files."""

    def __init__(self, headers: Sequence[GgufHeader]):
        self.path, self.metadata = headers[0].path, headers[0].metadata
        self.tensors: dict[str, GgufTensor] = {}
        for header in headers:
            self.tensors |= header.tensors
        named = self.metadata.get("general.architecture")
        if not isinstance(named, str):
            raise self.refuse("general.architecture", named)
        self.architecture = named

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key after the architecture. Values of layers that are all equal count as
        one."""
        value = self.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and value and all(each == value[0] for each in value):
            return value[0]
        return value

    def refuse(self, key: str, value: Any) -> UserError:
        return UserError(f"{self.path}: {key} is {shown(value)}, which is not supported")

    def refuse_own(self, key: str) -> UserError:
        return self.refuse(f"{self.architecture}.{key}", self.get(key))


def _attention(file: _File) -> dict[str, Any]:
    """Fields of grouped-query attention that the tensors show."""
    biased = any(name.endswith("attn_q.bias") for name in file.tensors)
    return {"attention_bias": biased, "qkv_bias": biased}


def _qwen3(file: _File) -> dict[str, Any]:
    return {"num_experts": file.get("expert_count"), "norm_topk_prob": True, **_attention(file)}


def _qwen2(file: _File) -> dict[str, Any]:
    width = file.get("expert_shared_feed_forward_length")
    return {
        "num_experts": file.get("expert_count"),
        "shared_expert_intermediate_size": width,
        "norm_topk_prob": False,
        **_attention(file),
    }


def _olmoe(file: _File) -> dict[str, Any]:
    return {"num_experts": file.get("expert_count"), "norm_topk_prob": False, **_attention(file)}


def _delta_net(file: _File) -> dict[str, Any]:
    for key in _DELTA_KEYS:
        if key.startswith("ssm.") and file.get(key) is None:
            raise UserError(f"{file.path}: {file.architecture}.{key} is missing")
    heads, values, layers = (
        file.get("ssm.time_step_rank"),
        file.get("ssm.inner_size"),
        _layers(file),
    )
    if not is_integer(heads) or not is_integer(values) or heads < 1 or values % heads:
        raise file.refuse_own("ssm.inner_size")
    types = file.metadata.get(f"{file.architecture}.attention.recurrent_layers")
    if isinstance(types, list) and is_integer(layers):  # layers behind those predict more tokens
        kinds = ("full_attention", "linear_attention")
        types = [kinds[each is True] for each in types[:layers]]
    return {
        "num_experts": file.get("expert_count"),
        "shared_expert_intermediate_size": file.get("expert_shared_feed_forward_length"),
        "linear_value_head_dim": values // heads,
        "layer_types": types,
        "norm_topk_prob": True,
        **_attention(file),
    }


def _mixtral(file: _File) -> dict[str, Any]:
    return {"num_local_experts": file.get("expert_count")}


def _glm4(file: _File) -> dict[str, Any]:
    return {
        "n_routed_experts": file.get("expert_count"),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        **_attention(file),
    }


def _dots1(file: _File) -> dict[str, Any]:
    return {"n_routed_experts": file.get("expert_count"), "sliding_window": None}


def _ernie(file: _File) -> dict[str, Any]:
    return {"moe_num_experts": file.get("expert_count")}


def _granite(file: _File) -> dict[str, Any]:
    width = file.get("expert_shared_feed_forward_length", 0)
    return {"num_local_experts": file.get("expert_count"), "shared_intermediate_size": width}


def _experts_alone(file: _File) -> dict[str, Any]:
    """Of families whose config.json has the experts' width as that of any feed-forward."""
    width = file.get("expert_feed_forward_length")
    return {"num_local_experts": file.get("expert_count"), "intermediate_size": width}


def _deepseek(file: _File) -> dict[str, Any]:
    """The fields of latent attention. Files of older converters have the lengths of heads under
    other keys, and the up-projection of keys and values as one tensor."""
    key, value, rotated = (
        file.get(name, file.get(older))
        for name, older in (
            ("attention.key_length_mla", "attention.key_length"),
            ("attention.value_length_mla", "attention.value_length"),
            ("rope.dimension_count", "rope.dimension_count"),
        )
    )
    if not all(map(is_integer, (key, value, rotated))):
        raise UserError(
            f"{file.path}: {file.architecture}.attention.key_length and value_length and "
            "rope.dimension_count must be whole numbers"
        )
    groups = file.get("expert_group_count", 1)
    return {
        "n_routed_experts": file.get("expert_count"),
        "num_key_value_heads": file.get("attention.head_count"),
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": value,
        "q_lora_rank": file.get("attention.q_lora_rank"),
        "topk_method": "noaux_tc"
        if _is_sigmoid(file)
        else "greedy"
        if groups == 1
        else "group_limited_greedy",
    }


def _is_sigmoid(file: _File) -> bool:
    return file.get("expert_gating_func") == _SIGMOID


_SHARED_EXPERTS: dict[str, str | None] = {
    "leading_dense_block_count": "first_k_dense_replace",
    "expert_shared_count": "n_shared_experts",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
}
"""Keys of families that route as DeepSeek's."""

NULLABLE = ("q_lora_rank", "sliding_window")
"""Fields whose absence means another value than null."""


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How llama.cpp's converter writes a family.

    - `family`: the architecture in config.json.
    - `fields`: the file → fields of config.json that go before those of _COMMON.
    - `keys`: key after the architecture → field, over _COMMON.
    - `partial`: whether a part of each head may be rotated.
    - `gating`: expert_gating_func, if the file has it.
    - `rope`: fields of rope_parameters that the file does not say, where it has a scaling.
    - `or_sigmoid`: the family whose files have the other gating.
    """

    family: str
    fields: Callable[[_File], dict[str, Any]]
    keys: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    partial: bool = False
    gating: int = _SOFTMAX
    rope: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    or_sigmoid: str | None = None


_DELTA_KEYS: dict[str, str | None] = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
    "full_attention_interval": "full_attention_interval",
    "ssm.inner_size": None,
    "attention.recurrent_layers": None,
    "rope.dimension_sections": None,  # of images: the positions of text are equal
}

ARCHITECTURES: dict[str, Architecture] = {
    "qwen3moe": Architecture("Qwen3MoeForCausalLM", _qwen3),
    "qwen2moe": Architecture("Qwen2MoeForCausalLM", _qwen2),
    "olmoe": Architecture("OlmoeForCausalLM", _olmoe, {"attention.clamp_kqv": "clip_qkv"}),
    "llama": Architecture("MixtralForCausalLM", _mixtral),
    "qwen3next": Architecture("Qwen3NextForCausalLM", _delta_net, _DELTA_KEYS, partial=True),
    "qwen35moe": Architecture("Qwen3_5MoeForCausalLM", _delta_net, _DELTA_KEYS, partial=True),
    "deepseek2": Architecture(
        "DeepseekV2ForCausalLM",
        _deepseek,
        {
            **_SHARED_EXPERTS,
            "attention.head_count_kv": None,
            "attention.key_length": None,
            "attention.q_lora_rank": "q_lora_rank",
            "attention.kv_lora_rank": "kv_lora_rank",
        },
        or_sigmoid="DeepseekV3ForCausalLM",
    ),
    "dots1": Architecture("Dots1ForCausalLM", _dots1, _SHARED_EXPERTS, gating=_SIGMOID),
    "ernie4_5-moe": Architecture(
        "Ernie4_5_MoeForCausalLM",
        _ernie,
        {
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
            "expert_shared_count": "moe_num_shared_experts",
        },
    ),
    "glm4moe": Architecture(
        "Glm4MoeForCausalLM",
        _glm4,
        _SHARED_EXPERTS,
        gating=_SIGMOID,
        partial=True,
    ),
    "gpt-oss": Architecture(
        "GptOssForCausalLM",
        _experts_alone,
        {"attention.sliding_window": "sliding_window"},
        rope={"truncate": False},
    ),
    "granitemoe": Architecture(
        "GraniteMoeSharedForCausalLM",
        _granite,
        {
            "attention.scale": "attention_multiplier",
            "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier",
            "logit_scale": "logits_scaling",
        },
    ),
    "minimax-m2": Architecture(
        "MiniMaxM2ForCausalLM", _experts_alone, gating=_SIGMOID, partial=True
    ),
}
"""general.architecture → how its files are read."""


def _architecture(file: _File) -> Architecture:
    if (found := ARCHITECTURES.get(file.architecture)) is None:
        raise UserError(
            f"{file.path}: general.architecture {shown(file.architecture)} is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    if not file.get("expert_count"):
        raise UserError(f"{file.path}: {file.architecture}.expert_count is 0: a dense model")
    return found


def config_fields(headers: Sequence[GgufHeader]) -> dict[str, Any]:
    """The fields of config.json for the files of a model.

    Raises UserError that names the key, for metadata that is not read here.
    """
    file = _File(headers)
    architecture = _architecture(file)
    keys: dict[str, str | None] = {**_COMMON, **architecture.keys}
    prefix = f"{file.architecture}."
    own = [key.removeprefix(prefix) for key in file.metadata if key.startswith(prefix)]
    for key in own:
        if key not in keys and key not in _ROPE and key not in (*_READ_HERE, "expert_count"):
            raise file.refuse_own(key)
    for key in _REQUIRED:
        if key not in own:
            raise UserError(f"{file.path}: {prefix}{key} is missing")
    other = architecture.or_sigmoid if _is_sigmoid(file) else None
    if (gating := file.get("expert_gating_func")) not in (
        None,
        0,
        architecture.gating,
    ) and not other:
        raise file.refuse("expert_gating_func", gating)
    family = other or architecture.family
    fields: dict[str, Any] = {"architectures": [family], "hidden_act": "silu"}
    fields |= {field: file.get(key) for key in own if (field := keys.get(key)) is not None}
    fields |= architecture.fields(file)
    if (embedding := file.tensors.get("token_embd.weight")) is None or len(embedding.shape) != 2:
        raise UserError(f"{file.path}: tensor token_embd.weight is missing")
    fields["vocab_size"] = embedding.shape[0]
    fields["tie_word_embeddings"] = "output.weight" not in file.tensors
    fields["num_hidden_layers"] = _layers(file)
    fields["rope_parameters"] = _rope(file, fields, architecture)
    fields["dtype"] = FLOATS.get(embedding.type, "bfloat16")
    eos, eot = (file.metadata.get(f"tokenizer.ggml.{end}_token_id") for end in ("eos", "eot"))
    fields["eos_token_id"] = [end for end in (eos, eot if eot != eos else None) if end is not None]
    return {key: value for key, value in fields.items() if value is not None or key in NULLABLE}


def _layers(file: _File) -> Any:
    count, later = file.get("block_count"), file.get("nextn_predict_layers", 0)
    return count - later if isinstance(count, int) and isinstance(later, int) else count


def _rope(file: _File, fields: dict[str, Any], architecture: Architecture) -> dict[str, Any]:
    hidden, heads = fields.get("hidden_size"), fields.get("num_attention_heads")
    whole = hidden // heads if is_integer(hidden) and is_integer(heads) and heads else None
    width, rotated = fields.get("head_dim", whole), file.get("rope.dimension_count")
    width, partial = fields.get("qk_rope_head_dim", width), architecture.partial
    rotated = width if rotated is None else rotated
    if rotated != width and not (partial and is_integer(rotated) and is_integer(width) and width):
        raise file.refuse_own("rope.dimension_count")
    found = {field: file.get(key) for key, field in _ROPE.items() if file.get(key) is not None}
    if found.setdefault("rope_type", "none") == "none":
        found = {"rope_theta": found.get("rope_theta", 10_000.0), "rope_type": "default"}
    elif found["rope_type"] not in ("linear", "yarn"):
        raise file.refuse_own("rope.scaling.type")
    else:
        log = file.get("rope.scaling.yarn_log_multiplier")
        if isinstance(log, float) and log and architecture.or_sigmoid:  # DeepSeek's
            found |= dict.fromkeys(("mscale", "mscale_all_dim"), round(10 * log, 5))
        found |= architecture.rope
    if partial:
        found["partial_rotary_factor"] = 1.0 if rotated == width else rotated / width
    return found


def quantization_of(headers: Sequence[GgufHeader], layers: Sequence[int]) -> Quantization | None:
    """The quantization of a model's experts; None: there is none.

    - `layers`: those with experts.

    Raises UserError for a type that no record format holds.
    """
    owner = {name: header for header in headers for name in header.tensors}
    versions = []
    for layer in layers:
        formats = []
        for matrix in MATRICES:
            name = f"blk.{layer}.ffn_{matrix}_exps.weight"
            if (header := owner.get(name)) is None:
                raise UserError(f"{headers[0].path}: tensor {name} is missing")
            type_ = header.tensors[name].type
            if type_ not in FORMATS and type_ not in FLOATS:
                raise UserError(
                    f"{header.path}: tensor {name} is {type_}; experts may be in "
                    f"{', '.join((*FORMATS, *FLOATS))}"
                )
            formats.append(FORMATS.get(type_, "dense"))
        versions.append(join_names(formats))
    return None if {*versions} == {"dense"} else Quantization("GGUF", (), tuple(versions))

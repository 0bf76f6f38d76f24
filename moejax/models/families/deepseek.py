"""DeepSeek-V2, V3 and V3.2, Kimi-K2, Moonlight and GLM-5: multi-head latent attention (DeepSeek-V2,
arXiv:2405.04434, section 2.1), shared experts beside the routed ones, dense first layers.

V2 routes by softmax, greedily or within the best groups (its section 2.2.2); V3 (arXiv:2412.19437,
section 2.1.2) by sigmoid, chosen with a learned correction that is not part of the weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from moejax.errors import shown
from moejax.models.attention.indexed import IndexedAttention
from moejax.models.attention.latent import LatentAttention
from moejax.models.family import (
    Family,
    Fields,
    Parts,
    corrected_moe_params,
    feed_forward_params,
    later_layer,
    router_params,
    shared_expert_params,
)
from moejax.models.model_config import ModelConfig
from moejax.models.rope import yarn_mscale


def parse_v2(fields: Fields) -> ModelConfig:
    """DeepseekV2Config's fields and defaults."""
    fields.only("scoring_func", "softmax")
    # transformers ignores it, the model's own code does not, and no published model sets it.
    fields.only("norm_topk_prob", False)
    method = fields.raw.get("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.refuse(
            f"topk_method {method!r} is not implemented for this model, only 'greedy' or "
            "'group_limited_greedy'"
        )
    grouped = method == "group_limited_greedy"
    config = ModelConfig(
        architecture=V2.architecture,
        norm_topk_prob=False,
        mlp_bias=fields.flag("mlp_bias", False),
        n_group=fields.integer("n_group", None) if grouped else 1,
        topk_group=fields.integer("topk_group", None) if grouped else 1,
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
        shared_width=fields.shared_width(fields.integer("moe_intermediate_size", 1407), 2),
        **_layers(
            fields,
            hidden=4096,
            layers=32,
            dense=0,
            width=1407,
            experts=64,
            alias="num_experts",
            top_k=None,
        ),
        **latent_attention(fields, heads=32, interleave=True),
        **fields.decoder(eps=1e-6, max_positions=2048, vocabulary=102400, eos=2),
    )
    return dataclasses.replace(config, attention_scale=latent_scale(fields, config))


def parse_v3(fields: Fields) -> ModelConfig:
    """DeepseekV3Config's fields and defaults. Layers that predict several tokens
    (num_nextn_predict_layers) are left out, as in transformers."""
    config = ModelConfig(
        architecture=V3.architecture,
        shared_width=fields.shared_width(fields.integer("moe_intermediate_size", 2048)),
        **fields.corrected_routing(normalize=True, scale=2.5, groups=8, top_groups=4),
        **_layers(
            fields,
            hidden=7168,
            layers=61,
            dense=3,
            width=2048,
            experts=256,
            alias="num_local_experts",
            top_k=8,
        ),
        **latent_attention(fields, heads=128, interleave=fields.flag("rope_interleave", True)),
        **fields.decoder(eps=1e-6, max_positions=4096, vocabulary=129280, eos=1),
    )
    return dataclasses.replace(config, attention_scale=latent_scale(fields, config))


def _layers(
    fields: Fields,
    *,
    hidden: int,
    layers: int,
    dense: int,
    width: int,
    experts: int,
    alias: str,
    top_k: int | None,
) -> dict[str, Any]:
    """Fields of ModelConfig that V2 and V3 share.

    - `alias`: the other name that transformers reads for n_routed_experts.
    - Other arguments: the family's defaults.
    """
    fields.only("moe_layer_freq", 1)
    count = fields.integer("num_hidden_layers", layers)
    fields.only("sliding_window", None)
    fields.same_attention(None, count)
    routed = fields.experts("n_routed_experts", alias, experts)
    return dict(
        hidden_size=fields.integer("hidden_size", hidden),
        num_hidden_layers=count,
        moe_layers=fields.dense_first(count, dense),
        intermediate_size=fields.integer("intermediate_size", 18432 if dense else 11008),
        moe_intermediate_size=fields.integer("moe_intermediate_size", width),
        **fields.routing(routed, top_k),
        sliding_window=None,
    )


def latent_attention(
    fields: Fields,
    *,
    heads: int,
    interleave: bool,
    q_lora: int = 1536,
    nope: int = 128,
    v: int = 128,
    kv_lora: int = 512,
) -> dict[str, Any]:
    """The fields of latent attention. q_lora, nope, v, kv_lora: a family's defaults of
    q_lora_rank, qk_nope_head_dim, v_head_dim and kv_lora_rank."""
    count = fields.integer("num_attention_heads", heads)
    fields.only("num_key_value_heads", count)
    attention = LatentAttention(
        q_lora_rank=fields.optional_integer("q_lora_rank", q_lora),
        kv_lora_rank=fields.integer("kv_lora_rank", kv_lora),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim", nope),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim", 64, least=2),
        v_head_dim=fields.integer("v_head_dim", v),
        rope_interleave=interleave,
    )
    if attention.qk_rope_head_dim % 2:
        raise fields.refuse(f"qk_rope_head_dim must be even, not {attention.qk_rope_head_dim}")
    return dict(
        num_attention_heads=count,
        num_key_value_heads=count,
        head_dim=attention.qk_nope_head_dim + attention.qk_rope_head_dim,
        attention_bias=fields.flag("attention_bias", False),
        attention=attention,
    )


def latent_scale(fields: Fields, config: ModelConfig) -> float:
    """The factor of scores, which yarn's mscale_all_dim increases."""
    rope = config.rope
    scale = config.head_dim**-0.5
    tables = [fields.raw.get(key) or {} for key in ("rope_parameters", "rope_scaling")]
    if rope.type not in ("default", "yarn") and any(t.get("mscale_all_dim") for t in tables):
        raise fields.refuse(
            f"rope_parameters.mscale_all_dim is not implemented for rope type {rope.type!r}"
        )
    if rope.type == "yarn" and rope.mscale_all_dim:
        scale *= yarn_mscale(rope.factor, rope.mscale_all_dim) ** 2
    return scale


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    params = latent_params(config)
    if not moe:
        return params | feed_forward_params(config, config.intermediate_size)
    return params | router_params(config) | shared_expert_params(config)


def layer_params_v3(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    return layer_params(config, moe) | (corrected_moe_params(config) if moe else {})


def latent_params(config: ModelConfig) -> dict[str, Parts]:
    mla, hidden, heads = config.attention, config.hidden_size, config.num_attention_heads
    assert isinstance(mla, LatentAttention)
    latent, queries = mla.kv_lora_rank, heads * config.head_dim
    params: dict[str, Parts] = {
        "input_norm": (("input_layernorm.weight", (hidden,)),),
        "kv_a": (("self_attn.kv_a_proj_with_mqa.weight", (latent + mla.qk_rope_head_dim, hidden)),),
        "kv_a_norm": (("self_attn.kv_a_layernorm.weight", (latent,)),),
        "kv_b": (
            (
                "self_attn.kv_b_proj.weight",
                (heads * (mla.qk_nope_head_dim + mla.v_head_dim), latent),
            ),
        ),
        "o": (("self_attn.o_proj.weight", (hidden, heads * mla.v_head_dim)),),
        "post_norm": (("post_attention_layernorm.weight", (hidden,)),),
    }
    if mla.q_lora_rank is None:
        params["q"] = (("self_attn.q_proj.weight", (queries, hidden)),)
    else:
        rank = mla.q_lora_rank
        params["q_a"] = (("self_attn.q_a_proj.weight", (rank, hidden)),)
        params["q_a_norm"] = (("self_attn.q_a_layernorm.weight", (rank,)),)
        params["q_b"] = (("self_attn.q_b_proj.weight", (queries, rank)),)
    if config.attention_bias:
        biased = {"kv_a": "kv_a_proj_with_mqa", "o": "o_proj"}
        biased |= {"q_a": "q_a_proj"} if mla.q_lora_rank is not None else {}
        for key, name in biased.items():
            rows = params[key][0][1][0]
            params[f"{key}_bias"] = ((f"self_attn.{name}.bias", (rows,)),)
    return params


def parse_sarvam_mla(fields: Fields) -> ModelConfig:
    """SarvamMLAConfig's fields and defaults: DeepseekV3Config's, also by the names of Sarvam's own
    code, and by its name of yarn."""
    raw = dict(fields.raw)
    if isinstance(table := raw.get("rope_scaling"), dict) and "deepseek_yarn" in (
        table.get("type"),
        table.get("rope_type"),
    ):
        named = {k: v for k, v in table.items() if k not in ("type", "rope_type")}
        raw["rope_scaling"] = named | {"rope_type": "yarn"}
    own = Fields(raw, fields.source)
    for name, other in (
        ("n_routed_experts", "num_experts"),
        ("n_shared_experts", "num_shared_experts"),
    ):
        if (value := own.alias(name, other)) is not None:
            raw[name] = value
    given = dict(vocab_size=262144, hidden_size=4096, intermediate_size=16384, n_group=1)
    given |= dict(num_hidden_layers=32, num_attention_heads=64, topk_group=1, q_lora_rank=None)
    given |= dict(first_k_dense_replace=1)
    if not own.has("num_local_experts"):
        given["n_routed_experts"] = 128
    config = parse_v3(Fields(given | raw, fields.source))
    return dataclasses.replace(config, architecture=SARVAM_MLA.architecture)


V2 = Family("DeepseekV2ForCausalLM", "deepseek_v2", parse_v2, layer_params)
V3 = Family(
    "DeepseekV3ForCausalLM",
    "deepseek_v3",
    parse_v3,
    layer_params_v3,
    wide_params=frozenset({"correction"}),
    ignores=later_layer,
    other_types=("kimi_k2",),
)
SARVAM_MLA = dataclasses.replace(
    V3,
    architecture="SarvamMLAForCausalLM",
    model_type="sarvam_mla",
    parse=parse_sarvam_mla,
    aliases=("DeepseekV3ForCausalLM",),
    other_types=(),
)


def parse_indexed(
    fields: Fields, architecture: str, defaults: dict[str, Any], index: dict[str, Any]
) -> ModelConfig:
    """The fields of DeepseekV32Config and GlmMoeDsaConfig: DeepseekV3Config's, and those of an
    indexer. Layers that reuse the choice of another layer's indexer (indexer_types) run up to as
    many tokens as it chooses: then it chooses all.

    - `defaults`: where they are not DeepseekV3Config's.
    - `index`: index_n_heads' default and index_interleave.
    """
    types = fields.raw.get("layer_types")
    raw = {key: v for key, v in fields.raw.items() if key not in ("layer_types", "head_dim")}
    if (experts := fields.alias("n_routed_experts", "num_experts")) is not None:
        raw["n_routed_experts"] = experts
    fields = Fields(defaults | raw, fields.source)
    config = parse_v3(fields)
    layers = config.num_hidden_layers
    if types is not None and types != ["indexed_attention"] * layers:
        raise fields.refuse(
            f"layer_types must be 'indexed_attention' for each of {layers} layers, not "
            f"{shown(types)}"
        )
    fields.only("rope_interleave", True)
    fields.integer("q_lora_rank", 1536)
    latent, chosen = config.attention, fields.integer("index_topk", 2048)
    assert isinstance(latent, LatentAttention)
    attention = IndexedAttention(
        **dataclasses.asdict(latent),
        index_topk=chosen,
        index_n_heads=fields.integer("index_n_heads", index.pop("index_n_heads")),
        index_head_dim=fields.integer("index_head_dim", 128),
        **index,
    )
    if attention.index_head_dim % 2 or attention.index_head_dim < attention.qk_rope_head_dim:
        raise fields.refuse(
            f"index_head_dim ({attention.index_head_dim}) must be even and at least "
            f"qk_rope_head_dim ({attention.qk_rope_head_dim})"
        )
    config = dataclasses.replace(
        config,
        architecture=architecture,
        attention=attention,
        moe_layers=fields.sparse_layers(layers, 3),
    )
    if "shared" not in _indexer_types(fields, layers):
        return config
    longest = min(config.max_position_embeddings, chosen)
    why = f"layers that share an indexer's choice run up to index_topk tokens, {chosen}"
    return dataclasses.replace(
        config,
        attention=latent,
        max_position_embeddings=longest,
        length_limit=why if longest < config.max_position_embeddings else None,
    )


def _indexer_types(fields: Fields, layers: int) -> Sequence[str]:
    """ "full" or "shared" for each layer: GlmMoeDsaConfig's indexer_types, or what makes them."""
    pattern = fields.raw.get("index_topk_pattern")
    types = fields.raw.get("indexer_types")
    if types is None and pattern is not None:
        types = ["full" if c == "F" else "shared" if c == "S" else c for c in pattern]
    if types is None:
        every = fields.integer("index_topk_freq", 1)
        offset = fields.integer("index_skip_topk_offset", 2, least=0)
        return ["shared" if max(i - offset + 1, 0) % every else "full" for i in range(layers)]
    if not isinstance(types, list) or len(types) != layers or {*types} - {"full", "shared"}:
        raise fields.refuse(
            f"indexer_types must be 'full' or 'shared' for each of {layers} layers, not "
            f"{shown(types)}"
        )
    return types


def _parse_v32(fields: Fields) -> ModelConfig:
    fields = _without_sharing(fields)
    defaults = dict(max_position_embeddings=163840)
    index = dict(index_n_heads=64, index_interleave=False)
    return parse_indexed(fields, V32.architecture, defaults, index)


def _without_sharing(fields: Fields) -> Fields:
    """The fields without GlmMoeDsaConfig's, which DeepseekV32Config does not read."""
    shared = "indexer_types", "index_topk_pattern", "index_topk_freq", "index_skip_topk_offset"
    return Fields({k: v for k, v in fields.raw.items() if k not in shared}, fields.source)


def _parse_glm_dsa(fields: Fields) -> ModelConfig:
    defaults = dict(vocab_size=154880, hidden_size=6144, intermediate_size=12288)
    defaults |= dict(num_hidden_layers=78, num_attention_heads=64, q_lora_rank=2048)
    defaults |= dict(v_head_dim=256, qk_nope_head_dim=192, n_group=1, topk_group=1)
    defaults |= dict(max_position_embeddings=202752, rms_norm_eps=1e-5)
    index = dict(index_n_heads=32, index_interleave=True)
    return parse_indexed(fields, GLM_DSA.architecture, defaults, index)


def _indexed_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    params, kind = layer_params_v3(config, moe), config.attention
    if not isinstance(kind, IndexedAttention):
        return params
    name, width, hidden = "self_attn.indexer.", kind.index_head_dim, config.hidden_size
    heads, rank = kind.index_n_heads, kind.q_lora_rank
    assert rank is not None
    return params | {
        "index_q": ((f"{name}wq_b.weight", (heads * width, rank)),),
        "index_k": ((f"{name}wk.weight", (width, hidden)),),
        "index_k_norm": ((f"{name}k_norm.weight", (width,)),),
        "index_k_norm_bias": ((f"{name}k_norm.bias", (width,)),),
        "index_weights": ((f"{name}weights_proj.weight", (heads, hidden)),),
    }


def _left_out(config: ModelConfig, name: str) -> bool:
    """Whether transformers does not read the tensor, or the indexer never matters."""
    unread = not isinstance(config.attention, IndexedAttention)
    return (unread and ".self_attn.indexer." in name) or later_layer(config, name)


V32 = dataclasses.replace(
    V3,
    architecture="DeepseekV32ForCausalLM",
    model_type="deepseek_v32",
    parse=_parse_v32,
    layer_params=_indexed_params,
    ignores=_left_out,
    other_types=(),
)
GLM_DSA = dataclasses.replace(
    V32,
    architecture="GlmMoeDsaForCausalLM",
    model_type="glm_moe_dsa",
    parse=_parse_glm_dsa,
)

"""LFM2-MoE: gated short convolutions in most layers, grouped-query attention in the others, experts
by sigmoid scores with a correction that is not part of the weights, dense layers first."""

from __future__ import annotations

from moejax.models.attention.short_conv import ShortConvolution
from moejax.models.family import Family, Fields, Parts, router_params
from moejax.models.model_config import ModelConfig, with_state


def parse(fields: Fields) -> ModelConfig:
    """Lfm2MoeConfig's fields and defaults."""
    raw = dict(fields.raw)
    for ours, theirs in (("rms_norm_eps", "norm_eps"), ("tie_word_embeddings", "tie_embedding")):
        if raw.get(theirs) is not None:
            raw[ours] = raw[theirs]
    fields = Fields(raw, fields.source)
    layers = fields.integer("num_hidden_layers", 32)
    fields.only("hidden_act", "silu")
    fields.only("conv_bias", False)
    fields.only("use_expert_bias", True)
    if not fields.has("layer_types"):
        raise fields.refuse("layer_types is missing: it says which layers are convolutions")
    heads = fields.heads(32, 8, hidden=2048)
    dense = fields.integer("num_dense_layers", 2, least=0)
    moe = tuple(i >= dense for i in range(layers))
    config = ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=layers,
        **heads,
        intermediate_size=fields.integer("intermediate_size", 7168),
        moe_intermediate_size=fields.integer("moe_intermediate_size", 1792),
        **fields.routing(fields.experts("num_experts", "num_local_experts", 32), 4),
        norm_topk_prob=fields.flag("norm_topk_prob", True),
        scoring_func="sigmoid",
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
        moe_layers=fields.some_experts(moe, f"num_dense_layers {dense} of {layers} layers"),
        attention_bias=False,
        sliding_window=None,
        **fields.decoder(
            eps=1e-5, max_positions=128000, vocabulary=65536, theta=1e6, eos=2, tied=True
        ),
    )
    conv = ShortConvolution(config.hidden_size, fields.integer("conv_L_cache", 3, least=2))
    return with_state(config, conv, fields.state_layers(layers, "conv", 1))


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    hidden, attention = config.hidden_size, config.attention
    params: dict[str, Parts] = {
        "input_norm": (("operator_norm.weight", (hidden,)),),
        "post_norm": (("ffn_norm.weight", (hidden,)),),
    }
    if isinstance(attention, ShortConvolution):
        params |= {
            "state_in": (("conv.in_proj.weight", (3 * hidden, hidden)),),
            "conv": (("conv.conv.weight", (hidden, 1, attention.taps)),),
            "o": (("conv.out_proj.weight", (hidden, hidden)),),
        }
    else:
        queries, keys = (
            count * config.head_dim
            for count in (config.num_attention_heads, config.num_key_value_heads)
        )
        heads = (("q", queries), ("k", keys), ("v", keys))
        params |= {
            "qkv": tuple((f"self_attn.{h}_proj.weight", (n, hidden)) for h, n in heads),
            "q_norm": (("self_attn.q_layernorm.weight", (config.head_dim,)),),
            "k_norm": (("self_attn.k_layernorm.weight", (config.head_dim,)),),
            "o": (("self_attn.out_proj.weight", (hidden, queries)),),
        }
    if not moe:
        width, into = config.intermediate_size, ("w1", "w3")
        return params | {
            "gate_up": tuple((f"feed_forward.{m}.weight", (width, hidden)) for m in into),
            "down": (("feed_forward.w2.weight", (hidden, width)),),
        }
    correction: Parts = (("feed_forward.expert_bias", (config.num_experts,)),)
    return params | router_params(config, "feed_forward.gate.weight") | {"correction": correction}


FAMILY = Family(
    "Lfm2MoeForCausalLM",
    "lfm2_moe",
    parse,
    layer_params,
    experts="feed_forward.experts.",
    matrices=("w1", "w3", "w2"),
    wide_params=frozenset({"correction"}),
    renamed=(("model.embedding_norm.", "model.norm."),),
)

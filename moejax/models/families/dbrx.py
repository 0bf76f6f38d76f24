"""DBRX: grouped-query attention with clipped q, k and v from one tensor, LayerNorms without biases,
and the experts of a layer as one matrix [E·F, D] each of gate, up and down."""

from __future__ import annotations

from moejax.errors import shown
from moejax.models.family import Family, Fields, Parts
from moejax.models.model_config import ModelConfig

_NAMES = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "max_seq_len": "max_position_embeddings",
}
"""Published name → transformers' other one."""


def parse(fields: Fields) -> ModelConfig:
    """DbrxConfig's fields and defaults."""
    raw = dict(fields.raw)
    for published, name in _NAMES.items():
        if (value := fields.alias(published, name)) is not None:
            raw[name] = value
    attention, experts = (_table(fields, name) for name in ("attn_config", "ffn_config"))
    fields.only("tie_word_embeddings", False)
    activation = experts.raw.get("ffn_act_fn") or {"name": "silu"}
    if not isinstance(activation, dict):
        raise experts.refuse(f"ffn_act_fn must be an object, not {shown(activation)}")
    raw["hidden_act"] = activation.get("name", "silu")
    raw["num_key_value_heads"] = attention.raw.get("kv_n_heads", 1)
    raw.pop("rms_norm_eps", None)  # which transformers does not read
    own = Fields(raw, fields.source)
    experts.only("moe_normalize_expert_weights", 1, 1.0)
    layers = own.integer("num_hidden_layers", 24)
    own.same_attention(None, layers)
    heads = own.heads(16, 1, hidden=2048)
    own.only("head_dim", heads["hidden_size"] // heads["num_attention_heads"])
    width = experts.integer("ffn_hidden_size", 3584)
    count = experts.integer("moe_num_experts", 4)
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=layers,
        **heads,
        intermediate_size=width,
        moe_intermediate_size=width,
        **experts.routing(count, 1, "moe_top_k"),
        norm_topk_prob=experts.raw.get("moe_normalize_expert_weights", 1.0) is not None,
        moe_layers=(True,) * layers,
        attention_bias=False,
        clip_qkv=attention.factor("clip_qkv", 1.0) if attention.has("clip_qkv") else None,
        mean_norms=True,
        sliding_window=None,
        **own.decoder(
            eps=1e-5,
            max_positions=2048,
            vocabulary=32000,
            theta=attention.number("rope_theta", 10_000.0),
        ),
    )


def _table(fields: Fields, name: str) -> Fields:
    found = fields.raw.get(name) or {}
    if not isinstance(found, dict):
        raise fields.refuse(f"{name} must be an object, not {shown(found)}")
    return Fields(found, f"{fields.source}: {name}")


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    hidden, name = config.hidden_size, "norm_attn_norm."
    rows = (config.num_attention_heads + 2 * config.num_key_value_heads) * config.head_dim
    return {
        "input_norm": ((f"{name}norm_1.weight", (hidden,)),),
        "qkv": ((f"{name}attn.Wqkv.weight", (rows, hidden)),),
        "o": ((f"{name}attn.out_proj.weight", (hidden, hidden)),),
        "post_norm": ((f"{name}norm_2.weight", (hidden,)),),
        "router": (("ffn.router.layer.weight", (config.num_experts, hidden)),),
    }


def shape_of(config: ModelConfig, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    if ".ffn.experts.mlp." in name and len(shape) == 2 and shape[0] % config.num_experts == 0:
        return config.num_experts, shape[0] // config.num_experts, shape[1]
    return shape


FAMILY = Family(
    "DbrxForCausalLM",
    "dbrx",
    parse,
    layer_params,
    experts="ffn.experts.mlp.",
    matrices=None,
    stacked=("w1", "v1", "w2"),
    renamed=(
        ("transformer.wte.", "model.embed_tokens."),
        ("transformer.blocks.", "model.layers."),
        ("transformer.norm_f.", "model.norm."),
    ),
    shape_of=shape_of,
)

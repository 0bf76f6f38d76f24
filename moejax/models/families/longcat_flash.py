"""LongCat-Flash (arXiv:2509.01322): layers of two latent attentions and two feed-forwards, beside
whose second half the experts run, and experts that return their input."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp

from moejax.models.attention.latent import LatentAttention
from moejax.models.families.deepseek import latent_attention, latent_params, latent_scale
from moejax.models.family import Family, Fields, Parts, feed_forward_params
from moejax.models.model_config import SECOND, ModelConfig


@dataclasses.dataclass(frozen=True)
class ScaledLatentAttention(LatentAttention):
    """Latent attention whose queries and latent values have a factor each."""

    query_factor: float = 1.0
    latent_factor: float = 1.0

    def scale_queries(self, q, positions):
        return (q.astype(jnp.float32) * self.query_factor).astype(q.dtype)

    def latent_norm(self, stack) -> jax.Array:
        weight = super().latent_norm(stack)
        return (weight.astype(jnp.float32) * self.latent_factor).astype(weight.dtype)


def parse(fields: Fields) -> ModelConfig:
    """LongcatFlashConfig's fields and defaults."""
    for name in ("mla_scale_q_lora", "mla_scale_kv_lora"):
        fields.only(name, True)
    fields.only("zero_expert_type", "identity")
    fields.only("router_bias", False)
    fields.only("sliding_window", None)
    layers = _layers(fields)
    fields.same_attention(None, layers)
    hidden = fields.integer("hidden_size", 6144)
    latent = latent_attention(fields, heads=64, interleave=True)
    attention, head_dim = latent["attention"], latent["head_dim"]
    fields.only("qk_head_dim", head_dim)
    rank = fields.integer("q_lora_rank", 1536)
    attention = ScaledLatentAttention(
        **dataclasses.asdict(attention),
        query_factor=(hidden / rank) ** 0.5,
        latent_factor=(hidden / attention.kv_lora_rank) ** 0.5,
    )
    width, chosen = _either(fields, "ffn_hidden_size", "intermediate_size"), "moe_topk"
    experts = fields.experts("n_routed_experts", "num_local_experts", 512)
    zero = fields.raw.get("zero_expert_num", 256)
    zero = 0 if zero is None else fields.integer("zero_expert_num", 256, least=0)
    routing = fields.routing(experts + zero, 12, chosen) | {"num_experts": experts}
    config = ModelConfig(
        architecture=FAMILY.architecture,
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=width.integer("ffn_hidden_size", 12288),
        moe_intermediate_size=_either(
            fields, "expert_ffn_hidden_size", "moe_intermediate_size"
        ).integer("expert_ffn_hidden_size", 2048),
        **routing,
        zero_experts=zero,
        norm_topk_prob=False,
        routed_scaling_factor=fields.number("routed_scaling_factor", 6.0),
        moe_layers=(True,) * layers,
        sliding_window=None,
        second_attention=True,
        routes_apart=True,
        **latent | {"attention": attention},
        **fields.decoder(
            eps=1e-5, max_positions=131072, vocabulary=131072, theta=10_000_000.0, eos=2
        ),
    )
    return dataclasses.replace(config, attention_scale=latent_scale(fields, config))


def _either(fields: Fields, name: str, other: str) -> Fields:
    """The fields, in which the value under either name is under the first one."""
    value = fields.alias(name, other)
    return fields if value is None else Fields(fields.raw | {name: value}, fields.source)


def _layers(fields: Fields) -> int:
    """transformers counts the two halves of a layer in num_hidden_layers."""
    if fields.has("num_layers") or not fields.has("num_hidden_layers"):
        return Fields(
            {"num_hidden_layers": fields.raw.get("num_layers", 28)}, fields.source
        ).integer("num_hidden_layers", 28)
    halves = fields.integer("num_hidden_layers", None, least=2)
    return halves // 2


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    params: dict[str, Parts] = {}
    own = latent_params(config) | feed_forward_params(config, config.intermediate_size)
    for number, start in enumerate(("", SECOND)):
        for key, parts in own.items():
            params[start + key] = tuple((_of_half(name, number), shape) for name, shape in parts)
    count = config.num_experts + config.zero_experts
    params["router"] = (("mlp.router.classifier.weight", (count, config.hidden_size)),)
    params["correction"] = (("mlp.router.e_score_correction_bias", (count,)),)
    return params


def _of_half(name: str, number: int) -> str:
    module, rest = name.split(".", 1)
    return f"{'mlps' if module == 'mlp' else module}.{number}.{rest}"


def _ignores(config: ModelConfig, name: str) -> bool:
    """transformers writes gate and up of experts that compute nothing."""
    found = re.search(r"\.mlp\.experts\.(\d{1,9})\.", name)
    return name.startswith("model.mtp.") or (
        found is not None and int(found[1]) >= config.num_experts
    )


FAMILY = Family(
    "LongcatFlashForCausalLM",
    "longcat_flash",
    parse,
    layer_params,
    wide_params=frozenset({"correction"}),
    ignores=_ignores,
)

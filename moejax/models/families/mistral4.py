"""Mistral Small 4: the latent attention of DeepSeek-V3 with queries that grow with their position,
routing by softmax within groups."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp

from moejax.models.attention.latent import LatentAttention
from moejax.models.families.deepseek import latent_attention, latent_scale, layer_params
from moejax.models.family import Family, Fields, wrapper_of
from moejax.models.model_config import ModelConfig
from moejax.models.rope import parse_rope


@dataclasses.dataclass(frozen=True)
class GrowingAttention(LatentAttention):
    """Latent attention whose queries at position p are multiplied by 1 + beta·ln(1 + ⌊p / length⌋)
    (llama_4_scaling_beta)."""

    beta: float = 0.0
    length: int = 1

    def scale_queries(self, q, positions):
        steps = jnp.floor(positions.astype(jnp.float32) / self.length)
        factors = 1 + self.beta * jnp.log1p(steps)
        return (q.astype(jnp.float32) * factors[:, None, None]).astype(q.dtype)


def parse(fields: Fields) -> ModelConfig:
    """Mistral4Config's fields and defaults."""
    longest = fields.integer("max_position_embeddings", 1048576)
    if not (fields.has("rope_parameters") or fields.has("rope_scaling")):
        yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 128.0}
        yarn |= {"original_max_position_embeddings": 8192, "mscale": 1.0, "mscale_all_dim": 1.0}
        fields = Fields(
            fields.raw | {"rope_parameters": yarn | {"llama_4_scaling_beta": 0.1}}, fields.source
        )
    tables = [fields.raw.get(key) for key in ("rope_parameters", "rope_scaling")]
    table = Fields(
        next((t for t in tables if isinstance(t, dict)), {}), f"{fields.source}: rope_parameters"
    )
    fields = _without_part(fields)
    layers = fields.integer("num_hidden_layers", 36)
    fields.only("sliding_window", None)
    fields.same_attention(None, layers)
    width = fields.integer("moe_intermediate_size", 2048)
    routed = fields.experts("n_routed_experts", "num_local_experts", 128)
    latent = latent_attention(
        fields,
        heads=32,
        interleave=fields.flag("rope_interleave", True),
        q_lora=1024,
        nope=64,
        kv_lora=256,
    )
    original = parse_rope(fields.raw, longest, fields.source).original_max_position_embeddings
    growing = GrowingAttention(
        **dataclasses.asdict(latent["attention"]),
        beta=table.number("llama_4_scaling_beta", 0.0),
        length=original or longest,
    )
    config = ModelConfig(
        architecture=FAMILY.architecture,
        hidden_size=fields.integer("hidden_size", 4096),
        num_hidden_layers=layers,
        moe_layers=fields.dense_first(layers, 0),
        intermediate_size=fields.integer("intermediate_size", 12288),
        moe_intermediate_size=width,
        **fields.routing(routed, 4),
        shared_width=fields.shared_width(width),
        norm_topk_prob=fields.flag("norm_topk_prob", True),
        n_group=fields.integer("n_group", 1),
        topk_group=fields.integer("topk_group", 1),
        group_score="top2",
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.0),
        sliding_window=None,
        **latent | {"attention": growing},
        **fields.decoder(eps=1e-6, max_positions=1048576, vocabulary=131072, eos=2),
    )
    return dataclasses.replace(config, attention_scale=latent_scale(fields, config))


def _without_part(fields: Fields) -> Fields:
    """The fields without partial_rotary_factor: qk_rope_head_dim says that too."""
    raw = {key: value for key, value in fields.raw.items() if key != "partial_rotary_factor"}
    for key in ("rope_parameters", "rope_scaling"):
        if isinstance(table := raw.get(key), dict):
            raw[key] = {k: v for k, v in table.items() if k != "partial_rotary_factor"}
    return Fields(raw, fields.source)


FAMILY = Family("Mistral4ForCausalLM", "mistral4", parse, layer_params)
MISTRAL3 = wrapper_of(
    FAMILY,
    "Mistral3ForConditionalGeneration",
    "mistral3",
    text_types=("mistral4",),
    tied=True,
    other_models=("vision_tower", "multi_modal_projector"),
)

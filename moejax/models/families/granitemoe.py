"""GraniteMoe (Granite 3.0 and 3.1, PowerMoE): Mixtral's layers with factors on embeddings, scores,
what a layer adds and logits (muP, arXiv:2203.03466); experts stacked in the files too. One of its
kinds has an expert that every token uses, one more has sinks, and a window and a rope by layer."""

from __future__ import annotations

import dataclasses

from moejax.errors import shown
from moejax.models.family import (
    Family,
    Fields,
    Parts,
    attention_params,
    router_params,
    sink_params,
)
from moejax.models.json_values import is_number
from moejax.models.model_config import LayerKind, ModelConfig
from moejax.models.rope import LARGEST


def parse(fields: Fields) -> ModelConfig:
    """GraniteMoeConfig's fields and defaults."""
    layers = fields.integer("num_hidden_layers", 32)
    fields.only("sliding_window", None)
    fields.same_attention(None, layers)
    return _parse(fields, layers)


def _parse(fields: Fields, layers: int) -> ModelConfig:
    width = fields.integer("intermediate_size", 11008)
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=layers,
        **fields.heads(32, None, hidden=4096),
        intermediate_size=width,
        moe_intermediate_size=width,
        **fields.routing(fields.integer("num_local_experts", 8, least=0), 2),
        norm_topk_prob=True,  # transformers' softmax over the chosen logits is that
        moe_layers=(True,) * layers,
        attention_bias=fields.flag("attention_bias", False),
        sliding_window=None,
        attention_scale=fields.factor("attention_multiplier", 1.0),
        embedding_multiplier=fields.factor("embedding_multiplier", 1.0),
        residual_multiplier=fields.factor("residual_multiplier", 1.0),
        logits_scaling=fields.factor("logits_scaling", 1.0),
        **fields.decoder(eps=1e-6, max_positions=2048, vocabulary=32000, eos=2),
    )


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    router = router_params(config, "block_sparse_moe.router.layer.weight")
    return attention_params(config, output_bias=True) | router


def parse_shared(fields: Fields) -> ModelConfig:
    """GraniteMoeSharedConfig's fields: GraniteMoeConfig's, and shared_intermediate_size."""
    width = fields.integer("shared_intermediate_size", 0, least=0)
    config = parse(fields)
    return dataclasses.replace(config, architecture=SHARED.architecture, shared_width=width)


def shared_layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    params = layer_params(config, moe)
    if width := config.shared_width:
        into, out = (2 * width, config.hidden_size), (config.hidden_size, width)
        params["shared_gate_up"] = (("shared_mlp.input_linear.weight", into),)
        params["shared_down"] = (("shared_mlp.output_linear.weight", out),)
    return params


def parse_windows(fields: Fields) -> ModelConfig:
    """GraniteMoeSWAConfig's fields: GraniteMoeSharedConfig's, and windows and thetas by layer, of
    which 0 means that nothing is rotated."""
    layers = fields.integer("num_hidden_layers", 32)
    sliding = fields.layer_types([i % 4 != 0 for i in range(layers)])
    config = _parse(fields, layers)
    rope, thetas = config.rope, fields.raw.get("layer_rope_theta")
    if thetas is None:
        thetas = [rope.theta] * layers
    if not isinstance(thetas, list) or len(thetas) != layers or not all(map(_is_theta, thetas)):
        raise fields.refuse(
            f"layer_rope_theta must be 0 or a number above 1 for each of {layers} layers, not "
            f"{shown(thetas)}"
        )
    ropes = [dataclasses.replace(rope, theta=float(t)) if t else rope for t in thetas]
    own = {name: getattr(config, name) for name in (f.name for f in dataclasses.fields(LayerKind))}
    return dataclasses.replace(
        config,
        architecture=WINDOWS.architecture,
        shared_width=fields.integer("shared_intermediate_size", 0, least=0),
        sliding_window=fields.integer("sliding_window", 128) if any(sliding) else None,
        window_layers=sliding if any(sliding) else None,
        rope_layers=None if all(thetas) else tuple(map(bool, thetas)),
        layer_kinds=tuple(dataclasses.replace(LayerKind(**own), rope=rope) for rope in ropes),
    )


def _is_theta(value: object) -> bool:
    return is_number(value) and (value == 0 or 1 < value <= LARGEST)


def windows_layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    router = router_params(config, "block_sparse_moe.router.weight")
    return shared_layer_params(config, moe) | router | sink_params(config)


FAMILY = Family(
    "GraniteMoeForCausalLM",
    "granitemoe",
    parse,
    layer_params,
    experts="block_sparse_moe.",
    matrices=None,
    stacked=("input_linear.weight", "output_linear.weight"),
)
SHARED = dataclasses.replace(
    FAMILY,
    architecture="GraniteMoeSharedForCausalLM",
    model_type="granitemoeshared",
    parse=parse_shared,
    layer_params=shared_layer_params,
)
WINDOWS = dataclasses.replace(
    SHARED,
    architecture="GraniteMoeSWAForCausalLM",
    model_type="granitemoe_swa",
    parse=parse_windows,
    layer_params=windows_layer_params,
    experts="block_sparse_moe.experts.",
    stacked=("gate_up_proj", "down_proj"),
)

"""Which tensors a Qwen3-MoE checkpoint holds, and where each of them goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Container

from moejax.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class ParamPlace:
    """A tensor of the given shape becomes rows of a parameter.

    run: index of the run of equal layers, None for the model's own parameters. layer: position in
    the run. row: the first row; several tensors may be concatenated in one parameter.
    """

    shape: tuple[int, ...]
    run: int | None
    key: str
    layer: int
    row: int


@dataclasses.dataclass(frozen=True)
class ExpertPlace:
    """A tensor of the given shape becomes rows of expert records.

    layer: counted over MoE layers. expert: None for a tensor stacked over all experts.
    matrix: "gate", "up", "down" or "gate_up" (gate rows, then up rows).
    """

    shape: tuple[int, ...]
    layer: int
    expert: int | None
    matrix: str


Place = ParamPlace | ExpertPlace
Parts = tuple[tuple[str, tuple[int, ...]], ...]
"""Tensor names and shapes, in the order in which a parameter concatenates them."""


def model_params(config: ModelConfig) -> dict[str, Parts]:
    """The parameters outside of layers; no lm_head where it is tied to embed."""
    table = (config.vocab_size, config.hidden_size)
    params: dict[str, Parts] = {
        "embed": (("model.embed_tokens.weight", table),),
        "final_norm": (("model.norm.weight", (config.hidden_size,)),),
    }
    if not config.tie_word_embeddings:
        params["lm_head"] = (("lm_head.weight", table),)
    return params


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    """The parameters of one layer except its experts; names follow ``model.layers.N.``."""
    hidden, head_dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    heads = (("q", queries), ("k", keys), ("v", keys))
    params: dict[str, Parts] = {
        "input_norm": (("input_layernorm.weight", (hidden,)),),
        "qkv": tuple((f"self_attn.{h}_proj.weight", (n, hidden)) for h, n in heads),
        "q_norm": (("self_attn.q_norm.weight", (head_dim,)),),
        "k_norm": (("self_attn.k_norm.weight", (head_dim,)),),
        "o": (("self_attn.o_proj.weight", (hidden, queries)),),
        "post_norm": (("post_attention_layernorm.weight", (hidden,)),),
    }
    if config.attention_bias:
        params["qkv_bias"] = tuple((f"self_attn.{h}_proj.bias", (n,)) for h, n in heads)
        params["o_bias"] = (("self_attn.o_proj.bias", (hidden,)),)
    if moe:
        params["router"] = (("mlp.gate.weight", (config.num_experts, hidden)),)
    else:
        width = config.intermediate_size
        params["gate_up"] = (
            ("mlp.gate_proj.weight", (width, hidden)),
            ("mlp.up_proj.weight", (width, hidden)),
        )
        params["down"] = (("mlp.down_proj.weight", (hidden, width)),)
    return params


def param_shape(parts: Parts) -> tuple[int, ...]:
    """The shape of the parts concatenated along their first axis."""
    return (sum(shape[0] for _, shape in parts), *parts[0][1][1:])


def expected_tensors(config: ModelConfig, found: Container[str]) -> dict[str, Place]:
    """Every tensor that the checkpoint must hold, by name.

    found: the names that it does hold, which tell for each layer whether its experts are separate
    (``mlp.experts.E.gate_proj.weight``) or stacked (``mlp.experts.gate_up_proj``).
    """
    places: dict[str, Place] = {}

    def add(params: dict[str, Parts], prefix: str, run: int | None, layer: int) -> None:
        for key, parts in params.items():
            row = 0
            for name, shape in parts:
                places[prefix + name] = ParamPlace(shape, run, key, layer, row)
                row += shape[0]

    add(model_params(config), "", None, 0)
    moe_layer = 0
    for index, run in enumerate(config.runs):
        for layer in range(run.count):
            prefix = f"model.layers.{run.start + layer}."
            add(layer_params(config, run.moe), prefix, index, layer)
            if run.moe:
                places |= _experts(config, found, prefix + "mlp.experts.", moe_layer)
                moe_layer += 1
    return places


def _experts(
    config: ModelConfig, found: Container[str], prefix: str, layer: int
) -> dict[str, Place]:
    count, width, hidden = config.num_experts, config.moe_intermediate_size, config.hidden_size
    stacked = {"gate_up": (count, 2 * width, hidden), "down": (count, hidden, width)}
    if any(f"{prefix}{matrix}_proj" in found for matrix in stacked):
        return {
            f"{prefix}{matrix}_proj": ExpertPlace(shape, layer, None, matrix)
            for matrix, shape in stacked.items()
        }
    shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    return {
        f"{prefix}{expert}.{matrix}_proj.weight": ExpertPlace(shape, layer, expert, matrix)
        for expert in range(count)
        for matrix, shape in shapes.items()
    }

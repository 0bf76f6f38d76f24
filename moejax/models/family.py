"""What makes a model family: how its config.json is read and what its tensors are called."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from moejax.models.fields import Fields
from moejax.models.model_config import ModelConfig

Parts = tuple[tuple[str, tuple[int, ...]], ...]
"""Tensor names and shapes, in the order in which a parameter concatenates them."""


@dataclasses.dataclass(frozen=True)
class Family:
    """One architecture of transformers over the shared layers (moejax.models.layers).

    architecture, model_type: as in config.json. aliases: names that published config.json files
    give the architecture too. parse: its fields → ModelConfig; raises UserError.
    layer_params: (config, whether the layer has experts) → the parameters of one layer except its
    routed experts, by the names that LayerStack knows, each the tensors it is made of, named after
    ``model.layers.N.``. experts: where routed experts are, after ``model.layers.N.``.
    matrices: what gate, up and down are called there. wide_params: parameters kept in float32
    whatever the run's dtype. final_norm_bias: the final norm is a LayerNorm. ignores: (config,
    tensor name) → a tensor that transformers does not read either.
    """

    architecture: str
    model_type: str
    parse: Callable[[Fields], ModelConfig]
    layer_params: Callable[[ModelConfig, bool], dict[str, Parts]]
    experts: str = "mlp.experts."
    matrices: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    wide_params: frozenset[str] = frozenset()
    final_norm_bias: bool = False
    ignores: Callable[[ModelConfig, str], bool] = lambda config, name: False
    aliases: tuple[str, ...] = ()


def attention_params(config: ModelConfig, *, output_bias: bool) -> dict[str, Parts]:
    """Norms and projections of grouped-query attention, without norms of q and k. output_bias:
    o_proj has a bias too where q, k and v have one."""
    hidden, head_dim = config.hidden_size, config.head_dim
    queries, keys = config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim
    heads = (("q", queries), ("k", keys), ("v", keys))
    params: dict[str, Parts] = {
        "input_norm": (("input_layernorm.weight", (hidden,)),),
        "qkv": tuple((f"self_attn.{h}_proj.weight", (n, hidden)) for h, n in heads),
        "o": (("self_attn.o_proj.weight", (hidden, queries)),),
        "post_norm": (("post_attention_layernorm.weight", (hidden,)),),
    }
    if config.attention_bias:
        params["qkv_bias"] = tuple((f"self_attn.{h}_proj.bias", (n,)) for h, n in heads)
        if output_bias:
            params["o_bias"] = (("self_attn.o_proj.bias", (hidden,)),)
    return params


def feed_forward_params(
    config: ModelConfig, width: int, name: str = "mlp.", key: str = ""
) -> dict[str, Parts]:
    """gate, up and down of a gated feed-forward; key: in front of the parameters' names."""
    hidden = config.hidden_size
    params: dict[str, Parts] = {
        f"{key}gate_up": (
            (f"{name}gate_proj.weight", (width, hidden)),
            (f"{name}up_proj.weight", (width, hidden)),
        ),
        f"{key}down": ((f"{name}down_proj.weight", (hidden, width)),),
    }
    if config.mlp_bias:
        params[f"{key}gate_up_bias"] = (
            (f"{name}gate_proj.bias", (width,)),
            (f"{name}up_proj.bias", (width,)),
        )
        params[f"{key}down_bias"] = ((f"{name}down_proj.bias", (hidden,)),)
    return params


def router_params(config: ModelConfig, name: str = "mlp.gate.weight") -> dict[str, Parts]:
    return {"router": ((name, (config.num_experts, config.hidden_size)),)}

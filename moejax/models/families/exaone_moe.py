"""K-EXAONE: layers with a sliding window rotate q and k, and layers that see all tokens do not;
norms on heads of q and k; the experts of DeepSeek-V3."""

from __future__ import annotations

from moejax.models.family import (
    Family,
    Fields,
    Parts,
    attention_params,
    corrected_moe_params,
    feed_forward_params,
    head_norm_params,
)
from moejax.models.model_config import ModelConfig


def parse(fields: Fields) -> ModelConfig:
    """ExaoneMoeConfig's fields and defaults."""
    layers = fields.integer("num_hidden_layers", 32)
    window = fields.optional_integer("sliding_window", 4096)
    sliding = _sliding_layers(fields, layers, window)
    width = fields.integer("moe_intermediate_size", 1024)
    return ModelConfig(
        architecture=FAMILY.architecture,
        num_hidden_layers=layers,
        **fields.heads(32, 32, hidden=4096),
        intermediate_size=fields.integer("intermediate_size", 16384),
        moe_intermediate_size=width,
        **fields.routing(fields.integer("num_experts", 64, least=0), 8),
        moe_layers=fields.sparse_layers(layers, 1),
        shared_width=width * fields.integer("num_shared_experts", 1, least=0),
        **fields.corrected_routing(normalize=True, scale=2.5),
        attention_bias=False,
        sliding_window=window if any(sliding) else None,
        window_layers=sliding if any(sliding) else None,
        rope_layers=None if window is None or all(sliding) else sliding,
        **fields.decoder(eps=1e-5, max_positions=2048, vocabulary=102400, eos=53),
    )


def _sliding_layers(fields: Fields, layers: int, window: int | None) -> tuple[bool, ...]:
    """For each layer, whether it has the window."""
    pattern = fields.raw.get("sliding_window_pattern", 4)
    if isinstance(pattern, str):
        if not pattern or set(pattern) - {"L", "G"}:
            raise fields.refuse(
                f"sliding_window_pattern must be a number or letters L and G, not {pattern!r}"
            )
        default = [pattern[i % len(pattern)] == "L" for i in range(layers)]
        default[-1] = False
    else:
        every = fields.optional_integer("sliding_window_pattern", 4)
        default = [every is not None and (i + 1) % every != 0 for i in range(layers)]
    sliding = fields.layer_types([window is not None and local for local in default])
    if any(sliding) and window is None:
        raise fields.refuse("layers with sliding_attention need a sliding_window")
    return sliding


def layer_params(config: ModelConfig, moe: bool) -> dict[str, Parts]:
    params = attention_params(config, output_bias=False) | head_norm_params(config)
    if not moe:
        return params | feed_forward_params(config, config.intermediate_size)
    correction: Parts = (("mlp.e_score_correction_bias", (config.num_experts,)),)
    return params | corrected_moe_params(config) | {"correction": correction}


def _of_later_tokens(config: ModelConfig, name: str) -> bool:
    return name.startswith("mtp.")


FAMILY = Family(
    "ExaoneMoeForCausalLM",
    "exaone_moe",
    parse,
    layer_params,
    wide_params=frozenset({"correction"}),
    ignores=_of_later_tokens,
    aliases=("ExaoneMoEForCausalLM",),
)

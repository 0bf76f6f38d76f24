"""The model's config.json, read without transformers: every field honoured or refused by name."""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

from moejax.checkpoints.directory import checkpoint_directory, read_json
from moejax.errors import UserError
from moejax.models.rope import Rope, parse_rope

ARCHITECTURES = {"qwen3_moe": "Qwen3MoeForCausalLM"}
"""model_type → the architecture that this release runs."""

ACTIVATIONS = ("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu")
DTYPES = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class Run:
    """Consecutive layers of one kind: `count` layers from layer `start`, all MoE or all dense."""

    moe: bool
    start: int
    count: int


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The numbers that define the computation, under transformers' names.

    moe_layers: per layer, whether its MLP is a mixture of experts. hidden_act: one of ACTIVATIONS
    ("swish" is read as "silu"). sliding_window: tokens each query sees, itself included, in every
    layer; None: all. dtype: the checkpoint's, one of DTYPES; None where the config does not say
    (`load_checkpoint` fills it in from the weights). eos_token_ids: empty if there is none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    norm_topk_prob: bool
    moe_layers: tuple[bool, ...]
    attention_bias: bool
    hidden_act: str
    rms_norm_eps: float
    rope: Rope
    sliding_window: int | None
    tie_word_embeddings: bool
    max_position_embeddings: int
    dtype: str | None
    eos_token_ids: tuple[int, ...]

    @property
    def runs(self) -> tuple[Run, ...]:
        """The layers as runs of equal layers, in order."""
        starts = [
            i for i, moe in enumerate(self.moe_layers) if i == 0 or moe != self.moe_layers[i - 1]
        ]
        ends = [*starts[1:], len(self.moe_layers)]
        return tuple(Run(self.moe_layers[s], s, e - s) for s, e in zip(starts, ends, strict=True))


def load_config(directory: str | os.PathLike) -> ModelConfig:
    """Reads config.json, and the end-of-sequence ids of generation_config.json where it has any.

    directory: a local Hugging Face checkpoint. Raises UserError naming the file and the field.
    """
    path = checkpoint_directory(directory)
    config = parse_config(read_json(path / "config.json"), str(path / "config.json"))
    generation = path / "generation_config.json"
    if generation.exists():
        ids = _token_ids(read_json(generation).get("eos_token_id"), str(generation))
        if ids:
            config = dataclasses.replace(config, eos_token_ids=ids)
    return config


def parse_config(raw: dict, source: str = "config.json") -> ModelConfig:
    """The ModelConfig of a parsed config.json, with Qwen3MoeConfig's defaults for absent keys.

    Accepts the older key names (torch_dtype, rope_theta, rope_scaling, num_experts) and those of
    transformers 5 (dtype, rope_parameters, num_local_experts). Keys that transformers does not read
    for this model are ignored; those that would change the computation are refused. source: the
    file's name, for messages. Raises UserError.
    """
    if not isinstance(raw, dict):
        raise UserError(f"{source}: expected a JSON object, found {type(raw).__name__}")
    architecture = _architecture(raw, source)
    _refuse_quantization(raw, source)
    _refuse_other_computations(raw, source)

    def integer(key: str, default: int, least: int = 1) -> int:
        value = raw.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise UserError(f"{source}: {key} must be an integer, not {value!r}")
        if value < least:
            raise UserError(f"{source}: {key} must be at least {least}, not {value}")
        return value

    def flag(key: str, default: bool) -> bool:
        value = raw.get(key, default)
        if not isinstance(value, bool):
            raise UserError(f"{source}: {key} must be true or false, not {value!r}")
        return value

    heads = integer("num_attention_heads", 32)
    kv_heads = integer("num_key_value_heads", 4)
    hidden = integer("hidden_size", 2048)
    if heads % kv_heads:
        raise UserError(
            f"{source}: num_attention_heads ({heads}) must be a multiple of "
            f"num_key_value_heads ({kv_heads})"
        )
    derived = raw.get("head_dim") is None
    head_dim = hidden // heads if derived else integer("head_dim", 0)
    if head_dim < 2 or head_dim % 2:
        origin = f", hidden_size {hidden} // num_attention_heads {heads}," if derived else ""
        raise UserError(f"{source}: head_dim{origin} must be even and positive, not {head_dim}")

    _alias(raw, "num_experts", "num_local_experts", source)
    experts = integer(
        "num_experts" if raw.get("num_experts") is not None else "num_local_experts", 128, least=0
    )
    top_k = integer("num_experts_per_tok", 8)
    moe_layers = _moe_layers(
        raw, integer("num_hidden_layers", 24), experts, integer("decoder_sparse_step", 1), source
    )
    if top_k > experts:
        raise UserError(f"{source}: num_experts_per_tok ({top_k}) exceeds num_experts ({experts})")

    eps = raw.get("rms_norm_eps", 1e-6)
    if isinstance(eps, bool) or not isinstance(eps, int | float) or not 0 <= eps < math.inf:
        raise UserError(f"{source}: rms_norm_eps must be a number from zero up, not {eps!r}")
    window = (
        integer("sliding_window", 4096)
        if (flag("use_sliding_window", False) and raw.get("sliding_window", 4096) is not None)
        else None
    )
    _check_layer_types(raw, len(moe_layers), window, source)
    max_positions = integer("max_position_embeddings", 32768)
    return ModelConfig(
        architecture=architecture,
        vocab_size=integer("vocab_size", 151936),
        hidden_size=hidden,
        num_hidden_layers=len(moe_layers),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=integer("intermediate_size", 6144),
        moe_intermediate_size=integer("moe_intermediate_size", 768),
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=flag("norm_topk_prob", False),
        moe_layers=moe_layers,
        attention_bias=flag("attention_bias", False),
        hidden_act=_activation(raw, source),
        rms_norm_eps=float(eps),
        rope=parse_rope(raw, max_positions, source),
        sliding_window=window,
        tie_word_embeddings=flag("tie_word_embeddings", False),
        max_position_embeddings=max_positions,
        dtype=_dtype(raw, source),
        eos_token_ids=_token_ids(raw.get("eos_token_id"), source),
    )


def _alias(raw: dict, first: str, second: str, source: str) -> Any:
    """The value under either name; UserError if they differ."""
    values = {key: raw[key] for key in (first, second) if raw.get(key) is not None}
    if len(values) == 2 and values[first] != values[second]:
        raise UserError(
            f"{source}: {first} ({values[first]!r}) contradicts {second} ({values[second]!r})"
        )
    return next(iter(values.values()), None)


def _architecture(raw: dict, source: str) -> str:
    supported = ", ".join(ARCHITECTURES.values())
    kind, names = raw.get("model_type"), raw.get("architectures")
    if names is not None and not (
        isinstance(names, list) and names and all(isinstance(n, str) for n in names)
    ):
        raise UserError(f"{source}: architectures must be a list of names, not {names!r}")
    if names is None and kind is None:
        raise UserError(
            f"{source}: names neither architectures nor model_type; supported: {supported}"
        )
    for found, known in ((names and names[0], ARCHITECTURES.values()), (kind, ARCHITECTURES)):
        if found is not None and (not isinstance(found, str) or found not in known):
            raise UserError(
                f"{source}: architecture {found!r} is not supported; supported: {supported}"
            )
    return names[0] if names else ARCHITECTURES[str(kind)]


def _refuse_quantization(raw: dict, source: str) -> None:
    for key in ("quantization_config", "compression_config"):
        table = raw.get(key)
        if table is None:
            continue
        method = (
            table.get("quant_method", "an unnamed method") if isinstance(table, dict) else table
        )
        raise UserError(
            f"{source}: {key}: the checkpoint is quantized with {method}, which is not "
            "supported; use the model's bfloat16, float16 or float32 checkpoint"
        )


def _refuse_other_computations(raw: dict, source: str) -> None:
    """Keys that transformers reads for any model and that change what this one computes."""
    for key, plain in (
        ("is_causal", True),
        ("is_encoder_decoder", False),
        ("attention_chunk_size", None),
        ("num_kv_shared_layers", 0),
        ("per_layer_config", {}),
    ):
        value = raw.get(key)
        if value is not None and value != plain:
            raise UserError(f"{source}: {key} {value!r} is not implemented")


def _moe_layers(raw: dict, layers: int, experts: int, step: int, source: str) -> tuple[bool, ...]:
    dense = raw.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list) or not all(type(i) is int for i in dense):
        raise UserError(f"{source}: mlp_only_layers must be a list of integers, not {dense!r}")
    moe = tuple(i not in dense and experts > 0 and (i + 1) % step == 0 for i in range(layers))
    if not any(moe):
        raise UserError(
            f"{source}: no layer has experts (num_experts {experts}, decoder_sparse_step "
            f"{step}, mlp_only_layers {dense}); moejax runs mixture-of-experts models"
        )
    return moe


def _check_layer_types(raw: dict, layers: int, window: int | None, source: str) -> None:
    types = raw.get("layer_types")
    expected = ["full_attention" if window is None else "sliding_attention"] * layers
    if types is not None and types != expected:
        raise UserError(
            f"{source}: layer_types must be {expected[0]!r} for each of {layers} layers, "
            "as the sliding window is here the same in every layer"
        )


def _activation(raw: dict, source: str) -> str:
    name = raw.get("hidden_act", "silu")
    name = "silu" if name == "swish" else name
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise UserError(
            f"{source}: hidden_act {name!r} is not supported; "
            f"supported: swish, {', '.join(ACTIVATIONS)}"
        )
    return name


def _dtype(raw: dict, source: str) -> str | None:
    name = _alias(raw, "dtype", "torch_dtype", source)
    if name is not None and (not isinstance(name, str) or name not in DTYPES):
        raise UserError(
            f"{source}: dtype {name!r} is not supported; supported: {', '.join(DTYPES)}"
        )
    return name


def _token_ids(value: Any, source: str) -> tuple[int, ...]:
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(type(i) is int and i >= 0 for i in ids):
        raise UserError(
            f"{source}: eos_token_id must be a token id or a list of them, not {value!r}"
        )
    return tuple(ids)

"""A small Mixture-of-Experts decoder in Flax NNX, with weights in Hugging Face's layout.

Its config.json is one of Qwen3-MoE (softmax routing and a balance loss) or of GLM-4-MoE (the
routing of DeepSeek-V3, arXiv:2412.19437, section 2.1.2: sigmoid scores, a shared expert, a
correction of the choice that is moved towards even loads instead of a large balance loss).

Every expert computes every token, and the router's weights, zero for experts not chosen, scale the
activations: with experts this small that is two large matrix products, faster on a GPU than moving
tokens to their experts. Nothing is dropped.
"""

from __future__ import annotations

import json
import pathlib
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from safetensors.flax import load_file, save_file

SEQUENCE_BALANCE = 1e-4
"""Factor of DeepSeek-V3's balance loss within each sequence."""
TENSORS = {
    "input_norm": "input_layernorm",
    "post_norm": "post_attention_layernorm",
    "q_norm": "self_attn.q_norm",
    "k_norm": "self_attn.k_norm",
    "q": "self_attn.q_proj",
    "k": "self_attn.k_proj",
    "v": "self_attn.v_proj",
    "o": "self_attn.o_proj",
    "router": "mlp.gate",
    "gate": "mlp.experts.{}.gate_proj",
    "up": "mlp.experts.{}.up_proj",
    "down": "mlp.experts.{}.down_proj",
    "shared_gate": "mlp.shared_experts.gate_proj",
    "shared_up": "mlp.shared_experts.up_proj",
    "shared_down": "mlp.shared_experts.down_proj",
}
"""Hugging Face's names of a layer's parameters; {}: the number of the expert."""
CORRECTION = "mlp.gate.e_score_correction_bias"

Config = dict[str, Any]
Attention = Literal["xla", "cudnn"]


class Correction(nnx.Variable):
    """Added to the scores for the choice of experts; moved by loads, not by gradients."""


class Decoder(nnx.Module):
    """Parameters of a decoder; those of layers are stacked over the layers, weights [in, out]."""

    def __init__(self, c: Config, rngs: nnx.Rngs):
        layers, hidden, width = c["num_hidden_layers"], c["hidden_size"], c["moe_intermediate_size"]
        experts = c.get("num_experts") or c["n_routed_experts"]
        heads, kv, head = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"]
        added = (2 * layers) ** -0.5  # what goes to the residual starts small

        def matrix(*shape: int, factor: float = 1.0) -> nnx.Param:
            values = jax.random.normal(rngs.params(), (layers, *shape))
            return nnx.Param(values * (factor * shape[-2] ** -0.5))

        def ones(*shape: int) -> nnx.Param:
            return nnx.Param(jnp.ones(shape))

        self.embed = nnx.Param(0.05 * jax.random.normal(rngs.params(), (c["vocab_size"], hidden)))
        self.norm = ones(hidden)
        parts = {
            "input_norm": ones(layers, hidden),
            "post_norm": ones(layers, hidden),
            "q_norm": ones(layers, head),
            "k_norm": ones(layers, head),
            "q": matrix(hidden, heads * head),
            "k": matrix(hidden, kv * head),
            "v": matrix(hidden, kv * head),
            "o": matrix(heads * head, hidden, factor=added),
            "router": matrix(hidden, experts),
            "gate": matrix(experts, hidden, width),
            "up": matrix(experts, hidden, width),
            "down": matrix(experts, width, hidden, factor=added),
        }
        if shared := c.get("n_shared_experts", 0) * width:
            parts["shared_gate"] = matrix(hidden, shared)
            parts["shared_up"] = matrix(hidden, shared)
            parts["shared_down"] = matrix(shared, hidden, factor=added)
        self.layers = nnx.Dict(parts)
        self.correction = Correction(jnp.zeros((layers, experts)))


class Routing(NamedTuple):
    """Of one layer: the balance loss and the share of tokens that chose each expert, [E]."""

    balance: jax.Array
    load: jax.Array


def forward(
    c: Config, model: Decoder, tokens: jax.Array, attention: Attention = "xla"
) -> tuple[jax.Array, Routing]:
    """The logits, float32[B, T, V], and the routing of each layer.

    tokens: int[B, T]. attention: which program computes it.
    """
    eps, embed = c["rms_norm_eps"], model.embed[...]

    @jax.checkpoint  # only x is kept for gradients: the rest costs more to write than to compute
    def layer(x, stacked):
        p, correction = stacked
        x = x + attend(c, p, rms_norm(x, p["input_norm"], eps), attention)
        normed = rms_norm(x, p["post_norm"], eps)
        weights, routing = route(c, p["router"], correction, normed)
        return x + mix_experts(p, normed, weights), routing

    params = {name: value[...] for name, value in model.layers.items()}
    x, routing = lax.scan(layer, embed[tokens], (params, model.correction[...]))
    x = rms_norm(x, model.norm[...], eps)
    return jnp.einsum("btd,vd->btv", x, embed, preferred_element_type=jnp.float32), routing


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """x over the root of the mean square of its last axis, times weight; sums in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * weight).astype(x.dtype)


def rotate(x: jax.Array, theta: float) -> jax.Array:
    """x [B, T, heads, width] rotated by position, halves as pairs."""
    width = x.shape[-1]
    frequency = theta ** (-jnp.arange(0, width, 2) / width)
    angle = (jnp.arange(x.shape[1])[:, None] * frequency)[:, None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attend(c: Config, p: dict[str, jax.Array], x: jax.Array, attention: Attention) -> jax.Array:
    """Causal grouped-query attention of x [B, T, D]."""
    batch, tokens, _ = x.shape
    eps, theta = c["rms_norm_eps"], c["rope_theta"]
    q, k, v = ((x @ p[name]).reshape(batch, tokens, -1, c["head_dim"]) for name in "qkv")
    q = rotate(rms_norm(q, p["q_norm"], eps), theta)
    k = rotate(rms_norm(k, p["k_norm"], eps), theta)
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention)
    return out.reshape(batch, tokens, -1) @ p["o"]


def route(
    c: Config, router: jax.Array, correction: jax.Array, x: jax.Array
) -> tuple[jax.Array, Routing]:
    """The weights of experts, [B, T, E], zero for those not chosen, and the routing.

    router: [D, E]. correction: [E]. x: [B, T, D].
    """
    top_k = c["num_experts_per_tok"]
    logits = jnp.einsum("btd,de->bte", x, router, preferred_element_type=jnp.float32)
    is_sigmoid = c["model_type"] == "glm4_moe"
    scores = jax.nn.sigmoid(logits) if is_sigmoid else jax.nn.softmax(logits)
    choice = lax.stop_gradient(scores) + correction
    chosen = choice >= lax.top_k(choice, top_k)[0][..., -1:]
    weights = jnp.where(chosen, scores, 0.0)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    chosen = chosen.astype(jnp.float32)
    if is_sigmoid:
        shares = scores / jnp.sum(scores, axis=-1, keepdims=True)
        by_row = jnp.sum(chosen.mean(axis=1) * shares.mean(axis=1), axis=-1)
        balance = SEQUENCE_BALANCE * jnp.mean(by_row)
        weights = weights * c["routed_scaling_factor"]
    else:
        by_expert = chosen.mean(axis=(0, 1)) * scores.mean(axis=(0, 1))
        balance = c["router_aux_loss_coef"] * jnp.sum(by_expert)
    experts = router.shape[-1]
    return weights.astype(x.dtype), Routing(balance * experts / top_k, chosen.mean(axis=(0, 1)))


def activate(gate: jax.Array, up: jax.Array, weights: jax.Array) -> jax.Array:
    """SwiGLU of gate and up [B, T, E, F] times weights [B, T, E]."""
    return jax.nn.silu(gate) * up * weights[..., None]


def mix_experts(p: dict[str, jax.Array], x: jax.Array, weights: jax.Array) -> jax.Array:
    """The sum of experts of x [B, T, D], each times its weight, and of the shared one."""
    gate = jnp.einsum("btd,edf->btef", x, p["gate"])
    up = jnp.einsum("btd,edf->btef", x, p["up"])
    y = jnp.einsum("btef,efd->btd", activate(gate, up, weights), p["down"])
    if "shared_gate" not in p:
        return y
    return y + (jax.nn.silu(x @ p["shared_gate"]) * (x @ p["shared_up"])) @ p["shared_down"]


def to_hugging_face(c: Config, model: Decoder) -> dict[str, jax.Array]:
    """Tensors by Hugging Face's names, [out, in], bfloat16 but for the correction."""

    def cast(x: jax.Array) -> jax.Array:
        return (x.T if x.ndim == 2 else x).astype(jnp.bfloat16)

    out = {
        "model.embed_tokens.weight": model.embed[...].astype(jnp.bfloat16),
        "model.norm.weight": cast(model.norm[...]),
    }
    for i in range(c["num_hidden_layers"]):
        for name, stacked in model.layers.items():
            value, pattern = stacked[...][i], f"model.layers.{i}.{TENSORS[name]}.weight"
            for expert, part in enumerate(value if "{}" in pattern else [value]):
                out[pattern.format(expert)] = cast(part)
        if c["model_type"] == "glm4_moe":
            out[f"model.layers.{i}.{CORRECTION}"] = model.correction[...][i]
    return out


def save_weights(directory: pathlib.Path, c: Config, model: Decoder, limit: float) -> None:
    """Writes safetensors files of at most `limit` bytes each, with an index if they are several."""
    tensors = to_hugging_face(c, model)
    shards: list[dict[str, jax.Array]] = [{}]
    size = 0
    for name, value in tensors.items():
        if size + value.nbytes > limit:
            shards.append({})
            size = 0
        shards[-1][name] = value
        size += value.nbytes
    if len(shards) == 1:
        save_file(shards[0], directory / "model.safetensors", metadata={"format": "pt"})
        return
    files = {}
    for number, shard in enumerate(shards, start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, directory / file, metadata={"format": "pt"})
        files |= dict.fromkeys(shard, file)
    total = sum(value.nbytes for value in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": files}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1) + "\n")


def load_weights(directory: pathlib.Path, c: Config, model: Decoder) -> None:
    """Puts the weights that save_weights wrote into the model, in float32."""
    tensors: dict[str, jax.Array] = {}
    for path in sorted(directory.glob("model*.safetensors")):
        tensors |= load_file(path)

    def read(name: str) -> jax.Array:
        value = tensors[f"{name}.weight"].astype(jnp.float32)
        return value.T if value.ndim == 2 else value

    layers = [f"model.layers.{i}" for i in range(c["num_hidden_layers"])]
    model.embed[...] = tensors["model.embed_tokens.weight"].astype(jnp.float32)
    model.norm[...] = read("model.norm")
    for name, stacked in model.layers.items():
        pattern = TENSORS[name]
        if "{}" in pattern:
            experts = range(stacked[...].shape[1])
            values = [
                jnp.stack([read(f"{layer}.{pattern.format(e)}") for e in experts])
                for layer in layers
            ]
        else:
            values = [read(f"{layer}.{pattern}") for layer in layers]
        stacked[...] = jnp.stack(values)
    if c["model_type"] == "glm4_moe":
        model.correction[...] = jnp.stack([tensors[f"{layer}.{CORRECTION}"] for layer in layers])

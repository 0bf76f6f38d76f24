"""Train a small Qwen3-MoE model with Flax NNX and optax, then evaluate its checkpoints by moejax.

    python examples/train_qwen3_moe.py README.md

The model knows nothing of moejax, and CheckpointManager saves it as any training program would.
moejax/checkpoints/foreign/name_maps/nnx_qwen3_moe.yaml says which of its leaves is which tensor.
"""

from __future__ import annotations

import json
import pathlib
import sys
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 256,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "moe_intermediate_size": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 256,
}


class Attention(nnx.Module):
    """Grouped-query attention with norms of q and k and rotary positions, causal."""

    def __init__(self, c: dict, rngs: nnx.Rngs):
        self.heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.width, self.theta = c["head_dim"], c["rope_theta"]
        rows = (self.heads + 2 * self.kv_heads) * self.width
        self.qkv = nnx.Linear(c["hidden_size"], rows, use_bias=False, rngs=rngs)
        self.q_norm = nnx.RMSNorm(self.width, epsilon=c["rms_norm_eps"], rngs=rngs)
        self.k_norm = nnx.RMSNorm(self.width, epsilon=c["rms_norm_eps"], rngs=rngs)
        self.out = nnx.Linear(self.heads * self.width, c["hidden_size"], use_bias=False, rngs=rngs)

    def rotated(self, x: jax.Array) -> jax.Array:
        """x [B, T, heads, width] rotated by position, halves as pairs."""
        frequency = self.theta ** (-jnp.arange(0, self.width, 2) / self.width)
        angle = (jnp.arange(x.shape[1])[:, None] * frequency)[:, None, :]
        a, b = jnp.split(x, 2, axis=-1)
        cos, sin = jnp.cos(angle), jnp.sin(angle)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    def __call__(self, x: jax.Array) -> jax.Array:
        batch, tokens, _ = x.shape
        at = np.cumsum([self.heads, self.kv_heads])
        parts = self.qkv(x).reshape(batch, tokens, -1, self.width)
        q, k, v = jnp.split(parts, at, axis=2)
        q, k = self.rotated(self.q_norm(q)), self.rotated(self.k_norm(k))
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return self.out(out.reshape(batch, tokens, -1))


class Experts(nnx.Module):
    """A mixture of experts in which every expert computes every token."""

    def __init__(self, c: dict, rngs: nnx.Rngs):
        hidden, width, count = c["hidden_size"], c["moe_intermediate_size"], c["num_experts"]
        self.top_k = c["num_experts_per_tok"]
        self.router = nnx.Linear(hidden, count, use_bias=False, rngs=rngs)
        init = nnx.initializers.lecun_normal(batch_axis=0)
        self.gate_up = nnx.Param(init(rngs.params(), (count, hidden, 2 * width)))
        self.down = nnx.Param(init(rngs.params(), (count, width, hidden)))

    def __call__(self, x: jax.Array) -> jax.Array:
        weights, chosen = jax.lax.top_k(jax.nn.softmax(self.router(x)), self.top_k)
        weights = weights / weights.sum(axis=-1, keepdims=True)
        share = jnp.sum(jax.nn.one_hot(chosen, self.down.shape[0]) * weights[..., None], axis=-2)
        gate, up = jnp.split(jnp.einsum("btd,edf->btef", x, self.gate_up[...]), 2, axis=-1)
        y = jnp.einsum("btef,efd->bted", jax.nn.silu(gate) * up, self.down[...])
        return jnp.einsum("bted,bte->btd", y, share)


class Layer(nnx.Module):
    """Attention and experts, each with its norm and a residual."""

    def __init__(self, c: dict, rngs: nnx.Rngs):
        self.input_norm = nnx.RMSNorm(c["hidden_size"], epsilon=c["rms_norm_eps"], rngs=rngs)
        self.attention = Attention(c, rngs)
        self.post_norm = nnx.RMSNorm(c["hidden_size"], epsilon=c["rms_norm_eps"], rngs=rngs)
        self.moe = Experts(c, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.attention(self.input_norm(x))
        return x + self.moe(self.post_norm(x))


class Qwen3Moe(nnx.Module):
    """tokens int32[B, T] → logits float32[B, T, V]."""

    def __init__(self, c: dict, rngs: nnx.Rngs):
        self.embed = nnx.Embed(c["vocab_size"], c["hidden_size"], rngs=rngs)
        self.layers = nnx.List([Layer(c, rngs) for _ in range(c["num_hidden_layers"])])
        self.norm = nnx.RMSNorm(c["hidden_size"], epsilon=c["rms_norm_eps"], rngs=rngs)
        self.lm_head = nnx.Linear(c["hidden_size"], c["vocab_size"], use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def loss(model: Qwen3Moe, tokens: jax.Array) -> jax.Array:
    """Mean −log p of each token but the first of its row, given those before it."""
    logits = model(tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


@nnx.jit
def train_step(model: Qwen3Moe, optimizer: nnx.Optimizer, tokens: jax.Array) -> None:
    """One step of AdamW on tokens int32[B, T]."""
    optimizer.update(model, nnx.grad(loss)(model, tokens))


def train(
    directory: pathlib.Path, data: bytes, held_out: jax.Array, steps: int = 60, every: int = 30
) -> dict[int, float]:
    """Trains on bytes and saves model and optimizer every few steps, with the loss on held_out
    int32[B, T] as metric. The loss by step."""
    model = Qwen3Moe(CONFIG, nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(1e-2), wrt=nnx.Param)
    evaluate, rng, text = nnx.jit(loss), np.random.default_rng(0), np.frombuffer(data, np.uint8)
    # Orbax keeps metrics only where a function says which is best.
    options = ocp.CheckpointManagerOptions(best_fn=lambda m: m["loss"], best_mode="min")
    losses = {}
    with ocp.CheckpointManager(directory, options=options) as manager:
        for step in range(1, steps + 1):
            first = rng.integers(0, len(text) - 65, size=8)
            rows = jnp.asarray(np.stack([text[i : i + 65] for i in first]), jnp.int32)
            train_step(model, optimizer, rows)
            if step % every == 0:
                losses[step] = float(evaluate(model, held_out))
                state = {"model": nnx.state(model), "optimizer": nnx.state(optimizer)}
                arguments = ocp.args.StandardSave(state)
                manager.save(step, args=arguments, metrics={"loss": losses[step]})
    (directory / "config.json").write_text(json.dumps(CONFIG))
    return losses


if __name__ == "__main__":
    from moejax import LLM

    if len(sys.argv) != 2 or not pathlib.Path(sys.argv[1]).is_file():
        sys.exit(__doc__)
    text = pathlib.Path(sys.argv[1]).read_bytes()
    end = np.frombuffer(text[-260:], np.uint8).reshape(4, 65).astype(np.int32)
    with tempfile.TemporaryDirectory() as folder:
        trained = train(pathlib.Path(folder), text[:-260], jnp.asarray(end))
        for step, expected in trained.items():
            with LLM(folder, step=step, name_map="nnx_qwen3_moe", progress=False) as llm:
                found = -np.mean(llm.score_batch(end.tolist()))
            print(f"step {step}: loss {found:.5f} by moejax, {expected:.5f} by its own program")

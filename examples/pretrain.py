"""Train a small Mixture-of-Experts model from token files, with Flax NNX, optax and Orbax.

    python examples/pretrain.py --model examples/models/demo --data DIR --mix story:1,chat:1 \\
        --seconds 600 --out OUT

The model is given by a config.json of Qwen3-MoE (softmax routing and a balance loss) or of GLM-4-MoE
(the routing of DeepSeek-V3, arXiv:2412.19437, section 2.1.2: sigmoid scores, a shared expert, a
correction of the choice that is moved towards even loads instead of a large balance loss). Its
tensors are saved in Hugging Face's layout, in bfloat16, so that moejax and transformers load them.

Every expert computes every token, and the router's weights, zero for experts not chosen, scale the
activations: with experts this small that is two large matrix products, faster on a GPU than moving
tokens to their experts. Nothing is dropped.

Token files are arrays `{domain}-{anything}.npy` (or .npy.xz) of uint16, documents that each end with
token 0. The folder is looked at again between dispatches, so another process may go on writing to
it. Each row starts at the start of a document.

The learning rate follows the clock: warmup, constant, then linear to zero over the last part of
--seconds. So a run ends when it must, at whatever speed the machine has.
"""

from __future__ import annotations

import argparse
import functools
import json
import lzma
import pathlib
import shutil
import signal
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from flax import nnx
from jax import lax

CORRECTION_STEP = 1e-3
"""How far the correction of an expert's choice moves a step, DeepSeek-V3's value."""
SEQUENCE_BALANCE = 1e-4
"""Factor of DeepSeek-V3's balance loss within each sequence."""


class Correction(nnx.Variable):
    """Added to the scores for the choice of experts; moved by loads, not by gradients."""


class Decoder(nnx.Module):
    """Parameters of a decoder; those of layers are stacked over the layers, weights [in, out]."""

    def __init__(self, c: dict[str, Any], rngs: nnx.Rngs):
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


def attend(c: dict[str, Any], p: dict[str, jax.Array], x: jax.Array, flash: bool) -> jax.Array:
    """Causal grouped-query attention of x [B, T, D]."""
    batch, tokens, _ = x.shape
    eps, theta = c["rms_norm_eps"], c["rope_theta"]
    q, k, v = ((x @ p[name]).reshape(batch, tokens, -1, c["head_dim"]) for name in "qkv")
    q = rotate(rms_norm(q, p["q_norm"], eps), theta)
    k = rotate(rms_norm(k, p["k_norm"], eps), theta)
    kind = "cudnn" if flash else None
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=kind)
    return out.reshape(batch, tokens, -1) @ p["o"]


def route(
    c: dict[str, Any], router: jax.Array, correction: jax.Array, x: jax.Array
) -> tuple[jax.Array, Routing]:
    """x [B, T, D] -> (weights [B, T, E], zero where an expert is not chosen; what training needs)."""
    top_k = c["num_experts_per_tok"]
    logits = jnp.einsum("btd,de->bte", x, router, preferred_element_type=jnp.float32)
    sigmoid = c["model_type"] == "glm4_moe"
    scores = jax.nn.sigmoid(logits) if sigmoid else jax.nn.softmax(logits)
    choice = lax.stop_gradient(scores) + correction
    chosen = choice >= lax.top_k(choice, top_k)[0][..., -1:]
    weights = jnp.where(chosen, scores, 0.0)
    weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    chosen = chosen.astype(jnp.float32)
    if sigmoid:
        shares = scores / jnp.sum(scores, axis=-1, keepdims=True)
        by_row = jnp.sum(chosen.mean(axis=1) * shares.mean(axis=1), axis=-1)
        balance = SEQUENCE_BALANCE * jnp.mean(by_row)
        weights = weights * c["routed_scaling_factor"]
    else:
        by_expert = chosen.mean(axis=(0, 1)) * scores.mean(axis=(0, 1))
        balance = c["router_aux_loss_coef"] * jnp.sum(by_expert)
    experts = router.shape[-1]
    return weights.astype(x.dtype), Routing(balance * experts / top_k, chosen.mean(axis=(0, 1)))


@jax.checkpoint
def activate(gate: jax.Array, up: jax.Array, weights: jax.Array) -> jax.Array:
    """[B, T, E, F] of each, weights [B, T, E]. Computed again for gradients, to save memory."""
    return jax.nn.silu(gate) * up * weights[..., None]


def experts_of(p: dict[str, jax.Array], x: jax.Array, weights: jax.Array) -> jax.Array:
    """Sum over experts of weight times gated feed-forward of x [B, T, D]."""
    gate = jnp.einsum("btd,edf->btef", x, p["gate"])
    up = jnp.einsum("btd,edf->btef", x, p["up"])
    y = jnp.einsum("btef,efd->btd", activate(gate, up, weights), p["down"])
    if "shared_gate" not in p:
        return y
    return y + (jax.nn.silu(x @ p["shared_gate"]) * (x @ p["shared_up"])) @ p["shared_down"]


def forward(
    c: dict[str, Any], model: Decoder, tokens: jax.Array, flash: bool = False
) -> tuple[jax.Array, Routing]:
    """tokens int[B, T] -> (logits float32[B, T, V], routing of each layer), in the dtype of the
    model's embedding. flash: attention by cuDNN."""
    eps, embed = c["rms_norm_eps"], model.embed[...]

    def layer(x, stacked):
        p, correction = stacked
        x = x + attend(c, p, rms_norm(x, p["input_norm"], eps), flash)
        normed = rms_norm(x, p["post_norm"], eps)
        weights, routing = route(c, p["router"], correction, normed)
        return x + experts_of(p, normed, weights), routing

    params = {name: value[...] for name, value in model.layers.items()}
    x, routing = lax.scan(layer, embed[tokens], (params, model.correction[...]))
    x = rms_norm(x, model.norm[...], eps)
    return jnp.einsum("btd,vd->btv", x, embed, preferred_element_type=jnp.float32), routing


def orthogonalize(x: jax.Array) -> jax.Array:
    """The nearest matrix with singular values near 1, of the last two axes: five Newton-Schulz steps
    of Muon (Keller Jordan, 2024)."""
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else jnp.swapaxes(x, -1, -2)
    x = x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)
    for _ in range(5):
        square = x @ jnp.swapaxes(x, -1, -2)
        x = a * x + (b * square + c * square @ square) @ x
    return x if wide else jnp.swapaxes(x, -1, -2)


def scale_by_muon(momentum: float = 0.95) -> optax.GradientTransformation:
    """Orthogonalized momentum with a root mean square of 0.2, that of AdamW's steps
    (arXiv:2502.16982), so that both share one learning rate."""

    def update(updates, state, params=None):
        del params
        state = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, state, updates)
        ahead = jax.tree.map(lambda m, g: momentum * m + (1 - momentum) * g, state, updates)
        scaled = jax.tree.map(lambda m: 0.2 * max(m.shape[-2:]) ** 0.5 * orthogonalize(m), ahead)
        return scaled, state

    return optax.GradientTransformation(lambda p: jax.tree.map(jnp.zeros_like, p), update)


def make_optimizer(kind: str) -> optax.GradientTransformation:
    """Steps of learning rate 1. Muon is for the layers' matrices, AdamW, at half the rate, for the
    rest."""
    adam = optax.scale_by_adam(b1=0.9, b2=0.95)

    def labels(params):
        def label(path, leaf):
            name = jax.tree_util.keystr(path)
            if leaf.ndim < 3 and "embed" not in name:
                return "norm"
            return kind if leaf.ndim >= 3 and "router" not in name else "adamw"

        return jax.tree_util.tree_map_with_path(label, params)

    decayed, half = optax.add_decayed_weights(0.1), optax.scale(0.5)
    kinds = {
        "norm": optax.chain(adam, half),
        "adamw": optax.chain(adam, decayed, half),
        "muon": optax.chain(scale_by_muon(), decayed),
    }
    return optax.chain(optax.clip_by_global_norm(1.0), optax.partition(kinds, labels))


class TrainState(NamedTuple):
    """What a step reads and writes; all of it is in a checkpoint."""

    params: Any
    correction: Any
    optimizer: Any
    step: jax.Array


def make_trainer(c: dict[str, Any], graph: Any, optimizer: Any, dtype: Any, flash: bool):
    """The jitted (state, rows uint16[steps, B, T + 1], rates float32[steps]) ->
    (state, losses [steps], loads [steps, L, E])."""

    def loss_of(params, correction, row):
        params = jax.tree.map(lambda x: x.astype(dtype), params)
        model = nnx.merge(graph, params, correction)
        tokens = row.astype(jnp.int32)
        logits, routing = forward(c, model, tokens[:, :-1], flash)
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()
        return loss + routing.balance.sum(), (loss, routing.load)

    def step(state, given):
        row, rate = given
        gradient = jax.grad(loss_of, has_aux=True)
        grads, (loss, load) = gradient(state.params, state.correction, row)
        updates, of_optimizer = optimizer.update(grads, state.optimizer, state.params)
        params = jax.tree.map(lambda p, u: p - rate * u, state.params, updates)
        correction = state.correction
        if c["model_type"] == "glm4_moe":
            towards = CORRECTION_STEP * jnp.sign(load.mean(axis=-1, keepdims=True) - load)
            correction = jax.tree.map(lambda b: b + towards, correction)
        return TrainState(params, correction, of_optimizer, state.step + 1), (loss, load)

    @functools.partial(jax.jit, donate_argnums=0)
    def run(state, rows, rates):
        state, (losses, loads) = lax.scan(step, state, (rows, rates))
        return state, losses, loads

    return run


class Rows:
    """Rows of tokens from the files of a folder, by the shares of their domains.

    mix: domain -> share.
    """

    def __init__(self, folders: list[pathlib.Path], mix: dict[str, float], length: int, seed: int):
        self.folders, self.length = folders, length
        self.shares = np.array(list(mix.values())) / sum(mix.values())
        self.files: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {name: [] for name in mix}
        self.seen: set[pathlib.Path] = set()
        self.random = np.random.default_rng(seed)

    def look(self) -> None:
        """Reads files that are new."""
        for folder in self.folders:
            for path in sorted([*folder.glob("*.npy"), *folder.glob("*.npy.xz")]):
                domain = path.name.split("-")[0]
                if path in self.seen or domain not in self.files:
                    continue
                self.seen.add(path)
                opened = lzma.open(path) if path.suffix == ".xz" else path.open("rb")
                with opened as file:
                    tokens = np.load(file)
                starts = np.flatnonzero(tokens[: -self.length] == 0) + 1
                self.files[domain].append((tokens, starts))

    @property
    def tokens(self) -> int:
        return sum(len(tokens) for files in self.files.values() for tokens, _ in files)

    @property
    def is_ready(self) -> bool:
        return all(self.files.values())

    def draw(self, *shape: int) -> np.ndarray:
        """uint16[*shape, length]."""
        count = int(np.prod(shape))
        out = np.empty((count, self.length), np.uint16)
        domains = self.random.choice(len(self.shares), size=count, p=self.shares)
        for number, files in enumerate(self.files.values()):
            rows = np.flatnonzero(domains == number)
            sizes = np.array([len(starts) for _, starts in files], float)
            chosen = self.random.choice(len(files), size=len(rows), p=sizes / sizes.sum())
            for index, (tokens, starts) in enumerate(files):
                of_file = rows[chosen == index]
                first = starts[self.random.integers(0, len(starts), size=len(of_file))]
                out[of_file] = tokens[first[:, None] + np.arange(self.length)]
        return out.reshape(*shape, self.length)


def hugging_face_tensors(c: dict[str, Any], model: Decoder) -> dict[str, np.ndarray]:
    """Name -> tensor, [out, in], bfloat16 but for the correction."""
    glm = c["model_type"] == "glm4_moe"
    cast = lambda x: np.asarray(x).astype(ml_dtypes.bfloat16)  # noqa: E731
    out = {"model.embed_tokens.weight": cast(model.embed[...])}
    layers = {name: np.asarray(value[...]) for name, value in model.layers.items()}
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        out[f"{at}.input_layernorm.weight"] = cast(layers["input_norm"][i])
        out[f"{at}.post_attention_layernorm.weight"] = cast(layers["post_norm"][i])
        for name in ("q_norm", "k_norm"):
            out[f"{at}.self_attn.{name}.weight"] = cast(layers[name][i])
        for name in "qkvo":
            out[f"{at}.self_attn.{name}_proj.weight"] = cast(layers[name][i].T)
        out[f"{at}.mlp.gate.weight"] = cast(layers["router"][i].T)
        if glm:
            correction = np.asarray(model.correction[...][i], np.float32)
            out[f"{at}.mlp.gate.e_score_correction_bias"] = correction
        for name in ("gate", "up", "down"):
            if f"shared_{name}" in layers:
                shared = cast(layers[f"shared_{name}"][i].T)
                out[f"{at}.mlp.shared_experts.{name}_proj.weight"] = shared
            for e, matrix in enumerate(layers[name][i]):
                out[f"{at}.mlp.experts.{e}.{name}_proj.weight"] = cast(matrix.T)
    out["model.norm.weight"] = cast(model.norm[...])
    return out


def write_safetensors(path: pathlib.Path, tensors: dict[str, np.ndarray]) -> None:
    """One file of the safetensors format."""
    header, at = {}, 0
    for name, value in tensors.items():
        kind = "F32" if value.dtype == np.float32 else "BF16"
        header[name] = {
            "dtype": kind,
            "shape": list(value.shape),
            "data_offsets": [at, at + value.nbytes],
        }
        at += value.nbytes
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for value in tensors.values():
            file.write(np.ascontiguousarray(value).tobytes())


def save_weights(directory: pathlib.Path, c: dict[str, Any], model: Decoder, limit: float) -> None:
    """Writes safetensors files of at most `limit` bytes each, with an index where they are several."""
    tensors = hugging_face_tensors(c, model)
    files: list[dict[str, np.ndarray]] = [{}]
    size = 0
    for name, value in tensors.items():
        if size + value.nbytes > limit:
            files.append({})
            size = 0
        files[-1][name] = value
        size += value.nbytes
    if len(files) == 1:
        write_safetensors(directory / "model.safetensors", files[0])
        return
    names = [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    for name, part in zip(names, files, strict=True):
        write_safetensors(directory / name, part)
    index = {name: file for file, part in zip(names, files, strict=True) for name in part}
    total = sum(value.nbytes for value in tensors.values())
    content = {"metadata": {"total_size": total}, "weight_map": index}
    (directory / "model.safetensors.index.json").write_text(json.dumps(content))


def read_weights(directory: pathlib.Path, c: dict[str, Any], model: Decoder) -> None:
    """Puts the weights that save_weights wrote into the model."""
    tensors = {}
    for path in sorted(directory.glob("model*.safetensors")):
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        for name, about in json.loads(data[8 : 8 + size]).items():
            if name != "__metadata__":
                first, last = (8 + size + at for at in about["data_offsets"])
                kind = np.float32 if about["dtype"] == "F32" else ml_dtypes.bfloat16
                value = np.frombuffer(data[first:last], kind).reshape(about["shape"])
                tensors[name] = value.astype(np.float32)
    layers = range(c["num_hidden_layers"])
    experts = range(model.correction[...].shape[1])

    def stacked(pattern: str, transpose: bool = False) -> jax.Array:
        values = [tensors[f"model.layers.{i}.{pattern}"] for i in layers]
        return jnp.asarray(np.stack([value.T if transpose else value for value in values]))

    model.embed[...] = jnp.asarray(tensors["model.embed_tokens.weight"])
    model.norm[...] = jnp.asarray(tensors["model.norm.weight"])
    of_layers = model.layers
    of_layers["input_norm"][...] = stacked("input_layernorm.weight")
    of_layers["post_norm"][...] = stacked("post_attention_layernorm.weight")
    of_layers["router"][...] = stacked("mlp.gate.weight", True)
    for name in ("q_norm", "k_norm"):
        of_layers[name][...] = stacked(f"self_attn.{name}.weight")
    for name in "qkvo":
        of_layers[name][...] = stacked(f"self_attn.{name}_proj.weight", True)
    for name in ("gate", "up", "down"):
        parts = [stacked(f"mlp.experts.{e}.{name}_proj.weight", True) for e in experts]
        of_layers[name][...] = jnp.stack(parts, axis=1)
        if f"shared_{name}" in of_layers:
            shared = stacked(f"mlp.shared_experts.{name}_proj.weight", True)
            of_layers[f"shared_{name}"][...] = shared
    if c["model_type"] == "glm4_moe":
        model.correction[...] = stacked("mlp.gate.e_score_correction_bias")


def flash_works(c: dict[str, Any], dtype: Any) -> bool:
    """Whether cuDNN computes this attention and its gradient here."""
    if jax.default_backend() != "gpu":
        return False

    def total(q, k):
        out = jax.nn.dot_product_attention(q, k, k, is_causal=True, implementation="cudnn")
        return out.astype(jnp.float32).sum()

    heads = c["num_attention_heads"], c["num_key_value_heads"]
    q, k = (jnp.ones((2, 512, count, c["head_dim"]), dtype) for count in heads)
    try:
        jax.block_until_ready(jax.jit(jax.grad(total, argnums=(0, 1)))(q, k))
    except Exception as error:  # whatever cuDNN refuses, XLA computes
        print(f"no attention by cuDNN: {str(error)[:200]}", flush=True)
        return False
    return True


def rate_at(done: float, step: int, peak: float, decay: float) -> float:
    """done: the fraction of time that is over. Warmup over 100 steps, constant, linear to zero over
    the last `decay` of the time."""
    return peak * min(1.0, (step + 1) / 100) * min(1.0, max(0.0, 1 - done) / decay)


def read_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", type=pathlib.Path, required=True, help="folder of config.json")
    parser.add_argument("--data", type=pathlib.Path, nargs="+", required=True, help="folders")
    parser.add_argument("--mix", default="story:1", help="shares of domains: story:2,chat:1")
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--seconds", type=float, required=True, help="all in all, start included")
    parser.add_argument("--rows", type=int, default=64, help="sequences a step")
    parser.add_argument("--length", type=int, default=512, help="tokens a sequence")
    parser.add_argument("--dispatch", type=int, default=32, help="steps a dispatch")
    parser.add_argument("--rate", type=float, default=5e-3, help="peak learning rate")
    parser.add_argument("--decay", type=float, default=0.3, help="part of the time it falls")
    parser.add_argument("--optimizer", choices=("muon", "adamw"), default="muon")
    parser.add_argument("--dtype", default="", help="of products; bfloat16 on GPUs, else float32")
    parser.add_argument("--resume", type=pathlib.Path, help="a folder that --out wrote")
    parser.add_argument("--state", type=pathlib.Path, help="where Orbax keeps the training state")
    parser.add_argument("--limit", type=float, default=15e6, help="bytes a weights file")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    began = time.monotonic()
    args = read_arguments(arguments)
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    c = json.loads((args.model / "config.json").read_text())
    gpu = jax.default_backend() == "gpu"
    dtype = jnp.dtype(args.dtype or ("bfloat16" if gpu else "float32"))

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:7.1f} s  {text}", flush=True)

    mix = {name: float(share) for name, share in (p.split(":") for p in args.mix.split(","))}
    rows = Rows(args.data, mix, args.length + 1, args.seed + int(time.time()))
    flash = flash_works(c, dtype)
    say(f"{jax.devices()[0].device_kind}, {dtype}, attention by {'cuDNN' if flash else 'XLA'}")

    model = nnx.jit(lambda: Decoder(c, nnx.Rngs(args.seed)))()
    if args.resume:
        read_weights(args.resume, c, model)
    graph, params, correction = nnx.split(model, nnx.Param, Correction)
    say(f"{sum(x.size for x in jax.tree.leaves(params)):,} parameters")
    optimizer = make_optimizer(args.optimizer)
    of_optimizer = jax.jit(optimizer.init)(params)
    state = TrainState(params, correction, of_optimizer, jnp.zeros((), jnp.int32))
    if args.state and args.state.exists():
        state = restore_state(args.state, state)
        say(f"goes on from step {int(state.step)}")
    shape = args.dispatch, args.rows, args.length + 1
    where = (jax.ShapeDtypeStruct(shape, jnp.uint16), jax.ShapeDtypeStruct(shape[:1], jnp.float32))

    def compile_trainer(flash: bool):
        return make_trainer(c, graph, optimizer, dtype, flash).lower(state, *where).compile()

    try:
        compiled = compile_trainer(flash)
    except Exception as error:  # cuDNN can refuse within the model what it computed alone
        if not flash:
            raise
        say(f"attention by XLA after all: {str(error)[:200]}")
        compiled = compile_trainer(False)
    say("compiled")
    rows.look()
    while not rows.is_ready:
        time.sleep(0.5)
        rows.look()
    say(f"{rows.tokens / 1e6:.1f}M tokens of data")

    args.out.mkdir(parents=True, exist_ok=True)

    def save() -> None:
        merged = nnx.merge(graph, state.params, state.correction)
        save_weights(args.out, c, merged, args.limit)
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            if (args.model / name).exists() and args.model != args.out:
                shutil.copy(args.model / name, args.out / name)

    start, last_said, saved_half = time.monotonic(), 0.0, False
    step = first_step = int(state.step)
    per_step, pending = 0.0, None
    margin = 4.0  # saving
    while True:
        now = time.monotonic()
        left = args.seconds - margin - (now - began) - 2 * per_step * args.dispatch
        if stopped or left <= 0:
            break
        total = args.seconds - margin - (start - began)
        times = now - start + per_step * (args.dispatch + np.arange(args.dispatch))
        rates = [rate_at(t / total, step + i, args.rate, args.decay) for i, t in enumerate(times)]
        batch = rows.draw(args.dispatch, args.rows)
        state, losses, loads = compiled(state, batch, jnp.asarray(rates, jnp.float32))
        if pending is not None:
            jax.block_until_ready(pending)
            per_step = (time.monotonic() - start) / (step - first_step)
        pending, before = (losses, loads), pending
        step += args.dispatch
        now = time.monotonic()
        if before is not None and now - last_said > 3:
            last_said = now
            load = np.asarray(before[1][-1])
            rate = args.rows * args.length / per_step
            spread = load.max(axis=1).mean() / load.mean()
            say(
                f"step {step - args.dispatch}: loss {np.mean(before[0]):.4f}, "
                f"{rate:,.0f} tokens/s, rate {rates[0]:.1e}, fullest expert {spread:.2f} of even, "
                f"{rows.tokens / 1e6:.0f}M tokens of data"
            )
            rows.look()
        if not saved_half and now - start > total / 2:
            saved_half = True
            save()
            say("saved, half of the time")
    say(f"step {step}: loss {np.mean(pending[0]) if pending else float('nan'):.4f}, the last")
    save()
    say(f"{(step - first_step) * args.rows * args.length:,} tokens, saved to {args.out}")
    if args.state:
        save_state(args.state, state)


def save_state(directory: pathlib.Path, state: TrainState) -> None:
    """Replaces the checkpoint in the directory."""
    import orbax.checkpoint as ocp

    options = ocp.CheckpointManagerOptions(max_to_keep=1)
    with ocp.CheckpointManager(directory.absolute(), options=options) as manager:
        leaves = {str(i): x for i, x in enumerate(jax.tree.leaves(state))}
        manager.save(int(state.step), args=ocp.args.StandardSave(leaves))


def restore_state(directory: pathlib.Path, state: TrainState) -> TrainState:
    """The newest checkpoint in the directory, in the shape of `state`."""
    import orbax.checkpoint as ocp

    leaves, tree = jax.tree.flatten(state)
    like = {str(i): x for i, x in enumerate(leaves)}
    with ocp.CheckpointManager(directory.absolute()) as manager:
        found = manager.restore(manager.latest_step(), args=ocp.args.StandardRestore(like))
    return jax.tree.unflatten(tree, [found[str(i)] for i in range(len(leaves))])


if __name__ == "__main__":
    main(sys.argv[1:])

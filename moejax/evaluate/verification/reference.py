"""A model's layers in plain jax.numpy and float32, read from the checkpoint one layer at a time.

It shares with the engine what says what a model is (ModelConfig, the family's names of tensors) and
how a file is read, and nothing of what computes: no kernel, no page, no record, no fused product.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from host_offload.versions.encoders import NUMPY_DTYPES
from moejax.checkpoints.shards import TensorReader
from moejax.checkpoints.tensor_checkpoint import TensorCheckpoint
from moejax.checkpoints.tensors import ExpertPlace, layer_params, model_params
from moejax.errors import UserError
from moejax.models.attention.grouped_query import GatedAttention, GroupedQueryAttention
from moejax.models.attention.latent import LatentAttention
from moejax.models.families.hunyuan_v1_moe import LateNormAttention
from moejax.models.families.mistral4 import GrowingAttention
from moejax.models.model_config import ModelConfig
from moejax.models.rope import inverse_frequencies

KNOWN = frozenset(
    (
        *("input_norm", "post_norm", "qkv", "o", "q_norm", "k_norm", "late_q_norm", "late_k_norm"),
        *("q", "q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "kv_b", "router", "correction"),
        *("gate_up", "down", "shared_gate_up", "shared_down", "shared_gate", "sinks"),
        *("attention_out_norm", "mlp_out_norm", "attention_gate"),
    )
)
"""Parameters of a layer that are computed here, with their biases."""

KINDS = GroupedQueryAttention, GatedAttention, LateNormAttention, LatentAttention, GrowingAttention
"""Kinds of attention that are computed here."""

HAIR = 2.0**-9
"""How much of its router's values (the root of their mean square) a token may be short of a choice
that the engine made: the engine gives out the router's input as float16, which is 2^-11 off."""

HEAD_ROWS = 8192
"""Rows of the output head that are in memory at once."""

LATENT_EPS = 1e-6
_ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "gelu_pytorch_tanh": lambda x: jax.nn.gelu(x, approximate=True),
}


class Followed(NamedTuple):
    """What an engine's routers saw and chose, of all MoE layers."""

    inputs: np.ndarray
    """float32[L, T, D]."""
    ids: np.ndarray
    """int32[L, T, K]."""


class Tensors:
    """The checkpoint's tensors as float32, read when they are asked for."""

    def __init__(self, checkpoint: TensorCheckpoint, stack: contextlib.ExitStack):
        self._owner = {name: file for file in checkpoint.files for name in file.tensors}
        self._stack, self._readers = stack, dict[Any, TensorReader]()
        self.experts: dict[tuple[int, int | None, str], tuple[str, ExpertPlace]] = {}
        for name, place in checkpoint.places.items():
            if isinstance(place, ExpertPlace):
                for matrix in place.matrices:
                    self.experts[place.layer, place.expert, matrix] = name, place

    def read(self, name: str, first: int = 0, rows: int | None = None) -> np.ndarray:
        """Rows of a tensor, all of them by default."""
        file = self._owner[name]
        header = file.tensors[name]
        if not header.shape[1:]:
            return self._rows(name, None, 0, (1, *header.shape))[0]
        shape = header.shape if rows is None else (rows, *header.shape[1:])
        return self._rows(name, None, first, shape)

    def parts(self, prefix: str, parts: Sequence[tuple[str, tuple[int, ...]]]) -> np.ndarray:
        """The tensors of a parameter, one after the other."""
        return np.concatenate([self.read(prefix + name) for name, _ in parts])

    def expert(self, layer: int, expert: int, matrix: str) -> np.ndarray:
        """gate or up [F, D], or down [D, F], of an expert of a MoE layer, or its bias."""
        for key in ((layer, expert, matrix), (layer, None, matrix)):
            if key in self.experts:
                name, place = self.experts[key]
                break
        else:
            raise UserError(f"no tensor holds {matrix} of expert {expert} of MoE layer {layer}")
        rows = place.rows(place.matrices.index(matrix))
        if place.is_bias:
            return self._rows(name, None, expert, (1, place.shape[-1]))[0, rows]
        index = expert if place.expert is None else None
        found = self._rows(name, index, 0, place.shape if index is None else place.shape[1:])
        return (found.T if place.turned else found)[rows]

    def _rows(self, name: str, index: int | None, first: int, shape: tuple[int, ...]):
        file = self._owner[name]
        if file.path not in self._readers:
            self._readers[file.path] = self._stack.enter_context(file.open())
        values = np.empty(shape, NUMPY_DTYPES[file.tensors[name].dtype])
        self._readers[file.path].rows(name, index)(first, values.reshape(-1, shape[-1]))
        return values.astype(np.float32)


class Reference:
    """The model in float32. `config` is the engine's, with the rope of its longest sequence."""

    def __init__(self, config: ModelConfig, tensors: Tensors):
        unknown = {
            key
            for run in config.runs
            for key in layer_params(config, run.start)
            if key.removesuffix("_bias") not in KNOWN
        }
        if unknown:
            raise UserError(
                f"verify has no reference for {min(unknown)}, a parameter of {config.architecture}"
            )
        if config.layer_kinds is not None or type(config.attention) not in KINDS:
            raise UserError(
                f"verify has no reference for the attention of {config.architecture} (sequences of "
                f"up to {config.max_position_embeddings} tokens)"
            )
        several = config.layer_kinds is not None or config.parallel
        if config.routes_apart or several:
            raise UserError(
                "verify has no reference for layers of several kinds, or experts that read other "
                f"values than the router ({config.architecture})"
            )
        self.config, self._tensors = config, tensors
        frequencies, self._factor = inverse_frequencies(config.rope, config.rotary_dim)
        self._frequencies = jnp.asarray(frequencies)
        self._moe = np.cumsum(config.moe_layers) - 1

    def embed(self, ids: Sequence[int]) -> jax.Array:
        """[T, D]."""
        name = model_params(self.config)["embed"][0][0]
        rows = {token: self._tensors.read(name, token, 1)[0] for token in set(ids)}
        return jnp.stack([rows[token] for token in ids]) * self.config.embedding_multiplier

    def layers(
        self, x: jax.Array, count: int | None = None, followed: Followed | None = None
    ) -> Iterator[tuple[jax.Array, jax.Array, int]]:
        """Yields for each layer (x after it, the normalised input of its router or feed-forward,
        how many tokens the engine routed otherwise than by its router's input).

        - `count`: how many layers; None: all.
        - `followed`: the engine's routing, which is taken here too. Of two experts that are alike
          to a token, either may come first, and a state is compared with one of the same experts.
        """
        config = self.config
        for layer in range(config.num_hidden_layers if count is None else count):
            moe, prefix = config.moe_layers[layer], f"model.layers.{layer}."
            params = {
                key: jnp.asarray(self._tensors.parts(prefix, parts))
                for key, parts in layer_params(config, layer).items()
            }
            normed = self._norm(x, params, "input_norm")
            attend = (
                self._latent if isinstance(config.attention, LatentAttention) else self._grouped
            )
            heads = attend(normed, params, layer)
            if "attention_gate" in params:
                heads = heads * jax.nn.sigmoid(_linear(normed, params, "attention_gate"))
            out = self._norm(_linear(heads, params, "o"), params, "attention_out_norm")
            x, wrong = x + config.residual_multiplier * out, 0
            normed = self._norm(x, params, "post_norm")
            if moe:
                out, wrong = self._experts(normed, params, layer, followed)
            else:
                out = self._gated(normed, params, "")
            x = x + config.residual_multiplier * self._norm(out, params, "mlp_out_norm")
            yield x, normed, wrong

    def logits(self, x: jax.Array) -> np.ndarray:
        """float32[T, V] of x after the last layer."""
        config, names = self.config, model_params(self.config)
        params = {
            key: jnp.asarray(self._tensors.parts("", parts))
            for key, parts in names.items()
            if key.startswith("final_norm")
        }
        x = self._norm(x, params, "final_norm")
        head = names.get("lm_head", names["embed"])[0][0]
        pieces = []
        for first in range(0, config.vocab_size, HEAD_ROWS):
            rows = min(HEAD_ROWS, config.vocab_size - first)
            pieces.append(x @ self._tensors.read(head, first, rows).T)
        logits = np.concatenate([np.asarray(piece) for piece in pieces], axis=1)
        if "lm_head_bias" in names:
            logits = logits + self._tensors.parts("", names["lm_head_bias"])
        return logits / config.logits_scaling

    def logits_of(self, ids: Sequence[int], count: int | None = None) -> np.ndarray:
        """float32[T, V] of tokens, after `count` layers or all."""
        states = self.embed(ids)
        for after, *_ in self.layers(states, count):
            states = after
        return self.logits(states)

    # ---- parts of a layer

    def _norm(self, x, params, key, eps=None):
        """Normalised x; x itself in a model without that norm."""
        if key not in params:
            return x
        eps = self.config.rms_norm_eps if eps is None else eps
        if f"{key}_bias" in params:
            x = x - x.mean(-1, keepdims=True)
        x = x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps) * params[key]
        return x + params[f"{key}_bias"] if f"{key}_bias" in params else x

    def _rotate(self, heads, layer, interleave, width):
        """Turns the first `width` values of each head [T, H, hd] by its token's position."""
        if self.config.rope_layers is not None and not self.config.rope_layers[layer]:
            return heads
        turned, rest = heads[..., :width], heads[..., width:]
        angles = jnp.arange(len(heads))[:, None] * self._frequencies
        cos, sin = self._factor * jnp.cos(angles)[:, None], self._factor * jnp.sin(angles)[:, None]
        if interleave:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = jnp.split(turned, 2, axis=-1)
        first, second = first * cos - second * sin, second * cos + first * sin
        # Of interleaved pairs q and k have another order now, both the same one.
        return jnp.concatenate([first, second, rest], axis=-1)

    def _grouped(self, normed, params, layer):
        config = self.config
        width, queries = config.head_dim, config.num_attention_heads
        qkv = _linear(normed, params, "qkv")
        ends = queries * width, (queries + config.num_key_value_heads) * width
        heads = dict(zip("qkv", jnp.split(qkv, ends, axis=1), strict=True))
        for name in "qk":
            if f"{name}_norm" in params:
                heads[name] = self._norm_heads(heads[name], params, f"{name}_norm")
        if (most := config.clip_qkv) is not None:
            heads = {name: jnp.clip(value, -most, most) for name, value in heads.items()}
        heads = {name: value.reshape(len(value), -1, width) for name, value in heads.items()}
        for name in "qk":
            rotated = config.rotary_width or width
            turned = self._rotate(heads[name], layer, config.rope_interleave, rotated)
            if f"late_{name}_norm" in params:
                turned = self._norm(turned, params, f"late_{name}_norm")
            heads[name] = turned
        return self._attention(heads["q"], heads["k"], heads["v"], layer, params.get("sinks"))

    def _norm_heads(self, values, params, key):
        """Normalises over as many values as the norm has weights: a head, or all heads."""
        parts = values.reshape(len(values), -1, len(params[key]))
        return self._norm(parts, params, key).reshape(values.shape)

    def _latent(self, normed, params, layer):
        mla, heads = self.config.attention, self.config.num_attention_heads
        assert isinstance(mla, LatentAttention)
        nope, rank = mla.qk_nope_head_dim, mla.kv_lora_rank
        if "q" in params:
            q = _linear(normed, params, "q")
        else:
            compressed = self._norm(_linear(normed, params, "q_a"), params, "q_a_norm", LATENT_EPS)
            q = _linear(compressed, params, "q_b")
        q = mla.scale_queries(q.reshape(len(q), heads, -1), jnp.arange(len(q)))
        kv = _linear(normed, params, "kv_a")
        latent = self._norm(kv[:, :rank], params, "kv_a_norm", LATENT_EPS)
        kv_heads = _linear(latent, params, "kv_b").reshape(len(kv), heads, -1)
        turn = mla.qk_rope_head_dim
        q_rope = self._rotate(q[..., nope:], layer, mla.rope_interleave, turn)
        k_rope = self._rotate(kv[:, None, rank:], layer, mla.rope_interleave, turn)
        k_rope = jnp.broadcast_to(k_rope, (len(kv), heads, turn))
        q = jnp.concatenate([q[..., :nope], q_rope], axis=-1)
        k = jnp.concatenate([kv_heads[..., :nope], k_rope], axis=-1)
        return self._attention(q, k, kv_heads[..., nope:], layer)

    def _attention(self, q, k, v, layer, sinks=None):
        """[T, H·hd], of q [T, H, hd] and k and v [T, KH, hd], each token seeing the ones before.
        sinks: [H], of scores without key and value."""
        groups, scale = q.shape[1] // k.shape[1], self.config.attention_scale
        k, v = jnp.repeat(k, groups, axis=1), jnp.repeat(v, groups, axis=1)
        scores = jnp.einsum("thd,shd->hts", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
        back = jnp.arange(len(q))[:, None] - jnp.arange(len(q))
        window = self.config.windows[layer]
        seen = (back >= 0) & (back < (len(q) if window is None else window))
        scores = jnp.where(seen, scores, -jnp.inf)
        if sinks is not None:
            sink = jnp.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
            scores = jnp.concatenate([scores, sink], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., : len(k)]
        return jnp.einsum("hts,shd->thd", weights, v).reshape(len(q), -1)

    def _gated(self, normed, params, key):
        gate, up = jnp.split(_linear(normed, params, f"{key}gate_up"), 2, axis=-1)
        hidden = _ACTIVATIONS[self.config.hidden_act](gate) * up
        return _linear(hidden, params, f"{key}down")

    def _experts(self, normed, params, layer, followed=None):
        """(what the experts give, how many tokens the engine routed wrongly)."""
        moe, wrong = int(self._moe[layer]), 0
        logits = np.asarray(_linear(normed, params, "router"), np.float64)
        ids, weights = self._route(logits, params)
        if followed is not None and self.config.scoring_func != "sparsemixer":
            seen = np.asarray(_linear(followed.inputs[moe], params, "router"), np.float64)
            ids = followed.ids[moe]
            wrong, weights = self._wrong(seen, params, ids), self._weights(logits, ids)
        out = np.zeros(normed.shape, np.float32)
        for expert in np.unique(ids):
            rows, places = np.nonzero(ids == expert)
            y = self._expert(normed[rows], moe, int(expert))
            np.add.at(out, rows, np.asarray(y) * weights[rows, places][:, None])
        if "shared_down" not in params:
            return out, wrong
        shared = self._gated(normed, params, "shared_")
        if "shared_gate" in params:
            shared = shared * jax.nn.sigmoid(_linear(normed, params, "shared_gate"))
        return out + shared, wrong

    def _expert(self, x, moe, expert):
        def product(x, matrix):
            y = x @ self._tensors.expert(moe, expert, matrix).T
            bias = self.config.expert_bias
            return y + self._tensors.expert(moe, expert, f"{matrix}_bias") if bias else y

        gate, up, clamped = product(x, "gate"), product(x, "up"), self.config.swiglu
        if clamped is None:
            return product(_ACTIVATIONS[self.config.hidden_act](gate) * up, "down")
        gate, up = jnp.minimum(gate, clamped.limit), jnp.clip(up, -clamped.limit, clamped.limit)
        return product((up + 1) * gate * jax.nn.sigmoid(clamped.alpha * gate), "down")

    def _route(self, logits: np.ndarray, params) -> tuple[np.ndarray, np.ndarray]:
        """(experts, weights) [T, K] by the config's rule, without its residual multiplier."""
        if self.config.scoring_func == "sparsemixer":
            return _sparsemixer(logits, self.config.router_jitter_noise)
        choice, _ = self._choice(logits, params)
        ids = np.argsort(-choice, axis=1, kind="stable")[:, : self.config.num_experts_per_tok]
        return ids, self._weights(logits, ids)

    def _scores(self, logits: np.ndarray) -> np.ndarray:
        if self.config.scoring_func == "sigmoid":
            return 1 / (1 + np.exp(-logits))
        scores = np.exp(logits - logits.max(1, keepdims=True))
        return scores / scores.sum(1, keepdims=True)

    def _choice(self, logits: np.ndarray, params) -> tuple[np.ndarray, np.ndarray]:
        """(by what experts are chosen [T, E], by how much the groups that may be chosen from are
        better than the others [T])."""
        config, apart = self.config, np.full(len(logits), np.inf)
        choice = self._scores(logits)
        choice = choice + (np.ravel(params["correction"]) if "correction" in params else 0)
        if config.topk_group < config.n_group:
            groups = choice.reshape(len(choice), config.n_group, -1)
            best = np.sort(groups, axis=2)[..., -(1 if config.group_score == "max" else 2) :].sum(2)
            order = np.sort(best, axis=1)
            last = order[:, -config.topk_group, None]
            apart = np.diff(order, axis=1)[:, -config.topk_group]
            choice = np.where(np.repeat(best >= last, groups.shape[2], axis=1), choice, -np.inf)
        return choice, apart

    def _weights(self, logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
        weights = np.take_along_axis(self._scores(logits), ids, axis=1)
        if self.config.norm_topk_prob:
            weights /= np.maximum(weights.sum(1, keepdims=True), 1e-20)
        return (weights * self.config.routed_scaling_factor).astype(np.float32)

    def _wrong(self, logits: np.ndarray, params, ids: np.ndarray) -> int:
        """How many tokens have other experts than their best, by more than a hair, or one twice."""
        (choice, apart), rows = self._choice(logits, params), np.arange(len(ids))[:, None]
        chosen = choice[rows, ids].min(1)
        others = choice.copy()
        others[rows, ids] = -np.inf
        # How steep a score is in its logit: at most the score (softmax), or a quarter (sigmoid).
        steep = self._scores(logits)[rows, others.argmax(1)[:, None]][:, 0]
        steep = steep if self.config.scoring_func == "softmax" else 0.25
        hair = 2 * HAIR * np.sqrt((logits**2).mean(1)) * steep
        worse = (chosen < others.max(1) - hair) & (apart > 2 * hair)
        twice = (np.diff(np.sort(ids, axis=1), axis=1) == 0).any(1)
        return int((worse | twice).sum())


def _linear(x, params, key):
    y = x @ params[key].T
    return y + params[f"{key}_bias"] if f"{key}_bias" in params else y


def _sparsemixer(logits: np.ndarray, jitter: float) -> tuple[np.ndarray, np.ndarray]:
    """Phi-3.5-MoE's choice of two experts (arXiv:2409.12136)."""
    left, ids, weights = logits.copy(), [], []
    rows = np.arange(len(logits))
    for _ in range(2):
        best = left.argmax(1)
        top = left[rows, best][:, None]
        near = (top - logits) / np.maximum(np.abs(logits), top) <= 2 * jitter
        gates = np.where(near, np.exp(left - top), 0)
        ids.append(best)
        weights.append((gates[rows, best] / gates.sum(1)).astype(np.float32))
        left[rows, best] = -np.inf
    return np.stack(ids, 1), np.stack(weights, 1)

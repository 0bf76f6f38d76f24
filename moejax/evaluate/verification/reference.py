"""A model's layers in plain jax.numpy and float32, read from the checkpoint one layer at a time.

It shares with the engine what says what a model is (ModelConfig, the family's names of tensors) and
how a file is read, and nothing of what computes: no kernel, no page, no record, no fused product.
"""

from __future__ import annotations

import contextlib
import functools
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
from moejax.evaluate.verification import attention
from moejax.evaluate.verification.attention import Layer
from moejax.models.model_config import SECOND, ModelConfig

KNOWN = attention.PARAMETERS | {
    *("input_norm", "post_norm", "router", "correction", "gate_up", "down"),
    *("shared_gate_up", "shared_down", "shared_gate", "attention_out_norm", "mlp_out_norm"),
    *("router_norm", "shared_norm", "shared_out_norm", "experts_out_norm"),
    *("expert_scale", "layer_scale", "up", "shared_up", "latent_in", "latent_out"),
}
"""Parameters of a layer that are computed with here, and their biases."""

HAIR = 2.0**-9
"""How much of its router's values (the root of their mean square) a token may be short of a choice
that the engine made: the engine gives out the router's input as float16, which is 2^-11 off."""

HEAD_ROWS = 8192
"""Rows of the output head that are in memory at once."""

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

    def parts(self, parts: Sequence[tuple[str, tuple[int, ...]]]) -> np.ndarray:
        """The tensors of a parameter, one after the other."""
        return np.concatenate([self.read(name) for name, _ in parts])

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
            if key.removeprefix(SECOND).removesuffix("_bias") not in KNOWN
        }
        if unknown:
            raise UserError(
                f"verify has no reference for {min(unknown)}, a parameter of {config.architecture}"
            )
        if {type(kind) for kind in config.attention_kinds} - attention.KINDS.keys():
            raise UserError(f"verify has no reference for the attention of {config.architecture}")
        self.config, self._tensors = config, tensors
        self._moe = np.cumsum(config.moe_layers) - 1

    def embed(self, ids: Sequence[int]) -> jax.Array:
        """[T, D]."""
        name = model_params(self.config)["embed"][0][0]
        rows = {token: self._tensors.read(name, token, 1)[0] for token in set(ids)}
        return jnp.stack([rows[token] for token in ids]) * self.config.embedding_multiplier

    def layers(
        self,
        x: jax.Array,
        count: int | None = None,
        followed: Followed | None = None,
        dtype: str | None = None,
    ) -> Iterator[tuple[jax.Array, jax.Array, int]]:
        """Yields for each layer (x after it, what its router or feed-forward reads, how many
        tokens the engine routed otherwise than by what its router reads).

        - `x`: [T, D]; with a `dtype` [2·T, D], the same tokens twice. The second ones are rounded
          to it wherever an engine keeps values.
        - `count`: how many layers; None: all.
        - `followed`: the engine's routing, which is taken here too. Of two experts that are alike
          to a token, either may come first, and a state is compared with one of the same experts.
        """
        for number in range(self.config.num_hidden_layers if count is None else count):
            params = {
                key: jnp.asarray(self._tensors.parts(parts))
                for key, parts in layer_params(self.config, number).items()
            }
            exact = 0 if dtype is None else len(x) // 2
            layer = Layer(self.config.of_layer(number), params, number, dtype, exact)
            x, normed, wrong = self._layer(layer, x, followed)
            yield x, normed, wrong

    def _layer(self, layer: Layer, x, followed):
        if layer.config.second_attention:
            return self._two_halves(layer, x, followed)
        config, before = layer.config, x
        normed, wrong, factor = layer.norm(x, "input_norm"), 0, config.residual_multiplier
        of_experts, routed = 1.0, normed
        heads = layer.linear(attention.attend(layer, normed), "o")
        x = layer.rounded(x + factor * layer.norm(heads, "attention_out_norm"))
        if not config.parallel:
            before, routed = x, layer.norm(x, "post_norm")
            normed = routed
        if config.attention_only:
            return x, normed, wrong
        if not config.moe_layers[layer.number]:
            out = self._gated(layer, normed, "")
        else:
            if "router_norm" in layer.params:
                routed = layer.norm(before, "router_norm") * config.hidden_size**-0.5
            given = self._latent(layer, normed, "latent_in")
            out, wrong = self._experts(layer, given, routed, followed)
            out = self._latent(layer, out, "latent_out")
            out = layer.norm(out, "experts_out_norm")
            if "shared_down" in layer.params:
                out = out + self._shared(layer, before, normed)
            of_experts = config.mlp_multiplier
        x = x + factor * of_experts * layer.norm(out, "mlp_out_norm")
        return layer.rounded(x * layer.params.get("layer_scale", 1.0)), routed, wrong

    def _two_halves(self, layer: Layer, x, followed):
        """A layer of two attentions and two feed-forwards, whose experts read what the first
        feed-forward reads and are added at the end."""
        second = {
            key.removeprefix(SECOND): value
            for key, value in layer.params.items()
            if key.startswith(SECOND)
        }
        given = []
        own = layer.config, second, layer.number, layer.dtype, layer.exact
        for half in (layer, Layer(*own)):
            normed = half.norm(x, "input_norm")
            x = half.rounded(x + half.linear(attention.attend(half, normed), "o"))
            given.append(half.norm(x, "post_norm"))
            x = half.rounded(x + self._gated(half, given[-1], ""))
        out, wrong = self._experts(layer, given[0], given[0], followed)
        return layer.rounded(x + out), given[0], wrong

    def logits(self, x: jax.Array, dtype: str | None = None) -> np.ndarray:
        """float32[T, V] of x after the last layer. dtype: as in layers."""
        config, names = self.config, model_params(self.config)
        params = {
            key: jnp.asarray(self._tensors.parts(parts))
            for key, parts in names.items()
            if key.startswith("final_norm")
        }
        exact = 0 if dtype is None else len(x) // 2
        x = Layer(config, params, config.num_hidden_layers, dtype, exact).norm(x, "final_norm")
        head = names.get("lm_head", names["embed"])[0][0]
        pieces = []
        for first in range(0, config.vocab_size, HEAD_ROWS):
            rows = min(HEAD_ROWS, config.vocab_size - first)
            pieces.append(x @ self._tensors.read(head, first, rows).T)
        logits = np.concatenate([np.asarray(piece) for piece in pieces], axis=1)
        if "lm_head_bias" in names:
            logits = logits + self._tensors.parts(names["lm_head_bias"])
        logits, cap = logits / config.logits_scaling, config.logits_cap
        return logits if cap is None else cap * np.tanh(logits / cap)

    def logits_of(self, ids: Sequence[int], count: int | None = None) -> np.ndarray:
        """float32[T, V] of tokens, after `count` layers or all."""
        states = self.embed(ids)
        for after, *_ in self.layers(states, count):
            states = after
        return self.logits(states)

    # ---- parts of a layer

    @staticmethod
    def _latent(layer: Layer, x, name):
        """x, or its projection where experts are latent."""
        return layer.linear(x, name) if name in layer.params else x

    def _gated(self, layer: Layer, normed, key):
        if self.config.ungated:
            up = layer.linear(normed, f"{key}up")
            return layer.linear(layer.rounded(jax.nn.relu(up) ** 2), f"{key}down")
        gate, up = jnp.split(layer.linear(normed, f"{key}gate_up"), 2, axis=-1)
        hidden = layer.rounded(_ACTIVATIONS[self.config.hidden_act](gate) * up)
        return layer.linear(hidden, f"{key}down")

    def _shared(self, layer: Layer, x, normed):
        """What the expert of every token gives."""
        apart = "shared_norm" in layer.params
        read = layer.norm(x, "shared_norm") if apart else normed
        out = layer.norm(self._gated(layer, read, "shared_"), "shared_out_norm")
        if "shared_gate" in layer.params:
            out = out * jax.nn.sigmoid(layer.linear(normed, "shared_gate"))
        return out

    def _experts(self, layer: Layer, normed, routed, followed=None):
        """(what the experts give, how many tokens the engine routed wrongly). routed: what the
        router reads."""
        moe, wrong, params = int(self._moe[layer.number]), 0, layer.params
        logits = np.asarray(layer.linear(routed, "router"), np.float64)
        ids, weights = self._route(logits, params)
        if followed is not None:
            seen = np.asarray(layer.linear(followed.inputs[moe], "router"), np.float64)
            ids = self._with_zero_experts(followed.ids[moe], seen, params)
            wrong = self._wrong(seen, params, ids)
            ids = np.tile(ids, (len(logits) // len(ids), 1))
            weights = self._weights(logits, ids)
        if "expert_scale" in params:
            weights = weights * np.asarray(params["expert_scale"])[ids]
        out = np.zeros(normed.shape, np.float32)
        for expert in np.unique(ids):
            rows, places = np.nonzero(ids == expert)
            weight = weights[rows, places][:, None]
            keep = functools.partial(layer.rounded, exact=int(np.searchsorted(rows, layer.exact)))
            if expert >= self.config.num_experts:
                y = normed[rows] * weight
            elif self.config.weighted_inputs:
                y = self._expert(keep(normed[rows] * weight), moe, int(expert), keep)
            else:
                y = self._expert(normed[rows], moe, int(expert), keep) * weight
            np.add.at(out, rows, np.asarray(y))
        return layer.rounded(out), wrong

    def _with_zero_experts(self, ids: np.ndarray, logits: np.ndarray, params) -> np.ndarray:
        """The engine's choice, which does not say which of the zero_experts it has: its best."""
        first = self.config.num_experts
        if not self.config.zero_experts:
            return ids
        choice, _ = self._choice(logits, params)
        best = first + np.argsort(-choice[:, first:], axis=1, kind="stable")
        found, number = ids.copy(), np.cumsum(ids >= first, axis=1) - 1
        rows, places = np.nonzero(ids >= first)
        found[rows, places] = best[rows, number[rows, places]]
        return found

    def _expert(self, x, moe, expert, keep):
        """keep: rounds what goes into the product with down."""

        def product(x, matrix):
            y = x @ self._tensors.expert(moe, expert, matrix).T
            bias = self.config.expert_bias
            return y + self._tensors.expert(moe, expert, f"{matrix}_bias") if bias else y

        if self.config.ungated:
            return product(keep(jax.nn.relu(product(x, "up")) ** 2), "down")
        gate, up, clamped = product(x, "gate"), product(x, "up"), self.config.swiglu
        if clamped is None:
            return product(keep(_ACTIVATIONS[self.config.hidden_act](gate) * up), "down")
        gate, up = jnp.minimum(gate, clamped.limit), jnp.clip(up, -clamped.limit, clamped.limit)
        return product(keep((up + 1) * gate * jax.nn.sigmoid(clamped.alpha * gate)), "down")

    def _route(self, logits: np.ndarray, params) -> tuple[np.ndarray, np.ndarray]:
        """(experts, weights) [T, K] by the config's rule, without its residual multiplier."""
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
        if self.config.scoring_func == "sparsemixer":
            return _sparsemixer(logits, self.config.router_jitter_noise, ids)
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
        steep = 0.25 if self.config.scoring_func == "sigmoid" else steep
        hair = 2 * HAIR * np.sqrt((logits**2).mean(1)) * steep
        worse = (chosen < others.max(1) - hair) & (apart > 2 * hair)
        twice = (np.diff(np.sort(ids, axis=1), axis=1) == 0).any(1)
        return int((worse | twice).sum())


def _sparsemixer(logits: np.ndarray, jitter: float, ids: np.ndarray) -> np.ndarray:
    """Returns the weights of Phi-3.5-MoE's two experts, each chosen among those that are left
    (arXiv:2409.12136)."""
    left, weights, rows = logits.copy(), np.zeros(ids.shape, np.float32), np.arange(len(logits))
    order = np.argsort(-np.take_along_axis(logits, ids, axis=1), axis=1, kind="stable")
    for place in order.T:
        chosen = ids[rows, place]
        top = left[rows, chosen][:, None]
        near = (top - logits) / np.maximum(np.abs(logits), top) <= 2 * jitter
        gates = np.where(near, np.exp(left - top), 0)
        weights[rows, place] = gates[rows, chosen] / gates.sum(1)
        left[rows, chosen] = -np.inf
    return weights

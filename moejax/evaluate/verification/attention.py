"""A layer's attention in plain jax.numpy and float32, of every kind; see reference.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from moejax.models.attention.gated_delta import GatedDeltaNet, KimiDeltaAttention
from moejax.models.attention.grouped_query import (
    GatedAttention,
    GroupedQueryAttention,
    HeadGatedAttention,
)
from moejax.models.attention.indexed import IndexedAttention
from moejax.models.attention.latent import LatentAttention
from moejax.models.attention.mamba import Mamba, Mamba2, StateSpace
from moejax.models.attention.short_conv import ShortConvolution
from moejax.models.families.gemma4 import NormedValues
from moejax.models.families.hunyuan_v1_moe import LateNormAttention
from moejax.models.families.laguna import SoftplusGatedAttention
from moejax.models.families.llama4 import Llama4Attention
from moejax.models.families.longcat_flash import ScaledLatentAttention
from moejax.models.families.mistral4 import GrowingAttention
from moejax.models.model_config import ModelConfig
from moejax.models.rope import inverse_frequencies

LATENT_EPS = 1e-6
WIDE = frozenset({"router", "gate_up", "shared_gate_up", "shared_gate"})
"""Products whose results an engine keeps in float32."""
STATE_EPS = 1e-6
"""Epsilon of the norm of keys and queries before they reach the state of a gated delta net."""


class Layer:
    """A layer of the reference.

    - `config`: as this layer has it.
    - `params`: the layer's parameters but its routed experts, float32.
    - `number`: its place in the model.
    - `dtype`: what values of rows from `exact` on are rounded to; None: none are.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Mapping[str, jax.Array],
        number: int,
        dtype: str | None = None,
        exact: int = 0,
    ):
        self.config, self.params, self.number = config, params, number
        self.dtype, self.exact = dtype, exact

    def rounded(self, y, exact: int | None = None):
        """y as an engine of `dtype` keeps it. exact: rows of y that are not rounded."""
        if self.dtype is None:
            return y
        first = self.exact if exact is None else exact
        return jnp.concatenate([y[:first], y[first:].astype(self.dtype).astype(jnp.float32)])

    def linear(self, x, key):
        y = x @ self.params[key].T
        y = y + self.params[f"{key}_bias"] if f"{key}_bias" in self.params else y
        return y if key in WIDE else self.rounded(y)

    def norm(self, x, key, eps=None):
        """Normalised x; x itself in a model without that norm."""
        if key not in self.params:
            return x
        eps = self.config.rms_norm_eps if eps is None else eps
        if self.config.mean_norms or f"{key}_bias" in self.params:
            x = x - x.mean(-1, keepdims=True)
        # What layers with state normalise before their gate has whole weights.
        offset = self.config.unit_offset_norms and key != "state_norm"
        x = rms(x, eps) * (self.params[key] + offset)
        x = x + self.params[f"{key}_bias"] if f"{key}_bias" in self.params else x
        return self.rounded(x)

    @functools.cached_property
    def _rotation(self):
        return inverse_frequencies(self.config.rope, self.config.rotary_dim)

    def rotate(self, heads, interleave, width):
        """Turns the first `width` values of each head [T, H, hd] by its token's position."""
        rotated = self.config.rope_layers
        if rotated is not None and not rotated[self.number]:
            return heads
        frequencies, factor = self._rotation
        turned, rest = heads[..., :width], heads[..., width:]
        angles = jnp.arange(len(heads))[:, None] * jnp.asarray(frequencies)
        cos, sin = factor * jnp.cos(angles)[:, None], factor * jnp.sin(angles)[:, None]
        if interleave:
            first, second = turned[..., 0::2], turned[..., 1::2]
        else:
            first, second = jnp.split(turned, 2, axis=-1)
        first, second = first * cos - second * sin, second * cos + first * sin
        # Of interleaved pairs q and k have another order now, both the same one.
        return self.rounded(jnp.concatenate([first, second, rest], axis=-1))

    def seen(self, count):
        """bool[T, T]: whether a token attends to another one."""
        tokens, window = jnp.arange(count), self.config.windows[self.number]
        back = tokens[:, None] - tokens
        if window is None:
            return back >= 0
        if self.config.chunked_window:
            return (back >= 0) & (tokens[:, None] // window == tokens // window)
        return (back >= 0) & (back < window)

    def attention(self, q, k, v, chosen: jax.Array | bool = True):
        """[T, H·hd], of q [T, H, hd] and k and v [T, KH, hd]; `sinks` are scores without key and
        value. chosen: which of the tokens that are seen count."""
        groups, scale = q.shape[1] // k.shape[1], self.config.attention_scale
        k, v = jnp.repeat(k, groups, axis=1), jnp.repeat(v, groups, axis=1)
        scores = jnp.einsum("thd,shd->hts", q, k) * (q.shape[2] ** -0.5 if scale is None else scale)
        scores = jnp.where(self.seen(len(q)) & chosen, scores, -jnp.inf)
        if "sinks" in self.params:
            sink = jnp.broadcast_to(self.params["sinks"][:, None, None], (*scores.shape[:2], 1))
            scores = jnp.concatenate([scores, sink], axis=-1)
        weights = jax.nn.softmax(scores, axis=-1)[..., : len(k)]
        return jnp.einsum("hts,shd->thd", weights, v).reshape(len(q), -1)


def rms(x, eps):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps)


def attend(layer: Layer, normed: jax.Array) -> jax.Array:
    """The heads' outputs [T, H·hd], before the output projection, of normalised inputs [T, D]. Rows
    after the exact ones are the same tokens again."""
    if layer.exact:
        own = layer.config, layer.params, layer.number
        parts = Layer(*own), Layer(*own, layer.dtype)
        rows = jnp.split(normed, (layer.exact,))
        return jnp.concatenate([attend(*part) for part in zip(parts, rows, strict=True)])
    kind = layer.config.attention
    heads = KINDS[type(kind)](layer, normed)
    if "attention_gate" in layer.params:
        gate, soft = layer.linear(normed, "attention_gate"), type(kind) is SoftplusGatedAttention
        gate = jax.nn.softplus(gate) if soft else jax.nn.sigmoid(gate)
        heads = heads * jnp.repeat(gate, heads.shape[1] // gate.shape[1], axis=1)
    return layer.rounded(heads)


def _grouped(layer: Layer, normed, gated=False):
    config, kind, params = layer.config, layer.config.attention, layer.params
    width = config.head_dim
    queries, keys = config.num_attention_heads * width, config.num_key_value_heads * width
    projected = layer.linear(normed, "qkv")
    projected, gate = _head_gates(projected, config) if gated else (projected, None)
    q, k, v = jnp.split(projected, (queries, queries + keys), axis=1)
    values = isinstance(kind, NormedValues)
    heads = {"q": q, "k": k, "v": k if values and kind.keys_are_values else v}
    for name in "qk":
        if f"{name}_norm" in params:  # over a head, or over all of them
            parts = heads[name].reshape(len(q), -1, len(params[f"{name}_norm"]))
            heads[name] = layer.norm(parts, f"{name}_norm").reshape(len(q), -1)
    if (most := config.clip_qkv) is not None:
        heads = {name: jnp.clip(value, -most, most) for name, value in heads.items()}
    heads = {name: value.reshape(len(q), -1, width) for name, value in heads.items()}
    for name in "qk":
        turned = layer.rotate(heads[name], config.rope_interleave, config.rotary_width or width)
        heads[name] = layer.norm(turned, f"late_{name}_norm")
    if values:
        heads["v"] = rms(heads["v"], config.rms_norm_eps)
    if isinstance(kind, Llama4Attention):
        if kind.norms:
            heads |= {name: rms(heads[name], config.rms_norm_eps) for name in "qk"}
        steps = (jnp.arange(len(q)) + 1) // kind.length
        heads["q"] = heads["q"] * (1 + kind.growth * jnp.log1p(steps))[:, None, None]
    out = layer.attention(heads["q"], heads["k"], heads["v"])
    return out if gate is None else out * jax.nn.sigmoid(gate)


def _head_gated(layer: Layer, normed):
    return _grouped(layer, normed, gated=True)


def _head_gates(projected, config):
    """(q, k and v; the gates of the heads of q), where each head of q has its gate behind it."""
    both = 2 * config.num_attention_heads * config.head_dim
    heads = projected[:, :both].reshape(len(projected), -1, 2, config.head_dim)
    q, gate = (heads[:, :, i].reshape(len(projected), -1) for i in (0, 1))
    return jnp.concatenate([q, projected[:, both:]], axis=1), gate


def _latent(layer: Layer, normed):
    mla, heads, chosen = layer.config.attention, layer.config.num_attention_heads, True
    assert isinstance(mla, LatentAttention)
    nope, rank, turn = mla.qk_nope_head_dim, mla.kv_lora_rank, mla.qk_rope_head_dim
    if "q" in layer.params:
        q = layer.linear(normed, "q")
    else:
        compressed = layer.norm(layer.linear(normed, "q_a"), "q_a_norm", LATENT_EPS)
        q = layer.linear(compressed, "q_b")
        if isinstance(mla, IndexedAttention):
            chosen = _choice(layer, mla, normed, compressed)
    q = mla.scale_queries(q.reshape(len(q), heads, -1), jnp.arange(len(q)))
    kv = layer.linear(normed, "kv_a")
    latent = layer.norm(kv[:, :rank], "kv_a_norm", LATENT_EPS)
    if isinstance(mla, ScaledLatentAttention):
        latent = latent * mla.latent_factor
    kv_heads = layer.linear(latent, "kv_b").reshape(len(kv), heads, -1)
    q_rope = layer.rotate(q[..., nope:], mla.rope_interleave, turn)
    k_rope = layer.rotate(kv[:, None, rank:], mla.rope_interleave, turn)
    k_rope = jnp.broadcast_to(k_rope, (len(kv), heads, turn))
    q = jnp.concatenate([q[..., :nope], q_rope], axis=-1)
    k = jnp.concatenate([kv_heads[..., :nope], k_rope], axis=-1)
    return layer.attention(q, k, kv_heads[..., nope:], chosen)


def _choice(layer: Layer, kind: IndexedAttention, normed, compressed):
    """bool[T, T]: the tokens that the indexer chooses for each token."""
    count, width = len(normed), kind.index_head_dim
    if count <= kind.index_topk:
        return True
    q = layer.linear(compressed, "index_q").reshape(count, -1, width)
    k = layer.norm(layer.linear(normed, "index_k"), "index_k_norm", LATENT_EPS)[:, None]
    q, k = (layer.rotate(x, kind.index_interleave, kind.qk_rope_head_dim) for x in (q, k))
    weights = layer.linear(normed, "index_weights") * (kind.index_n_heads * width) ** -0.5
    alike = jax.nn.relu(jnp.einsum("thd,sd->ths", q, k[:, 0]))
    scores = jnp.where(layer.seen(count), jnp.einsum("th,ths->ts", weights, alike), -jnp.inf)
    places = jnp.argsort(jnp.argsort(-scores, axis=1, stable=True), axis=1)
    return places < kind.index_topk


def _convolved(x, weight):
    """Each column of x [T, N] as the sum of its last values times weights [N, 1, taps]."""
    taps = weight.shape[-1]
    past = jnp.pad(x, ((taps - 1, 0), (0, 0)))
    return sum(past[i : i + len(x)] * weight[:, 0, i] for i in range(taps))


def _short_conv(layer: Layer, normed):
    before, after, values = jnp.split(layer.linear(normed, "state_in"), 3, axis=1)
    return after * _convolved(before * values, layer.params["conv"])


def _gated_delta(layer: Layer, normed):
    """The recurrence of arXiv:2412.06464, equation 10, one token after the other."""
    net, count = layer.config.attention, len(normed)
    assert isinstance(net, GatedDeltaNet)
    keys, heads = net.linear_num_key_heads, net.linear_num_value_heads
    wide, high = net.linear_key_head_dim, net.linear_value_head_dim
    sizes = [keys * wide, keys * wide, heads * high, heads * high, heads, heads]
    projected = layer.linear(normed, "state_in")
    if net.by_key_head:  # two projections, each with all of a key head together
        first = sum(sizes[:4])
        of_head = [size // keys for size in sizes]
        parts = [
            *_split(projected[:, :first].reshape(count, keys, -1), of_head[:4]),
            *_split(projected[:, first:].reshape(count, keys, -1), of_head[4:]),
        ]
        q, k, v, gate, beta, decay = (part.reshape(count, -1) for part in parts)
    else:
        q, k, v, gate, beta, decay = _split(projected, sizes)
    mixed = jax.nn.silu(_convolved(jnp.concatenate([q, k, v], 1), layer.params["conv"]))
    q, k, v = _split(mixed, sizes[:3])
    a_log, steps = layer.params["a_log"], jax.nn.softplus(decay + layer.params["dt_bias"])
    fades = jnp.exp(-jnp.exp(a_log) * steps)[:, :, None]
    q, k = (x.reshape(count, keys, wide).repeat(heads // keys, axis=1) for x in (q, k))
    out = _delta_rule(q, k, v.reshape(count, heads, high), jax.nn.sigmoid(beta), fades)
    out = layer.norm(out, "state_norm") * jax.nn.silu(gate.reshape(out.shape))
    return out.reshape(count, -1)


def _kimi_delta(layer: Layer, normed):
    """The same with a decay for each value of a key (arXiv:2510.26692)."""
    kind, count = layer.config.attention, len(normed)
    assert isinstance(kind, KimiDeltaAttention)
    heads, width = kind.heads, kind.width
    sizes = [3 * heads * width, width, width, heads]
    qkv, decay, gate, beta = _split(layer.linear(normed, "state_in"), sizes)
    mixed = jax.nn.silu(_convolved(qkv, layer.params["conv"]))
    q, k, v = (x.reshape(count, heads, width) for x in jnp.split(mixed, 3, axis=1))
    steps = jax.nn.softplus(layer.linear(decay, "decay") + layer.params["dt_bias"])
    rates = jnp.exp(layer.params["a_log"].reshape(-1, 1))
    fades = jnp.exp(-rates * steps.reshape(count, heads, width))
    out = layer.norm(_delta_rule(q, k, v, jax.nn.sigmoid(beta), fades), "state_norm")
    out = out * jax.nn.sigmoid(layer.linear(gate, "state_gate")).reshape(out.shape)
    return out.reshape(count, -1)


def _delta_rule(q, k, v, beta, fades):
    """[T, H, V], of q and k [T, H, K], v [T, H, V], beta [T, H] and fades [T, H, K or 1]."""

    def step(state, token):
        q, k, v, beta, fade = token
        state = fade[:, :, None] * state
        new = beta[:, None] * (v - jnp.einsum("hk,hkv->hv", k, state))
        state = state + k[:, :, None] * new[:, None]
        return state, jnp.einsum("hk,hkv->hv", q, state)

    q, k, none = _unit(q) * q.shape[2] ** -0.5, _unit(k), jnp.zeros((*k.shape[1:], v.shape[2]))
    return lax.scan(step, none, (q, k, v, beta, fades))[1]


def _mamba2(layer: Layer, normed):
    kind = layer.config.attention
    assert isinstance(kind, Mamba2)
    shape = kind.shape
    projected = layer.linear(normed, "state_in")
    gate, xbc, dt = _split(projected, [shape.values, shape.columns, shape.heads])
    xbc = _state_convolved(layer, xbc)
    x, keys, reads = _split(xbc, [shape.values, *[shape.groups * shape.state] * 2])
    gated = _state_space(layer, x, keys, reads, dt) * jax.nn.silu(gate)
    parts = rms(gated.reshape(len(x), shape.groups, -1), layer.config.rms_norm_eps)
    return parts.reshape(gated.shape) * layer.params["state_norm"]


def _mamba(layer: Layer, normed):
    kind = layer.config.attention
    assert isinstance(kind, Mamba)
    x, gate = jnp.split(layer.linear(normed, "state_in"), 2, axis=1)
    x = _state_convolved(layer, x)
    sizes = [kind.rank, kind.shape.state, kind.shape.state]
    dt, keys, reads = _split(layer.linear(x, "selection"), sizes)
    dt = layer.linear(layer.norm(dt, "step_norm"), "step")
    keys, reads = layer.norm(keys, "key_norm"), layer.norm(reads, "read_norm")
    return _state_space(layer, x, keys, reads, dt) * jax.nn.silu(gate)


def _state_convolved(layer: Layer, x):
    mixed = _convolved(x, layer.params["conv"]) + layer.params.get("conv_bias", 0.0)
    return jax.nn.silu(mixed)


def _state_space(layer: Layer, x, keys, reads, dt):
    """[T, values] of the recurrence of Mamba and Mamba-2 (arXiv:2405.21060, equation 1), one token
    after the other. Each value of x counts as a head here."""
    kind = layer.config.attention
    assert isinstance(kind, StateSpace)
    shape, count = kind.shape, len(x)
    each = shape.values // shape.steps
    dt = jax.nn.softplus(dt + layer.params["dt_bias"])
    dt = jnp.clip(dt, *kind.limits).repeat(each, axis=1)
    rates = jnp.exp(layer.params["a_log"].reshape(shape.steps, -1)).repeat(each, axis=0)
    keys, reads = (
        part.reshape(count, shape.groups, -1).repeat(shape.values // shape.groups, axis=1)
        for part in (keys, reads)
    )

    def step(state, token):
        x, key, read, dt = token
        state = jnp.exp(-rates * dt[:, None]) * state + (dt * x)[:, None] * key
        return state, (state * read).sum(1)

    _, out = lax.scan(step, jnp.zeros((shape.values, shape.state)), (x, keys, reads, dt))
    return out + layer.params["skip"].repeat(each) * x


def _split(x, sizes):
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes) - 1)]
    return jnp.split(x, ends, axis=-1)


def _unit(x):
    return x / jnp.sqrt((x * x).sum(-1, keepdims=True) + STATE_EPS)


KINDS: dict[type, Callable[[Layer, Any], jax.Array]] = {
    **dict.fromkeys((GroupedQueryAttention, GatedAttention, LateNormAttention), _grouped),
    **dict.fromkeys((Llama4Attention, NormedValues, SoftplusGatedAttention), _grouped),
    **dict.fromkeys((LatentAttention, GrowingAttention, IndexedAttention), _latent),
    ScaledLatentAttention: _latent,
    HeadGatedAttention: _head_gated,
    GatedDeltaNet: _gated_delta,
    KimiDeltaAttention: _kimi_delta,
    Mamba: _mamba,
    Mamba2: _mamba2,
    ShortConvolution: _short_conv,
}
"""Kind of attention → its heads' outputs, of a layer and its normalised inputs [T, D]."""

PARAMETERS = frozenset(
    (
        *("qkv", "o", "q_norm", "k_norm", "late_q_norm", "late_k_norm", "sinks", "attention_gate"),
        *("q", "q_a", "q_a_norm", "q_b", "kv_a", "kv_a_norm", "kv_b"),
        *("index_q", "index_k", "index_k_norm", "index_weights"),
        *("state_in", "conv", "a_log", "dt", "state_norm", "decay", "state_gate"),
        *("skip", "selection", "step", "step_norm", "key_norm", "read_norm"),
    )
)
"""Parameters that are computed with here, and their biases."""

"""Tensors of gated delta nets as transformers has them, from what llama.cpp's converters write."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from moejax.models.attention.gated_delta import GatedDeltaNet
from moejax.models.model_config import ModelConfig

Restore = Callable[[Sequence[np.ndarray]], np.ndarray]
"""The tensors that a converter made of one, float32 → that tensor."""


class Restored(NamedTuple):
    """How a tensor is made of those in a file."""

    restore: Restore
    parts: tuple[str, ...] = ()
    """Their names before the converter's renaming; empty: the tensor's own."""


def gated_delta_tensor(config: ModelConfig, name: str) -> Restored | None:
    """What a tensor of Qwen3-Next or Qwen3.5-MoE is made of; None: of that of its name, as it is.

    Norms have one added, A_log is −exp(A_log), and Qwen3.5's value heads are in tiles: first that
    of each key head, then the second of each. Qwen3-Next's projection is split: q, k and v; gate.
    """
    delta = config.state
    assert isinstance(delta, GatedDeltaNet)
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return Restored(lambda parts: parts[0] - 1)
    prefix, _, part = name.rpartition("linear_attn.")
    prefix += "linear_attn."
    if part == "in_proj_qkvz.weight":
        names = f"{prefix}in_proj_qkv.weight", f"{prefix}in_proj_z.weight"
        return Restored(functools.partial(_by_key_head, delta=delta), names)
    if part == "A_log":
        return Restored(lambda parts: _grouped_heads(np.log(-parts[0]), delta, 1))
    if part == "dt_bias":
        names = (f"{prefix}dt_proj.bias",)
        return Restored(lambda parts: _grouped_heads(parts[0], delta, 1), names)
    if delta.by_key_head:
        return None
    width, keys = delta.linear_value_head_dim, 2 * delta.shape.key_heads * delta.shape.key_dim
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        return Restored(lambda parts: _grouped_heads(parts[0], delta, 0, width, keys))
    if part in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight"):
        each = width if part == "in_proj_z.weight" else 1
        return Restored(lambda parts: _grouped_heads(parts[0], delta, 0, each))
    if part == "out_proj.weight":
        return Restored(lambda parts: _grouped_heads(parts[0], delta, 1, width))
    return None


def _grouped_heads(
    whole: np.ndarray, delta: GatedDeltaNet, axis: int, width: int = 1, before: int = 0
) -> np.ndarray:
    """Puts the value heads of each key head side by side; in Qwen3-Next's files they are.

    - `width`: of a head along the axis.
    - `before`: rows along it that are of no value head.
    """
    if delta.by_key_head:
        return whole
    heads, each = delta.linear_num_key_heads, delta.linear_num_value_heads
    head = np.arange(each).reshape(-1, heads).T.reshape(-1)  # where each one lies in the file
    order = before + (head[:, None] * width + np.arange(width)).reshape(-1)
    return np.take(whole, np.concatenate([np.arange(before), order]), axis)


def _by_key_head(parts: Sequence[np.ndarray], delta: GatedDeltaNet) -> np.ndarray:
    """The rows of q, k and v, and of the gate → q, k, v and gate of each key head together."""
    qkv, gate = parts
    heads, keys = delta.linear_num_key_heads, delta.linear_num_key_heads * delta.linear_key_head_dim
    q, k, v = np.split(qkv, [keys, 2 * keys])
    hidden = qkv.shape[-1]
    each = [part.reshape(heads, -1, hidden) for part in (q, k, v, gate)]
    return np.concatenate(each, axis=1).reshape(-1, hidden)

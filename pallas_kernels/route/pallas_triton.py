"""route as one Triton-lowered kernel."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.triton import triton_call


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int
    """Tokens of one program."""
    num_warps: int
    num_stages: int


def configuration() -> Config:
    """The tile, the same for any number of tokens and of experts: a warp per token, so that no
    reduction crosses warps and decode's 16 rows take the time of one."""
    return Config(rows=4, num_warps=4, num_stages=1)


def route(logits, valid, *, top_k, normalize):
    tokens = logits.shape[0]
    config = configuration()
    call = triton_call(
        functools.partial(_route, config=config, top_k=top_k, normalize=normalize),
        name="route",
        grid=(pl.cdiv(tokens, config.rows),),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, top_k), jnp.int32),
            jax.ShapeDtypeStruct((tokens, top_k), jnp.float32),
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return tuple(call(logits.astype(jnp.float32), valid))


def _route(logits, valid, ids, weights, *, config, top_k, normalize):
    """Program i: tokens [i · rows, (i + 1) · rows).

    Writes: program i writes the rows of its own tokens in `ids` and `weights`, and nobody else's.
    Within a row each chosen expert writes the element of its rank, so each is written once.
    """
    experts = logits.shape[1]
    row = pl.program_id(0) * config.rows + jnp.arange(config.rows)
    expert = jnp.arange(pl.next_power_of_2(experts))[None, :]
    inside = (row < logits.shape[0])[:, None]
    scores = plgpu.load(
        logits.at[row[:, None], expert], mask=inside & (expert < experts), other=-jnp.inf
    )
    real = plgpu.load(valid.at[row], mask=row < logits.shape[0], other=False)[:, None]
    exp = jnp.exp(scores - jnp.max(scores, axis=1)[:, None])
    probabilities = exp / jnp.sum(exp, axis=1)[:, None]

    # −1: not to be chosen, or chosen before. A NaN makes its whole row NaN: the first experts are
    # chosen then, as in padding, which may hold anything.
    left = jnp.where(jnp.isnan(probabilities), 0.0, probabilities)
    left = jnp.where(expert < experts, left, -1.0)
    for _ in range(top_k):
        best = left == jnp.max(left, axis=1)[:, None]
        first = jnp.min(jnp.where(best, expert, experts), axis=1)
        left = jnp.where(expert == first[:, None], -1.0, left)
    chosen = (left < 0) & (expert < experts)

    if normalize:
        total = jnp.sum(jnp.where(chosen, probabilities, 0.0), axis=1)
        probabilities = probabilities / total[:, None]
    rank = jnp.cumsum(chosen.astype(jnp.int32), axis=1) - 1
    # Ranks that nobody has lie outside, so that no masked element names another's place.
    place = row[:, None], jnp.where(chosen, rank, top_k)
    listed = chosen & inside
    plgpu.store(ids.at[place], jnp.where(real, expert, experts), mask=listed)
    plgpu.store(weights.at[place], jnp.where(real, probabilities, 0.0), mask=listed)

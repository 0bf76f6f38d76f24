"""route as one Triton-lowered kernel: no sorts, a reduction over the row for each choice."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import plgpu
from pallas_kernels.linear import sum_of_parts
from pallas_kernels.route.rule import RouteRule
from pallas_kernels.triton import scalar, triton_call

MOST_GROUPS = 16
"""Most groups: each adds instructions to the unrolled kernel. DeepSeek has 8."""

GONE = -(2**31)
"""A key below the key of every number; see _ordered."""


@dataclasses.dataclass(frozen=True)
class Config:
    rows: int
    """Tokens of one program."""
    num_warps: int
    num_stages: int


def configuration() -> Config:
    """The tile, the same for any number of tokens and experts: a warp per token, so that no
    reduction crosses warps and the 16 rows of decode take the time of one."""
    return Config(rows=4, num_warps=4, num_stages=1)


def why_not_pallas(rule: RouteRule) -> str | None:
    """Why the kernel cannot follow the rule; None where it can."""
    if rule.scoring == "sqrtsoftplus":
        return f"the kernel has no score {rule.scoring!r}"
    if rule.groups > MOST_GROUPS:
        return f"the kernel takes at most {MOST_GROUPS} groups, not {rule.groups}"
    return None


def route(logits, valid, correction, layer, *, rule):
    if reason := why_not_pallas(rule):
        raise ValueError(f"route 'pallas': {reason}; 'xla' takes it")
    tokens = logits.shape[-2]
    config = configuration()
    operands = [logits.astype(jnp.float32), valid]
    if correction is not None:
        operands += [scalar(layer), correction]
    call = triton_call(
        functools.partial(_route, config=config, rule=rule),
        name="route",
        grid=(pl.cdiv(tokens, config.rows),),
        out_shape=(
            jax.ShapeDtypeStruct((tokens, rule.top_k), jnp.int32),
            jax.ShapeDtypeStruct((tokens, rule.top_k), jnp.float32),
        ),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return tuple(call(*operands))


def _route(logits, valid, *refs, config, rule):
    """Program i: tokens [i · rows, (i + 1) · rows).

    Writes: program i alone writes the rows of its tokens in `ids` and `weights`. Within a row each
    chosen expert writes the element of its rank, so each element is written once.
    """
    *correction, ids, weights = refs
    row = pl.program_id(0) * config.rows + jnp.arange(config.rows)
    found = chosen(logits, valid, correction, row, rule)
    place = row[:, None], found.rank
    plgpu.store(ids.at[place], found.ids, mask=found.listed)
    plgpu.store(weights.at[place], found.weights, mask=found.listed)


class Chosen(NamedTuple):
    """The experts of some rows, each [rows, E] with E rounded up to a power of two."""

    listed: jax.Array
    """Where an expert is chosen; the other fields are undefined elsewhere."""
    real: jax.Array
    """[rows, 1]: rows that hold a token."""
    rank: jax.Array
    """A chosen expert's rank by id among the chosen of its row; top_k elsewhere, so that no masked
    element names a used place."""
    ids: jax.Array
    weights: jax.Array


def chosen(logits, valid, correction, row, rule):
    """The chosen experts of tokens `row`, int32[rows].

    - `correction`: refs to the layer and to all corrections, or empty.

    No bit depends on which thread holds which element: rounded values are summed only in a fixed
    order (`_sum_of_fractions`), so kernels with other tiles agree.
    """
    tokens, experts = logits.shape[-2:]
    expert = jnp.arange(pl.next_power_of_2(experts))[None, :]
    inside = (row < tokens)[:, None]

    def load(*part):
        place = logits.at[(*part, row[:, None], expert)]
        return plgpu.load(place, mask=inside & (expert < experts), other=-jnp.inf)

    parts = [()] if len(logits.shape) == 2 else [(s,) for s in range(logits.shape[0])]
    scores = sum_of_parts([load(*part) for part in parts])
    broken = jnp.max(jnp.isnan(scores).astype(jnp.int32), axis=1)[:, None] > 0
    real = plgpu.load(valid.at[row], mask=row < tokens, other=False)[:, None]
    if rule.scoring == "sparsemixer":
        best, scores = _sparsemixer(scores, expert, experts, rule.jitter)
    else:
        if rule.scoring == "sigmoid":
            scores = jax.nn.sigmoid(scores)
        else:
            exp = jnp.exp(scores - jnp.max(scores, axis=1)[:, None])
            scores = exp / _sum_of_fractions(exp)[:, None]
        added = None
        if correction:
            layer, rows = correction
            added = plgpu.load(rows.at[layer[0], expert], mask=expert < experts, other=0.0)
        best, total = _best(scores, added, expert, experts, rule)
        if rule.normalize:
            if rule.scoring == "sigmoid":
                total += 1e-20
            elif correction:
                total = jnp.maximum(total, 1e-12)
            scores = scores / total[:, None]
    scores = jnp.where(broken, jnp.nan, scores * rule.scale)
    rank = jnp.cumsum(best.astype(jnp.int32), axis=1) - 1
    return Chosen(
        listed=best & inside,
        real=real,
        rank=jnp.where(best, rank, rule.top_k),
        ids=jnp.where(real, expert, experts),
        weights=jnp.where(real, scores, 0.0),
    )


def _sum_of_fractions(values):
    """float32 [rows]: sums of [rows, E] values from 0 to 1, as integers in units of 2⁻⁴⁰, whose sum
    does not depend on the order. A NaN counts as some number."""
    unit = 2.0**20
    high = (values * unit).astype(jnp.int32)
    low = ((values * unit - high.astype(jnp.float32)) * unit).astype(jnp.int32)
    high, low = (jnp.sum(part, axis=1).astype(jnp.float32) for part in (high, low))
    return high / unit + low / unit**2


def _largest(keys, expert, experts):
    """(key [rows], expert [rows]): the largest key and its first place. keys: of _ordered, or
    GONE."""
    most = jnp.max(keys, axis=1)
    return most, jnp.min(jnp.where(keys == most[:, None], expert, experts), axis=1)


def _ordered(values):
    """int32 keys in the order of float32 values without NaN, equal for equal values. A warp finds
    the largest integer by one instruction, the largest float by a chain of ten."""
    values = jnp.where(values == 0, 0.0, values)  # -0.0 too
    return _turned(lax.bitcast_convert_type(values, jnp.int32))


def _of_key(keys):
    return lax.bitcast_convert_type(_turned(keys), jnp.float32)


def _turned(bits):
    """Reverses the order of negative numbers; it is its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _best(scores, added, expert, experts, rule):
    """(bool [rows, E] with exactly top_k experts in each row, whatever it holds; the sum of their
    scores, best first).

    - `added`: added to the scores for the choice; None: nothing.
    """
    # Padding may hold anything, and a NaN would equal nothing.
    choice = scores if added is None else scores + added
    choice = jnp.where(jnp.isnan(choice), jnp.inf, choice)
    if rule.top_groups < rule.groups:
        choice = jnp.where(_allowed(choice, expert, experts, rule), choice, -jnp.inf)
    total, keys = jnp.zeros(scores.shape[:1]), jnp.where(expert < experts, _ordered(choice), GONE)
    for _ in range(rule.top_k):
        most, first = _largest(keys, expert, experts)
        here, score = expert == first[:, None], _of_key(most)
        if added is not None and rule.normalize:  # a sum of one number and zeros
            score = jnp.sum(jnp.where(here, scores, 0.0), axis=1)
        keys, total = jnp.where(here, GONE, keys), total + score
    return (expert < experts) & (keys == GONE), total


def _allowed(choice, expert, experts, rule):
    """bool [rows, E]: experts of the best groups; of equal groups the lower one counts first."""
    size = experts // rule.groups
    members = [(expert >= g * size) & (expert < (g + 1) * size) for g in range(rule.groups)]
    scores, keys = [], _ordered(choice)
    for member in members:
        most, first = _largest(jnp.where(member, keys, GONE), expert, experts)
        score = _of_key(most)
        if rule.group_score == "top2":
            others = jnp.where(member & (expert != first[:, None]), keys, GONE)
            score += _of_key(_largest(others, expert, experts)[0])
        scores.append(score)
    allowed = expert < 0
    for g, member in enumerate(members):
        better = sum((s >= scores[g]) if h < g else (s > scores[g]) for h, s in enumerate(scores))
        allowed |= member & (better < rule.top_groups)[:, None]
    return allowed


def _sparsemixer(logits, expert, experts, jitter):
    """(bool, weights) [rows, E]: the largest logit, then the largest of the others."""
    left, weights = expert < experts, jnp.zeros_like(logits)
    # As in _best.
    keys = _ordered(jnp.where(jnp.isnan(logits), jnp.inf, logits))
    for _ in range(2):
        _, first = _largest(jnp.where(left, keys, GONE), expert, experts)
        best = expert == first[:, None]
        top = jnp.sum(jnp.where(best, logits, 0.0), axis=1)[:, None]
        far = (top - logits) / jnp.maximum(jnp.abs(logits), top) > 2 * jitter
        near = jnp.where(far | ~left, 0.0, jnp.exp(logits - top))
        weights = jnp.where(best, 1 / _sum_of_fractions(near)[:, None], weights)
        left &= ~best
    return (expert < experts) & ~left, weights

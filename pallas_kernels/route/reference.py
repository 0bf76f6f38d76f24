import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.route.scores import route_scores


def route(logits, valid, correction, layer, *, rule):
    logits = logits.astype(jnp.float32)
    if rule.scoring == "sparsemixer":
        ids, weights = _sparsemixer(logits, rule.jitter)
    else:
        ids, weights = _best(logits, correction, layer, rule)
    # [T, K, K] comparisons instead of a sort: K is small, and a kernel can do the same.
    rank = jnp.sum(ids[:, :, None] > ids[:, None, :], axis=-1)
    place = rank[:, :, None] == jnp.arange(rule.top_k)
    ids = jnp.sum(jnp.where(place, ids[:, :, None], 0), axis=1)
    weights = jnp.sum(jnp.where(place, weights[:, :, None], 0.0), axis=1)
    return _finish(logits, valid, ids, weights, correction is not None, rule)


def weigh(logits, chosen, valid, *, rule):
    """What route returns where the experts int32[T, K] are chosen already."""
    ids, logits = jnp.sort(chosen, axis=-1), logits.astype(jnp.float32)
    weights = jnp.take_along_axis(route_scores(logits, rule), ids, axis=-1)
    return _finish(logits, valid, ids, weights, False, rule)


def _finish(logits, valid, ids, weights, corrected, rule):
    """Normalised and scaled weights, of ascending ids."""
    if rule.normalize:
        # Sigmoids may all be near zero, the largest of a softmax is at least 1/E, but a correction
        # may choose others.
        total = jnp.sum(weights, axis=-1, keepdims=True)
        if rule.scoring in ("sigmoid", "sqrtsoftplus"):
            total += 1e-20
        elif corrected:
            total = jnp.maximum(total, 1e-12)
        weights = weights / total
    weights = weights * rule.scale
    weights = jnp.where(jnp.any(jnp.isnan(logits), axis=-1, keepdims=True), jnp.nan, weights)
    ids = jnp.where(valid[:, None], ids, logits.shape[-1]).astype(jnp.int32)
    return ids, jnp.where(valid[:, None], weights, 0.0)


def _best(logits, correction, layer, rule):
    """(ids, scores) [T, K] of the experts with the largest scores, best first."""
    scores = route_scores(logits, rule)
    choice = scores
    if correction is not None:
        choice = scores + lax.dynamic_index_in_dim(correction, layer, keepdims=False)
    if rule.top_groups < rule.groups:
        choice = jnp.where(_allowed(choice, rule), choice, -jnp.inf)
    chosen, ids = lax.top_k(choice, rule.top_k)
    return ids, chosen if correction is None else jnp.take_along_axis(scores, ids, axis=-1)


def _allowed(choice, rule):
    """bool[T, E]: experts of the best groups."""
    groups = choice.reshape(len(choice), rule.groups, -1)
    best = lax.top_k(groups, 1 if rule.group_score == "max" else 2)[0]
    listed = lax.top_k(jnp.sum(best, axis=-1), rule.top_groups)[1]
    allowed = jnp.any(listed[:, :, None] == jnp.arange(rule.groups), axis=1)
    return jnp.repeat(allowed, groups.shape[-1], axis=-1)


def _sparsemixer(logits, jitter):
    """(ids, weights) [T, 2]: the largest logit, then the largest of the others."""
    left, ids, weights = logits, [], []
    for _ in range(2):
        best = jnp.argmax(left, axis=-1)
        top = jnp.max(left, axis=-1, keepdims=True)
        far = (top - logits) / jnp.maximum(jnp.abs(logits), top) > 2 * jitter
        gates = jax.nn.softmax(jnp.where(far, -jnp.inf, left), axis=-1)
        ids.append(best)
        weights.append(jnp.take_along_axis(gates, best[:, None], axis=-1)[:, 0])
        left = jnp.where(jnp.arange(logits.shape[-1]) == best[:, None], -jnp.inf, left)
    return jnp.stack(ids, axis=-1), jnp.stack(weights, axis=-1)

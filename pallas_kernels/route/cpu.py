import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu.library import call, int32
from pallas_kernels.route.rule import SCORINGS


def route(logits, valid, correction, layer, *, rule):
    """route of the api, for every rule but one. Sums in double."""
    if rule.scoring == "sqrtsoftplus":
        raise ValueError(f"route 'cpu': the op has no score {rule.scoring!r}; 'xla' takes it")
    shape = (logits.shape[0], rule.top_k)
    out = (jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, jnp.float32))
    correction = jnp.zeros((0, 0), jnp.float32) if correction is None else correction
    counts = SCORINGS.index(rule.scoring), rule.top_k, rule.groups, rule.top_groups
    group_best = 1 if rule.group_score == "max" else 2
    operands = logits.astype(jnp.float32), valid, correction.astype(jnp.float32), int32(layer)
    return call(
        "route",
        out,
        *operands,
        counts=np.array([*counts, group_best, rule.normalize], np.int64),
        scale=np.float32(rule.scale),
        jitter=np.float32(rule.jitter),
    )

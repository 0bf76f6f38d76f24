"""truncate against a sort in float64."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.truncate import api
from pallas_kernels.truncate.specs import SPECS, Spec
from tests.pallas_kernels.contract import SEEDS, Contract, Mutant, compiled

SEARCHED = [(0, 1.0), (3, 1.0), (0, 0.7), (20, 0.95), (1, 0.5), (10**6, 0.999)]
"""top_k and top_p of a row, in turns."""


def case(spec, seed):
    """Logits with equal values and some that are minus infinity; the seed decides who begins."""
    rng = np.random.default_rng(seed)
    logits = np.round(rng.normal(0, 4, (spec.rows, spec.vocabulary)), 1).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = -np.inf
    logits[:, 0] = 9  # whatever else is minus infinity
    turns = [SEARCHED[(seed + row) % len(SEARCHED)] for row in range(spec.rows)]
    top_k, top_p = (np.array(values) for values in zip(*turns, strict=True))
    min_p = rng.choice(np.float32([0, 0.0123, 1]), spec.rows, p=[0.6, 0.3, 0.1])
    return (
        logits - logits.max(axis=1, keepdims=True),
        top_k.astype(np.int32),
        top_p.astype(np.float32),
        min_p,
    )


def run(implementation, *arrays):
    return np.asarray(compiled(api.truncate, implementation=implementation)(*arrays))


def check(spec, implementation):
    for seed in SEEDS:
        arrays = case(spec, seed)
        found = run(implementation, *arrays)
        for got, *row in zip(found, *arrays, strict=True):
            check_row(got, *row)


def check_row(got, scaled, top_k, top_p, min_p):
    """Which tokens are kept, but for those whose mass before them is top_p to rounding."""
    mass = np.exp(scaled.astype(np.float64))
    keep = np.exp(scaled) >= min_p
    if top_k > 0:
        alive = np.sort(scaled[keep])[::-1]
        keep &= scaled >= alive[min(top_k, len(alive)) - 1]
    nearer = np.array([mass[keep & (scaled > value)].sum() for value in scaled])
    before = nearer / mass[keep].sum()
    surely = keep & ((before < top_p - 1e-5) | (top_p >= 1))
    perhaps = keep & ((before < top_p + 1e-5) | (top_p >= 1))
    kept = (np.exp(scaled) >= min_p) & (np.abs(scaled).view(np.int32) <= got)
    np.testing.assert_array_equal(kept, np.where(surely == perhaps, surely, kept))
    assert kept[np.argmax(scaled)]


def rows_alone(implementation):
    """A row depends on no other one."""
    arrays = case(Spec(16, 1000), 2)
    want = run(implementation, *arrays)
    others = [np.roll(array, 5, axis=0) for array in arrays]
    np.testing.assert_array_equal(run(implementation, *others), np.roll(want, 5))
    for array in others:
        array[:-1] = array[-1:]
    np.testing.assert_array_equal(run(implementation, *others)[-1], want[10])


def refused(scaled, top_k, dtype, options):
    rows = jnp.zeros(top_k)
    return api.truncate(jnp.zeros(scaled, dtype), rows, rows, rows, **options)


CONTRACTS = (
    Contract(
        "truncate",
        api.IMPLEMENTATIONS,
        SPECS,
        check,
        facts=(rows_alone,),
        mutant=Mutant(lambda a: {"top_k": a["top_k"] + (a["top_k"] > 0)}, SPECS[1]),
        refused=refused,
        refusals=(
            ((3,), (3,), "float32", {}, r"scaled \(3,\), top_k \(3,\), .* are not \[R, V\] and"),
            ((3, 4), (2,), "float32", {}, r"top_k \(2,\)"),
            ((3, 4), (3,), "bfloat16", {}, "scaled is float32, not bfloat16"),
            ((3, 4), (3,), "float32", {"implementation": "cpu"}, "op 'truncate' has no impl"),
        ),
    ),
)

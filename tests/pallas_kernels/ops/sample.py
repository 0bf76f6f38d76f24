"""sample against a sort in float64 and XLA's noise; logprobs against float64; the likeliest."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.sample import api, greedy
from pallas_kernels.sample.specs import SPECS, Spec
from tests.pallas_kernels.contract import SEEDS, Contract, Mutant, close, compiled
from tests.pallas_kernels.ops.truncate import SEARCHED

INF = np.float32(np.inf)
exponential = compiled(jnp.exp)


@functools.cache
def noise_of(seed, position, vocabulary):
    key = jax.random.fold_in(jax.random.key(np.uint32(seed), impl="threefry2x32"), position)
    return np.asarray(jax.random.gumbel(key, (vocabulary,), jnp.float32))


def case(spec, seed):
    """Logits with equal values and some that are minus infinity; the seed decides who begins."""
    rng = np.random.default_rng(seed)
    logits = np.round(rng.normal(0, 2, (spec.rows, spec.vocabulary)), 1).astype(np.float32)
    logits[rng.random(logits.shape) < 0.1] = -INF
    logits[:, 0] = 5  # whatever else is minus infinity
    turns = [SEARCHED[(seed + row) % len(SEARCHED)] for row in range(spec.rows)]
    top_k, top_p = (np.array(values) for values in zip(*turns, strict=True))
    return logits, api.Choices(
        rng.choice(np.float32([0, 0.3, 1, 1, 3]), spec.rows),
        top_k.astype(np.int32),
        top_p.astype(np.float32),
        rng.choice(np.float32([0, 0.0123, 1]), spec.rows, p=[0.7, 0.2, 0.1]),
        rng.integers(0, 2**32, spec.rows, np.uint32),
        np.arange(spec.rows, dtype=np.int32),
    )


def run(implementation, logits, choices, **options):
    op = compiled(api.sample, implementation=implementation, **options)
    return np.asarray(op(logits, choices))


def want_of(logits, temperature, top_k, top_p, min_p, seed, position):
    """The token of a row."""
    if temperature == 0:
        return np.argmax(logits)
    scaled = (logits - logits.max()) * (np.float32(1) / temperature)
    keep = np.asarray(exponential(scaled)) >= min_p
    if top_k > 0:
        alive = np.sort(scaled[keep])[::-1]
        keep &= scaled >= alive[min(top_k, len(alive)) - 1]
    if top_p < 1:
        mass = np.where(keep, np.exp(scaled.astype(np.float64)), 0)
        order = np.argsort(-scaled)
        before = np.cumsum(mass[order])
        keep &= scaled >= scaled[order[np.searchsorted(before, top_p * before[-1])]]
    return np.argmax(np.where(keep, scaled + noise_of(seed, position, len(logits)), -INF))


def check(spec, implementation):
    for seed in SEEDS:
        logits, choices = case(spec, seed)
        found = run(implementation, logits, choices)
        want = [want_of(row, *of_row) for row, *of_row in zip(logits, *choices, strict=True)]
        assert found.tolist() == want


def draws_by_xlas_logarithm(implementation):
    """Tokens whose values are equal but for the last bits of their noise, the first of equal ones,
    and tokens at min_p's bound."""
    rows, vocabulary = 16, 4096
    rng = np.random.default_rng(1)
    logits = np.full((rows, vocabulary), -INF)
    temperature = np.where(np.arange(rows) % 2, 1, 0.37).astype(np.float32)
    near = [rng.choice(vocabulary, 12, replace=False) for _ in range(rows)]
    for row, ids in enumerate(near):
        logits[row, ids] = -noise_of(row, 7, vocabulary)[ids] * temperature[row]
        logits[row, 5] = 9 - row  # far above or below the others
    logits[-1], logits[-2, ::2] = 3, 3
    inverse = (np.float32(1) / temperature)[:, None]
    far = exponential((logits - logits.max(axis=1)[:, None]) * inverse)
    bound = np.asarray(far)[np.arange(rows), [ids[0] for ids in near]]
    ones, none = np.ones(rows, np.float32), np.zeros(rows, np.int32)
    for min_p in (0 * ones, bound, np.nextafter(bound, 2)):
        choices = api.Choices(
            *(temperature, none, ones, np.minimum(min_p, 1), np.arange(rows, dtype=np.uint32)),
            none + 7,
        )
        want = [want_of(row, *of_row) for row, *of_row in zip(logits, *choices, strict=True)]
        assert run(implementation, logits, choices).tolist() == want


def rows_without_a_largest(implementation):
    """NaN and infinities, drawn with and without truncation, and greedy."""
    logits = np.zeros((4, 70), np.float32)
    logits[0, 3], logits[1], logits[2, 4:6] = np.nan, -INF, INF
    logits[3, :] = np.float32(-3e38)
    logits[3, 69] = 3e38
    ones, none = np.ones(4, np.float32), np.zeros(4, np.int32)
    for temperature, top_k, want in (
        (1, 0, [0, 0, 0, 69]),
        (1, 2, [0, 0, 0, 69]),
        (0, 0, [69, 0, 4, 69]),
    ):
        choices = api.Choices(
            *(temperature * ones, none + top_k, ones, 0 * ones, none.astype(np.uint32), none)
        )
        assert run(implementation, logits, choices).tolist() == want
    assert compiled(greedy)(logits).tolist() == want


def rows_alone(implementation):
    """A row depends on no other one, nor on whether the others truncate."""
    logits, choices = case(Spec(16, 1000), 2)
    want = run(implementation, logits, choices)
    rolled = [np.roll(array, 5, axis=0) for array in (logits, *choices)]
    found = run(implementation, rolled[0], api.Choices(*rolled[1:]))
    np.testing.assert_array_equal(found, np.roll(want, 5))
    for row in (1, 10):
        one = api.Choices(*(array[row : row + 1] for array in choices))
        assert run(implementation, logits[row : row + 1], one, one_row=True) == want[row]


def check_logprobs(spec, implementation):
    n = min(20, spec.vocabulary)
    for seed in SEEDS:
        logits, _ = case(spec, seed)
        tokens = np.random.default_rng(seed).integers(0, spec.vocabulary, spec.rows, np.int32)
        tokens[logits[np.arange(spec.rows), tokens] == -INF] = 0
        op = compiled(api.logprobs, n=n, implementation=implementation)
        chosen, rank, top_ids, top = op(logits, tokens)
        wide = logits.astype(np.float64)
        want = wide - np.logaddexp.reduce(wide, axis=1)[:, None]
        order = np.argsort(-logits, axis=1, kind="stable")
        np.testing.assert_array_equal(top_ids, order[:, :n])
        np.testing.assert_array_equal(np.argwhere(order == tokens[:, None])[:, 1] + 1, rank)
        close("sample", "float32", chosen, np.take_along_axis(want, tokens[:, None], 1)[:, 0])
        likeliest, finite = np.take_along_axis(want, order[:, :n], 1), np.isfinite(top)
        assert np.array_equal(np.isfinite(likeliest), finite)
        close("sample", "float32", np.asarray(top)[finite], likeliest[finite])


def logprobs_of_nan(implementation):
    """A NaN spoils its row alone."""
    logits, _ = case(Spec(3, 70), 0)
    logits[1, 9] = np.nan
    op = compiled(api.logprobs, n=5, implementation=implementation)
    chosen, _, _, top = op(logits, np.zeros(3, np.int32))
    assert np.isnan(chosen).tolist() == [False, True, False] and np.isnan(top[1]).all()


def check_likeliest(spec, implementation):
    for seed in SEEDS:
        logits, _ = case(spec, seed)
        rng = np.random.default_rng(seed)
        tokens = rng.integers(0, spec.vocabulary, spec.rows + seed % 2, np.int32)
        update = rng.random(spec.rows) < 0.7
        logits[0, rng.integers(0, spec.vocabulary, 2)] = 7
        want = tokens.copy()
        want[: spec.rows][update] = np.argmax(logits, axis=1)[update]
        op = compiled(api.choose_likeliest, implementation=implementation)
        assert op(logits, tokens, update).tolist() == want.tolist()


def likeliest_without_a_largest(implementation):
    """NaN and infinities."""
    logits = np.zeros((5, 70), np.float32)
    logits[0, 3], logits[1], logits[2, 4:6] = np.nan, -INF, INF
    logits[3, 68], logits[4, 2], logits[4, :2] = np.nan, 0, -0.0
    op = compiled(api.choose_likeliest, implementation=implementation)
    found = op(logits, np.full(5, -1, np.int32), np.ones(5, bool))
    assert found.tolist() == [69, 0, 4, 69, 0]


def refused_likeliest(logits, tokens, update, options):
    tokens, update = jnp.zeros(tokens, jnp.int32), jnp.zeros(update, bool)
    return api.choose_likeliest(jnp.zeros(logits), tokens, update, **options)


def refused(logits, rows, dtype, options):
    values = jnp.zeros(rows)
    return api.sample(jnp.zeros(logits, dtype), api.Choices(*[values] * 6), **options)


def refused_logprobs(logits, rows, n, options):
    return api.logprobs(jnp.zeros(logits), jnp.zeros(rows, jnp.int32), n, **options)


CONTRACTS = (
    Contract(
        "sample",
        api.IMPLEMENTATIONS,
        SPECS,
        check,
        facts=(rows_alone, rows_without_a_largest, draws_by_xlas_logarithm),
        mutant=Mutant.in_record("choices", "top_k", lambda k: k + (k > 0), SPECS[0]),
        refused=refused,
        refusals=(
            ((3,), (3,), "float32", {}, r"logits \(3,\) and choices .* are not \[R, V\] and"),
            ((3, 4), (2,), "float32", {}, r"choices \[\(2,\)"),
            ((3, 4), (3,), "bfloat16", {}, "logits are float32, not bfloat16"),
            ((3, 4), (3,), "float32", {"implementation": "pallas"}, "op 'sample' has no impl"),
        ),
    ),
    Contract(
        "logprobs",
        api.LOGPROBS,
        SPECS,
        check_logprobs,
        facts=(logprobs_of_nan,),
        mutant=Mutant(lambda a: {"tokens": (a["tokens"] + 1) % 1000}, SPECS[0]),
        refused=refused_logprobs,
        refusals=(
            ((3, 4), (3,), 5, {}, r"logits \(3, 4\), tokens \(3,\) and 5 likeliest"),
            ((3, 4), (3,), 2, {"implementation": "pallas"}, "op 'sample' has no implementation"),
        ),
    ),
    Contract(
        "choose_likeliest",
        api.LIKELIEST,
        SPECS,
        check_likeliest,
        facts=(likeliest_without_a_largest,),
        mutant=Mutant(lambda a: {"update": ~a["update"]}, SPECS[0]),
        refused=refused_likeliest,
        refusals=(
            ((3, 4), (2,), (3,), {}, r"logits \(3, 4\) do not fit update \(3,\) and tokens \(2"),
            ((3, 4), (4,), (4,), {}, r"logits \(3, 4\) do not fit update \(4,\) and tokens \(4"),
            ((3, 4), (3,), (3,), {"implementation": "pallas"}, "op 'sample' has no implement"),
        ),
    ),
)

"""norm_route_and_list against the two ops it is made of."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.combine import row_squares
from pallas_kernels.linear import norm_linear_parts
from pallas_kernels.route import api, normed
from pallas_kernels.route.specs import RULES
from tests.pallas_kernels.contract import compiled, each, same_bits
from tests.pallas_kernels.test_route_and_list import LONE

EPS, STACK_LAYER, LAYER = 1e-6, np.int32(1), np.int32(2)


@dataclasses.dataclass(frozen=True)
class Spec:
    tokens: int
    experts: int
    hidden: int
    rule: str
    correction: bool = False
    squares: bool = False
    dtype: str = "bfloat16"


SPECS = (
    Spec(3, 48, 512, "top4-normalized"),
    Spec(16, 64, 512, "moonlight", correction=True, squares=True),
    Spec(1, 128, 1024, "top8-normalized", squares=True),
    Spec(8, 60, 600, "ernie", dtype="float16"),
    Spec(2, 16, 256, "phi-3.5"),
    Spec(17, 16, 512, "top4"),
    Spec(4, 12, 512, "sigmoid-groups"),
    Spec(3, 1100, 512, "top1"),
)
"""The last three are for two kernels: too many tokens, groups, a product of one part."""

FUSED = SPECS[:5]


def case(spec, seed):
    rng = np.random.default_rng(seed)

    def draw(*shape, scale=1.0):
        return jnp.asarray(rng.standard_normal(shape) * scale, spec.dtype)

    x, factors = draw(spec.tokens, spec.hidden), draw(2, spec.hidden, scale=0.5)
    weights = draw(2, spec.experts, spec.hidden, scale=spec.hidden**-0.5)
    correction = rng.standard_normal((2, spec.experts)).astype(np.float32) / 8
    valid = np.arange(spec.tokens) % 3 != 1
    return x, factors, weights, valid, correction if spec.correction else None


def both(
    x, factors, weights, valid, correction, squares, records, counters, *, rule, implementation
):
    """The two ops, one by one."""
    names = dict.fromkeys(("implementation", "norm_implementation"), implementation)
    rows, logits = norm_linear_parts(
        x, factors, EPS, weights, STACK_LAYER, squares=squares, **names
    )
    rows, logits = jax.lax.optimization_barrier((rows, logits))
    operands = logits, valid, correction, STACK_LAYER, records, LAYER, counters
    return rows, *api.route_and_list(*operands, rule=rule, implementation=implementation)


def check(spec, implementation):
    """The bits of both ops, of all that they give; counters are zeros again."""
    rule = RULES[spec.rule]
    names = dict.fromkeys(("linear_implementation", "norm_implementation"), implementation)
    names["implementation"] = implementation
    op = compiled(api.norm_route_and_list, eps=EPS, rule=rule, **names)
    alone = compiled(both, rule=rule, implementation=implementation)
    records = np.full((3, 2 * spec.tokens * rule.top_k), LONE, np.int32)
    counters = np.zeros(2, np.int32)
    for seed in range(2):
        x, factors, weights, valid, correction = case(spec, seed)
        squares = row_squares(x) if spec.squares else None
        given = {"weights": weights, "valid": valid, "correction": correction, "squares": squares}
        beside = {"records": records, "counters": counters}
        got = op(x, factors, i=STACK_LAYER, layer=LAYER, **given, **beside)
        wanted = alone(x, factors, **given, **beside)
        *got, active, count, after = map(np.asarray, got)
        *wanted, listed, number, _ = map(np.asarray, wanted)
        for mine, other in zip(got, wanted, strict=True):
            same_bits(mine, other)
        assert count == number
        np.testing.assert_array_equal(active[:count], listed[:count])
        np.testing.assert_array_equal(after, counters)


# Of others it is the ops themselves, which have contracts.
@each({name: api.IMPLEMENTATIONS[name] for name in ("xla", "pallas")}, SPECS)
def test_contract(spec, implementation):
    check(spec, implementation)


@pytest.mark.parametrize("spec", SPECS)
def test_where_the_last_program_routes(spec):
    given = spec.tokens, spec.experts, spec.hidden, spec.dtype
    assert normed.routes_last(*given, RULES[spec.rule]) == (spec in FUSED)


def test_float32_is_for_other_implementations_than_kernels():
    spec = dataclasses.replace(SPECS[0], dtype="float32")
    check(spec, "xla")


def one_row_less(keep, logits, valid, correction, layer, ids, weights, records, row, rule):
    return keep(logits, valid, correction, layer, ids, weights, records, row[:1], rule)


def none_listed(list_active, used, active, number):
    list_active(used * 0, active, number)


def one_part(run):
    """Routing by one part of the logits."""

    class First:
        def __init__(self, ref):
            self.shape, self.at = ref.shape[1:], self
            self._at = ref.at

        def __getitem__(self, place):
            return self._at[(0, *place)]

    return lambda logits, operands, results, *, rule: run(
        First(logits), operands, results, rule=rule
    )


MUTANTS = {
    "keep": lambda keep: lambda *given: one_row_less(keep, *given),
    "list_active": lambda listing: lambda *given: none_listed(listing, *given),
    "_route": one_part,
}


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_contract_catches(name, monkeypatch):
    monkeypatch.setattr(normed, name, MUTANTS[name](getattr(normed, name)))
    # jax keeps kernels of known shapes
    spec = dataclasses.replace(SPECS[0], tokens=4, experts=40 + list(MUTANTS).index(name))
    with pytest.raises(AssertionError):
        check(spec, "pallas")


def test_refuses_what_does_not_fit():
    spec = SPECS[0]
    x, factors, weights, valid, _ = case(spec, 0)
    names = dict.fromkeys(
        ("implementation", "linear_implementation", "norm_implementation"), "pallas"
    )

    def routed(x=x, factors=factors, width=2 * 3 * 4, **options):
        records = jnp.zeros((3, width), jnp.int32)
        operands = x, factors, EPS, weights, valid, None, 0, records, 0, jnp.zeros(1, jnp.int32)
        api.norm_route_and_list(*operands, rule=RULES[spec.rule], **names, **options)

    with pytest.raises(ValueError, match=r"records are \(3, 15\), those of 12 pairs are \[M, 24\]"):
        routed(width=15)
    with pytest.raises(ValueError, match="x has 512 columns, the norm has 4"):
        routed(factors=factors[:, :4])
    with pytest.raises(ValueError, match="3 rows are not whole tiles of 2"):
        routed(row_tile=2)
    with pytest.raises(ValueError, match="not float32; 'xla' takes it"):
        routed(x=x.astype("float32"))

"""One suite for all ops: every implementation keeps the contract of its op.

Native ops take every spec. Of the reference, specs whose number of rows alone differs from that of
an earlier and of a later one are nightly, and of one COMPOSED of others all but the first. Kernels
run as PTX in .ci/run (tests/ptx), the first spec of those in LATER interpreted instead; all others
are interpreted at night. Of Mosaic's kernels, which only the newest jax has, the first spec is
interpreted. The quick suite has the first spec of what is neither interpreted nor a
composed reference. Facts beyond the contracts are in test_facts, a file of their own since a file
is one process's.
"""

import functools
import inspect

import pytest

from pallas_kernels.dispatch import KERNELS, OPS
from tests.pallas_kernels.contract import NATIVE, differs_in_rows, name_of, takes
from tests.pallas_kernels.ops.contracts import CONTRACTS, LATER

COMPOSED = {
    *("norm_linear", "norm_linear_parts", "linear_with_squares", "combine_with_squares"),
    *("route_and_plan", "route_and_list", "norm_route_and_list", "plan_routed"),
    *("fill_ffn", "fill_ffn that combines", "expert_ffn that combines"),
}
"""Contracts whose reference is that of other ops, one after the other."""


def cases():
    for contract in CONTRACTS:
        for implementation in contract.implementations:
            specs = [spec for spec in contract.specs if takes(implementation, spec)]
            for place, spec in enumerate(specs):
                interpreted = implementation in KERNELS
                composed = implementation == "xla" and contract.name in COMPOSED
                left_out = composed and place > 0
                if implementation == "xla":
                    left_out |= differs_in_rows(spec, contract.specs)
                slow = implementation == "pallas" or composed or place > 0
                marks = [pytest.mark.slow] * slow
                later = OPS if implementation == "mosaic" else LATER
                left_out |= interpreted and (place > 0 or contract.name not in later)
                # As PTX it runs in tests/aot/test_mosaic_ops.py, in a tenth of the time.
                left_out |= implementation == "mosaic" and contract.name == "expert_ffn"
                marks += [pytest.mark.nightly] * left_out
                marks += [NATIVE] * (implementation == "cpu")
                name = f"{contract.name}-{implementation}-{name_of(spec)}"
                yield pytest.param(contract, spec, implementation, id=name, marks=marks)


@pytest.mark.parametrize(("contract", "spec", "implementation"), list(cases()))
def test_contract(contract, spec, implementation):
    contract.run(spec, implementation)


@pytest.mark.nightly  # a test of the tests
@pytest.mark.parametrize(
    "contract", [pytest.param(c, id=c.name) for c in CONTRACTS if c.mutant is not None]
)
def test_contract_catches(contract, monkeypatch):
    mutant = contract.mutant
    table = mutant.table or contract.implementations
    function = table[mutant.of]

    @functools.wraps(function)
    def broken(*args, **options):
        given = inspect.signature(function).bind(*args, **options)
        given.arguments |= mutant.change(dict(given.arguments))
        return function(*given.args, **given.kwargs)

    name = mutant.of if mutant.table else "mutant"
    monkeypatch.setitem(table, name, broken)
    with pytest.raises(AssertionError):
        contract.run(mutant.spec, name, examples=300)


def refusals():
    for contract in CONTRACTS:
        for number, (*given, message) in enumerate(contract.refusals):
            yield pytest.param(contract, given, message, id=f"{contract.name}-{number}")


@pytest.mark.parametrize(("contract", "given", "message"), list(refusals()))
def test_refuses(contract, given, message):
    with pytest.raises(ValueError, match=message):
        contract.refused(*given)

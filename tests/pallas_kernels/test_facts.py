"""What implementations of ops do beyond their contracts: bits of a row whatever stands beside it,
rounding where the reference rounds."""

import pytest

from pallas_kernels.dispatch import KERNELS
from pallas_kernels.mosaic import why_not_mosaic
from tests.pallas_kernels.contract import NATIVE
from tests.pallas_kernels.ops.contracts import CONTRACTS

pytestmark = pytest.mark.slow


def facts():
    for contract in CONTRACTS:
        for fact in contract.facts:
            for implementation in contract.implementations:
                if implementation == "mosaic" and why_not_mosaic():
                    continue
                bits = implementation in KERNELS and fact.__name__ != "activations"
                marks = [pytest.mark.nightly] * bits
                marks += [NATIVE] * (implementation == "cpu")
                name = f"{contract.name}-{fact.__name__}-{implementation}"
                yield pytest.param(fact, implementation, id=name, marks=marks)


@pytest.mark.parametrize(("fact", "implementation"), list(facts()))
def test_fact(fact, implementation):
    fact(implementation)

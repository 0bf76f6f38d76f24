"""What implementations of ops do beyond their contracts: bits of a row whatever stands beside it,
rounding where the reference rounds."""

import numpy as np
import pytest

from pallas_kernels.dispatch import KERNELS
from pallas_kernels.mosaic import why_not_mosaic
from pallas_kernels.paged_attention.specs import PrefillSpec
from tests.pallas_kernels.contract import NATIVE, same_bits
from tests.pallas_kernels.ops.contracts import CONTRACTS
from tests.pallas_kernels.ops.prefill_attention import case, laid_out, run

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


@NATIVE
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_value_that_is_not_finite_reaches_no_token_before_it(dtype):
    spec = PrefillSpec(((56, 16),), 16, dtype)
    q, keys, values = case(spec, 0)
    want = run(spec, "cpu", q, laid_out(spec, keys, values))[0]
    values[0][-1] = np.inf
    got = run(spec, "cpu", q, laid_out(spec, keys, values))[0]
    same_bits(got[:-1], want[:-1])
    assert not np.isfinite(got[-1].astype(np.float32)).any()

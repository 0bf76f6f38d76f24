"""The contracts of ops with the PTX that XLA makes of their kernels, run by the interpreter.

A contract's operands, references and tolerances are those of tests/pallas_kernels/ops.
"""

import sys

import pytest

from tests.aot.aot_h200 import CARDS
from tests.pallas_kernels.contract import takes
from tests.pallas_kernels.ops.contracts import CONTRACTS, LATER
from tests.ptx.program import patched

pytestmark = [pytest.mark.aot, pytest.mark.slow]

SECOND = (
    "rtx5060ti",
    ("linear", "expert_ffn", "decode_attention", "route", "plan", "fill", "move"),
)
"""A card without a warpgroup's matrix instructions, with those of compute capability 10.0 and
higher, and what .ci/run has for it beside an H200. All of it, and other cards, at night."""

OTHERS = {
    "linear": 17,
    "norm_linear_parts": 2,
    "expert_ffn": 19,
    "fill_ffn": 4,
    "write_and_attend": 6,
}
"""Specs beside the first of which .ci/run has the PTX: 64 rows, several parts of the depth or of a
row's pages."""


OF_CHECKPOINTS = "expert_ffn of checkpoints' formats"
"""The contract of which .ci/run has, for every card, the specs with tiles of 64 rows, one of each
format: 2 to 17 s each on a busy machine."""


def cases():
    for contract in CONTRACTS:
        if "pallas" not in contract.implementations:
            continue
        specs = [spec for spec in contract.specs if takes("pallas", spec)]
        for place, spec in enumerate(specs):
            first = place in (0, OTHERS.get(contract.name)) and contract.name not in LATER
            for card in CARDS:
                second = place == 0 and card == SECOND[0] and contract.name in SECOND[1]
                always = second or (first and card == "h200")
                always |= contract.name == OF_CHECKPOINTS and spec.row_tile == 64
                marks = [] if always else [pytest.mark.nightly]
                name = f"{contract.name}-{place}-{card}"
                yield pytest.param(contract, spec, card, id=name, marks=marks)


@pytest.mark.parametrize(("contract", "spec", "card"), list(cases()))
def test_contract(contract, spec, card):
    with patched(sys.modules[contract.check.__module__], card=card):
        contract.run(spec, "pallas", examples=2)

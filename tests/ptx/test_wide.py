"""Arrays beyond 4 GiB, whose kernels address with 64 bits: memory that nobody writes takes none."""

import re

import numpy as np
import pytest

from pallas_kernels.fill import Fills, fill
from tests.ptx.memory import zeros
from tests.ptx.parse import Fault
from tests.ptx.program import interpret

pytestmark = [pytest.mark.aot, pytest.mark.slow]

HIDDEN, ROWS, EXPERTS = 2048, 48, 4
RECORD = 2 * HIDDEN * ROWS
CELLS = (1 << 32) // RECORD + 300
LAYERS = CELLS // EXPERTS + 1


def filled(edit=lambda ptx: ptx):
    """What is wrong after the record of an expert of the last layer was copied to the last cell."""
    arena = zeros((CELLS * ROWS, HIDDEN), np.dtype(np.uint16))
    store = zeros((LAYERS, EXPERTS, ROWS, HIDDEN), np.dtype(np.uint16))
    store[-1] = np.random.default_rng(0).integers(1, 1 << 16, store.shape[1:])
    row = (CELLS - 1) * ROWS
    moves = (np.array(entry, np.int32) for entry in ([2, -1], [row, -1], [0, 0], 1))
    run = interpret(fill, ("arena",), implementation="pallas", edit=edit)
    try:
        changed = run(arena, (store,), np.int32(LAYERS - 1), Fills(*moves))
    except Fault as fault:
        return str(fault)
    return "" if np.array_equal(changed[row:], store[-1, 2]) else "wrong values"


def test_fill_of_the_last_cell_from_the_last_layer():
    assert filled() == ""


@pytest.mark.nightly  # a test of the tests
@pytest.mark.parametrize("factor", [EXPERTS * RECORD, 2 * HIDDEN])
def test_a_product_of_32_bits_is_found(factor):
    """Of the layer's number, and of the arena's row."""

    def edit(ptx):
        product = rf"(mul\.wide\.[us]32\s+(%rd\d+), %r\d+, {factor};)"
        changed, count = re.subn(product, r"\1 and.b64 \2, \2, 4294967295;", ptx)
        assert count >= 1
        return changed

    assert filled(edit) != ""

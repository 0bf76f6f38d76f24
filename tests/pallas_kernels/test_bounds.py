"""An interpreted kernel that reads or writes outside of its arrays is found."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.triton import triton_call
from tests.pallas_kernels.contract import compiled

pytestmark = pytest.mark.slow

ROWS, COLUMNS, TILE = 3, 12, 8


def copy(x, *, mask_load, mask_store, by_index, programs):
    """Copies x in tiles of one row and TILE columns."""

    def kernel(x, y):
        row, first = pl.program_id(0), pl.program_id(1) * TILE
        columns = first + jnp.arange(TILE)
        mask = (columns < COLUMNS) & (row < ROWS)
        at = row, columns if by_index else pl.ds(first, TILE)
        values = plgpu.load(x.at[at], mask=mask if mask_load else None)
        plgpu.store(y.at[at], values, mask=mask if mask_store else None)

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    call = triton_call(
        kernel, name="copy", grid=programs, out_shape=shape, num_warps=1, num_stages=1
    )
    return call(x)


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.int32, jnp.uint16])
@pytest.mark.parametrize("by_index", [False, True])
@pytest.mark.parametrize("programs", [(3, 2), (4, 2)])
def test_only_a_missing_mask_shows(programs, by_index, dtype):
    x = np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS).astype(dtype)
    options = dict(by_index=by_index, programs=programs)
    right = compiled(copy, mask_load=True, mask_store=True, **options)(x)
    np.testing.assert_array_equal(right, x)
    for masks in ((False, True), (True, False)):
        wrong = compiled(copy, mask_load=masks[0], mask_store=masks[1], **options)(x)
        assert np.any(np.asarray(wrong) != x)

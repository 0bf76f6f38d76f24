"""Tiles of records in kernels have the bits of decoded records; interpreted here."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

import tests.pallas_kernels.cpu_lowerings  # noqa: F401  (what the interpreter lacks)
from pallas_kernels.expert_ffn.specs import CODED
from pallas_kernels.records import RecordFormat, decode
from pallas_kernels.records.format import MATRICES
from pallas_kernels.records.tile import DOWN, plane_size, read_planes, span
from pallas_kernels.triton import interpreted, triton_call
from tests.pallas_kernels.encoded import records

TILE = 16


def tiles_of(record, fmt, matrix):
    """uint16[I, D]: a matrix, tile by tile."""
    down = matrix == DOWN
    results, axis = (fmt.hidden, fmt.width) if down else (fmt.width, fmt.hidden)

    def kernel(source, out):
        def read(rows, columns, mask):
            return plgpu.load(
                source.at[rows, columns], mask=mask, other=None if mask is None else 0
            )

        start, across = (pl.program_id(i) * TILE for i in range(2))
        for plane in read_planes(read, fmt, matrix, start, across, TILE, TILE):
            bits = lax.bitcast_convert_type(plane.weights(), jnp.uint16)
            index, result = span(plane.start, TILE), span(across, TILE)
            inside = index < (axis if plane.end is None else plane.end)
            rows, columns = (index, result) if down else (result, index)
            masks = (inside, result < results) if down else (result < results, inside)
            mask = masks[0][:, None] & masks[1][None, :]
            plgpu.store(out.at[rows[:, None], columns[None, :]], bits, mask=mask)

    with interpreted():
        run = triton_call(
            kernel,
            name="tiles",
            grid=(pl.cdiv(plane_size(fmt, matrix), TILE), pl.cdiv(results, TILE)),
            out_shape=jax.ShapeDtypeStruct((fmt.width, fmt.hidden), jnp.uint16),
            num_warps=4,
            num_stages=1,
        )
        return np.asarray(jax.jit(run)(record))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("version", CODED)
def test_tiles_have_the_bits_of_decoded_records(version, dtype):
    fmt = RecordFormat(version, 96, 80, dtype, biases=True)
    record = jnp.asarray(records(np.random.default_rng(0), 1, fmt)[0])
    wanted = np.asarray(decode(record, fmt)).view(np.uint16)
    for matrix in range(len(MATRICES)):
        rows = slice(matrix * fmt.width, (matrix + 1) * fmt.width)
        np.testing.assert_array_equal(tiles_of(record, fmt, matrix), wanted[rows])

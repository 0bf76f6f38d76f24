import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu.library import call, check_dtypes, int32
from pallas_kernels.linear.coded import CodedWeights
from pallas_kernels.records.cpu import format_numbers


def linear(x, weights, layer, bias, tiling, out_dtype):
    """linear of the api. A row has one order of sums for any T, so row_tile decides no bits. Rows
    of tiles that are not computed are 0."""
    check_dtypes("linear", x=x, weights=weights, bias=bias)
    coded = isinstance(weights, CodedWeights)
    out = jax.ShapeDtypeStruct((x.shape[0], weights.shape[1]), jnp.dtype(out_dtype))
    bias = jnp.zeros((0, 0), x.dtype) if bias is None else bias
    tile, tiles = np.int64(tiling.row_tile), int32(tiling.tiles)
    if not coded:
        return call("linear", out, x, weights, int32(layer), bias, tiles, row_tile=tile)
    formats: dict[tuple[int, ...], int] = {}
    parts = [
        (
            formats.setdefault(tuple(format_numbers(rows.format, tiling.arithmetic)), len(formats)),
            rows.first,
            rows.format.width,
        )
        for layer in weights.layers
        for rows in layer
    ]
    return call(
        "linear_codes",
        out,
        *(x, weights.elements, int32(layer), bias, tiles),
        row_tile=tile,
        layers=np.int64(len(weights.layers)),
        formats=np.array([*formats], np.int64).reshape(-1),
        parts=np.array(parts, np.int64).reshape(-1),
    )

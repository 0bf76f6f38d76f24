import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu.library import call, check_dtypes, int32


def linear(x, weights, layer, bias, tiling, out_dtype):
    """linear of the api. A row has one order of sums for any T, so row_tile decides no bits. Rows
    of tiles that are not computed are 0."""
    check_dtypes("linear", x=x, weights=weights, bias=bias)
    out = jax.ShapeDtypeStruct((x.shape[0], weights.shape[1]), jnp.dtype(out_dtype))
    bias = jnp.zeros((0, 0), x.dtype) if bias is None else bias
    tile, tiles = np.int64(tiling.row_tile), int32(tiling.tiles)
    return call("linear", out, x, weights, int32(layer), bias, tiles, row_tile=tile)

import jax
import numpy as np
from jax import lax

from pallas_kernels.cpu.library import call, check_dtypes, int32


def head_linear(x, weights, layer, *, part, transposed, row_tile, tiles):
    """As linear, head by head. The layer's part of the weights is cut out, and turned, by XLA."""
    check_dtypes("head_linear", x=x, weights=weights)
    weight = lax.dynamic_index_in_dim(weights, layer)[:, :, slice(*part)]
    weight = weight.swapaxes(2, 3) if transposed else weight
    out = jax.ShapeDtypeStruct((*x.shape[:2], weight.shape[2]), x.dtype)
    tile = np.int64(row_tile)
    return call("head_linear", out, x, weight, int32(0), int32(tiles), row_tile=tile)

import jax
import numpy as np

from pallas_kernels.cpu.library import call, check_dtypes, int32


def head_linear(x, weights, layer, *, part, transposed, row_tile, tiles):
    """linear, head by head. The part is read in place, without a copy."""
    check_dtypes("head_linear", x=x, weights=weights)
    first, stop = part
    outputs = weights.shape[3] if transposed else stop - first
    return call(
        "head_linear",
        jax.ShapeDtypeStruct((*x.shape[:2], outputs), x.dtype),
        *(x, weights, int32(layer), int32(tiles)),
        row_tile=np.int64(row_tile),
        first=np.int64(first),
        transposed=np.int64(transposed),
    )

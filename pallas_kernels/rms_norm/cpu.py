import jax
import numpy as np

from pallas_kernels.cpu.library import call, check_dtypes, int32


def rms_norm(x, weights, layer, eps):
    """Sums in double, one order of a row whatever the number of rows."""
    check_dtypes("rms_norm", x=x, weights=weights)
    rows = x.reshape(-1, x.shape[-1])
    out = jax.ShapeDtypeStruct(rows.shape, x.dtype)
    y = call("rms_norm", out, rows, weights, int32(layer), eps=np.float32(eps))
    return y.reshape(x.shape)

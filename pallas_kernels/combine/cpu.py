import jax

from pallas_kernels.cpu.library import call, check_dtypes


def combine(residual, y, weights):
    check_dtypes("combine", residual=residual)
    out = jax.ShapeDtypeStruct(residual.shape, residual.dtype)
    return call("combine", out, residual, y, weights)

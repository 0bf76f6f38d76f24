"""rms_norm as one Mosaic kernel: a warpgroup for each row."""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# The oldest jax lacks some names, and refuses these kernels by name.

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mosaic import check_mosaic, mosaic_call
from pallas_kernels.triton import scalar


def rms_norm(x, weights, layer, eps):
    width = x.shape[-1]
    check_mosaic("rms_norm", [width], x.dtype, weights.dtype)
    rows = math.prod(x.shape[:-1])
    out = mosaic_call(
        functools.partial(_kernel, eps=eps),
        name="rms_norm",
        grid={"row": rows},
        out_type=jax.ShapeDtypeStruct((rows, width), x.dtype),
    )(scalar(layer), x.reshape(rows, width), weights)
    return out.reshape(x.shape)


def _kernel(layer, x, weights, out, *, eps):
    """Program t normalises row t.

    Writes: program t alone writes out[t].
    """
    t = lax.axis_index("row")
    wide = x[t].astype(jnp.float32)
    scale = lax.rsqrt(jnp.sum(wide * wide) / x.shape[1] + eps)
    normed = weights[layer[0]] * (wide * scale).astype(out.dtype)
    plgpu.store(out.at[t], normed, optimized=False)

"""layer_norm as one Triton-lowered kernel, a program a row."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import plgpu
from pallas_kernels.rms_norm.pallas_triton import configuration
from pallas_kernels.triton import scalar, triton_call


def layer_norm(x, weights, biases, layer, eps):
    width = x.shape[-1]
    config = configuration(width, jnp.result_type(x, weights, biases), "layer_norm")
    rows = math.prod(x.shape[:-1])
    out = triton_call(
        functools.partial(_kernel, eps=eps, config=config),
        name="layer_norm",
        grid=(rows,),
        out_shape=jax.ShapeDtypeStruct((rows, width), x.dtype),
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )(scalar(layer), x.reshape(rows, width), weights, biases)
    return out.reshape(x.shape)


def _kernel(layer, x, weights, biases, out, *, eps, config):
    """Program t normalises row t.

    Writes: program t alone writes out[t].
    """
    t, width = pl.program_id(0), x.shape[1]
    columns = pl.ds(0, config.columns)
    mask = None if width == config.columns else jnp.arange(config.columns) < width
    other = None if mask is None else 0

    def row(ref):
        return plgpu.load(ref, mask=mask, other=other).astype(jnp.float32)

    wide = row(x.at[t, columns])
    centered = wide - jnp.sum(wide) / width
    if mask is not None:
        centered = jnp.where(mask, centered, 0.0)
    scale = lax.rsqrt(jnp.sum(centered * centered) / width + eps)
    weight, bias = row(weights.at[layer[0], columns]), row(biases.at[layer[0], columns])
    result = centered * scale * weight + bias
    plgpu.store(out.at[t, columns], result.astype(out.dtype), mask=mask)

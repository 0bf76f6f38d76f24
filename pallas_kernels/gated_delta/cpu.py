import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.cpu.library import call, check_dtypes, int32
from pallas_kernels.gated_delta.columns import separate
from pallas_kernels.state_pages import run_operands


def gated_delta(heads, weights, arena, sequences, layer, options):
    """gated_delta of the api. A thread computes whole key heads, one token after the other. State
    pages outside the arena are an error, before anything is written."""
    heads = separate(heads, options)
    check_dtypes("gated_delta", **heads._asdict())
    stack_layer = weights.stack_layer
    conv, a_log, dt_bias = (
        lax.dynamic_index_in_dim(each, stack_layer, keepdims=False).astype(jnp.float32)
        for each in weights[:3]
    )
    shape = options.shape
    values = shape.value_heads * shape.value_dim
    out = jax.ShapeDtypeStruct((len(heads.qkv), values), heads.qkv.dtype)
    return call(
        "gated_delta",
        (out, arena),
        *(*heads, conv, a_log, dt_bias, arena, *run_operands(sequences), int32(layer)),
        aliases={6: 1},
        shape=np.array(shape, np.int64),
        page=np.array(options.page, np.int64),
    )

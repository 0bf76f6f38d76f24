import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.cpu.library import call, check_dtypes, int32


def gated_delta(heads, weights, arena, sequences, layer, options):
    """gated_delta of the api. A thread computes whole key heads, one token after the other. State
    pages outside the arena are an error, before anything is written."""
    check_dtypes("gated_delta", **heads._asdict())
    stack_layer = weights.stack_layer
    conv, a_log, dt_bias = (
        lax.dynamic_index_in_dim(each, stack_layer, keepdims=False).astype(jnp.float32)
        for each in weights[:3]
    )
    pages, shape = sequences.pages, options.shape
    read = pages if sequences.read is None else sequences.read
    copy = jnp.full_like(pages, -1) if sequences.copy is None else sequences.copy
    values = shape.value_heads * shape.value_dim
    out = jax.ShapeDtypeStruct((len(heads.qkv), values), heads.qkv.dtype)
    runs = sequences.start, sequences.skip, sequences.length, int32(sequences.count)
    return call(
        "gated_delta",
        (out, arena),
        *(*heads, conv, a_log, dt_bias, arena, pages, read, copy, *runs, int32(layer)),
        aliases={6: 1},
        shape=np.array(shape, np.int64),
        page=np.array(options.page, np.int64),
    )

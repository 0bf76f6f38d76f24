import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.cpu.library import call, check_dtypes, int32
from pallas_kernels.state_pages import run_operands


def selective_scan(inputs, weights, arena, sequences, layer, options):
    """selective_scan of the api. A thread computes whole heads, one token after the other. State
    pages outside the arena are an error, before anything is written."""
    check_dtypes("selective_scan", **inputs._asdict())
    of_layer = (
        lax.dynamic_index_in_dim(each, weights.stack_layer, keepdims=False).astype(jnp.float32)
        for each in weights[:3]
    )
    out = jax.ShapeDtypeStruct((len(inputs.xbc), options.shape.values), inputs.xbc.dtype)
    least, most = options.limits
    return call(
        "selective_scan",
        (out, arena),
        *(*inputs, *of_layer, arena, *run_operands(sequences), int32(layer)),
        aliases={5: 1},
        shape=np.array(options.shape, np.int64),
        least=np.float32(least),
        most=np.float32(most),
        page=np.array(options.page, np.int64),
    )

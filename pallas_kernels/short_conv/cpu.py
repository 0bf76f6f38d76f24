import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.cpu.library import call, check_dtypes, int32
from pallas_kernels.state_pages import run_operands


def short_conv(x, weights, arena, sequences, layer, options):
    """short_conv of the api. State pages outside the arena are an error, before anything is
    written."""
    check_dtypes("short_conv", x=x)
    stack, stack_layer, biases = weights
    if biases is None:
        biases = jnp.zeros(stack.shape[:2], jnp.float32)
    of_layer = (
        lax.dynamic_index_in_dim(each, stack_layer, keepdims=False).astype(jnp.float32)
        for each in (stack, biases)
    )
    return call(
        "short_conv",
        (jax.ShapeDtypeStruct(x.shape, x.dtype), arena),
        *(x, *of_layer, arena, *run_operands(sequences), int32(layer)),
        aliases={3: 1},
        page=np.array(options.page, np.int64),
        silu=np.int64(options.silu),
    )

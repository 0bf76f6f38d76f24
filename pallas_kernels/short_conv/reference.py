import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.state_pages import advance


def short_conv(x, weights, arena, sequences, layer, options):
    stack, stack_layer, biases = weights
    of_layer = lax.dynamic_index_in_dim(stack, stack_layer, keepdims=False)
    taps = of_layer.astype(jnp.float32).T[::-1]  # the newest token's weights first
    bias = None
    if biases is not None:
        bias = lax.dynamic_index_in_dim(biases, stack_layer, keepdims=False).astype(jnp.float32)

    def token(state, row):
        new = lax.dynamic_index_in_dim(x, row, keepdims=False)
        # Of a single row it is the same in every turn, and would be computed outside of the loop.
        (last,), new = lax.optimization_barrier((state, new))
        seen = jnp.concatenate([new[None], last])  # the newest first
        total = mixed(seen, taps)
        out = (total if bias is None else total + bias).astype(x.dtype)
        if options.silu:
            out = jax.nn.silu(out.astype(jnp.float32)).astype(x.dtype)
        return (seen[:-1],), out

    shapes = (((taps.shape[0] - 1, x.shape[1]), str(x.dtype)),)
    return advance(token, shapes, jnp.zeros_like(x), arena, sequences, layer, options.page)


def mixed(seen, taps):
    """The convolution float32[W] of the tokens [taps, W], added in order."""
    total = seen[0].astype(jnp.float32) * taps[0]
    for token, weights in zip(seen[1:], taps[1:], strict=True):
        total = total + token.astype(jnp.float32) * weights
    return total

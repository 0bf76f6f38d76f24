import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.gated_delta.columns import separate
from pallas_kernels.short_conv.reference import mixed as convolved
from pallas_kernels.state_pages import advance


def gated_delta(heads, weights, arena, sequences, layer, options):
    heads = separate(heads, options)
    shape, dtype = options.shape, heads.qkv.dtype
    conv, a_log, dt_bias = (
        lax.dynamic_index_in_dim(each, weights.stack_layer, keepdims=False).astype(jnp.float32)
        for each in weights[:3]
    )
    taps = conv.T[::-1]  # the newest token's weights first

    def token(state, row):
        row_of = [lax.dynamic_index_in_dim(each, row, keepdims=False) for each in heads]
        # Of a single row they are the same in every turn: computed outside of the loop, by other
        # code, they would have other bits.
        (matrices, last), (new, beta, decay) = lax.optimization_barrier((state, row_of))
        seen = jnp.concatenate([new[None], last])  # the newest first
        mixed = jax.nn.silu(convolved(seen, taps).astype(dtype).astype(jnp.float32)).astype(dtype)
        q, k, v = _heads(mixed.astype(jnp.float32), shape)
        decay = jax.nn.softplus(decay.astype(jnp.float32) + dt_bias)
        rate = jnp.exp(a_log)[:, None] * decay.reshape(shape.value_heads, -1)
        matrices = matrices * jnp.exp(-rate)[:, :, None]
        error = v - jnp.sum(matrices * k[:, :, None], axis=1)
        change = jax.nn.sigmoid(beta.astype(jnp.float32))[:, None] * error
        matrices = matrices + k[:, :, None] * change[:, None]
        out = jnp.sum(matrices * q[:, :, None], axis=1)
        return (matrices, seen[:-1]), out.astype(dtype).reshape(-1)

    values = shape.value_heads * shape.value_dim
    out = jnp.zeros((heads.qkv.shape[0], values), dtype)
    state = shape.state(str(dtype))
    return advance(token, state, out, arena, sequences, layer, options.page)


def _heads(mixed, shape):
    """q and k [V, dk], normalised, and v [V, dv]."""
    width = shape.key_heads * shape.key_dim
    q, k, v = jnp.split(mixed, (width, 2 * width))
    each = shape.value_heads // shape.key_heads
    q, k = (jnp.repeat(_unit(x.reshape(shape.key_heads, -1)), each, axis=0) for x in (q, k))
    return q * shape.key_dim**-0.5, k, v.reshape(shape.value_heads, -1)


def _unit(x):
    return x * lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6)

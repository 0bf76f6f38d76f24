import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.state_pages import advance


def selective_scan(inputs, weights, arena, sequences, layer, options):
    shape, dtype = options.shape, inputs.xbc.dtype
    a_log, dt_bias, skip = (
        lax.dynamic_index_in_dim(each, weights.stack_layer, keepdims=False).astype(jnp.float32)
        for each in weights[:3]
    )
    # Numbers of a head's steps: one, or one for each of its values.
    by_head = lambda x: x.reshape(shape.heads, -1)  # noqa: E731
    rates = -jnp.exp(a_log).reshape(shape.heads, -1, shape.state if shape.each else 1)
    rates = rates.swapaxes(1, 2)  # [heads, state or 1, head_dim or 1]

    def token(state, row):
        row_of = [lax.dynamic_index_in_dim(each, row, keepdims=False) for each in inputs]
        # Of a single row they are the same in every turn: computed outside of the loop, by other
        # code, they would have other bits.
        (matrices,), (xbc, dt) = lax.optimization_barrier((state, row_of))
        split = shape.values, shape.values + shape.groups * shape.state
        x, key, read = jnp.split(xbc.astype(jnp.float32), split)
        key, read = (
            jnp.repeat(each.reshape(shape.groups, -1), shape.heads // shape.groups, axis=0)
            for each in (key, read)
        )
        dt = jnp.clip(jax.nn.softplus(dt.astype(jnp.float32) + dt_bias), *options.limits)
        x, dt = by_head(x), by_head(dt)
        kept = jnp.exp(rates * dt[:, None])
        matrices = matrices * kept + key[:, :, None] * (x * dt)[:, None]
        out = jnp.sum(matrices * read[:, :, None], axis=1) + by_head(skip) * x
        return (matrices,), out.astype(dtype).reshape(-1)

    out = jnp.zeros((inputs.xbc.shape[0], shape.values), dtype)
    return advance(token, shape.arrays(), out, arena, sequences, layer, options.page)

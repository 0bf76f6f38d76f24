import jax.numpy as jnp
from jax import lax


def head_linear(x, weights, layer, *, part, transposed, row_tile, tiles):
    weight = lax.dynamic_index_in_dim(weights, layer, keepdims=False)[:, slice(*part)]
    weight = weight.swapaxes(1, 2) if transposed else weight

    def product(rows):
        y = lax.dot_general(
            rows,
            weight,
            (((2,), (2,)), ((1,), (0,))),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        return y.swapaxes(0, 1).astype(x.dtype)

    if row_tile == x.shape[0]:
        return product(x)

    def tile(i, y):
        rows = lax.dynamic_slice_in_dim(x, i * row_tile, row_tile)
        return lax.dynamic_update_slice_in_dim(y, product(rows), i * row_tile, 0)

    return lax.fori_loop(0, tiles, tile, jnp.zeros((*x.shape[:2], weight.shape[1]), x.dtype))

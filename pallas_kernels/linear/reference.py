from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels.linear.coded import CodedWeights
from pallas_kernels.records.integers import multiply


def linear(x, weights, layer, bias, tiling, out_dtype):
    row_tile = tiling.row_tile
    outputs = weights.shape[1]
    coded = isinstance(weights, CodedWeights)  # whose integers are multiplied
    weight: Any = None if coded else lax.dynamic_index_in_dim(weights, layer, keepdims=False)

    def multiplied(rows):
        if coded:
            each = [
                [multiply(rows, weights.record(part), part.format, "up") for part in parts]
                for parts in weights.layers
            ]
            every = jnp.stack([jnp.concatenate(parts, axis=1) for parts in each])
            return lax.dynamic_index_in_dim(every, layer, keepdims=False)
        return lax.dot_general(
            rows,
            weight,
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )

    def product(rows):
        y = multiplied(rows)
        if bias is not None:
            y = y + lax.dynamic_index_in_dim(bias, layer, keepdims=False).astype(jnp.float32)
        return y.astype(out_dtype)

    if row_tile == x.shape[0]:
        return product(x)

    def tile(i, y):
        rows = lax.dynamic_slice_in_dim(x, i * row_tile, row_tile)
        return lax.dynamic_update_slice_in_dim(y, product(rows), i * row_tile, 0)

    return lax.fori_loop(0, tiling.tiles, tile, jnp.zeros((x.shape[0], outputs), out_dtype))

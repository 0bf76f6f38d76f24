import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu.library import call, check_dtypes, int32


def kv_write(heads, arena, places, options):
    """kv_write of the api. A place outside the arena is an error, before anything is written."""
    qkv, q_norm, k_norm, stack_layer, inverse_frequencies = heads
    positions, pages, layer = places
    page = options.page
    check_dtypes("kv_write", qkv=qkv, q_norm=q_norm, k_norm=k_norm)
    if q_norm is None:
        q_norm = k_norm = jnp.zeros((0, page.head_dim), qkv.dtype)
    tokens, queries = qkv.shape[0], qkv.shape[1] // page.head_dim - 2 * page.kv_heads
    q = jax.ShapeDtypeStruct((tokens, queries, page.head_dim), qkv.dtype)
    norms = q_norm, k_norm, int32(stack_layer)
    return call(
        "kv_write",
        (q, arena),
        *(qkv, *norms, positions, inverse_frequencies, arena, pages, int32(layer)),
        aliases={6: 1},
        page=np.array(page, np.int64),
        factor=np.float32(options.attention_factor),
        eps=np.float32(options.eps),
    )

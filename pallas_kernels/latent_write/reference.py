import jax.numpy as jnp

from pallas_kernels.kv_write.reference import write_rows
from pallas_kernels.kv_write.rotary import cosine_and_sine, rotate
from pallas_kernels.rms_norm.reference import rms_norm


def latent_write(heads, arena, places, options):
    kv, kv_norm, stack_layer, q_rope, inverse_frequencies = heads
    page = options.page
    latent, key = jnp.split(kv[:, None], (page.latent,), axis=-1)
    cos, sin = cosine_and_sine(
        places.positions, inverse_frequencies, options.attention_factor, kv.dtype
    )
    if options.interleave:
        key, q_rope = _halves(key), _halves(q_rope)
    row = [rms_norm(latent, kv_norm, stack_layer, options.eps), rotate(key, cos, sin)]
    arena = write_rows(arena, jnp.concatenate(row, axis=-1), places, page)
    return rotate(q_rope, cos, sin), arena


def _halves(x):
    """Values 2i of x [T, H, P] first, then values 2i + 1."""
    return jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)

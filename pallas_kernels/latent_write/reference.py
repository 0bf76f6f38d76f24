import jax.numpy as jnp

from pallas_kernels.kv_write.reference import write_rows
from pallas_kernels.kv_write.rotary import cosine_and_sine, rotate
from pallas_kernels.rms_norm.reference import rms_norm


def latent_write(
    kv,
    kv_norm,
    stack_layer,
    q_rope,
    positions,
    inverse_frequencies,
    arena,
    pages,
    layer,
    *,
    page,
    attention_factor,
    eps,
    interleave,
):
    latent, key = jnp.split(kv[:, None], (page.latent,), axis=-1)
    cos, sin = cosine_and_sine(positions, inverse_frequencies, attention_factor, kv.dtype)
    if interleave:
        key, q_rope = _halves(key), _halves(q_rope)
    row = [rms_norm(latent, kv_norm, stack_layer, eps), rotate(key, cos, sin)]
    arena = write_rows(arena, jnp.concatenate(row, axis=-1), positions, pages, layer, page)
    return rotate(q_rope, cos, sin), arena


def _halves(x):
    """Values 2i of x [T, H, P] first, then values 2i + 1."""
    return jnp.concatenate([x[..., ::2], x[..., 1::2]], axis=-1)

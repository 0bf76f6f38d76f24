import numpy as np

from pallas_kernels.cpu.library import call, check_dtypes, int32


def latent_write(heads, arena, places, options):
    """latent_write of the api. A place outside the arena is an error, before anything is
    written."""
    kv, kv_norm, stack_layer, q_rope, inverse_frequencies = heads
    positions, pages, layer = places
    check_dtypes("latent_write", kv=kv, kv_norm=kv_norm, q_rope=q_rope)
    operands = kv, kv_norm, int32(stack_layer), q_rope, positions, inverse_frequencies
    return call(
        "latent_write",
        (q_rope, arena),
        *(*operands, arena, pages, int32(layer)),
        aliases={6: 1},
        page=np.array(options.page, np.int64),
        factor=np.float32(options.attention_factor),
        eps=np.float32(options.eps),
        interleave=np.int64(options.interleave),
    )

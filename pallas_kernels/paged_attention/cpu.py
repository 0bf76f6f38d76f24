from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu.library import call, check_dtypes, int32
from pallas_kernels.paged_attention.reference import whole


def decode_attention(q, arena, block_table, lengths, layer, options, q_rope, per_layer):
    q = whole(q, q_rope)
    check_dtypes("paged_attention", q=q)
    operands = q, arena, block_table, lengths, int32(layer), *_operands(per_layer)
    return call("decode_attention", _result(q, options), *operands, **_attributes(options))


def prefill_attention(q, arena, block_table, chunks, layer, options, q_rope, per_layer):
    """prefill_attention of the api; undefined rows are 0."""
    q = whole(q, q_rope)
    check_dtypes("paged_attention", q=q)
    numbers = int32(chunks.count), int32(layer), *_operands(per_layer)
    operands = q, arena, block_table, *chunks[:3], *numbers
    return call("prefill_attention", _result(q, options), *operands, **_attributes(options))


def _result(q, options):
    return jax.ShapeDtypeStruct((q.shape[0], q.shape[1] * options.page.value_dim), q.dtype)


def _operands(per_layer):
    """Sinks, windows and index; what there is none of is empty."""
    index, sinks, windows, _ = per_layer
    sinks = jnp.zeros((0, 0), jnp.float32) if sinks is None else sinks.astype(jnp.float32)
    windows = jnp.zeros(0, jnp.int32) if windows is None else windows
    return sinks, windows, int32(index)


def _attributes(options) -> dict[str, Any]:
    return dict(
        page=np.array(options.page, np.int64),
        scale=np.float32(options.scale),
    )

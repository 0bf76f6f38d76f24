from typing import Any

import jax
import numpy as np

from pallas_kernels.cpu.library import call, check_dtypes, int32
from pallas_kernels.paged_attention.reference import whole


def decode_attention(q, arena, block_table, lengths, layer, options, q_rope):
    q = whole(q, q_rope)
    check_dtypes("paged_attention", q=q)
    operands = q, arena, block_table, lengths, int32(layer)
    return call("decode_attention", _result(q, options), *operands, **_attributes(options))


def prefill_attention(q, arena, block_table, chunks, layer, options, q_rope):
    """prefill_attention of the api; undefined rows are 0."""
    q = whole(q, q_rope)
    check_dtypes("paged_attention", q=q)
    operands = q, arena, block_table, *chunks[:3], int32(chunks.count), int32(layer)
    return call("prefill_attention", _result(q, options), *operands, **_attributes(options))


def _result(q, options):
    return jax.ShapeDtypeStruct((q.shape[0], q.shape[1] * options.page.value_dim), q.dtype)


def _attributes(options) -> dict[str, Any]:
    return dict(
        page=np.array(options.page, np.int64),
        window=np.int64(options.window or 0),
        scale=np.float32(options.scale),
    )

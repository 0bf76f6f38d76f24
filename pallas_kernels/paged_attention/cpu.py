from typing import Any

import jax
import numpy as np

from pallas_kernels.cpu.library import call, check_dtypes, int32
from pallas_kernels.paged_attention.reference import whole


def decode_attention(q, arena, block_table, lengths, layer, *, page, window, scale, q_rope):
    q = whole(q, q_rope)
    check_dtypes("paged_attention", q=q)
    operands = q, arena, block_table, lengths, int32(layer)
    return call("decode_attention", _result(q, page), *operands, **_options(page, window, scale))


def prefill_attention(
    q, arena, block_table, row, start, length, count, layer, *, page, window, scale, q_rope
):
    """Rows that mean nothing are 0."""
    q = whole(q, q_rope)
    check_dtypes("paged_attention", q=q)
    operands = q, arena, block_table, row, start, length, int32(count), int32(layer)
    return call("prefill_attention", _result(q, page), *operands, **_options(page, window, scale))


def _result(q, page):
    return jax.ShapeDtypeStruct((q.shape[0], q.shape[1] * page.value_dim), q.dtype)


def _options(page, window, scale) -> dict[str, Any]:
    return dict(
        page=np.array(page, np.int64), window=np.int64(window or 0), scale=np.float32(scale)
    )

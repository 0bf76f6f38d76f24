import numpy as np

from pallas_kernels.cpu.library import call, check_dtypes, int32
from pallas_kernels.expert_ffn.activation import ClampedSwiGLU
from pallas_kernels.records.cpu import versions

CODES = {"silu": 0, "swish": 0, "gelu": 1, "gelu_new": 2, "gelu_pytorch_tanh": 2, "relu": 3}
CLAMPED = 4
"""Activation → its number in kernels.h, and that of ClampedSwiGLU."""


def expert_ffn(y, arena, batch, places, options):
    """Reads each weight once for all rows of its expert, from where the record is.

    down is summed in the order of `row_of_place` in cpu.cc, which is the same for all versions. If
    a queue copies records, the op returns when the records of all active experts with cells have
    arrived, also of an expert without tokens.
    """
    check_dtypes("expert_ffn", x=batch.x)
    stores, layer, address, version = places
    rows = y, batch.x, batch.ids, arena
    listed = batch.active, int32(batch.active_count)
    activation, limit, alpha = options.activation, 0.0, 0.0
    if isinstance(activation, ClampedSwiGLU):
        if activation.shift != 1:
            raise ValueError(f"expert_ffn 'cpu': no shift but 1, not {activation}; 'xla' takes it")
        limit, alpha = activation.limit, activation.alpha
    return call(
        "expert_ffn",
        y,
        *rows,
        int32(layer),
        address,
        version,
        *listed,
        *stores,
        aliases={0: 0},
        activation=np.int64(CODES[activation] if isinstance(activation, str) else CLAMPED),
        limit=np.float32(limit),
        alpha=np.float32(alpha),
        threads=np.int64(0),  # as many as XLA's pool has
        **versions(options.formats, stores, address.shape[0], options.arithmetic),
    )

import numpy as np

from pallas_kernels.cpu.library import call, check_dtypes, int32
from pallas_kernels.records.cpu import versions

CODES = {"silu": 0, "swish": 0, "gelu": 1, "gelu_new": 2, "gelu_pytorch_tanh": 2, "relu": 3}
"""Activation → its number in kernels.h."""


def expert_ffn(y, arena, batch, places, options):
    """Each weight is read once for all rows of its expert, where the record lies. down is summed in
    the order that cpu.cc gives (`row_of_place`), the same for all versions. Where a queue brings
    records, those of all active experts with cells are there afterwards, also of one without a
    token."""
    check_dtypes("expert_ffn", x=batch.x)
    stores, layer, address, version = places
    rows = y, batch.x, batch.ids, arena
    listed = batch.active, int32(batch.active_count)
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
        activation=np.int64(CODES[options.activation]),
        threads=np.int64(0),  # as many as XLA's pool has
        **versions(options.formats, stores, address.shape[0]),
    )

import numpy as np

from pallas_kernels.cpu.library import call, check_dtypes, int32
from pallas_kernels.expert_ffn.activation import ACTIVATIONS
from pallas_kernels.records.cpu import versions

CODES = {"silu": 0, "swish": 0, "gelu": 1, "gelu_new": 2, "gelu_pytorch_tanh": 2, "relu": 3}
"""Activation → its number in kernels.h."""


def expert_ffn(
    y,
    x,
    ids,
    arena,
    stores,
    layer,
    address,
    version,
    active,
    active_count,
    *,
    formats,
    activation,
    row_tile,
    threads=0,
):
    """Each weight is read once for all rows of its expert, where the record lies. A row's sums have
    one order, whatever the number of rows: row_tile decides no bits. down is summed in the order
    that cpu.cc gives (`row_of_place`), the same for all versions. Where a queue brings records,
    those of all active experts with cells are there afterwards, also of one without a token.
    threads: as of the API."""
    check_dtypes("expert_ffn", x=x)
    name = next(name for name, function in ACTIVATIONS.items() if function is activation)
    operands = y, x, ids, arena, int32(layer), address, version, active, int32(active_count)
    return call(
        "expert_ffn",
        y,
        *operands,
        *stores,
        aliases={0: 0},
        activation=np.int64(CODES[name]),
        threads=np.int64(threads),
        **versions(formats, stores, address.shape[0]),
    )

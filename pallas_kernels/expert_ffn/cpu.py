import numpy as np

from pallas_kernels.cpu.library import call, check_dtypes, int32
from pallas_kernels.expert_ffn.activation import ACTIVATIONS
from pallas_kernels.records.format import MATRICES, VERSIONS

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
):
    """Each weight is read once for all rows of its expert, where the record lies. A row's sums have
    one order, whatever the number of rows: row_tile decides no bits. down is summed in the order
    that cpu.cc gives (`row_of_place`), the same for all versions."""
    check_dtypes("expert_ffn", x=x)
    name = next(name for name, function in ACTIVATIONS.items() if function is activation)
    layers = address.shape[0]
    operands = y, x, ids, arena, int32(layer), address, version, active, int32(active_count)
    return call(
        "expert_ffn",
        y,
        *operands,
        *stores,
        aliases={0: 0},
        activation=np.int64(CODES[name]),
        width=np.int64(formats[0].cell.width),
        **versions(formats, layers),
    )


def versions(formats, layers):
    """The versions as handlers.cc reads them (`versions_of`). layers: of the tables."""
    places = [range(layers) if f.places is None else f.places for f in formats]
    return {
        "formats": np.array([fields(fmt) for f in formats for fmt in f[:2]], np.int64).reshape(-1),
        "places": np.array(places, np.int64).reshape(-1),
    }


def fields(fmt):
    """A record format as handlers.cc reads it (`format_of`)."""

    def first(matrix, *names):
        return next((fmt.parts[p][0] for n in names if (p := matrix + n) in fmt.parts), 0)

    lossless = fmt.version == "lossless12"
    return [
        VERSIONS.index(fmt.version),
        fmt.rows,
        fmt.group_in,
        fmt.group_out,
        fmt.blocks,
        fmt.escapes,
        *(first(matrix, "_bytes" if lossless else "_codes", "") for matrix in MATRICES),
        *(first(matrix, "_codes" if lossless else "_scales") for matrix in MATRICES),
        first("tables", ""),
    ]

import numpy as np

from pallas_kernels.cpu.library import call, int32
from pallas_kernels.expert_ffn.cpu import versions

_FIELDS = 13
"""Numbers of a format, see pallas_kernels/expert_ffn/cpu.py."""


def fill(arena, stores, layer, expert, row, version, count, *, formats):
    """Threads copy parts of records, and decode what is decoded on the way. An entry whose record
    or cell is not there is an error, before anything is written."""
    if formats is None:  # copied as they are: of a format only its rows count
        width, layers = 0, stores[0].shape[0]
        plain = np.zeros((len(stores), 2, _FIELDS), np.int64)
        plain[:, :, 1] = [[store.shape[2]] for store in stores]
        places = np.tile(np.arange(layers), len(stores))
        said = {"formats": plain.reshape(-1), "places": places}
    else:
        places = formats[0].places
        layers = stores[0].shape[0] if places is None else len(places)
        width, said = formats[0].cell.width, versions(formats, layers)
    return call(
        "fill",
        arena,
        *(arena, int32(layer), expert, row, version, int32(count)),
        *stores,
        aliases={0: 0},
        width=np.int64(width),
        **said,
    )

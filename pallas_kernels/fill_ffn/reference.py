from pallas_kernels.expert_ffn import expert_ffn
from pallas_kernels.fill import fill


def fill_ffn(
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
    *moves,
    formats,
    activation,
    row_tile,
    epilogue=None,
):
    """One after the other."""
    arena = fill(arena, stores, layer, *moves, formats=formats)
    options = {"activation": activation, "row_tile": row_tile, "formats": formats}
    options["epilogue"] = epilogue
    of = layer, address, version, active, active_count
    return arena, expert_ffn(y, x, ids, arena, stores, *of, **options)

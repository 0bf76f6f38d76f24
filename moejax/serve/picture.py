"""The server's page as a file: what memory holds, and which experts were chosen."""

from __future__ import annotations

from colorsys import hsv_to_rgb
from typing import Any

import numpy as np

from moejax.engine.snapshot import EMPTY_CELL, FREE, KV_FREE, KV_USED
from moejax.errors import UserError

_PLAIN = {
    KV_USED: ("#8a94a3", "KV in use"),
    KV_FREE: ("#c9ced6", "KV, empty"),
    EMPTY_CELL: ("#f3f4f6", "empty cell"),
    FREE: ("#ffffff", "free"),
}


def check_picture(path: str) -> None:
    """Raises UserError for a picture that cannot be drawn here."""
    if not path.lower().endswith((".svg", ".png")):
        raise UserError(f"--picture {path}: the name must end in .svg or .png")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UserError(
            "--picture needs matplotlib, which is not installed here: pip install 'moejax[plot]'"
        ) from None


def write_picture(path: str, about: dict[str, Any], state: dict[str, Any], title: str) -> None:
    """Draws a snapshot.

    - `path`: FILE.svg or FILE.png.
    - `about`, `state`: of moejax.engine.snapshot's describe and snapshot.

    Raises UserError if the file cannot be written.
    """
    import matplotlib.colors as colors
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    layers, experts = about["layers"], about["experts"]
    hues = [colors.to_hex(hsv_to_rgb(i / layers, 0.75, 0.85)) for i in range(layers)]
    slots = np.asarray(state["slots"])
    columns = max(1, min(60, len(slots)))
    image = np.ones((-(-len(slots) // columns) * columns, 3))
    for i, held in enumerate(slots.tolist()):
        layer = held % (layers * experts) // experts
        image[i] = colors.to_rgb(_PLAIN[held][0] if held < 0 else hues[layer])
    figure = Figure(figsize=(9, 6), layout="constrained")
    figure.suptitle(title)
    above, below = figure.subplots(2, 1)
    above.imshow(image.reshape(-1, columns, 3), interpolation="none", aspect="auto")
    above.set_title(f"memory: {len(slots)} slots of {about['slot_bytes'] / 2**20:.2f} MiB")
    above.set_xticks([])
    above.set_yticks([])
    shown = sorted({0, layers - 1, *range(0, layers, max(1, layers // 8))})
    patches = [Patch(color=fill, label=name) for fill, name in list(_PLAIN.values())[:3]]
    patches += [Patch(color=hues[layer], label=f"layer {layer}") for layer in shown]
    above.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, 0), ncols=7, fontsize=8)
    chosen = np.reshape(state["chosen"], (layers, experts))
    drawn = below.imshow(chosen, interpolation="none", aspect="auto", cmap="viridis")
    resident = np.argwhere(np.reshape(state["resident"], (layers, experts)))
    below.plot(resident[:, 1], resident[:, 0], ".", color="white", markersize=3, label="resident")
    below.set_xlabel("expert")
    below.set_ylabel("layer")
    hits, needed = state["hits"], state["activations"]
    rate = f"; {hits / needed:.1%} of what steps needed was resident" if needed else ""
    below.set_title(f"experts: dots are resident{rate}")
    figure.colorbar(drawn, ax=below, label="tokens that chose it")
    try:
        figure.savefig(path)
    except OSError as error:
        raise UserError(f"--picture {path} cannot be written ({error.strerror})") from None

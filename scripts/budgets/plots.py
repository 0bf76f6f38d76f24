"""A plot of miss curves with the points that the command `curves` found to be chosen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from scripts.parts.plots import pyplot

_COLOURS = ("#d62728", "#2ca02c", "#9467bd", "#7f7f7f")
_MARKERS = "osD^"


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Four panels: misses of experts by cap, of KV by pages, what both cost, cells of layers."""
    plt = pyplot()
    figure, panels = plt.subplots(2, 2, figsize=(13, 9))
    by_layer = np.array(found["by_layer"])
    caps = np.arange(by_layer.shape[1])
    (experts, kv), (cost, cells) = panels
    experts.plot(caps, by_layer.sum(axis=0), color="#1f77b4", label="all layers")
    experts.set(xlabel="cells of each layer (cap C)", ylabel="warm misses M_E(C)", yscale="symlog")
    label = f"exact from C = {found['exact_from']} on"
    experts.axvline(found["exact_from"], color="grey", linestyle=":", label=label)
    misses = np.array(found["kv"])
    kv.plot(np.arange(len(misses)), misses, color="#1f77b4", label="all sessions")
    kv.set(xlabel="KV pages N", ylabel="warm misses M_K(N)")
    seconds = np.array([np.nan if s is None else s for s in found["seconds"]])
    legal = ~np.isnan(seconds)
    cost.plot(caps, seconds, color="black", label="J = c_E·M_E + c_K·M_K")
    cost.plot(caps[legal], np.array(found["expert_s"])[legal], "--", label="experts")
    cost.plot(caps[legal], seconds[legal] - np.array(found["expert_s"])[legal], ":", label="KV")
    cost.set(xlabel="cells of each layer (cap C); KV has the rest", ylabel="seconds, predicted")
    for point, colour, marker in zip(found["points"], _COLOURS, _MARKERS, strict=True):
        style = dict(color=colour, marker=marker, linestyle="none", markersize=9, alpha=0.8)
        label = f"{point['who']}: C = {point['cap']}, N = {point['pages']}"
        experts.plot(point["cap"], point["expert_misses"], **style, label=label)
        kv.plot(point["pages"], point["kv_misses"], **style)
        cost.plot(point["cap"], point["seconds"], **style)
    layers = np.arange(len(by_layer))
    for i, (rule, shared) in enumerate(found["cells"].items()):
        label = f"{rule}: {found['misses'][rule]:.0f} misses"
        cells.plot(layers, shared, marker=_MARKERS[i], label=label, alpha=0.8)
    cells.set(xlabel="layer", ylabel="cells", ylim=(0, by_layer.shape[1]))
    for panel in panels.flat:
        panel.legend(fontsize=9)
        panel.grid(alpha=0.3)
    figure.suptitle(f"{found['name']} (misses by reuse distances; seconds: predicted)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)

"""Timelines as files: of a run that native ops recorded, or predicted; for Perfetto, or drawn.

docs/transfers.md says how to read them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from host_offload.queue.native import Span
from host_offload.simulate.timeline import DEVICE, TimelineEvent, write_trace
from moejax.errors import UserError
from pallas_kernels.cpu.spans import OpSpan

WRITERS = ("kv_write", "latent_write")
"""The ops of a layer that know which one it is."""

LAYERS = 3
"""How many a picture shows."""

COLORS = {
    "wait": "#d62728",
    "gate and up": "#1f77b4",
    "expert_ffn": "#1f77b4",
    "down": "#6baed6",
    "fill": "#ff7f0e",
    "read_through": "#ffbb78",
    "demand": "#ff7f0e",
    "prefetch": "#2ca02c",
    "stage": "#2ca02c",
    "chunk": "#9467bd",
    "attention": "#7f7f7f",
    "": "#c7c7c7",
}
"""What a name has in it → its color; the first that fits."""


def check_timeline(path: str | os.PathLike[str]) -> None:
    """Raises UserError for a file that write_timeline would not know how to write."""
    if Path(path).suffix not in (".json", ".png"):
        raise UserError(
            f"{path}: a timeline is FILE.json, for https://ui.perfetto.dev, or FILE.png, a picture "
            f"of {LAYERS} layers"
        )


def write_timeline(path: str | os.PathLike[str], events: Sequence[TimelineEvent]) -> None:
    """Writes all events for Perfetto and chrome://tracing (.json), or draws LAYERS layers from
    their middle (.png). Raises UserError for another suffix, a file that cannot be written, a
    picture without matplotlib or of events of no layer."""
    check_timeline(path)
    try:
        if Path(path).suffix == ".json":
            write_trace(Path(path), events)
        else:
            _draw(path, events)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from error


def measured_events(ops: Sequence[OpSpan], chunks: Iterable[Span] = ()) -> list[TimelineEvent]:
    """What native ops recorded (by beginning), beside the chunks that a queue moved. Times are from
    the first op on, which those before it do not have."""
    if not ops:
        return []
    first = ops[0].begin
    layers = _layers(ops)
    found = [
        TimelineEvent(DEVICE, op.op, op.begin - first, op.end - first, layer)
        for op, layer in zip(ops, layers, strict=True)
    ]
    for span in chunks:
        if span.begin >= first:
            said = f"{span.cause or 'chunk'} {span.ticket} from byte {span.first}"
            found.append(TimelineEvent("link", said, span.begin - first, span.end - first))
    return found


def _layers(ops: Sequence[OpSpan]) -> list[int | None]:
    """The layer of each op: that of the KV that was written last, and of what comes next where its
    norm has begun. What follows the last layer of a step belongs to none."""
    found: list[int | None] = [op.layer for op in ops]
    current: int | None = None
    last = max((op.layer for op in ops if op.layer is not None), default=0)
    since = 0  # the first op that may belong to the layer to come
    for i, op in enumerate(ops):
        if op.op in WRITERS and op.layer is not None:
            norms = [j for j in range(since, i) if ops[j].op == "rms_norm"]
            # Behind the experts everything is the next layer's, elsewhere its last norm on.
            follows = op.layer > 0 and since and ops[since - 1].op == "combine"
            begin = since if follows else (norms[-1] if norms else i)
            for j in range(begin, i):
                found[j] = op.layer
            current, since = op.layer, i + 1
        elif current is not None:
            found[i] = current
            if op.op == "combine":
                since = i + 1
                current = None if current == last else current
    return found


def middle_layers(events: Sequence[TimelineEvent]) -> tuple[float, float]:
    """When LAYERS layers in a row in the middle of everything begin and end. Raises UserError
    without a layer."""
    mine = [e for e in sorted(events, key=lambda e: e.begin) if e.track == DEVICE]
    layered = [e for e in mine if e.layer is not None]
    runs = [list(run) for _, run in itertools.groupby(layered, key=lambda e: e.layer)]
    if not runs:
        raise UserError("there is nothing to draw: no layer was computed")
    middle = max(len(runs) // 2 - LAYERS // 2, 0)
    # Of one step, where it has as many layers.
    for first in range(middle, max(middle - LAYERS, -1), -1):
        chosen = runs[first : first + LAYERS]
        numbers = [run[0].layer or 0 for run in chosen]
        if numbers == sorted(numbers):
            break
    return chosen[0][0].begin, max(event.end for event in chosen[-1])


def _draw(path: str | os.PathLike[str], events: Sequence[TimelineEvent]) -> None:
    try:
        import matplotlib
    except ImportError as error:
        raise UserError(
            "a picture needs matplotlib: pip install matplotlib; or write FILE.json"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    begin, end = middle_layers(events)
    shown = [event for event in events if event.end > begin and event.begin < end]
    tracks = list(dict.fromkeys(e.track for e in sorted(shown, key=lambda e: e.track != DEVICE)))
    figure, axes = plt.subplots(figsize=(12, 1.2 + 0.8 * len(tracks)), layout="constrained")
    labels: dict[str, Any] = {}
    for event in shown:
        word = next(word for word in COLORS if word in event.name)
        left = max(event.begin, begin)
        bar = axes.barh(
            tracks.index(event.track),
            (min(event.end, end) - left) * 1e3,
            left=(left - begin) * 1e3,
            height=0.7,
            color=COLORS[word],
            edgecolor="white",
            linewidth=0.3,
        )
        labels.setdefault(word or "other", bar)
    for layer in sorted({e.layer for e in shown if e.track == DEVICE and e.layer is not None}):
        at = min(e.begin for e in shown if e.track == DEVICE and e.layer == layer)
        x = max(at - begin, 0) * 1e3
        axes.axvline(x, color="black", linewidth=0.6, linestyle=":")
        axes.text(x, -0.55, f" layer {layer}", fontsize=9)
    axes.set_yticks(range(len(tracks)), tracks)
    axes.set_ylim(len(tracks) - 0.5, -0.8)
    axes.set_xlim(0, (end - begin) * 1e3)
    axes.set_xlabel(f"ms, from {begin * 1e3:.3f} ms on")
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=8, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)

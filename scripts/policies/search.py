"""How long a search for expert maps takes (fMoE): a layer's, a step's, and what a step leaves.

python -m scripts.policies search [--layers 48 --experts 128 --hidden 2048] [--capacity 1000]
    [--batches 1,8,32] [--layer-us 200] [--json]

A store of `capacity` maps of a made-up model (by default of Qwen3-30B-A3B's shape) is searched for
steps of `batch` rows, on the threads that numpy has: `semantic` at a step's begin, `layer` after
each router (what is added to the products, the cosines, the nearest map and the experts selected
from it), `step` all of these, `learn` the maps of a step into a full store. Figures are medians
over `repeats`, with the fastest and slowest of a layer.

With --layer-us, what a layer computes for, it says whether a search ends within it; where it does
not, an asynchronous one (`ExpertMap(asynchronous=True)`) comes late for a layer that is near, and
one that is waited for costs the difference in each layer.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from host_offload.policies.prefetch.expert_map.store import (
    MapStore,
    Trajectory,
    selected,
    semantic_scores,
    stored,
    with_rows,
)
from scripts.parts.commands import new_parser, refuse
from scripts.parts.text_table import aligned

COLUMNS = [
    ("batch", "{batch}"),
    ("semantic µs", "{semantic_us:.0f}"),
    ("layer µs", "{layer_us:.0f}"),
    ("fastest", "{fastest_us:.0f}"),
    ("slowest", "{slowest_us:.0f}"),
    ("step ms", "{step_ms:.2f}"),
    ("learn ms", "{learn_ms:.2f}"),
    ("within a layer", "{within}"),
]


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        batches = [int(batch) for batch in args.batches.split(",")]
    except ValueError:
        return refuse(__name__, f"--batches are numbers such as 1,8,32, not {args.batches}")
    sizes = args.layers - 1, args.experts, args.hidden, args.capacity, args.top_k, args.repeats
    if min(*sizes, *batches) < 1 or args.top_k > args.experts:
        return refuse(__name__, "sizes must be positive, layers at least 2, top-k fit the experts")
    rng = np.random.default_rng(0)
    store = stored(*_drawn(rng, args, args.capacity))
    lines = [
        {"store_bytes": sum(a.nbytes for a in store), **measured(store, args, batch, rng)}
        for batch in batches
    ]
    if args.json:
        for line in lines:
            print(json.dumps(line))
        return 0
    print(f"store: {lines[0]['store_bytes'] / 2**20:.1f} MiB, {args.capacity} maps")
    print(*aligned(COLUMNS, lines), sep="\n")
    return 0


def measured(
    store: MapStore, args: argparse.Namespace, batch: int, rng: np.random.Generator
) -> dict[str, Any]:
    """The figures of a batch size."""
    embeddings, maps = _drawn(rng, args, batch)
    embeddings, maps = embeddings.astype(np.float16), maps.astype(np.float16)
    semantic, layers, learn = [], [], []
    distance = min(3, args.layers - 1)

    def begin() -> None:
        scores = semantic_scores(store, embeddings)
        for layer in range(distance):
            _chosen(store, scores, layer, args.top_k)

    def keep() -> MapStore:
        return with_rows(store, embeddings, maps, capacity=args.capacity, distance=distance)

    for _ in range(args.repeats):
        begun = Trajectory.of(store, batch)
        semantic.append(_seconds(begin))
        for layer in range(args.layers):
            before = begun

            def search(layer: int = layer, before: Trajectory = before) -> Trajectory:
                after = before.after(store, layer, maps[:, layer])
                scores = after.scores(store, layer)
                _chosen(store, scores, min(layer + distance, args.layers - 1), args.top_k)
                return after

            layers.append(_seconds(search))
            begun = before.after(store, layer, maps[:, layer])
        learn.append(_seconds(keep))
    layer_us = float(np.median(layers)) * 1e6
    within = "" if args.layer_us is None else "yes" if layer_us <= args.layer_us else "late"
    return {
        "batch": batch,
        "semantic_us": float(np.median(semantic)) * 1e6,
        "layer_us": layer_us,
        "fastest_us": min(layers) * 1e6,
        "slowest_us": max(layers) * 1e6,
        "step_ms": (float(np.median(semantic)) + args.layers * float(np.median(layers))) * 1e3,
        "learn_ms": float(np.median(learn)) * 1e3,
        "within": within,
    }


def _chosen(store: MapStore, scores: np.ndarray, layer: int, top_k: int) -> np.ndarray:
    nearest = np.argmax(scores, axis=1)
    best = scores[np.arange(len(scores)), nearest]
    return selected(store.maps[layer, nearest], best, top_k)


def _drawn(
    rng: np.random.Generator, args: argparse.Namespace, rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Embeddings and few-peaked maps."""
    shape = rows, args.layers, args.experts
    scores = np.exp(3 * rng.standard_normal(shape, np.float32))
    embeddings = rng.standard_normal((rows, args.hidden), np.float32)
    return embeddings, scores / scores.sum(axis=-1, keepdims=True)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    shape = (("layers", 48), ("experts", 128), ("hidden", 2048), ("top-k", 8), ("capacity", 1000))
    for name, value in (*shape, ("repeats", 10)):
        parser.add_argument(f"--{name}", type=int, default=value, help=f"default: {value}")
    parser.add_argument("--batches", default="1,8,32", help="default: 1,8,32")
    parser.add_argument("--layer-us", type=float, help="what a layer computes for")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead")
    return parser

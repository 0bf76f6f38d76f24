"""What predicts the next layer's experts: its router, PreScope's networks, co-activation.

python -m scripts.bench predictors [--model DIR] [--seeds 3]

A seed has training texts of its own (scripts/texts), which LLaPor's networks and co-activation
counts learn from, and held-out texts, on which all predict from each layer the experts of the next
one. Recall: the share of a token's experts among as many predicted ones. Hot: the share of the 4
experts with most predicted tokens, of 32 tokens, among the 6 with most in truth (the paper's
"Top-4 hit"). Means over seeds with 95% intervals, Student's t.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.policies.prefetch import llapor
from host_offload.policies.prefetch.next_layers import gate_scores
from host_offload.policies.prefetch.training import layer_samples, recall_of
from host_offload.sizing.coactivation_counts import coactivation_counts, likelihoods
from host_offload.traces.reader import Trace, read_trace
from moejax import LLM
from moejax.commands.train_predictor import routers_of
from moejax.evaluate.comparison import over_seeds
from scripts.bench.answers import RESEARCH
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.text_table import aligned, show
from scripts.texts.documents import HELD_OUT, document, require_domains
from scripts.texts.exact import DOMAINS

TOGETHER, HOT, AMONG = 32, 4, 6
NAMES = ("router", "llapor", "coactivation")
COLUMNS = (
    ("layer", "{layer}"),
    *((f"{n}: recall", f"{{{n}:.1%}} [{{{n}_low:.1%}}, {{{n}_high:.1%}}]") for n in NAMES),
    *((f"{n}: hot", f"{{{n}_hot:.1%}} [{{{n}_hot_low:.1%}}, {{{n}_hot_high:.1%}}]") for n in NAMES),
)


def hot_hits(scores: np.ndarray, later: np.ndarray) -> float:
    """Returns the share of the predicted hot experts that are hot.

    - `scores`: [N, E].
    - `later`: int[N, k], the experts in truth.
    """
    experts, k = scores.shape[1], later.shape[1]
    best, hits = np.argsort(-scores, axis=1, kind="stable")[:, :k], []
    for first in range(0, len(later) - TOGETHER + 1, TOGETHER):
        some = slice(first, first + TOGETHER)
        told, true = (np.bincount(ids[some].ravel(), minlength=experts) for ids in (best, later))
        hot = np.argsort(-told, kind="stable")[:HOT]
        # Of experts with as many tokens as the sixth all count.
        hits.append(np.mean(true[hot] >= max(np.sort(true)[-AMONG], 1)))
    return float(np.mean(hits))


def record(args: argparse.Namespace, first: int, path: Path) -> Trace:
    """Records the routing of documents of all domains, from seed `first` on."""
    limits = {"max_num_seqs": 8, "max_model_len": args.length, "progress": False}
    with LLM(args.model, trace=f"{path},arrays=gate_input", **limits) as llm:
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None
        texts = [document(name, first + i) for i in range(args.count) for name in args.domains]
        llm.score_batch([tokenizer.encode(text)[: args.length] for text in texts])
    return read_trace(path)


def measure(args: argparse.Namespace, seed: int, folder: Path) -> np.ndarray:
    """Returns recall and hot hits of each predictor, float64[L − 1, 3, 2]."""
    learned = record(args, seed * args.count, folder / f"{seed}-train")
    held = record(args, HELD_OUT + seed * args.count, folder / f"{seed}-test")
    sizes = {"width": args.width, "epochs": args.epochs}
    networks = llapor.fit(learned, seed=seed, **sizes).fitted
    router = routers_of(args.model, held.header.config_digest)
    pairs = coactivation_counts(learned.array("token.ids"), held.header.experts, reach=1)
    found = np.zeros((held.header.layers - 1, len(NAMES), 2))
    for layer in range(len(found)):
        some = layer_samples(held, layer, 1)
        likely = likelihoods(pairs[layer + 1, 0], held.header.top_k)
        told = (
            gate_scores(some.gate_input, router[layer + 1]),
            llapor.scores(networks.of_layer(layer), some.gate_input, some.ids, some.weights),
            likely[some.ids].sum(axis=1),
        )
        found[layer] = [(recall_of(s, some.later), hot_hits(s, some.later)) for s in told]
    return found


def rows_of(found: np.ndarray) -> list[dict[str, Any]]:
    """Returns a row of each layer, and of their mean.

    - `found`: float64[seeds, L − 1, 3, 2].
    """
    by_layer = np.concatenate([found, found.mean(axis=1, keepdims=True)], axis=1)
    rows = []
    for layer in range(by_layer.shape[1]):
        row: dict[str, Any] = {"layer": layer + 1 if layer < found.shape[1] else "mean"}
        for number, name in enumerate(NAMES):
            for what, ending in enumerate(("", "_hot")):
                ends = over_seeds(by_layer[:, layer, number, what].tolist())
                keys = (f"{name}{ending}{end}" for end in ("", "_low", "_high"))
                row |= dict(zip(keys, ends, strict=True))
        rows.append(row)
    return rows


@refusing()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__ or "")
    add = parser.add_argument
    add("--model", default=str(RESEARCH), help="(default: examples/models/research)")
    add("--domains", nargs="+", default=["story", *DOMAINS], help="(default: %(default)s)")
    add("--count", type=int, default=12, help="texts of a domain (default: %(default)s)")
    add("--seeds", type=int, default=3, help="(default: %(default)s)")
    add("--length", type=int, default=256, help="most tokens of a text (default: %(default)s)")
    add("--width", type=int, default=128, help="of LLaPor's networks (default: %(default)s)")
    add("--epochs", type=int, default=10, help="(default: %(default)s)")
    add("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args(arguments)
    positive(args, "count", "seeds", "length", "width", "epochs")
    require_domains(args.domains)
    with tempfile.TemporaryDirectory() as directory:
        found = [measure(args, seed, Path(directory)) for seed in range(args.seeds)]
    rows = rows_of(np.array(found))
    show(args.json, rows, aligned(COLUMNS, rows))
    return 0

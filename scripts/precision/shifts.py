"""How soon DynaExq follows when the text changes: the share of its hottest experts that is high.

python -m scripts.precision shifts DIR [--hi dense --lo int4 --budget 60%] [--text FILE ...]

A curve along one run, which is no cell of a grid: quality and ablations of the same arms are
`moejax ablate scripts/experiments/precision/*.yaml`. Texts are scored one after the other, the last
fifth of each, in windows of 512 tokens, from a cold start; arms differ in how many transitions
there can be. Who is hottest is counted in the run itself. "if unbounded" is what the arm whose
transitions block keeps in a text's second half; tokens are those after a change of text until an
arm has gone 90% of the way there. Writes DIR/shifts.jsonl and DIR/convergence.png.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.interface import routed_counts
from host_offload.policies.precision.maps import HI, top
from host_offload.traces.reader import Trace, read_trace
from moejax import LLM, UserError
from moejax.evaluate.evaluation import perplexity
from moejax.evaluate.experiments.sources.corpus import TEST, TEXTS, text_path
from scripts.parts.commands import new_parser, refusing
from scripts.parts.plots import pyplot
from scripts.parts.text_table import aligned
from scripts.parts.version_history import VersionHistory, version_history

WINDOW = 512

BLOCKING = "blocking"
ARMS: Mapping[str, tuple[int, str]] = {
    "2 spares, steps of 128": (128, "spares=2"),
    "8 spares, steps of 128": (128, "spares=8"),
    "2 spares, steps of 64": (64, "spares=2"),
    "8 spares, steps of 64": (64, "spares=8"),
    BLOCKING: (128, "spares=2,blocking=true"),
}
"""Name → tokens of a step, DynaExq's settings: from few transitions to as many as are wanted."""


class Text(NamedTuple):
    name: str
    text: str


@refusing(OSError)
def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    plt = pyplot()
    texts = [read_text(name) for name in args.text]
    args.directory.mkdir(parents=True, exist_ok=True)
    lines = []
    with open(args.directory / "shifts.jsonl", "w") as file:
        for arm in ARMS:
            lines.append(follow(args, arm, texts))
            print(json.dumps(lines[-1]), file=file, flush=True)
    print(*report(lines), sep="\n")
    draw(plt, lines, args.directory / "convergence.png")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    add = parser.add_argument
    add("directory", type=Path, metavar="DIR", help="of results")
    add("--model", default="demo", help="default: %(default)s")
    add("--text", nargs="+", default=TEXTS, help=f"default: {', '.join(TEXTS)}, in this order")
    add("--hi", default="dense", help="default: %(default)s")
    add("--lo", default="int4", help="default: %(default)s")
    add("--budget", default="60%", help="of the dense experts' bytes (default: %(default)s)")
    add("--settings", default="alpha=0", help="DynaExq's, for all arms (default: %(default)s)")
    add("--interval", default="512 tokens", help="DynaExq's (default: %(default)s)")
    add("--windows", type=int, default=6, help="of a text (default: %(default)s)")
    return parser


def read_text(name: str) -> Text:
    """The last fifth of a packaged text or a file. Raises UserError where there is none."""
    path = text_path(name, Path.cwd())
    whole = path.read_text()
    return Text(path.stem, whole[int(TEST[0] * len(whole)) :])


def follow(args: argparse.Namespace, arm: str, texts: Sequence[Text]) -> dict[str, Any]:
    """The line of an arm: for each text [tokens since it began, share of its hottest that is high],
    by step."""
    prefill, settings = ARMS[arm]
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace"
        with LLM(
            args.model,
            precision=f"dynaexq,{settings},{args.settings}",
            hi=args.hi,
            lo=args.lo,
            interval=args.interval,
            expert_budget=args.budget,
            max_model_len=WINDOW,
            max_num_seqs=2,
            max_num_batched_tokens=prefill,
            enable_prefix_caching=False,
            progress=False,
            trace=trace,
        ) as llm:
            given, limit = dict(texts), args.windows * WINDOW
            result = perplexity(llm, given, window=WINDOW, stride=WINDOW, limit=limit)
            stats = llm.stats()["precision"]
        found = read_trace(trace)
        history = version_history(found)
    counts, lengths = _of_texts(found, len(texts), args.windows)
    each = -(-stats["hi_capacity"] // found.header.layers)
    wanted = [top(count, each) for count in counts]
    return {
        "arm": arm,
        "perplexity": result.total.perplexity,
        "steps": len(history.step),
        "transitions": stats["promotions"] + stats["demotions"],
        "agreement": dict(
            zip([text.name for text in texts], agreement(history, lengths, wanted), strict=True)
        ),
    }


def _of_texts(trace: Trace, texts: int, windows: int) -> tuple[list[np.ndarray], list[int]]:
    """(selections int64[L, E], tokens) of each text; requests are numbered in the order of their
    windows."""
    steps, counts, lengths = list(trace.step_traces()), [], []
    for number in range(texts):
        mine = np.concatenate([s.ids[s.request // windows == number] for s in steps])
        if not len(mine):
            raise UserError("a text has fewer windows than the others; give fewer --windows")
        counts.append(routed_counts(mine, trace.header.experts))
        lengths.append(len(mine))
    return counts, lengths


def agreement(
    history: VersionHistory, lengths: Sequence[int], wanted: Sequence[np.ndarray]
) -> list[list[list[float]]]:
    """lengths: tokens of each text. wanted: bool[L, E] of each. A step belongs to the text that its
    first token is of."""
    begins = np.cumsum(history.tokens) - history.tokens
    found = []
    for end, length, mine in zip(np.cumsum(lengths), lengths, wanted, strict=True):
        steps = np.flatnonzero((begins >= end - length) & (begins < end))
        high = np.sum((history.version[steps] == HI) & mine, axis=(1, 2)) / mine.sum()
        since = begins[steps] - (end - length)
        found.append([[int(t), round(float(s), 4)] for t, s in zip(since, high, strict=True)])
    return found


def tokens_to_follow(curve: Sequence[Sequence[float]], reach: float, share: float = 0.9) -> Any:
    """Tokens since a change until the high set has gone `share` of the way from where it began to
    `reach`; 0 where it began there; None where it did not come so far."""
    begin = curve[0][1]
    target = begin + share * (reach - begin)
    return next((int(token) for token, agree in curve if agree >= target), None)


def level(curve: Sequence[Sequence[float]]) -> float:
    """The mean agreement of a text's second half."""
    return float(np.mean([agree for token, agree in curve if token >= curve[-1][0] / 2]))


def report(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """A row for each arm, over the texts after the first."""
    best = next(line for line in lines if line["arm"] == BLOCKING)["agreement"]
    rows = []
    for line in lines:
        curves = {name: curve for name, curve in line["agreement"].items() if name in [*best][1:]}
        reach = {name: level(best[name]) for name in curves}
        tokens = [tokens_to_follow(curve, reach[name]) for name, curve in curves.items()]
        came = [t for t in tokens if t is not None]
        told = f"{np.mean(came):.0f}" if came else "–"
        shares = {
            "begin": np.mean([curve[0][1] for curve in curves.values()]),
            "level": np.mean([level(curve) for curve in curves.values()]),
            "reach": np.mean([*reach.values()]),
        }
        moves = line["transitions"] / line["steps"]
        told = f"{told} ({len(came)} of {len(tokens)})"
        rows.append({**line, **shares, "moves": moves, "told": told})
    yield from aligned(
        [
            ("arm", "{arm}"),
            ("transitions a step", "{moves:.2f}"),
            ("high at a change", "{begin:.0%}"),
            ("in the second half", "{level:.0%}"),
            ("if unbounded", "{reach:.0%}"),
            ("tokens to 90% of the way", "{told}"),
            ("perplexity", "{perplexity:.3f}"),
        ],
        rows,
    )


def draw(plt: Any, lines: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The agreement along the run."""
    figure, panel = plt.subplots(figsize=(9, 4), layout="constrained")
    for line in lines:
        begin, xs, ys = 0, [], []
        for curve in line["agreement"].values():
            xs += [begin + token for token, _ in curve]
            ys += [share for _, share in curve]
            begin = xs[-1]
            panel.axvline(begin, color="grey", linewidth=0.6)
        panel.plot(xs, ys, label=line["arm"], linewidth=1.3)
    panel.set(xlabel="tokens; lines: the text changes", ylim=(0, 1))
    panel.set_ylabel("share of the text's own\nhottest experts that is high")
    panel.legend(fontsize=8)
    figure.savefig(path, dpi=90)
    plt.close(figure)

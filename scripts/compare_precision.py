"""Perplexity at equal expert bytes: uniform versions, fixed maps, DynaExq.

python scripts/compare_precision.py run DIR [--pairs dense/int4@int8,…] [--windows 12]
python scripts/compare_precision.py fixed | dynamic | draw DIR

A pair HI/LO@VERSION mixes HI and LO in the bytes that VERSION takes for all experts; HI/LO@SHARE
makes that share of the experts high. `run` writes DIR/precision.jsonl, prints tables and draws
plots (draw makes them again); docs/precision.md reads them. `fixed` is its first part, everything
but DynaExq; `dynamic` goes on from there.

A text's first 60% are `train`, for calibration, the next 20% `validation`, for what is chosen here
(each version's quantizer, DynaExq's settings), the last 20% `test`, which is reported, in windows
of 512 tokens. Every arm has as many high experts as its bytes have room for, to the nearest one;
DynaExq's spare cells are inside its bytes. Bytes are those of records: what whole slots waste in an
arena of so small experts is left out.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from precision_engine import (
    WINDOW,
    Calibration,
    Domain,
    MapEngine,
    Pair,
    Scores,
    calibrate,
    engine_options,
    output_errors,
    parse_pair,
    read_domains,
    run_dynaexq,
)
from precision_report import draw, pyplot, show

from host_offload.policies.precision_maps import HI, random_map, top, top_map, uniform_map
from host_offload.quantizers import QUANTIZERS
from host_offload.traces import TraceError
from host_offload.version_history import VersionHistory
from moejax import UserError
from pallas_kernels.records.format import BITS

TUNED = tuple(
    {"alpha": alpha, "interval": interval}
    for alpha, interval in itertools.product((0.0, 0.8), (512, 2048))
)
"""DynaExq's settings that are tried on the validation part."""

ABLATIONS: Mapping[str, dict[str, Any]] = {
    "no hysteresis": {"margin": 0.0},
    "no EMA": {"alpha": 0.0},
    "rank slack 2": {"slack": 2},
    "global": {"scope": "global"},
    "blocking": {"blocking": "true"},
    "error-weighted": {"scope": "error-weighted"},
}
"""Changes of the settings, in the first order of domains: the last one with every pair, because the
fixed map of that name is the best; the others with the last pair."""


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    path = args.directory / "precision.jsonl"
    try:
        if args.what == "draw":
            draw(_read_lines(path), args.directory)
            return 0
        if not args.no_plots:
            pyplot()
        pairs = [parse_pair(text) for text in args.pairs.split(",")]
        args.directory.mkdir(parents=True, exist_ok=True)
        lines = _read_lines(path) if args.what == "dynamic" else []
        with open(path, "a" if lines else "w") as file:
            for line in Comparison(args, pairs).lines(lines):
                lines.append(line)
                print(json.dumps(line), file=file, flush=True)
    except (UserError, TraceError) as error:
        print(f"compare_precision: error: {error}", file=sys.stderr)
        return 2
    show(lines)
    if not args.no_plots:
        draw(lines, args.directory)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("run", "fixed", "dynamic", "draw"))
    parser.add_argument("directory", type=Path, metavar="DIR", help="of results")
    shared = Path(__file__).resolve().parents[2] / "shared"
    parser.add_argument("--model", default=str(shared / "models/tri"), help="default: %(default)s")
    parser.add_argument(
        "--text",
        nargs="+",
        default=[str(shared / f"corpora/{name}.txt") for name in ("text", "math", "code")],
        help="files, a domain each (default: ../shared/corpora)",
    )
    parser.add_argument(
        "--pairs",
        default="dense/int4@int8,int8/int2@int4,int4/int2@0.5",
        help="default: %(default)s",
    )
    parser.add_argument("--windows", type=int, default=12, help="of a domain (default: 12)")
    parser.add_argument("--seeds", type=int, default=20, help="random maps (default: 20)")
    parser.add_argument("--orders", type=int, default=6, help="of domains (default: all 6)")
    parser.add_argument(
        "--spares", type=int, default=2, help="DynaExq's, of each version (default: 2)"
    )
    parser.add_argument(
        "--sweep",
        type=int,
        default=128,
        help="tokens of a step under DynaExq: steps and spares bound how many transitions an "
        "interval has (default: 128)",
    )
    parser.add_argument("--no-plots", action="store_true", help="figures only, no matplotlib")
    return parser


def _read_lines(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read {path} ({error}); run it first") from error


class Comparison:
    """All arms over all pairs. Every line has what it is and `nll`: domain → of each window."""

    def __init__(self, args: argparse.Namespace, pairs: Sequence[Pair]):
        if min(args.windows, args.seeds, args.orders, args.spares, args.sweep) < 1:
            raise UserError("--windows, --seeds, --orders, --spares and --sweep are at least 1")
        self.args, self.pairs = args, pairs
        self.domains: list[Domain] = read_domains(args.text)
        self.quantizers: dict[str, str] = {}
        """Version → the one that was best on the validation part."""
        self._weights: dict[Pair, np.ndarray] = {}
        self._began = time.perf_counter()

    def lines(self, known: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
        """known: of the fixed part, where that was done."""
        args = self.args
        # Fewer windows to choose by than to report.
        self.few = min(args.windows, 6)
        self._say("calibration")
        self.found: Calibration = calibrate(args.model, self.domains, self.few, args.windows)
        self.engine = MapEngine(args.model)
        try:
            for line in known:
                if line.get("quantizer"):
                    self.quantizers[line["version"]] = line["quantizer"]
            if not known:
                yield from self._all_fixed()
            for pair in self.pairs:
                self.weights(pair)
        finally:
            self.engine.close()
        if args.what == "fixed":
            return
        settings = self._tuned()
        for pair in self.pairs:
            yield from self._dynamic(pair, settings)
        for pair in self.pairs:
            yield from self._ablations(pair, settings)

    def _all_fixed(self) -> Iterator[dict[str, Any]]:
        for version in BITS:
            self.quantizers[version] = self._best_quantizer(version)
        for version in ("dense", *BITS):
            yield self._uniform(version)
        for pair in self.pairs:
            yield from self._fixed(pair)

    # ---- bytes

    def _bytes(self, version: str) -> int:
        return self.engine.format(version).nbytes

    def _high(self, pair: Pair, spares: int = 0) -> int:
        """High experts in the pair's bytes, of all layers. spares: cells of each version that are
        in them too."""
        total = self.engine.layers * self.engine.experts
        hi, lo = self._bytes(pair.hi), self._bytes(pair.lo)
        if pair.rival is not None:
            budget = total * self._bytes(pair.rival)
        else:
            assert pair.share is not None
            high = round(pair.share * total)
            budget = high * hi + (total - high) * lo
        room = budget - total * lo - spares * (hi + lo)
        # To the nearest, so that an arm is at most half an expert over.
        return round(room / (hi - lo))

    def _line(
        self, pair: Pair, arm: str, scores: Scores, spares: int = 0, **more: Any
    ) -> dict[str, Any]:
        total, n = self.engine.layers * self.engine.experts, self._high(pair, spares)
        hi, lo = self._bytes(pair.hi), self._bytes(pair.lo)
        used = (n + spares) * hi + (total - n + spares) * lo
        rival = None if pair.rival is None else total * self._bytes(pair.rival)
        return {
            "pair": pair.name,
            "arm": arm,
            "high": n,
            "experts": total,
            "bytes": used,
            "rival": pair.rival,
            "rival_bytes": rival,
            "dense_bytes": total * self._bytes("dense"),
            **more,
            "nll": {name: values.tolist() for name, values in scores.items()},
            "tokens": WINDOW - 1,
        }

    # ---- fixed maps

    def _score(self, versions: Sequence[str], experts: np.ndarray, **where: Any) -> Scores:
        told = {"domains": self.domains, "part": "test", "windows": self.args.windows}
        told |= {"quantizers": self.quantizers, **where}
        return self.engine.score(versions, experts, **told)

    def _best_quantizer(self, version: str) -> str:
        """The one of least −ln p on the validation part."""
        same = uniform_map(self.engine.layers, self.engine.experts, 0)

        def total(quantizer: str) -> float:
            scores = self._score(
                (version,),
                same,
                part="validation",
                windows=self.few,
                quantizers={version: quantizer},
            )
            return sum(float(values.sum()) for values in scores.values())

        best = min(QUANTIZERS, key=total)
        self._say(f"quantizer of {version}: {best}")
        return best

    def _uniform(self, version: str) -> dict[str, Any]:
        self._say(f"all {version}")
        same = uniform_map(self.engine.layers, self.engine.experts, 0)
        size = self.engine.layers * self.engine.experts
        return {
            "pair": None,
            "arm": f"all {version}",
            "version": version,
            "quantizer": self.quantizers.get(version),
            "bytes": size * self._bytes(version),
            "dense_bytes": size * self._bytes("dense"),
            "nll": {n: v.tolist() for n, v in self._score((version,), same).items()},
            "tokens": WINDOW - 1,
        }

    def maps(self, pair: Pair) -> Iterator[tuple[str, np.ndarray]]:
        """Name → map, for all domains together."""
        n, counts = self._high(pair), self.found.counts
        shares = {name: count / count.sum() for name, count in counts.items()}
        mixed = sum(shares.values())
        for name, count in counts.items():
            yield f"calibrated on {name}", top_map(count, n)
        yield "calibrated on all", top_map(np.asarray(mixed), n)
        gain = np.asarray(mixed) * self.weights(pair)
        yield "error-weighted", top_map(gain, n, per_layer=False)
        for seed in range(self.args.seeds):
            yield f"random {seed}", random_map(self.engine.layers, self.engine.experts, n, seed)

    def weights(self, pair: Pair) -> np.ndarray:
        """float64[L, E]: how much more error an expert's output has in the low version."""
        if pair not in self._weights:
            errors = [
                output_errors(self.engine, self.found, version, self.quantizers.get(version, "rtn"))
                for version in (pair.hi, pair.lo)
            ]
            self._weights[pair] = np.maximum(errors[1] - errors[0], 0)
        return self._weights[pair]

    def _fixed(self, pair: Pair) -> Iterator[dict[str, Any]]:
        versions = pair.hi, pair.lo
        for arm, experts in self.maps(pair):
            self._say(f"{pair.name}: {arm}")
            yield self._line(pair, arm, self._score(versions, experts))
        # Knows the test part's own routing: what no map of one domain can be better informed than.
        self._say(f"{pair.name}: oracle")
        scores: Scores = {}
        for domain in self.domains:
            best = top_map(self.found.own[domain.name], self._high(pair))
            scores |= self._score(versions, best, domains=[domain])
        yield self._line(pair, "oracle of each domain", scores)

    # ---- DynaExq

    def _run(
        self,
        pair: Pair,
        order: Sequence[Domain],
        part: str,
        windows: int,
        settings: Mapping[str, Any],
    ) -> tuple[Scores, dict[str, Any], VersionHistory]:
        settings = {"margin": 0.1, "spares": self.args.spares, **settings}
        if settings.get("scope") == "error-weighted":
            settings["weights"] = self.weights(pair)
        engine = engine_options(self.args.model, self.args.sweep)
        options = dict(
            hi=pair.hi,
            lo=pair.lo,
            hi_share=self._high(pair, self.args.spares)
            / (self.engine.layers * self.engine.experts),
            quantizer=self.quantizers.get(pair.lo, "rtn"),
        )
        return run_dynaexq(engine, settings, options, order, part, windows)

    def _tuned(self) -> dict[str, Any]:
        """The settings of least −ln p on the validation part, with the last pair, where they matter
        most."""
        best: tuple[float, dict[str, Any]] | None = None
        for settings in TUNED:
            scores, _, _ = self._run(self.pairs[-1], self.domains, "validation", self.few, settings)
            total = sum(float(values.sum()) for values in scores.values())
            self._say(f"DynaExq {settings}: {total:.2f}")
            if best is None or total < best[0]:
                best = total, settings
        assert best is not None
        return best[1]

    def _dynamic(self, pair: Pair, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        windows = self.args.windows
        orders = list(itertools.permutations(self.domains))[: self.args.orders]
        for order in orders:
            names = [domain.name for domain in order]
            self._say(f"{pair.name}: DynaExq over {', '.join(names)}")
            scores, stats, history = self._run(pair, order, "test", windows, settings)
            yield self._line(
                pair,
                "DynaExq",
                scores,
                order=names,
                settings=settings,
                spares=self.args.spares,
                stats=stats,
                sweep=self.args.sweep,
                converged=self._converged(pair, order, history),
            )

    def _converged(
        self, pair: Pair, order: Sequence[Domain], history: VersionHistory
    ) -> dict[str, Any]:
        """Domain → agreement of the high set with the domain's own top, in each window."""
        wanted = {
            domain.name: top(
                self.found.own[domain.name],
                self._high(pair, self.args.spares) // self.engine.layers,
            )
            for domain in order
        }
        windows, found = self.args.windows, {}
        window = (np.cumsum(history.tokens) - 1) // (WINDOW - 1)
        for place, domain in enumerate(order):
            mine = wanted[domain.name]
            found[domain.name] = [
                float(np.mean([np.sum((v == HI) & mine) for v in history.version[window == w]]))
                / mine.sum()
                for w in range(place * windows, (place + 1) * windows)
            ]
        return found

    def _ablations(self, pair: Pair, settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for name, changes in ABLATIONS.items():
            if pair is not self.pairs[-1] and name != "error-weighted":
                continue
            self._say(f"{pair.name}: DynaExq, {name}")
            scores, stats, _ = self._run(
                pair, self.domains, "test", self.args.windows, {**settings, **changes}
            )
            yield self._line(pair, f"DynaExq, {name}", scores, spares=self.args.spares, stats=stats)

    def _say(self, text: str) -> None:
        print(f"{time.perf_counter() - self._began:6.0f} s  {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

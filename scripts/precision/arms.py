"""The arms that the command `compare` compares: their bytes, their maps and their runs.

Every line has what it is and `nll`: domain → −ln p of each window.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.policies.precision.maps import random_map, top, top_map
from moejax import UserError
from pallas_kernels.records.format import BITS
from scripts.precision.engine import (
    CHOICES,
    WINDOW,
    Calibration,
    Domain,
    MapEngine,
    Pair,
    Scores,
    engine_options,
    output_errors,
)
from scripts.precision.stream import agreement, run_decode, run_dynaexq

TOLERANCE = 0.01
"""An arm whose bytes are farther from the budget is refused."""

TUNED = tuple(
    {"alpha": alpha, "interval": interval, "spares": 2}
    for alpha, interval in itertools.product((0.0, 0.8), (512, 2048))
)
"""DynaExq's settings that are tried on the validation part, for each pair."""

WEIGHTED = {"scope": "error-weighted"}


@dataclasses.dataclass
class Arms:
    """What every arm needs. quantizers: version → the one that was best on the validation part.
    settings: pair's name → DynaExq's that were best. checkpoint: has those versions."""

    model: str
    domains: list[Domain]
    windows: int
    few: int
    """Windows to choose DynaExq's settings by."""
    prefill: int
    """Tokens of a step under DynaExq."""
    found: Calibration
    engine: MapEngine
    quantizers: dict[str, str]
    settings: dict[str, dict[str, Any]]
    known: list[dict[str, Any]]
    """Lines that are there; they are not made again."""
    checkpoint: Path | None = None
    errors: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    began: float = dataclasses.field(default_factory=time.perf_counter)

    def say(self, text: str) -> None:
        seconds = time.perf_counter() - self.began
        print(f"{seconds:6.0f} s  {text}", file=sys.stderr, flush=True)

    def has(
        self, pair: Pair | None, arm: str, order: Sequence[str] = (), study: str | None = None
    ) -> bool:
        wanted = None if pair is None else pair.name, arm, [*order], study
        return any(
            (line["pair"], line["arm"], line.get("order", []), line.get("study")) == wanted
            for line in self.known
        )

    # ---- bytes

    @property
    def total(self) -> int:
        return self.engine.layers * self.engine.experts

    def bytes_of(self, version: str) -> int:
        return self.engine.format(version).nbytes

    def budget(self, pair: Pair) -> int:
        """Bytes of the pair's arms."""
        if pair.rival is not None:
            return self.total * self.bytes_of(pair.rival)
        assert pair.share is not None
        high = round(pair.share * self.total)
        return high * self.bytes_of(pair.hi) + (self.total - high) * self.bytes_of(pair.lo)

    def used(self, pair: Pair, high: int, spares: int) -> int:
        """Bytes with so many high experts and so many spare cells of each version."""
        hi, lo = self.bytes_of(pair.hi), self.bytes_of(pair.lo)
        return (high + spares) * hi + (self.total - high + spares) * lo

    def high(self, pair: Pair, spares: int = 0) -> int:
        """High experts in the pair's bytes, of all layers, spare cells of each version being in
        them too; to the nearest, so that an arm is at most half an expert off. Raises UserError
        where an arm would be off by more than TOLERANCE, or has no high expert."""
        hi, lo = self.bytes_of(pair.hi), self.bytes_of(pair.lo)
        room = self.budget(pair) - self.used(pair, 0, spares)
        high = round(room / (hi - lo))
        if not 1 <= high < self.total:
            raise UserError(
                f"{pair.name} has room for {high} high experts of {self.total} beside {spares} "
                "spare cells of each version; give other pairs"
            )
        if abs(off := self.used(pair, high, spares) / self.budget(pair) - 1) > TOLERANCE:
            raise UserError(
                f"{pair.name} with {spares} spares is {off:+.1%} off its bytes, more than "
                f"{TOLERANCE:.0%}; give other pairs"
            )
        return high

    def line(
        self, pair: Pair, arm: str, scores: Scores, spares: int = 0, study: str | None = None
    ) -> dict[str, Any]:
        high = self.high(pair, spares)
        rival = None if pair.rival is None else self.total * self.bytes_of(pair.rival)
        return {
            "pair": pair.name,
            "arm": arm,
            "high": high,
            "experts": self.total,
            "bytes": self.used(pair, high, spares),
            "budget": self.budget(pair),
            "rival": pair.rival,
            "rival_bytes": rival,
            "dense_bytes": self.total * self.bytes_of("dense"),
            **({} if study is None else {"study": study}),
            "nll": {name: values.tolist() for name, values in scores.items()},
            "tokens": WINDOW - 1,
        }

    # ---- one version

    def same(self) -> np.ndarray:
        return np.zeros((self.engine.layers, self.engine.experts), np.int8)

    def score(
        self,
        versions: Sequence[str],
        experts: np.ndarray,
        domains: Sequence[Domain] | None = None,
        part: str = "test",
        quantizers: Mapping[str, str] | None = None,
    ) -> Scores:
        """None: all domains, the quantizers that were chosen."""
        domains = self.domains if domains is None else domains
        quantizers = self.quantizers if quantizers is None else quantizers
        return self.engine.score(versions, experts, domains, part, self.windows, quantizers)

    def choose_quantizers(self) -> Iterator[dict[str, Any]]:
        """Lines of the versions alone, each with the quantizer of least −ln p on the validation
        part; `choices` says what each one came to."""
        for version in ("dense", *BITS):
            if self.has(None, f"all {version}"):
                continue
            found = {}
            for name in CHOICES if version in BITS else ():
                scores = self.score(
                    (version,), self.same(), part="validation", quantizers={version: name}
                )
                found[name] = sum(float(values.sum()) for values in scores.values())
            if found:
                self.quantizers[version] = min(found, key=found.__getitem__)
                told = ", ".join(f"{name} {value:.1f}" for name, value in found.items())
                self.say(f"quantizer of {version}: {self.quantizers[version]} ({told})")
            yield {
                "pair": None,
                "arm": f"all {version}",
                "version": version,
                "quantizer": self.quantizers.get(version),
                "choices": found,
                "bytes": self.total * self.bytes_of(version),
                "dense_bytes": self.total * self.bytes_of("dense"),
                "nll": {n: v.tolist() for n, v in self.score((version,), self.same()).items()},
                "tokens": WINDOW - 1,
            }

    # ---- fixed maps

    def _mixed(self) -> np.ndarray:
        return np.sum([count / count.sum() for count in self.found.counts.values()], axis=0)

    def maps(self, pair: Pair, seeds: int, *, each: bool = True) -> Iterator[tuple[str, Any]]:
        """Name → map, for all domains together. each: also those calibrated on one domain."""
        n, mixed = self.high(pair), self._mixed()
        for name, count in self.found.counts.items() if each else ():
            yield f"calibrated on {name}", top_map(count, n)
        yield "calibrated on all", top_map(mixed, n)
        yield "error-weighted", top_map(mixed * self.weights(pair), n, per_layer=False)
        for seed in range(seeds):
            yield f"random {seed}", random_map(self.engine.layers, self.engine.experts, n, seed)

    def weights(self, pair: Pair) -> np.ndarray:
        """float64[L, E]: how much more error an expert's output has in the low version."""
        for version in (pair.hi, pair.lo):
            if version not in self.errors:
                name = self.quantizers.get(version, "rtn")
                self.errors[version] = output_errors(self.engine, self.found, version, name)
        return np.maximum(self.errors[pair.lo] - self.errors[pair.hi], 0)

    def fixed(
        self, pair: Pair, maps: Iterator[tuple[str, Any]], study: str | None = None
    ) -> Iterator[dict[str, Any]]:
        """maps: of `maps`."""
        self.say(f"{pair.name}: fixed maps")
        for arm, experts in maps:
            if not self.has(pair, arm, study=study):
                scores = self.score((pair.hi, pair.lo), experts)
                yield self.line(pair, arm, scores, study=study)

    def oracles(self, pair: Pair) -> Iterator[dict[str, Any]]:
        """They know the test part's own routing: what no map of one domain can be better informed
        than."""
        for weighted in (False, True):
            arm = "oracle of each domain" + (", error-weighted" if weighted else "")
            if self.has(pair, arm):
                continue
            scores: Scores = {}
            for domain in self.domains:
                own = self.found.own[domain.name] * (self.weights(pair) if weighted else 1.0)
                best = top_map(own, self.high(pair), per_layer=not weighted)
                scores |= self.score((pair.hi, pair.lo), best, domains=[domain])
            yield self.line(pair, arm, scores)

    # ---- DynaExq

    def _asked(
        self, pair: Pair, settings: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """(engine's options, DynaExq's settings, options of LLM)."""
        keys = {"margin": 0.1, **settings}
        engine = engine_options(str(self.checkpoint), keys.pop("prefill", self.prefill))
        if keys.get("scope") == "error-weighted":
            keys["weights"] = self.weights(pair)
        share = self.high(pair, keys["spares"]) / self.total
        return engine, keys, dict(hi=pair.hi, lo=pair.lo, hi_share=share)

    def tune(self, pair: Pair) -> None:
        """Finds the settings of least −ln p on the validation part."""
        found = {}
        for number, settings in enumerate(TUNED):
            asked = self._asked(pair, settings)
            scores, _, _ = run_dynaexq(*asked, self.domains, "validation", self.few)
            found[number] = sum(float(values.sum()) for values in scores.values())
            self.say(f"{pair.name}: DynaExq {settings}: {found[number]:.2f}")
        self.settings[pair.name] = dict(TUNED[min(found, key=found.__getitem__)])

    def dynaexq(
        self,
        pair: Pair,
        arm: str,
        changes: Mapping[str, Any],
        order: Sequence[Domain],
        study: str | None = None,
    ) -> Iterator[dict[str, Any]]:
        """The line of one run over the test parts. changes: of the pair's settings."""
        settings = {**self.settings[pair.name], **changes}
        names = [domain.name for domain in order]
        if self.has(pair, arm, names, study):
            return
        self.say(f"{pair.name}: {arm} over {', '.join(names)}")
        asked = self._asked(pair, settings)
        scores, stats, history = run_dynaexq(*asked, order, "test", self.windows)
        high = self.high(pair, settings["spares"])
        wanted = {n: top(c, -(-high // self.engine.layers)) for n, c in self.found.own.items()}
        lengths = [self.windows * (WINDOW - 1)] * len(order)
        yield self.line(pair, arm, scores, settings["spares"], study) | {
            "order": names,
            "settings": settings,
            "stats": stats,
            "steps": len(history.step),
            "agreement": agreement(history, order, lengths, wanted),
        }

    def decode(self, pair: Pair, arm: str, changes: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The line of one stream of decode steps; without −ln p, as its tokens are sampled."""
        settings = {**self.settings[pair.name], **changes}
        names = [domain.name for domain in self.domains]
        if self.has(pair, arm, names, "shifts"):
            return
        self.say(f"{pair.name}: {arm}")
        high = self.high(pair, settings["spares"])
        each = -(-high // self.engine.layers)
        asked, prompts = self._asked(pair, settings), 2 * self.windows
        stats, steps, agreed = run_decode(*asked, self.domains, prompts, each)
        yield self.line(pair, arm, {}, settings["spares"], "shifts") | {
            "order": names,
            "settings": settings,
            "stats": stats,
            "steps": steps,
            "agreement": agreed,
        }

"""Runs of DynaExq over a stream whose domain changes, and how soon it follows."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.control.interface import routed_counts
from host_offload.policies.precision.maps import HI, LO, top
from host_offload.traces.reader import Trace, read_trace
from moejax import LLM, SamplingParams, UserError
from scripts.parts.version_history import VersionHistory, version_history
from scripts.precision.engine import WINDOW, Domain, MapEngine, Scores, engine_options, score

PROMPT, GENERATED, ROWS = 32, 128, 8
"""The decode stream: tokens of a prompt, tokens generated of it, and prompts at once."""

Agreement = dict[str, list[list[float]]]
"""Domain → [tokens since it began, share of its own hottest experts that is high], by step."""


def dynaexq_options(settings: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """Options of LLM. settings: DynaExq's, with `interval` in tokens and `weights` an array, which
    is written into the directory."""
    keys = dict(settings)
    interval = keys.pop("interval")
    if "weights" in keys:
        np.save(file := directory / "weights.npy", keys["weights"])
        keys["weights"] = file
    text = ",".join(["dynaexq", *(f"{key}={value}" for key, value in keys.items())])
    return {"precision": text, "interval": f"{interval} tokens"}


def run_dynaexq(
    engine: Mapping[str, Any],
    settings: Mapping[str, Any],
    options: Mapping[str, Any],
    order: Sequence[Domain],
    part: str,
    windows: int,
) -> tuple[Scores, dict[str, Any], VersionHistory]:
    """(scores, statistics, history) of one run from a cold start over the domains in that order.

    engine: of engine_options. settings: of dynaexq_options. options: of LLM.
    """
    with tempfile.TemporaryDirectory() as directory:
        asked = dynaexq_options(settings, Path(directory))
        trace = Path(directory) / "trace"
        with LLM(**engine, **options, **asked, trace=trace) as llm:
            scores = score(llm, order, part, windows)
            stats = llm.stats()["precision"]
        return scores, stats, version_history(read_trace(trace))


def run_decode(
    engine: Mapping[str, Any],
    settings: Mapping[str, Any],
    options: Mapping[str, Any],
    order: Sequence[Domain],
    prompts: int,
    high: int,
) -> tuple[dict[str, Any], int, Agreement]:
    """(statistics, steps, agreement) where most steps are of decode: a domain's prompts, from its
    test part, are continued ROWS at a time (temperature 1, one seed), then the next one's. What a
    domain's hottest experts are is counted in the run itself; high: how many of a layer."""
    engine = {**engine, "max_num_seqs": ROWS, "max_num_batched_tokens": max(ROWS * PROMPT, 64)}
    sampling = SamplingParams(temperature=1, seed=0, max_tokens=GENERATED, ignore_eos=True)
    with tempfile.TemporaryDirectory() as directory:
        asked = dynaexq_options(settings, Path(directory))
        trace = Path(directory) / "trace"
        with LLM(**engine, **options, **asked, trace=trace) as llm:
            tokenizer = llm.get_tokenizer()
            assert tokenizer is not None
            for domain in order:
                ids = tokenizer(domain.parts["test"])["input_ids"]
                if len(ids) < prompts * PROMPT:
                    raise UserError(
                        f"the test part of {domain.name} has {len(ids)} tokens, fewer than "
                        f"{prompts} prompts of {PROMPT}; give fewer --windows"
                    )
                starts = np.linspace(0, len(ids) - PROMPT, prompts).astype(int)
                llm.generate([list(ids[s : s + PROMPT]) for s in starts], sampling)
            stats, experts = llm.stats()["precision"], llm.config.num_experts
        found = read_trace(trace)
        counts, lengths = _of_requests(found, order, prompts, experts)
        history = version_history(found)
        agreed = agreement(history, order, lengths, {n: top(c, high) for n, c in counts.items()})
        return stats, len(history.step), agreed


def _of_requests(
    trace: Trace, order: Sequence[Domain], prompts: int, experts: int
) -> tuple[dict[str, np.ndarray], list[int]]:
    """(domain → int64[L, E], selections; tokens of each domain), requests being numbered in the
    order of the stream."""
    steps, counts, lengths = list(trace.step_traces()), {}, []
    for place, domain in enumerate(order):
        mine = [s.ids[s.request // prompts == place] for s in steps]
        counts[domain.name] = routed_counts(np.concatenate(mine), experts)
        lengths.append(sum(len(ids) for ids in mine))
    return counts, lengths


def agreement(
    history: VersionHistory,
    order: Sequence[Domain],
    lengths: Sequence[int],
    wanted: Mapping[str, np.ndarray],
) -> Agreement:
    """lengths: tokens of each domain of the stream. wanted: domain → bool[L, E]. A step belongs to
    the domain that its first token is of."""
    begins = np.cumsum(history.tokens) - history.tokens
    ends, found = np.cumsum(lengths), {}
    for domain, end, length in zip(order, ends, lengths, strict=True):
        mine = wanted[domain.name]
        steps = np.flatnonzero((begins >= end - length) & (begins < end))
        high = np.sum((history.version[steps] == HI) & mine, axis=(1, 2)) / mine.sum()
        since = begins[steps] - (end - length)
        found[domain.name] = [
            [int(token), round(float(share), 4)] for token, share in zip(since, high, strict=True)
        ]
    return found


def check_agreement(
    engine: MapEngine,
    checkpoint: Path,
    versions: tuple[str, str],
    experts: np.ndarray,
    quantizers: Mapping[str, str],
    domains: Sequence[Domain],
    *,
    dynamic: bool,
) -> None:
    """Raises UserError unless the checkpoint's versions in a real arena give, bit for bit, what the
    engine of fixed maps gives over one window of each domain: with this map of both, and if
    `dynamic` with DynaExq where none may be high."""
    names = dict(zip(("hi", "lo"), versions, strict=True))
    low = np.full((engine.layers, engine.experts), LO, np.int8)
    with tempfile.TemporaryDirectory() as directory:
        np.save(file := Path(directory) / "map.npy", experts)
        arms: dict[str, Any] = {"a fixed map": (experts, {"precision": f"map={file}"})}
        if dynamic:
            arms["DynaExq with all low"] = low, {"precision": "dynaexq", "hi_share": 0.0}
        for arm, (expected, options) in arms.items():
            with LLM(**engine_options(str(checkpoint)), **names, **options) as llm:
                found = score(llm, domains, "test", 1)
            same = engine.score(versions, expected, domains, "test", 1, quantizers)
            if any(not np.array_equal(found[name], same[name]) for name in found):
                raise UserError(
                    f"{'/'.join(versions)}, {arm}: −ln p of the checkpoint's versions is "
                    f"{_told(found)}, of their decoded weights {_told(same)}; the arms would not "
                    "compute with the same weights"
                )


def _told(scores: Scores) -> str:
    return ", ".join(f"{name} {values.sum():.6f}" for name, values in scores.items())


def tokens_to_follow(
    curve: Sequence[Sequence[float]], reach: float, share: float = 0.9
) -> int | None:
    """Tokens since a shift until the high set has gone `share` of the way from where it began to
    `reach`; 0 where it began there; None where it did not come so far."""
    begin = curve[0][1]
    target = begin + share * (reach - begin)
    return next((int(token) for token, agree in curve if agree >= target), None)


def level(curve: Sequence[Sequence[float]]) -> float:
    """The mean agreement of a domain's second half."""
    last = curve[-1][0]
    return float(np.mean([agree for token, agree in curve if token >= last / 2]))


def by_window(curve: Sequence[Sequence[float]], windows: int) -> list[float]:
    """The mean agreement in each window of the domain, where it has such steps; else of the one
    before."""
    found: list[float] = []
    for window in range(windows):
        inside = [a for t, a in curve if window * (WINDOW - 1) <= t < (window + 1) * (WINDOW - 1)]
        found.append(float(np.mean(inside)) if inside else (found or [0.0])[-1])
    return found


def orders_of(domains: Sequence[Domain], most: int) -> list[tuple[Domain, ...]]:
    return list(itertools.permutations(domains))[:most]

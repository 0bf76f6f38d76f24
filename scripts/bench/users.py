"""WiSP's section 5.4: what a user's routing tells, and the memory that right-sizing by user frees.

python -m scripts.bench users [--model DIR]

Three users ask about stories, mathematics and code, one session after the other; by turns one
session of each is left out. A co-activation predictor (Appendix C) learns from 1, 2, … sessions of
the user (personal), or from four times as many sessions of all users (population), and predicts
each next layer's experts of the session that is left out. Cells are those of the layer with the
most, for all but --epsilon of the use; what a user needs less than the population goes to KV.
Figures are means over the turns; points ahead have a 95% interval, Student's t over the turns.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.sizing.coactivation_counts import (
    REACH,
    coactivation_counts,
    likelihoods,
    predicted_use,
)
from host_offload.sizing.right_size import EPSILON, right_size_of_use
from host_offload.traces.reader import read_trace
from host_offload.traces.schema import KINDS
from moejax import LLM, SamplingParams, UserError
from moejax.evaluate.comparison import over_seeds
from moejax.evaluate.experiments.definition import TEXTS, text_path
from moejax.evaluate.experiments.sources.corpus import windows
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.text_table import aligned, show

DECAY = 0.5
FOLD = 4
"""Sessions of the population for one of the user, as in the paper."""


def sessions_of(args: argparse.Namespace) -> tuple[dict[str, list[np.ndarray]], dict[str, Any]]:
    """Runs the sessions. Returns each user's ids of the decode steps, int16[N, L, k] for each
    session, and the model's figures."""
    with tempfile.TemporaryDirectory() as directory:
        path, length = Path(directory) / "trace", args.prompt + args.tokens
        params = SamplingParams(temperature=0, max_tokens=args.tokens, ignore_eos=True)
        options = {"max_num_seqs": 1, "max_model_len": length, "trace": str(path)}
        with LLM(args.model, enable_prefix_caching=False, progress=False, **options) as llm:
            order, tokenizer = [], llm.get_tokenizer()
            assert tokenizer is not None
            for user in TEXTS:
                ids = tokenizer.encode(text_path(user, Path()).read_text())
                for prompt in windows(ids, args.sessions + 1, args.prompt, user):
                    llm.generate([list(prompt)], params, use_tqdm=False)
                    order.append(user)
            spec = llm.plan.spec
            about = {"slot_bytes": spec.slot_bytes, "page_bytes": spec.page_bytes}
            about |= {"page_tokens": spec.page_tokens}
        trace = read_trace(path)
        request, ids = trace.array("token.request"), trace.array("token.ids")
        decoded = trace.array("token.phase") == KINDS.index("decode")
        about |= {"experts": trace.header.experts, "top_k": trace.header.top_k}
        found: dict[str, list[np.ndarray]] = {user: [] for user in TEXTS}
        for user, number in zip(order, np.unique(request), strict=True):
            found[user].append(ids[(request == number) & decoded])
    return found, about


def precision(pairs: np.ndarray, ids: np.ndarray) -> float:
    """Returns the share of predicted experts that a token uses, over all layers but the first.

    - `pairs`: of coactivation_counts.
    - `ids`: int16[N, L, k].
    """
    top_k, hits = ids.shape[2], []
    for layer in range(1, ids.shape[1]):
        scores = np.zeros((len(ids), pairs.shape[-1]))
        for d in range(min(REACH, layer)):
            likely = likelihoods(pairs[layer, d], top_k)
            scores += DECAY**d * likely[ids[:, layer - 1 - d]].sum(axis=1)
        best = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
        hits.append((best[:, :, None] == ids[:, layer, None]).any(axis=2).mean())
    return float(np.mean(hits))


def footprint(sessions: Sequence[np.ndarray], experts: int) -> np.ndarray:
    """Returns bool[L, E]: the experts that the sessions use."""
    ids = np.concatenate(sessions)
    found = np.zeros((ids.shape[1], experts), bool)
    for layer, chosen in enumerate(found):
        chosen[ids[:, layer]] = True
    return found


def compare(
    users: dict[str, list[np.ndarray]], about: dict[str, Any], epsilon: float
) -> list[dict[str, Any]]:
    """Returns a row for each user and number of sessions that the predictor learns from."""
    experts, top_k = about["experts"], about["top_k"]
    every = {user: sessions[:-1] for user, sessions in users.items()}
    count, rows = len(next(iter(every.values()))), []
    # Taken in turn from all users, as a service would see them.
    population = [sessions[i] for i in range(count) for sessions in every.values()]

    def learn(sessions: Sequence[np.ndarray]) -> np.ndarray:
        return coactivation_counts(np.concatenate(sessions), experts)

    def cells(pairs: np.ndarray) -> int:
        return int(right_size_of_use(predicted_use(pairs, top_k), epsilon).max())

    everyone = cells(learn(population))
    for user, sessions in users.items():
        own, left_out = sessions[:-1], sessions[-1]
        bursts = [footprint([each], experts) for each in own]
        both = [(a & b).sum() / b.sum() for a, b in itertools.pairwise(bursts)]
        known = 1
        while known <= count:
            personal = learn(own[:known])
            cap = cells(personal)
            used = footprint(own[:known], experts)
            freed = (everyone - cap) * about["slot_bytes"] * len(used)
            rows.append(
                {
                    "user": user,
                    "sessions": known,
                    "burst": float(np.mean([burst.mean() for burst in bursts])),
                    "overlap": float(np.mean(both)) if both else None,
                    "footprint": float(used.mean()),
                    "personal": precision(personal, left_out),
                    "population": precision(learn(population[: FOLD * known]), left_out),
                    "cells": cap,
                    "of_all": everyone,
                    "covered": float(used[np.arange(len(used))[:, None], left_out].mean()),
                    "kv_tokens": int(freed // about["page_bytes"] * about["page_tokens"]),
                }
            )
            known *= 2
    return rows


def by_turns(
    users: dict[str, list[np.ndarray]], about: dict[str, Any], epsilon: float
) -> list[dict[str, Any]]:
    """Returns the means of `compare` with each session left out in turn, and by how many points
    personal is `ahead` of population."""
    rows, sessions = [], len(next(iter(users.values())))
    turns = [
        compare({user: own[turn:] + own[:turn] for user, own in users.items()}, about, epsilon)
        for turn in range(sessions)
    ]
    for alike in zip(*turns, strict=True):
        row = dict(alike[0])
        for name in row.keys() - {"user", "sessions"}:
            if row[name] is not None:
                row[name] = float(np.mean([each[name] for each in alike]))
        points = [100 * (each["personal"] - each["population"]) for each in alike]
        ends = ("ahead", "ahead_low", "ahead_high")
        rows.append(row | dict(zip(ends, over_seeds(points), strict=True)))
    return rows


COLUMNS = (
    ("user", "{user}"),
    ("sessions", "{sessions}"),
    ("a burst's experts", "{burst:.0%}"),
    ("of the next", "{overlap:.0%}"),
    ("in all", "{footprint:.0%}"),
    ("precision: personal", "{personal:.1%}"),
    ("population", "{population:.1%}"),
    ("points ahead", "{ahead:+.1f} [{ahead_low:+.1f}, {ahead_high:+.1f}]"),
    ("cells", "{cells:.1f}"),
    ("population's", "{of_all:.1f}"),
    ("use known", "{covered:.1%}"),
    ("tokens of KV freed", "{kv_tokens:.0f}"),
)


@refusing()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__ or "")
    add = parser.add_argument
    add("--model", default="demo", help="(default: %(default)s)")
    add("--sessions", type=int, default=8, help="of each user to learn from (default: %(default)s)")
    add("--prompt", type=int, default=64, help="tokens of a prompt (default: %(default)s)")
    add("--tokens", type=int, default=128, help="tokens of an answer (default: %(default)s)")
    add("--epsilon", type=float, default=EPSILON, help="(default: %(default)s)")
    add("--json", action="store_true", help="one JSON object a line")
    args = parser.parse_args(arguments)
    positive(args, "sessions", "prompt", "tokens")
    if not 0 <= args.epsilon < 1:
        raise UserError(f"--epsilon must be from 0 to below 1, got {args.epsilon}")
    rows = by_turns(*sessions_of(args), args.epsilon)
    show(args.json, rows, aligned(COLUMNS, rows))
    return 0

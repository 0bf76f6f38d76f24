"""How likely a grid's precisions find its texts: no budget and no policy changes it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moejax.engine.loop import Engine
from moejax.errors import UserError
from moejax.evaluate.comparison import Comparison, Units, paired
from moejax.evaluate.evaluation import sliding_windows
from moejax.serve.generation import run_scores


def score_tokens(engine: Engine, ids: Sequence[int]) -> dict[str, Any]:
    """The quality of a text: its perplexity in windows of as many tokens as the engine has room
    for, one after the other, and each window's bits, by which two are compared. Raises UserError
    for log-probabilities that are not finite."""
    room = engine.scheduler.max_model_len
    windows = sliding_windows(len(ids), room, room)
    bits, tokens = [0.0] * len(windows), [w.end - w.first for w in windows]
    most = 2 * engine.scheduler.prefill_chunks
    given = (list(ids[w.begin : w.end]) for w in windows)
    with contextlib.closing(run_scores(engine, given, most)) as steps:
        for ended in steps:
            for place, scores in ended:
                bits[place] = -math.fsum(np.asarray(scores, np.float64)) / math.log(2)
    engine.drain()
    if not np.isfinite(bits).all():
        raise UserError("log-probabilities are not finite; try options: {dtype: float32}")
    return {
        "tokens": sum(tokens),
        "window": room,
        "perplexity": 2 ** (sum(bits) / sum(tokens)),
        "window_bits": bits,
        "window_tokens": tokens,
    }


def compare_quality(line: Mapping[str, Any], baseline: Mapping[str, Any]) -> Comparison:
    """Bits a token of a record of quality less the baseline's, paired by window."""
    return paired(_units(baseline), _units(line))


def _units(line: Mapping[str, Any]) -> Units:
    keys = [str(place) for place in range(len(line["window_bits"]))]
    return Units(line["text"], "bits/token", keys, line["window_bits"], line["window_tokens"])

"""Engines that compare_precision.py asks: one for all fixed maps, and one a run of DynaExq.

A version's experts compute with exactly the weights that its records decode to, so a fixed map has
the bits of a dense store of decoded records. That is what the engine of fixed maps holds: the next
map is another array for the same executables. (tests/moejax/test_precision.py compares the two.)
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from host_offload.encoders import decode, encode
from host_offload.policy import routed_counts
from host_offload.precision_names import VERSIONS
from host_offload.quantizers import QUANTIZERS
from host_offload.tables import with_contents
from host_offload.traces import read_trace
from host_offload.version_history import VersionHistory, version_history
from moejax import LLM, UserError
from moejax.evaluation import perplexity
from pallas_kernels.records import RecordFormat

WINDOW = 512
"""Tokens, each window alone; the bootstrap draws whole ones."""

PARTS = {"train": (0.0, 0.6), "validation": (0.6, 0.8), "test": (0.8, 1.0)}
"""Contiguous parts of each text."""

Scores = dict[str, np.ndarray]
"""Domain → −ln p of each window, summed, float64[windows]."""


@dataclasses.dataclass(frozen=True)
class Domain:
    name: str
    parts: Mapping[str, str]
    """Of PARTS: texts."""


@dataclasses.dataclass(frozen=True)
class Pair:
    hi: str
    lo: str
    rival: str | None
    """Its bytes are the budget."""
    share: float | None
    """Of high experts, where no rival says it."""

    @property
    def name(self) -> str:
        return f"{self.hi}/{self.lo}@{self.rival or f'{self.share:.0%}'}"


def parse_pair(text: str) -> Pair:
    """Raises UserError for what is no HI/LO@VERSION and no HI/LO@SHARE."""
    pair, _, budget = text.partition("@")
    hi, _, lo = pair.partition("/")
    try:
        rival, share = (budget, None) if budget in VERSIONS else (None, float(budget))
    except ValueError:
        rival, share = None, -1.0
    if {hi, lo} - {*VERSIONS} or (share is not None and not 0 < share < 1):
        raise UserError(
            f"{text!r} is no pair; give HI/LO@VERSION or HI/LO@SHARE, such as dense/int4@int8 or "
            "int4/int2@0.5"
        )
    return Pair(hi, lo, rival, share)


def read_domains(paths: Sequence[str]) -> list[Domain]:
    """Raises UserError for a file that cannot be read."""
    domains = []
    for path in map(Path, paths):
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {path} ({error})") from error
        ends = {name: [int(len(text) * x) for x in share] for name, share in PARTS.items()}
        domains.append(Domain(path.stem, {n: text[a:b] for n, (a, b) in ends.items()}))
    return domains


def score(llm: LLM, domains: Sequence[Domain], part: str, windows: int) -> Scores:
    """The first `windows` whole windows of a part of each domain, in that order, one a sweep.
    Raises UserError for a part that is shorter."""
    texts = {domain.name: domain.parts[part] for domain in domains}
    result = perplexity(llm, texts, window=WINDOW, stride=WINDOW, limit=windows * WINDOW)
    scores = {}
    for text in result.texts:
        if text.tokens < windows * WINDOW:
            raise UserError(
                f"the {part} part of {text.name} has {text.tokens} tokens, fewer than {windows} "
                f"windows of {WINDOW}; give fewer --windows"
            )
        scores[text.name] = -np.nansum(text.logprobs.reshape(windows, WINDOW), axis=1)
    return scores


def engine_options(model: str, sweep: int = WINDOW) -> dict[str, Any]:
    """sweep: tokens of one."""
    return dict(
        model=model,
        max_model_len=WINDOW,
        max_num_seqs=2,
        max_num_batched_tokens=sweep,
        enable_prefix_caching=False,
        progress=False,
    )


class MapEngine:
    """An engine of fixed maps: experts from decoded records, everything resident."""

    def __init__(self, model: str):
        self.llm = LLM(**engine_options(model))
        runner = self.llm.engine.runner
        (self._dense,) = runner.stores
        self.layers, self.experts = self._dense.shape[:2]
        config = self.llm.config
        self.hidden, self.width = config.hidden_size, config.moe_intermediate_size
        self._decoded: dict[tuple[str, str], np.ndarray] = {}

    def format(self, version: str) -> RecordFormat:
        return RecordFormat(version, self.hidden, self.width, self.llm.dtype)

    def decoded(self, version: str, quantizer: str) -> np.ndarray:
        """uint16[L, E, rows, D]: dense records of what that version decodes to."""
        dense = np.asarray(self._dense)
        if version in ("dense", "lossless12"):
            return dense
        key = version, quantizer
        if key not in self._decoded:
            fmt, like = self.format(version), self.format("dense")
            weights = decode(dense.reshape(-1, *dense.shape[2:]), like)
            records = encode(weights, fmt, QUANTIZERS[quantizer])
            made = encode(decode(records, fmt), like)
            self._decoded[key] = made.reshape(dense.shape)
        return self._decoded[key]

    def score(
        self,
        versions: Sequence[str],
        experts: np.ndarray,
        domains: Sequence[Domain],
        part: str,
        windows: int,
        quantizers: Mapping[str, str],
    ) -> Scores:
        """With the map experts int8[L, E] of numbers of `versions`."""
        choices = [self.decoded(v, quantizers.get(v, "rtn")) for v in versions]
        mixed = np.choose(experts[:, :, None, None], choices)
        runner = self.llm.engine.runner
        runner.stores = (jax.device_put(mixed, self._dense.sharding),)
        shape = runner.tables.owner.shape, runner.tables.address.shape
        absent = {n: np.full(s, -1) for n, s in zip(("owner", "address"), shape, strict=True)}
        runner.tables = with_contents(runner.tables, absent)
        return score(self.llm, domains, part, windows)

    def close(self) -> None:
        self.llm.engine.runner.stores = (self._dense,)
        self.llm.close()


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What the dense model's routing was."""

    counts: dict[str, np.ndarray]
    """Domain → int64[L, E]: selections on its train part."""
    own: dict[str, np.ndarray]
    """The same of its test part, for the oracle."""
    inputs: np.ndarray
    """float32[n, L, D]: what the experts of a layer see, on the train parts."""
    ids: np.ndarray
    """int16[n, L, k]"""
    weights: np.ndarray
    """float32[n, L, k]"""


def calibrate(model: str, domains: Sequence[Domain], train: int, test: int) -> Calibration:
    """Runs the dense model over the first windows of the train and of the test parts."""
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace"
        with LLM(**engine_options(model), trace=trace, trace_arrays="gate_input") as llm:
            score(llm, domains, "train", train)
            score(llm, domains, "test", test)
            experts = llm.config.num_experts
        steps = list(read_trace(trace).step_traces())

    # Requests are numbered in the order of their windows.
    def counts(first: int, windows: int) -> dict[str, np.ndarray]:
        found = {}
        for number, domain in enumerate(domains):
            mine = first + number * windows + np.arange(windows)
            ids = np.concatenate([s.ids[np.isin(s.request, mine)] for s in steps])
            found[domain.name] = routed_counts(ids, experts)
        return found

    first = len(domains) * train
    seen = [
        np.concatenate([getattr(s, name)[s.request < first] for s in steps])
        for name in ("gate_input", "ids", "weights")
    ]
    return Calibration(counts(0, train), counts(first, test), seen[0].astype(np.float32), *seen[1:])


def output_errors(
    engine: MapEngine, found: Calibration, version: str, quantizer: str, most: int = 48
) -> np.ndarray:
    """float64[L, E]: the mean square error of an expert's output in that version, over up to `most`
    of the calibration's tokens that were routed to it, times the mean square of their weights."""
    exact, coarse = (engine.decoded(v, quantizer) for v in ("dense", version))
    errors = np.zeros(exact.shape[:2])
    like = engine.format("dense")

    @jax.jit
    def error(x, a, b):
        def outputs(weights):
            gate, up, down = weights.reshape(3, engine.width, engine.hidden)
            return (jax.nn.silu(x @ gate.T) * (x @ up.T)) @ down

        return jax.numpy.mean(jax.numpy.square(outputs(a) - outputs(b)))

    for layer, expert in np.ndindex(errors.shape):
        row, place = np.nonzero(found.ids[:, layer] == expert)
        if not len(row):
            continue
        chosen = np.resize(np.linspace(0, len(row) - 1, most).astype(int), most)
        x = found.inputs[row[chosen], layer]
        weight = found.weights[row[chosen], layer, place[chosen]]
        pair = [
            decode(np.ascontiguousarray(records[layer, expert])[None], like)[0].astype(np.float32)
            for records in (exact, coarse)
        ]
        errors[layer, expert] = float(error(x, *pair)) * float(np.mean(weight**2))
    return errors


def run_dynaexq(
    engine: Mapping[str, Any],
    settings: Mapping[str, Any],
    options: Mapping[str, Any],
    order: Sequence[Domain],
    part: str,
    windows: int,
) -> tuple[Scores, dict[str, Any], VersionHistory]:
    """(scores, statistics, history) of one run from a cold start over the domains in that order.

    engine: of engine_options. settings: of DynaExq; `interval` in tokens, `weights` an array.
    options: of LLM.
    """
    keys = dict(settings)
    interval = keys.pop("interval")
    with tempfile.TemporaryDirectory() as directory:
        trace = Path(directory) / "trace"
        if "weights" in keys:
            np.save(weights := Path(directory) / "weights.npy", keys["weights"])
            keys["weights"] = weights
        text = ",".join(["dynaexq", *(f"{key}={value}" for key, value in keys.items())])
        asked = dict(options, precision=text, interval=f"{interval} tokens", trace=trace)
        with LLM(**engine, **asked) as llm:
            scores = score(llm, order, part, windows)
            stats = llm.stats()["precision"]
        return scores, stats, version_history(read_trace(trace))

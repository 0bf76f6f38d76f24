"""What the command `compare` computes fixed maps with, and what it calibrates on.

A version's experts compute with exactly the weights that its records decode to, so a fixed map has
the bits of a dense store of decoded records. That is what the engine of fixed maps holds: the next
map is another array for the same executables. (stream.check_agreement compares it with an
engine that has the versions.)
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from host_offload.control.interface import routed_counts
from host_offload.memory.tables import with_contents
from host_offload.policies.precision.names import VERSIONS
from host_offload.traces.reader import read_trace
from host_offload.versions.encoders import decode, encode
from host_offload.versions.quantizers import QUANTIZERS
from moejax import LLM, UserError
from moejax.checkpoints.conversion_source import open_source
from moejax.checkpoints.convert import Encoding, write_checkpoint
from moejax.checkpoints.orbax.destination import free_destination
from moejax.checkpoints.versions import GPTQ
from moejax.evaluate.evaluation import perplexity
from moejax.evaluate.quantization import ExpertInputs, gptq_records, layer_inputs
from moejax.models.directory import checkpoint_directory
from pallas_kernels.records import RecordFormat

WINDOW = 512
"""Tokens, each window alone; the bootstrap draws whole ones."""

PARTS = {"train": (0.0, 0.6), "validation": (0.6, 0.8), "test": (0.8, 1.0)}
"""Contiguous parts of each text."""

CHOICES = (*QUANTIZERS, GPTQ)
"""Quantizers that are compared."""

Scores = dict[str, np.ndarray]
"""Domain → −ln p of each window, summed, float64[windows]."""


@dataclasses.dataclass(frozen=True)
class Domain:
    name: str
    parts: Mapping[str, str]
    """Part, of PARTS → its text."""


@dataclasses.dataclass(frozen=True)
class Pair:
    hi: str
    lo: str
    rival: str | None
    """Its bytes are the budget."""
    share: float | None
    """The share of high experts, where no rival says it."""

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
    """The first `windows` whole windows of a part of each domain, in that order, one a prefill
    step. Raises UserError for a part that is shorter."""
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


def engine_options(model: str, prefill: int = WINDOW) -> dict[str, Any]:
    """prefill step: tokens of one."""
    return dict(
        model=model,
        max_model_len=WINDOW,
        max_num_seqs=2,
        max_num_batched_tokens=prefill,
        enable_prefix_caching=False,
        progress=False,
    )


class MapEngine:
    """An engine of fixed maps: experts from decoded records, everything resident."""

    def __init__(self, model: str, inputs: ExpertInputs):
        """inputs: what experts saw of the calibration texts, for gptq."""
        self.llm = LLM(**engine_options(model))
        runner = self.llm.engine.runner
        (self._dense,) = runner.stores
        self.layers, self.experts = self._dense.shape[:2]
        config = self.llm.config
        self.hidden, self.width = config.hidden_size, config.moe_intermediate_size
        self._inputs = inputs
        self._records: dict[tuple[str, str], np.ndarray] = {}
        self._decoded: dict[tuple[str, str], np.ndarray] = {}

    def format(self, version: str) -> RecordFormat:
        return RecordFormat(version, self.hidden, self.width, self.llm.dtype)

    def records(self, version: str, quantizer: str) -> np.ndarray:
        """uint16[L, E, rows, D] of a lossy version. quantizer: of CHOICES."""
        key = version, quantizer
        if key not in self._records:
            fmt, like = self.format(version), self.format("dense")
            layers = (decode(records, like) for records in np.asarray(self._dense))
            self._records[key] = np.stack(
                [
                    gptq_records(weights, fmt, self._inputs, layer)
                    if quantizer == GPTQ
                    else encode(weights, fmt, QUANTIZERS[quantizer])
                    for layer, weights in enumerate(layers)
                ]
            )
        return self._records[key]

    def decoded(self, version: str, quantizer: str) -> np.ndarray:
        """uint16[L, E, rows, D]: dense records of what that version decodes to."""
        dense = np.asarray(self._dense)
        if version in ("dense", "lossless12"):
            return dense
        key = version, quantizer
        if key not in self._decoded:
            fmt, like = self.format(version), self.format("dense")
            records = self.records(version, quantizer)
            weights = decode(records.reshape(-1, *records.shape[2:]), fmt)
            self._decoded[key] = encode(weights, like).reshape(dense.shape)
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


def write_versions(
    engine: MapEngine, model: str, quantizers: Mapping[str, str], destination: Path
) -> None:
    """Writes the checkpoint with these versions of its experts, as `moejax quantize` does, from the
    very records that the engine of fixed maps decodes, so that both compute with the same weights.
    quantizers: version → of CHOICES. Raises UserError for a model that is no safetensors
    checkpoint and for a destination that is there already."""
    directory = checkpoint_directory(model)
    source = open_source(directory, "auto")

    def encoding(version: str, quantizer: str) -> Encoding:
        records = engine.records(version, quantizer)
        return Encoding(quantizer, lambda layer, _: records[layer])

    encodings = {version: encoding(version, name) for version, name in quantizers.items()}
    write_checkpoint(source, free_destination(destination), encodings)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What the dense model's routing was."""

    counts: dict[str, np.ndarray]
    """Domain → int64[L, E]: selections on its train part."""
    own: dict[str, np.ndarray]
    """The same of its test part, for the oracle."""
    inputs: ExpertInputs
    """What the experts of a layer see, on the train parts."""


def calibrate(
    model: str, domains: Sequence[Domain], train: int, test: int, directory: Path
) -> Calibration:
    """Runs the dense model over the first windows of the train and of the test parts. directory:
    for traces, which have to stay while the result is used."""
    for part, windows, arrays in (("train", train, "gate_input"), ("test", test, None)):
        traced: dict[str, Any] = {"trace": directory / part}
        if arrays:
            traced["trace_arrays"] = arrays
        with LLM(**engine_options(model), **traced) as llm:
            score(llm, domains, part, windows)
            experts, hidden_act = llm.config.num_experts, llm.engine.runner.config.hidden_act
    text = "".join(domain.parts["train"] for domain in domains)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    trace = read_trace(directory / "train")

    def counts(part: str, windows: int) -> dict[str, np.ndarray]:
        found, steps = {}, list(read_trace(directory / part).step_traces())
        # Requests are numbered in the order of their windows.
        for number, domain in enumerate(domains):
            mine = number * windows + np.arange(windows)
            ids = np.concatenate([s.ids[np.isin(s.request, mine)] for s in steps])
            found[domain.name] = routed_counts(ids, experts)
        return found

    inputs = ExpertInputs(trace, hidden_act, trace.tokens, digest)
    return Calibration(counts("train", train), counts("test", test), inputs)


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

    for layer in range(engine.layers):
        inputs, ids, shares = layer_inputs(found.inputs.trace, layer, "leave this model out")
        for expert in range(engine.experts):
            row, place = np.nonzero(ids == expert)
            if not len(row):
                continue
            chosen = np.resize(np.linspace(0, len(row) - 1, most).astype(int), most)
            weight = shares[row[chosen], place[chosen]].astype(np.float64)
            pair = [
                decode(np.ascontiguousarray(records[layer, expert])[None], like)[0]
                for records in (exact, coarse)
            ]
            wide = [weights.astype(np.float32) for weights in pair]
            found_error = float(error(inputs[row[chosen]].astype(np.float32), *wide))
            errors[layer, expert] = found_error * float(np.mean(weight**2))
    return errors

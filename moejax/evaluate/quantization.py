"""Versions that a checkpoint gets beside its dense experts, `moejax quantize`, and what each expert
sees of some texts, for quantizers that ask for it."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax.numpy as jnp
import numpy as np

from host_offload.traces.reader import Trace, read_trace
from host_offload.versions.encoders import WORKERS, EncodingError, encode, pack_quantized
from host_offload.versions.gptq import gptq_expert
from host_offload.versions.quantizers import QUANTIZERS, UnquantizableError, rtn, to_float32
from moejax.checkpoints.conversion import Conversion, Encoding, free_destination, write_checkpoint
from moejax.checkpoints.conversion_source import Source, open_source, orbax_source
from moejax.checkpoints.load import checkpoint_format
from moejax.checkpoints.orbax.manifest import MANIFEST, read_manifest
from moejax.checkpoints.versions import GPTQ, LOSSLESS, check_quantizer, check_versions
from moejax.errors import UserError
from moejax.evaluate.evaluation import perplexity
from moejax.models.directory import checkpoint_directory
from moejax.serve.llm import LLM
from pallas_kernels.expert_ffn.activation import ACTIVATIONS
from pallas_kernels.records import RecordFormat
from pallas_kernels.records.format import MATRICES

CALIBRATION_TOKENS = 32768
"""Tokens of each file, unless the caller says otherwise."""


@dataclasses.dataclass(frozen=True)
class WrittenVersion:
    """quantizer: how it was made. record_bytes: of an expert. errors: by MoE layer, ‖W − Ŵ‖/‖W‖
    of each expert. dense_layers: MoE layers that it cannot hold without loss, which it lacks.
    matrix_s: seconds in which a matrix was made, on average, with
    host_offload.versions.encoders.WORKERS threads at work; None where all of them were there from
    before an interruption."""

    quantizer: str
    record_bytes: int
    errors: dict[int, tuple[float, ...]]
    dense_layers: tuple[int, ...] = ()
    matrix_s: float | None = None

    @property
    def layer_errors(self) -> list[float]:
        """By layer, the mean over its experts; 0 where they stay dense."""
        errors = self.errors | dict.fromkeys(self.dense_layers, (0.0,))
        return [float(np.mean(errors[layer])) for layer in sorted(errors)]


@dataclasses.dataclass(frozen=True)
class Quantization:
    """What `quantize` did. dense_bytes: of an expert's dense record."""

    conversion: Conversion
    dense_bytes: int
    versions: dict[str, WrittenVersion]


def quantize(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    versions: Sequence[str],
    quantizer: str = "rtn",
    data: Sequence[str | os.PathLike[str]] = (),
    tokens: int = CALIBRATION_TOKENS,
    progress: Callable[[int, int], None] | None = None,
) -> Quantization:
    """Writes the checkpoint `source` as one of our Orbax format with these versions of its experts
    beside the dense one.

    source: a Hugging Face directory, or what `moejax convert` or `moejax quantize` wrote; of the
    latter, versions that are not named are left out. quantizer: one of QUANTIZERS, or GPTQ. data,
    tokens: GPTQ's texts, and how many tokens of each; the model is run over them first, which needs
    the memory of a run, and on the disk of the destination 2·D bytes a token and MoE layer.
    progress: called with (done, total) bytes. Host memory, and what happens after an interruption:
    as in convert.

    Of lossless12, layers with an expert that it cannot hold are left out, and the manifest says so.
    Raises UserError for what check_versions refuses, for experts that a lossy version cannot hold,
    for lossless12 where every layer is left out, and as convert does.
    """
    if quantizer != GPTQ:
        check_quantizer(quantizer)
    if bool(data) != (quantizer == GPTQ):
        raise UserError(
            "quantizer gptq needs texts to look at: give files (--data)"
            if quantizer == GPTQ
            else f"texts (--data) are for quantizer gptq; {quantizer} looks at weights alone"
        )
    src = checkpoint_directory(source)
    kind = checkpoint_format(src)
    if kind not in ("moejax-orbax", "safetensors"):
        raise UserError(
            f"{src}: its format is {kind}; quantize reads safetensors checkpoints and what moejax "
            "convert wrote"
        )
    opened = orbax_source(src) if kind == "moejax-orbax" else open_source(src, "auto")
    if "dense" in versions:
        raise UserError("dense is always written; name the versions to be made from it")
    check_versions(opened.layout(), opened.dtype, versions)
    dst = free_destination(destination)
    with contextlib.ExitStack() as stack:
        inputs = None
        if quantizer == GPTQ:
            dst.parent.mkdir(parents=True, exist_ok=True)
            files = [pathlib.Path(file) for file in data]
            inputs = stack.enter_context(expert_inputs(src, files, tokens, dst.parent))
        spent: dict[str, list[float]] = {version: [] for version in versions}
        encodings = {v: _encoding(opened, v, quantizer, inputs, spent[v]) for v in versions}
        conversion = write_checkpoint(opened, dst, encodings, progress=progress)
    manifest = read_manifest(conversion.directory / MANIFEST)
    written = {
        version: WrittenVersion(
            encoding.quantizer,
            opened.layout(version).nbytes,
            manifest.errors[version],
            manifest.dense_layers.get(version, ()),
            float(np.mean(spent[version])) if spent[version] else None,
        )
        for version, encoding in encodings.items()
    }
    return Quantization(conversion, opened.layout().nbytes, written)


def _encoding(
    source: Source,
    version: str,
    quantizer: str,
    inputs: ExpertInputs | None,
    spent: list[float],
) -> Encoding:
    """spent: gets the seconds of a matrix, of each layer that is made."""
    fmt, named = source.layout(version), quantizer
    if not fmt.lossy:
        named = LOSSLESS
    elif inputs is not None:
        named = f"{GPTQ}, {inputs.tokens} tokens {inputs.digest}"

    def encoded(layer: int, weights: np.ndarray) -> np.ndarray:
        began = time.perf_counter()
        try:
            if inputs is not None and fmt.lossy:
                records = gptq_records(weights, fmt, inputs, layer)
            else:
                records = encode(weights, fmt, QUANTIZERS.get(quantizer, rtn))
        except EncodingError as error:
            if not fmt.lossy:
                raise
            raise UserError(
                f"{source.directory}: {version} cannot hold expert {error.experts[0]} of MoE layer "
                f"{layer}: {error.reason}; leave this version out"
            ) from None
        spent.append((time.perf_counter() - began) / (len(MATRICES) * len(weights)))
        return records

    return Encoding(named, encoded)


# ---- what experts see


@dataclasses.dataclass(frozen=True)
class ExpertInputs:
    """trace: of a run over the texts, with the routers' inputs, which are the experts' too. tokens:
    of all texts. digest: 8 hex digits that tell one choice of texts from another."""

    trace: Trace
    hidden_act: str
    tokens: int
    digest: str


def layer_inputs(
    trace: Trace, layer: int, otherwise: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(inputs float16[N, D], ids int16[N, k], weights float[N, k]) of all tokens in a MoE layer.
    Raises UserError, with what to do otherwise, where an input is beyond float16."""
    inputs, ids, weights = (
        np.concatenate([chunk.array(f"token.{name}")[:, layer] for chunk in trace.chunks])
        for name in ("gate_input", "ids", "weights")
    )
    if not np.isfinite(inputs).all():
        raise UserError(
            f"inputs of MoE layer {layer} are beyond float16, in which they are recorded; "
            f"{otherwise}"
        )
    return inputs, ids, weights


def inside(inputs: np.ndarray, gate: np.ndarray, up: np.ndarray, hidden_act: str) -> np.ndarray:
    """float32[n, I], what an expert's down sees of inputs [n, D]. gate, up: float32[I, D]."""
    gated = np.asarray(ACTIVATIONS[hidden_act](jnp.asarray(inputs @ gate.T)))
    return gated * (inputs @ up.T)


@contextlib.contextmanager
def expert_inputs(
    model: pathlib.Path, files: Sequence[pathlib.Path], tokens: int, scratch: pathlib.Path
) -> Iterator[ExpertInputs]:
    """Runs the model over the first `tokens` tokens of each file.

    scratch: a directory with room for tokens · MoE layers · 2·D bytes, given back at the end.
    Raises UserError for files that cannot be read and as LLM and perplexity do.
    """
    texts = {str(file): _text(file) for file in files}
    with tempfile.TemporaryDirectory(dir=scratch, prefix=".calibration-") as directory:
        trace = pathlib.Path(directory) / "trace"
        with LLM(str(model), trace=f"{trace},arrays=gate_input", max_num_seqs=16) as llm:
            window = min(512, llm.engine.scheduler.max_model_len)
            result = perplexity(llm, texts, window=window, stride=window, limit=tokens)
            hidden_act = llm.engine.runner.config.hidden_act
        said = "".join(f"{text.sha256} {text.tokens}\n" for text in result.texts)
        digest = hashlib.sha256(said.encode()).hexdigest()[:8]
        yield ExpertInputs(read_trace(trace), hidden_act, result.total.tokens, digest)


def gptq_records(
    weights: np.ndarray, fmt: RecordFormat, inputs: ExpertInputs, layer: int
) -> np.ndarray:
    """uint16[E, rows, D]: a MoE layer's experts by host_offload.versions.gptq, each for what it
    sees of the texts. weights: [E, 3·I, D]. Raises EncodingError for weights that no scale
    holds."""
    seen, ids, _ = layer_inputs(inputs.trace, layer, "use quantizer rtn or mse")
    records = np.empty((len(weights), fmt.rows, fmt.hidden), np.uint16)

    def one(expert: int) -> str | None:
        matrices = to_float32(weights[expert]).reshape(3, fmt.width, fmt.hidden)
        if not np.isfinite(matrices).all():
            return "weights are NaN or infinite"
        mine = seen[(ids == expert).any(1)].astype(np.float32)
        hidden = inside(mine, matrices[0], matrices[1], inputs.hidden_act)
        try:
            pack_quantized(gptq_expert(matrices, mine, hidden, fmt), fmt, records[expert])
        except UnquantizableError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(WORKERS) as pool:
        failed = {i: why for i, why in enumerate(pool.map(one, range(len(weights)))) if why}
    if failed:
        raise EncodingError(tuple(failed), next(iter(failed.values())))
    return records


def _text(file: pathlib.Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{file}: cannot be read as text in UTF-8: {error}") from None

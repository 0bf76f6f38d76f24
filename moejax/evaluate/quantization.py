"""Versions that a checkpoint gets beside its dense experts: `moejax quantize`."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import time
from collections.abc import Callable, Sequence

import numpy as np

from host_offload.versions.encoders import EncodingError, encode
from host_offload.versions.quantizers import QUANTIZERS, rtn
from moejax.checkpoints.conversion_source import Source, open_source, orbax_source
from moejax.checkpoints.convert import Conversion, Encoding, free_destination, write_checkpoint
from moejax.checkpoints.load import checkpoint_format
from moejax.checkpoints.orbax.manifest import MANIFEST, read_manifest
from moejax.checkpoints.versions import GPTQ, LOSSLESS, check_quantizer, check_versions
from moejax.errors import UserError
from moejax.evaluate.expert_inputs import ExpertInputs, expert_inputs, gptq_records
from moejax.models.directory import checkpoint_directory
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
    opened = _open_source(src)
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


def _open_source(directory: pathlib.Path) -> Source:
    kind = checkpoint_format(directory)
    if kind == "moejax-orbax":
        return orbax_source(directory)
    if kind == "safetensors":
        return open_source(directory, "auto")
    raise UserError(
        f"{directory}: its format is {kind}; quantize reads safetensors checkpoints and what "
        "moejax convert wrote"
    )


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

"""Versions of a model's experts: those that a run wants, and those that a checkpoint gets."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import pathlib
import time
from collections.abc import Callable, Sequence

import numpy as np

from host_offload.memory.layout import ExpertLayout
from host_offload.versions.encoders import EncodingError, encode
from host_offload.versions.quantizers import QUANTIZERS, rtn
from host_offload.versions.store_versions import VersionError, add_version, lossless_where_it_fits
from moejax.checkpoints.conversion_source import Source, open_source
from moejax.checkpoints.convert import Conversion, Encoding, free_destination, write_checkpoint
from moejax.checkpoints.formats import checkpoint_format
from moejax.checkpoints.loaded_model import LoadedModel
from moejax.checkpoints.orbax.manifest import MANIFEST, read_manifest
from moejax.checkpoints.orbax.source import orbax_source
from moejax.checkpoints.safetensors.shards import find_shards
from moejax.device import require_pinned_memory
from moejax.errors import UserError
from moejax.evaluate.expert_inputs import ExpertInputs, expert_inputs, gptq_records
from moejax.models.config import load_config
from moejax.models.directory import checkpoint_directory
from pallas_kernels.records import RecordFormat
from pallas_kernels.records.format import MATRICES

log = logging.getLogger("moejax")

GPTQ = "gptq"
"""The quantizer that looks at what experts see of a text (host_offload.versions.gptq)."""

CALIBRATION_TOKENS = 32768
"""Of each file, unless the caller says otherwise."""

LOSSLESS = "lossless"
"""Stands for a quantizer where a version keeps all bits."""


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


def check_versions(layout: ExpertLayout, dtype: str, versions: Sequence[str]) -> None:
    """Raises UserError for versions that experts of this dense layout cannot have in a run's dtype,
    saying what to do, and for one named twice or none."""
    if not versions or len(set(versions)) < len(versions):
        raise UserError(f"name each version once, not {', '.join(versions) or 'none'}")
    for version in versions:
        try:
            RecordFormat(version, layout.hidden, layout.width, dtype)
        except ValueError as error:
            raise UserError(str(error)) from None


def check_quantizer(name: str) -> None:
    """Raises UserError for a quantizer that cannot make versions when a run starts."""
    if name == GPTQ:
        raise UserError(
            "quantizer 'gptq' needs a text, and long; write its versions once with moejax quantize "
            "--quantizer gptq --data FILE, and run what it writes"
        )
    if name not in QUANTIZERS:
        raise UserError(f"quantizer {name!r} is unknown; choose {', '.join(QUANTIZERS)}")


def with_versions(
    loaded: LoadedModel,
    wanted: Sequence[str],
    *,
    quantizer: str = "rtn",
    progress: Callable[[str, int, int], None] | None = None,
) -> LoadedModel:
    """The model with a store of exactly these versions, in this order.

    wanted: of pallas_kernels.records.VERSIONS, each once. Those that the checkpoint has are taken;
    the others are encoded from the dense version, which is freed afterwards if it is not wanted.
    Of lossless12, unless dense is wanted too, layers with an expert that it cannot hold stay dense,
    each in one of the two arrays (ExpertStore.layers), and the log says which and why.
    quantizer: how int versions are made. progress: called with (version, done, total bytes).

    Raises UserError for unknown names, where the dense version is needed and not there, for what
    the version cannot hold (its message says what to do), and where host memory is too small.
    """
    check_quantizer(quantizer)
    check_versions(loaded.layout, loaded.dtype, wanted)
    store, began, quantizers = loaded.store, time.perf_counter(), dict(loaded.quantizers)
    # Last what takes the place of dense, which the others are made from.
    replacing = {"lossless12"} if "dense" not in wanted else set()
    for version in sorted(wanted, key=replacing.__contains__):
        if version in store.layouts:
            continue
        layout = dataclasses.replace(loaded.layout, version=version, dtype=loaded.dtype)
        device = next(iter(next(iter(store.arrays.values())).devices()))
        layers, experts = next(iter(store.arrays.values())).shape[:2]
        require_pinned_memory(device, store.nbytes + layers * experts * layout.nbytes)

        def report(done: int, total: int, version: str = version) -> None:
            if progress is not None:
                progress(version, done, total)

        try:
            if version in replacing:
                store, dense = lossless_where_it_fits(store, loaded.dtype, report)
                for layer, reason in dense.items():
                    log.warning("lossless12: MoE layer %d stays dense: %s", layer, reason)
            else:
                store = add_version(store, version, loaded.dtype, QUANTIZERS[quantizer], report)
        except VersionError as error:
            raise UserError(f"{error}; use another version") from None
        except MemoryError as error:
            raise UserError(str(error)) from error
        if version != "dense":
            quantizers[version] = quantizer if layout.format.lossy else LOSSLESS
    kept = list(wanted)
    if store.layers:
        kept.insert(kept.index("lossless12") + 1, "dense")
    seconds = loaded.seconds | {"versions": time.perf_counter() - began}
    return dataclasses.replace(
        loaded,
        store=store.only(kept),
        seconds=seconds,
        quantizers={version: name for version, name in quantizers.items() if version in wanted},
    )


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
    check_versions(opened.layout, opened.dtype, versions)
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
            encoding.layout.nbytes,
            manifest.errors[version],
            manifest.dense_layers.get(version, ()),
            float(np.mean(spent[version])) if spent[version] else None,
        )
        for version, encoding in encodings.items()
    }
    return Quantization(conversion, opened.layout.nbytes, written)


def _open_source(directory: pathlib.Path) -> Source:
    kind = checkpoint_format(directory)
    if kind == "moejax-orbax":
        return orbax_source(directory)
    if kind == "safetensors":
        return open_source(directory, load_config(directory), find_shards(directory), "auto")
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
    layout = dataclasses.replace(source.layout, version=version, dtype=source.dtype)
    fmt, named = layout.format, quantizer
    if not fmt.lossy:
        named = LOSSLESS
    elif inputs is not None:
        named = f"{GPTQ}, {inputs.tokens} tokens {inputs.digest}"

    def encoded(layer: int, weights: np.ndarray) -> np.ndarray:
        began = time.perf_counter()
        records = made(layer, weights)
        spent.append((time.perf_counter() - began) / (len(MATRICES) * len(weights)))
        return records

    def made(layer: int, weights: np.ndarray) -> np.ndarray:
        try:
            if inputs is not None and fmt.lossy:
                return gptq_records(weights, fmt, inputs, layer)
            return encode(weights, fmt, QUANTIZERS.get(quantizer, rtn))
        except EncodingError as error:
            if not fmt.lossy:
                raise
            raise UserError(
                f"{source.directory}: {version} cannot hold expert {error.experts[0]} of MoE layer "
                f"{layer}: {error.reason}; leave this version out"
            ) from None

    return Encoding(layout, named, encoded)

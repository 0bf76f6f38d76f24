"""Makes versions of a checkpoint's experts beside its dense ones: `moejax quantize`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence

import numpy as np

from host_offload.versions.encoders import EncodingError, encode
from host_offload.versions.quantizers import QUANTIZERS
from moejax.checkpoints.conversion import (
    Conversion,
    Encoding,
    Source,
    free_destination,
    open_source,
    orbax_source,
    write_checkpoint,
)
from moejax.checkpoints.load import check_orbax_options, checkpoint_format
from moejax.checkpoints.orbax.manifest import MANIFEST, read_manifest
from moejax.checkpoints.versions import LOSSLESS, check_quantizer, check_versions
from moejax.errors import UserError
from moejax.models.directory import checkpoint_directory


@dataclasses.dataclass(frozen=True)
class WrittenVersion:
    """A version that was written.

    - `quantizer`: how it was made.
    - `record_bytes`: bytes of an expert.
    - `errors`: by MoE layer, ‖W − Ŵ‖/‖W‖ of each expert.
    - `dense_layers`: MoE layers that it cannot hold without loss, which it lacks.
    """

    quantizer: str
    record_bytes: int
    errors: dict[int, tuple[float, ...]]
    dense_layers: tuple[int, ...] = ()

    @property
    def layer_errors(self) -> list[float]:
        """Returns the mean error over the experts of each layer; 0 if they stay dense."""
        errors = self.errors | dict.fromkeys(self.dense_layers, (0.0,))
        return [float(np.mean(errors[layer])) for layer in sorted(errors)]


@dataclasses.dataclass(frozen=True)
class Quantization:
    """The result of `quantize`.

    - `dense_bytes`: bytes of an expert's dense record.
    """

    conversion: Conversion
    dense_bytes: int
    versions: dict[str, WrittenVersion]


def quantize(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    versions: Sequence[str],
    quantizer: str = "rtn",
    progress: Callable[[int, int], None] | None = None,
    step: int | str | None = None,
    name_map: str | os.PathLike[str] | None = None,
) -> Quantization:
    """Writes the checkpoint `source` in our Orbax format with these versions of its experts beside
    the dense one.

    - `source`: a Hugging Face directory, a GGUF file, a training run, or what `moejax convert` or
      `moejax quantize` wrote; versions of the latter that are not named are left out.
    - `quantizer`: one of QUANTIZERS, for int versions.
    - `progress`: called with (done, total) bytes.
    - `step`, `name_map`: as in load_checkpoint.

    Host memory and interruptions are as in convert. Layers with an expert that lossless12 cannot
    hold are left out of it, and the manifest says so. Raises UserError like check_versions and
    convert, for experts that a lossy version cannot hold, and for lossless12 if every layer is left
    out.
    """
    check_quantizer(quantizer)
    src = checkpoint_directory(source)
    kind = checkpoint_format(src)
    check_orbax_options(src, kind, step, name_map)
    if kind == "moejax-orbax":
        opened = orbax_source(src)
    else:
        opened = open_source(src, kind, step=step, name_map=name_map)
    if "dense" in versions:
        raise UserError("dense is always written; name the versions to be made from it")
    check_versions(opened.layout(), opened.dtype, versions)
    encodings = {version: _encoding(opened, version, quantizer) for version in versions}
    conversion = write_checkpoint(
        opened, free_destination(destination), encodings, progress=progress
    )
    manifest = read_manifest(conversion.directory / MANIFEST)
    written = {
        version: WrittenVersion(
            encoding.quantizer,
            opened.layout(version).nbytes,
            manifest.errors[version],
            manifest.dense_layers.get(version, ()),
        )
        for version, encoding in encodings.items()
    }
    return Quantization(conversion, opened.layout().nbytes, written)


def _encoding(source: Source, version: str, quantizer: str) -> Encoding:
    fmt = source.layout(version)

    def encode_layer(layer: int, weights: np.ndarray) -> np.ndarray:
        try:
            return encode(weights, fmt, QUANTIZERS[quantizer])
        except EncodingError as error:
            if not fmt.lossy:
                raise
            raise UserError(
                f"{source.directory}: {version} cannot hold expert {error.experts[0]} of MoE layer "
                f"{layer}: {error.reason}; leave this version out"
            ) from None

    return Encoding(quantizer if fmt.lossy else LOSSLESS, encode_layer)

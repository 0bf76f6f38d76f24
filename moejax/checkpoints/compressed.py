"""Writes checkpoints whose experts are quantized as the compressed-tensors library packs them, for
transformers, vLLM and moejax. Everything else stays as it is."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from host_offload.versions.encoders import NUMPY_DTYPES
from host_offload.versions.quantizers import (
    QUANTIZERS,
    UnquantizableError,
    nearest_codes,
    to_float32,
)
from moejax.checkpoints.conversion import read_copied_files
from moejax.checkpoints.load import checkpoint_format
from moejax.checkpoints.loaded_model import count_progress
from moejax.checkpoints.orbax.destination import (
    LOCK,
    free_destination,
    require_space,
    write_beside,
)
from moejax.checkpoints.orbax.manifest import JOURNAL, MANIFEST
from moejax.checkpoints.quantized_tensors import QuantizedShard
from moejax.checkpoints.shards import DTYPES, INDEX, SINGLE, TensorFile, TensorReader
from moejax.checkpoints.tensor_checkpoint import TensorCheckpoint, open_tensors
from moejax.checkpoints.tensor_tasks import cast, require_finite
from moejax.checkpoints.tensors import ExpertPlace, name_expert
from moejax.checkpoints.versions import check_quantizer
from moejax.errors import UserError, shown, user_errors
from moejax.models.directory import checkpoint_directory
from moejax.models.families import FAMILIES
from moejax.models.quantization import KEYS
from pallas_kernels.records.encoding import GROUPS

BITS = {"int8": 8, "int4": 4}
"""Version → bits of a code."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class _Tensor(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class _Piece(NamedTuple):
    """Tensors that are made together."""

    tensors: Sequence[_Tensor]
    read: Callable[[TensorReader], Sequence[np.ndarray]]
    """Returns their values."""


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How experts are quantized."""

    source: TensorCheckpoint
    bits: int
    group: int
    """Weights that share a scale."""
    quantizer: str

    def pieces(self, file: TensorFile) -> Iterator[_Piece]:
        """What is written for the tensors of a file."""
        for name, header in file.tensors.items():
            place = self.source.places.get(name)
            if isinstance(place, ExpertPlace):
                for expert in [place.expert] if place.expert is not None else range(place.shape[0]):
                    for number in range(len(place.matrices)):
                        yield self._packed(file, name, place, expert, number)
                continue
            coded = isinstance(file, QuantizedShard) and file.version_of(name) is not None
            dtype = self.source.dtype if coded else header.dtype
            read = functools.partial(self._read, file, name, None, dtype)
            yield _Piece(
                [_Tensor(name, dtype, header.shape)], lambda reader, read=read: [read(reader)]
            )

    def _packed(
        self, file: TensorFile, name: str, place: ExpertPlace, expert: int, number: int
    ) -> _Piece:
        """A matrix of an expert.

        - `number`: which one of the tensor's matrices.
        """
        rows, width = place.shape[-2] // len(place.matrices), place.shape[-1]
        index = expert if place.expert is None else None
        base = name.removesuffix(".weight")
        if index is not None:
            base = name_expert(self.source.config, name, expert, place.matrices[number])

        def read(reader: TensorReader) -> list[np.ndarray]:
            weights = self._read(file, name, index, self.source.dtype, reader)[place.rows(number)]
            with user_errors(UnquantizableError, where=f"{file.named(name)}: "):
                return [*self._quantize(weights), np.array([rows, width], np.int64)]

        tensors = [
            _Tensor(f"{base}.weight_packed", "int32", (rows, width * self.bits // 32)),
            _Tensor(f"{base}.weight_scale", self.source.dtype, (rows, width // self.group)),
            _Tensor(f"{base}.weight_shape", "int64", (2,)),
        ]
        return _Piece(tensors, read)

    def _quantize(self, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Codes, in words of 32 bits, and scales of weights [rows, width]."""
        groups = to_float32(weights).reshape(len(weights), -1, self.group)
        scales = QUANTIZERS[self.quantizer](groups, 2, self.bits)
        scales = scales.astype(NUMPY_DTYPES[self.source.dtype])
        codes = nearest_codes(groups, scales, self.bits).reshape(len(weights), -1)
        if self.bits == 4:
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        return np.ascontiguousarray(codes).view("<i4"), scales[:, :, 0]

    def _read(
        self, file: TensorFile, name: str, index: int | None, dtype: str, reader: TensorReader
    ) -> np.ndarray:
        """The values of a tensor, or of its part at an index, in a dtype."""
        header = file.tensors[name]
        shape = header.shape if index is None else header.shape[1:]
        values = np.empty(shape or (1,), np.dtype(header.dtype))
        reader.rows(name, index)(0, values.reshape(-1, (shape or (1,))[-1]))
        named = file.named(name)
        if name in self.source.places:
            require_finite(values, named)
        if header.dtype == dtype:
            return values
        made = np.empty(values.shape, NUMPY_DTYPES[dtype])
        cast(values, made, named)
        return made


def write_compressed(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    version: str,
    quantizer: str = "rtn",
    progress: Callable[[int, int], None] | None = None,
) -> pathlib.Path:
    """Writes the Hugging Face checkpoint `source` with quantized experts. Returns the new
    directory.

    - `version`: "int4" or "int8", with a scale in the checkpoint's dtype for each 128, 64 or 32
      weights.
    - `quantizer`: one of QUANTIZERS.
    - `progress`: called with (done, total) bytes of what is written.

    Raises UserError for other checkpoints and versions, and for experts that cannot be so written.
    """
    check_quantizer(quantizer)
    if version not in BITS:
        raise UserError(f"compressed-tensors holds {' or '.join(BITS)}, not {shown(version)}")
    src = checkpoint_directory(source)
    if (kind := checkpoint_format(src)) != "safetensors":
        raise UserError(f"{src}: its format is {kind}; compressed-tensors is made of safetensors")
    opened, dst = open_tensors(src, kind), free_destination(destination)
    plan = _Plan(opened, BITS[version], _group_of(opened), quantizer)
    written = [[*plan.pieces(file)] for file in opened.files]
    names = [SINGLE]
    if len(written) > 1:
        names = [
            f"model-{i:05}-of-{len(written):05}.safetensors" for i in range(1, len(written) + 1)
        ]
    files = read_copied_files(src)
    files["config.json"] = _config(plan, json.loads(files["config.json"]))
    if len(names) > 1:
        placed = {
            tensor.name: to
            for to, pieces in zip(names, written, strict=True)
            for piece in pieces
            for tensor in piece.tensors
        }
        files[INDEX] = json.dumps({"metadata": {}, "weight_map": placed}, indent=2).encode()
    total = sum(t.nbytes for pieces in written for piece in pieces for t in piece.tensors)
    advance = count_progress(progress, total)
    with write_beside(dst) as work:
        _begin(work)
        require_space(work, total)
        for to, file, pieces in zip(names, opened.files, written, strict=True):
            _write(work / to, file, pieces, advance)
        for name, content in files.items():
            (work / name).parent.mkdir(exist_ok=True)
            (work / name).write_bytes(content)
        (work / JOURNAL).unlink()
    return dst


def _begin(work: pathlib.Path) -> None:
    """Deletes what an interrupted call left. Raises UserError for an unfinished conversion to
    moejax's own format, which can go on; only such a one has words in its journal."""
    journal = work / JOURNAL
    journal.touch()
    if journal.stat().st_size or (work / MANIFEST).exists():
        raise UserError(
            f"{work}: an unfinished conversion to moejax's own format; choose another destination, "
            "or delete it"
        )
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in (JOURNAL, LOCK):
            path.unlink()


def _group_of(source: TensorCheckpoint) -> int:
    """The most weights of GROUPS that can share a scale in every matrix. Raises UserError for
    experts that have none."""
    config = source.config
    family = FAMILIES[config.architecture]
    axes = config.expert_hidden, config.moe_intermediate_size
    turned = any(
        isinstance(p, ExpertPlace) and (p.turned or p.is_bias) for p in source.places.values()
    )
    if family.renamed or turned:
        raise UserError(
            f"{source.directory}: experts of {config.architecture} cannot be written as "
            "compressed-tensors; leave --to out"
        )
    if (group := next((g for g in GROUPS if not any(axis % g for axis in axes)), None)) is None:
        raise UserError(
            f"{source.directory}: matrices of {axes[0]} and {axes[1]} weights have no groups of "
            f"{', '.join(map(str, GROUPS))}; leave --to out"
        )
    return group


def _config(plan: _Plan, fields: dict) -> bytes:
    """config.json of what is written."""
    others = {
        name.removesuffix(".weight"): None
        for file in plan.source.files
        for name, header in file.tensors.items()
        if name.endswith(".weight") and len(header.shape) == 2
        if not isinstance(plan.source.places.get(name), ExpertPlace)
    }
    weights = {
        "num_bits": plan.bits,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": plan.group,
        "dynamic": False,
    }
    for key in KEYS:
        fields.pop(key, None)
    fields["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        # A tied head is a Linear too, though the files have no tensor of it.
        "ignore": [*others | {"lm_head": None}],
    }
    return json.dumps(fields, indent=2).encode()


def _write(
    path: pathlib.Path, file: TensorFile, pieces: Sequence[_Piece], advance: Callable[[int], None]
) -> None:
    """Writes a safetensors file, piece by piece."""
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in (tensor for piece in pieces for tensor in piece.tensors):
        place = [end, end := end + tensor.nbytes]
        about = {"dtype": _NAMES[tensor.dtype], "shape": tensor.shape, "data_offsets": place}
        header[tensor.name] = about
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open() as reader, path.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        for piece in pieces:
            for tensor, values in zip(piece.tensors, piece.read(reader), strict=True):
                assert (values.nbytes, values.dtype) == (tensor.nbytes, tensor.dtype), tensor.name
                out.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
                advance(tensor.nbytes)
        out.flush()
        os.fsync(out.fileno())

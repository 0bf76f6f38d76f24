"""Reads the tensors of GGUF files under the names that transformers uses.

The codes and scales of experts go into records as they are. Everything else that is quantized is
dequantized by the gguf package.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from host_offload.versions.quantized import (
    QuantizedError,
    QuantizedMatrix,
    as_scales,
    numbers_dtype,
)
from moejax.checkpoints.gguf_delta import Restore, Restored, gated_delta_tensor
from moejax.checkpoints.shards import Header, ReadRows, Shard, ShardReader
from moejax.checkpoints.tensors import ExpertPlace, expected_tensors, separate_experts
from moejax.errors import UserError
from moejax.models.gguf_config import FLOATS, FORMATS
from moejax.models.gguf_header import GgufHeader, GgufTensor
from moejax.models.model_config import ModelConfig
from pallas_kernels.cpu.gguf import put_blocks
from pallas_kernels.cpu.library import why_not_cpu
from pallas_kernels.records.encoding import Encoding
from pallas_kernels.records.format import encoding_of

_LAYER = re.compile(r"blk\.(\d{1,9})\.")

Unpack = Callable[[np.ndarray, Encoding], QuantizedMatrix]
"""(uint8[rows, blocks, bytes of a block], the format) → the matrix."""


class Source(NamedTuple):
    """Where a tensor comes from."""

    parts: tuple[tuple[GgufHeader, str], ...]
    """File and name of the GGUF tensors that it is made of."""
    index: int | None = None
    """The expert, in a tensor stacked over experts."""
    restore: Restore | None = None
    """Undoes what the converter did; None: it is the tensor."""

    @property
    def tensor(self) -> GgufTensor:
        """The first part."""
        header, name = self.parts[0]
        return header.tensors[name]


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """A TensorFile: what one GGUF file holds of a model. Quantized tensors look like float32.

    sources: tensor → where it comes from.
    """

    header: GgufHeader
    tensors: dict[str, Header]
    sources: dict[str, Source]

    @property
    def path(self) -> pathlib.Path:
        return self.header.path

    def named(self, name: str) -> str:
        """File, name and expert of the first GGUF tensor that a tensor is made of, for messages."""
        source = self.sources[name]
        header, stored = source.parts[0]
        expert = "" if source.index is None else f", expert {source.index}"
        return f"{header.path}: tensor {stored}{expert}"

    def version_of(self, name: str) -> str | None:
        """The record format of a tensor; None: it is in none."""
        return FORMATS.get(self.sources[name].tensor.type)

    @contextlib.contextmanager
    def open(self) -> Iterator[GgufReader]:
        with _as_shard(self.header).open() as reader:
            yield GgufReader(self, reader, why_not_cpu() is None)


def _as_shard(header: GgufHeader) -> Shard:
    """The file as tensors of bytes."""
    tensors, begins = {}, {}
    for name, tensor in header.tensors.items():
        rows = math.prod(tensor.shape[:-1])
        shape = (*tensor.shape[:-1], tensor.nbytes // rows if rows else 0)
        tensors[name], begins[name] = Header("uint8", shape), tensor.begin
    return Shard(header.path, tensors, begins, header.stamp)


@dataclasses.dataclass(frozen=True)
class GgufReader:
    """An open GgufFile; a TensorReader.

    native: whether the native library puts codes into records.
    """

    file: GgufFile
    reader: ShardReader
    native: bool

    splits = True

    def rows(self, name: str, index: int | None = None) -> ReadRows:
        source = self.file.sources[name]
        if source.restore is not None:
            parts = [_floats(self._bytes(part), part) for part in source.parts]
            whole = source.restore(parts).reshape(-1, self.file.tensors[name].shape[-1])
            return lambda first, out: np.copyto(out, whole[first : first + len(out)])
        part = source.parts[0]
        read = self.reader.rows(part[1], source.index)
        per_row = self.reader.shard.tensors[part[1]].shape[-1]

        def fill(first: int, out: np.ndarray) -> None:
            if source.tensor.type in FLOATS:
                read(first, out.view(np.uint8).reshape(len(out), -1))
                return
            raw = np.empty((len(out), per_row), np.uint8)
            read(first, raw)
            out[:] = _floats(raw, part)

        return fill

    def matrix(
        self,
        name: str,
        dtype: np.dtype,
        index: int | None = None,
        rows: slice | None = None,
    ) -> QuantizedMatrix:
        """Reads the codes and scales of a matrix.

        - `dtype`: the run's.
        - `index`: which one of a stack; by default the one that the name stands for.
        - `rows`: some neighbouring rows; None: all of them.

        Raises UserError that names the tensor, for scales that give no finite weights.
        """
        source = self.file.sources[name]
        index = source.index if index is None else index
        raw = self._bytes(source.parts[0], index, rows)
        matrix = unpacked(raw, source.tensor)
        self._check(matrix, source, dtype, index)
        return matrix

    def put(
        self,
        name: str,
        dtype: np.dtype,
        matrix: str,
        parts: Mapping[str, np.ndarray],
        rows: slice | None = None,
    ) -> None:
        """Reads a matrix into its parts of a record. Arguments and errors are those of `matrix` and
        of QuantizedMatrix.put."""
        source = self.file.sources[name]
        tensor, index = source.tensor, source.index
        if not self.native:
            self.matrix(name, dtype, rows=rows).put(matrix, parts)
            return
        raw, down = self._bytes(source.parts[0], index, rows), matrix == "down"
        put_blocks(tensor.type, raw, tensor.shape[-1], down, parts)
        encoding = encoding_of(FORMATS[tensor.type])
        numbers = {}
        for field in encoding.fields[1:]:
            if field != "highs":
                each = encoding.groups[0] * (encoding.super if field.endswith("supers") else 1)
                shape = len(raw), tensor.shape[-1] // each
                item = numbers_dtype(encoding.dtype_of(field))
                flat = parts[field].reshape(-1).view(np.uint8)[: math.prod(shape) * item.itemsize]
                flat = flat.view(item)
                numbers[field] = flat.reshape(shape[::-1]).T if down else flat.reshape(shape)
        codes = np.empty((len(raw), 0), np.uint8)  # of which none means NaN
        self._check(QuantizedMatrix(codes, encoding=encoding, **numbers), source, dtype, index)

    def _check(
        self, matrix: QuantizedMatrix, source: Source, dtype: np.dtype, index: int | None
    ) -> None:
        try:
            matrix.check(dtype)
        except QuantizedError as error:
            expert = "" if index is None else f", expert {index}"
            raise UserError(
                f"{self.file.path}: tensor {source.parts[0][1]}{expert} {error}"
            ) from None

    def _bytes(
        self,
        part: tuple[GgufHeader, str],
        index: int | None = None,
        some: slice | None = None,
    ) -> np.ndarray:
        """uint8[rows, bytes of a row] of a tensor, or of one expert's part of it.

        - `some`: neighbouring rows of it; None: all of them.
        """
        header, name = part
        with contextlib.ExitStack() as stack:
            mine = header is self.file.header
            reader = self.reader if mine else stack.enter_context(_as_shard(header).open())
            *axes, width = reader.shard.tensors[name].shape
            count = math.prod(axes if index is None else axes[1:])
            first, last = (0, count) if some is None else (some.start, some.stop)
            out = np.empty((last - first, width), np.uint8)
            reader.rows(name, index)(first, out)
        return out


def _block(type_: str) -> tuple[int, int]:
    """Weights and bytes of a block."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    return GGML_QUANT_SIZES[GGMLQuantizationType[type_]]


def unpacked(raw: np.ndarray, tensor: GgufTensor) -> QuantizedMatrix:
    """Some rows of a tensor.

    - `raw`: uint8[rows, bytes of a row].
    """
    weights, nbytes = _block(tensor.type)
    blocks = raw.reshape(len(raw), tensor.shape[-1] // weights, nbytes)
    return UNPACK[tensor.type](blocks, encoding_of(FORMATS[tensor.type]))


def _floats(raw: np.ndarray, part: tuple[GgufHeader, str]) -> np.ndarray:
    """float32[rows, width] of bytes.

    - `raw`: uint8[rows, bytes of a row].

    Raises UserError that names the tensor, for blocks that mean NaN or infinity.
    """
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    header, name = part
    type_ = header.tensors[name].type
    try:
        with np.errstate(over="ignore", invalid="ignore"):
            found = dequantize(raw, GGMLQuantizationType[type_])
    except NotImplementedError as error:
        raise UserError(f"{header.path}: tensor {name}: {error}") from None
    reserved = type_ == "MXFP4" and (raw[:, :: _block(type_)[1]] == 255).any()  # NaN in e8m0
    if reserved or not np.isfinite(found).all():
        what = "values" if type_ in FLOATS else "scales"
        raise UserError(f"{header.path}: tensor {name} has {what} that are NaN or infinite")
    return found


def _halves(blocks: np.ndarray) -> np.ndarray:
    """Codes of 4 bits: the lower halves of a block's bytes, then the upper halves."""
    return np.concatenate([blocks & 15, blocks >> 4], -1).reshape(len(blocks), -1)


def _halves_of(blocks: np.ndarray, count: int) -> np.ndarray:
    """The same of blocks of some parts that each have their halves."""
    return _halves(blocks.reshape(*blocks.shape[:-1], count, -1))


def _numbers(blocks: np.ndarray, dtype: str) -> np.ndarray:
    """[rows, blocks, numbers]: a block's bytes as numbers of that dtype."""
    return np.ascontiguousarray(blocks).view(dtype)


def _scaled(scale: str, codes: Callable[[np.ndarray], np.ndarray]) -> Unpack:
    """Unpacks blocks of a scale of that dtype and codes."""
    width = np.dtype(scale).itemsize

    def unpack(blocks: np.ndarray, encoding: Encoding) -> QuantizedMatrix:
        scales = _numbers(blocks[..., :width], scale)[..., 0]
        return QuantizedMatrix(codes(blocks[..., width:]), as_scales(scales, encoding), encoding)

    return unpack


def _with_minimum(blocks: np.ndarray, encoding: Encoding) -> QuantizedMatrix:
    """Q4_1: a scale, a minimum, codes."""
    scales, mins = np.moveaxis(_numbers(blocks[..., :4], "<f2"), -1, 0)
    return QuantizedMatrix(_halves(blocks[..., 4:]), scales, encoding, mins=mins)


def _with_fifth_bits(begin: int, unpack: Unpack) -> Unpack:
    """Unpacks blocks in which the codes' fifth bits, in their order, lie before their halves.

    - `unpack`: for the blocks without these bytes, which begin at `begin`.
    """

    def unpack_all(blocks: np.ndarray, encoding: Encoding) -> QuantizedMatrix:
        bits = np.unpackbits(blocks[..., begin : begin + 4], axis=-1, bitorder="little")
        rest = np.concatenate([blocks[..., :begin], blocks[..., begin + 4 :]], -1)
        matrix = unpack(rest, encoding)
        codes = matrix.codes | bits.reshape(len(blocks), -1) << 4
        return dataclasses.replace(matrix, codes=codes)

    return unpack_all


def _q4_k(blocks: np.ndarray, encoding: Encoding) -> QuantizedMatrix:
    """Two supers, eight scales and minimums of 6 bits, [fifth bits: bit i of 32 bytes are those of
    group i], halves of four times 64 codes."""
    from gguf.quants import Q4_K

    rows = len(blocks)
    supers, min_supers = np.moveaxis(_numbers(blocks[..., :4], "<f2"), -1, 0)
    scales, mins = Q4_K.get_scale_min(np.ascontiguousarray(blocks[..., 4:16]).reshape(-1, 12))
    codes = _halves_of(blocks[..., -128:], 4)
    if encoding.high:
        bits = np.unpackbits(blocks[..., 16:48, None], axis=-1, bitorder="little")
        codes |= bits.swapaxes(-1, -2).reshape(rows, -1) << 4
    return QuantizedMatrix(
        codes,
        scales.reshape(rows, -1),
        encoding,
        mins=mins.reshape(rows, -1),
        supers=supers,
        min_supers=min_supers,
    )


def _q6_k(blocks: np.ndarray, encoding: Encoding) -> QuantizedMatrix:
    """Halves of two times 128 codes, their upper 2 bits, sixteen scales, a super."""
    rows = len(blocks)
    codes = _halves_of(blocks[..., :128], 2)
    upper = blocks[..., 128:192].reshape(rows, -1, 1, 32) >> np.array([[0], [2], [4], [6]], "u1")
    codes |= (upper & 3).reshape(rows, -1) << 4
    scales = _numbers(blocks[..., 192:208], "i1").reshape(rows, -1)
    supers = _numbers(blocks[..., 208:], "<f2")[..., 0]
    return QuantizedMatrix(codes, scales, encoding, supers=supers)


UNPACK: dict[str, Unpack] = {
    "Q8_0": _scaled("<f2", lambda blocks: blocks.reshape(len(blocks), -1) ^ np.uint8(0x80)),
    "Q4_0": _scaled("<f2", _halves),
    "Q4_1": _with_minimum,
    "Q5_0": _with_fifth_bits(2, _scaled("<f2", _halves)),
    "Q5_1": _with_fifth_bits(4, _with_minimum),
    "Q4_K": _q4_k,
    "Q5_K": _q4_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _scaled("<f2", _halves),
    "MXFP4": _scaled("u1", _halves),
}


def open_gguf(headers: Sequence[GgufHeader], config: ModelConfig) -> tuple[GgufFile, ...]:
    """Finds the tensors of a model in its files. Raises UserError that names the tensor, for one
    that is missing, has another shape, or that the model does not have."""
    from gguf import get_tensor_name_map
    from gguf.constants import MODEL_ARCH_NAMES

    named = headers[0].metadata["general.architecture"]
    arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == named)
    names = get_tensor_name_map(arch, config.num_hidden_layers)
    restored_of = RESTORED.get(named, lambda config, name: None)
    owner = {name: header for header in headers for name in header.tensors}
    files = {header.path: GgufFile(header, {}, {}) for header in headers}
    used = set()

    def stored_as(name: str) -> str:
        stem = name.replace("_correction_bias", "_correction.bias")
        found = names.get_name(stem, (".weight", ".bias")) or name
        return f"{found}.weight" if f"{found}.weight" in owner else found

    for name, place in expected_tensors(config, separate_experts(config)).items():
        index, restore, wanted = None, None, [stored_as(name)]
        if isinstance(place, ExpertPlace):
            index = place.expert
            matrix, end = place.matrix.removesuffix("_bias"), "bias" if place.is_bias else "weight"
            wanted = [f"blk.{name.split('.')[2]}.ffn_{matrix}_exps.{end}"]
        elif (found := restored_of(config, name)) and not (found.parts and wanted[0] in owner):
            wanted, restore = [stored_as(part) for part in found.parts or (name,)], found.restore
        for each in wanted:
            if each not in owner:
                raise UserError(f"{headers[0].path}: tensor {each} is missing")
        source = Source(tuple((owner[each], each) for each in wanted), index, restore)
        shape = place.shape if index is None else (config.num_experts, *place.shape)
        _check_shape(source, shape)
        used |= {*wanted}
        dtype = FLOATS.get(source.tensor.type, "float32") if restore is None else "float32"
        file = files[owner[wanted[0]].path]
        file.tensors[name], file.sources[name] = Header(dtype, place.shape), source
    for name, header in owner.items():
        later = (found := _LAYER.match(name)) and int(found[1]) >= config.num_hidden_layers
        if name not in used and not later:
            raise UserError(f"{header.path}: tensor {name} is not one that {named} has")
    return tuple(files.values())


def _check_shape(source: Source, wanted: tuple[int, ...]) -> None:
    """Raises UserError for another shape; axes of one do not count."""
    header, name = source.parts[0]
    rows = sum(each.tensors[part].shape[0] for each, part in source.parts)
    found = (rows, *source.tensor.shape[1:])
    if len(source.parts) > 1 and len(found) != len(wanted):  # parts are stacks of matrices
        shapes = [each.tensors[part].shape for each, part in source.parts]
        found, wanted = (sum(map(math.prod, shapes)),), (math.prod(wanted),)
    if [size for size in found if size != 1] != [size for size in wanted if size != 1]:
        raise UserError(
            f"{header.path}: tensor {name} has shape {list(found)}, but the file's metadata asks "
            f"for {list(wanted)}"
        )


def _latent(config: ModelConfig, name: str) -> Restored | None:
    """For the up-projection of latent KV: joins its rows of keys, which llama.cpp has transposed,
    and of values."""
    if not name.endswith(".self_attn.kv_b_proj.weight"):
        return None

    def restore(parts: Sequence[np.ndarray]) -> np.ndarray:
        heads = config.num_attention_heads
        keys, values = (part.reshape(heads, -1, part.shape[-1]) for part in parts)
        return np.concatenate([keys.swapaxes(1, 2), values], 1)

    layer = f"blk.{name.split('.')[2]}"
    return Restored(restore, (f"{layer}.attn_k_b.weight", f"{layer}.attn_v_b.weight"))


def _granite(config: ModelConfig, name: str) -> Restored | None:
    """For gate and up of the shared expert, which are one tensor in its own files; others as of
    Mixtral."""
    if not name.endswith(".shared_mlp.input_linear.weight"):
        return _unpermuted(config, name)
    layer = f"blk.{name.split('.')[2]}"
    parts = f"{layer}.ffn_gate_shexp.weight", f"{layer}.ffn_up_shexp.weight"
    return Restored(np.concatenate, parts)


def _unpermuted(config: ModelConfig, name: str) -> Restored | None:
    """For q and k: puts values that are rotated together, which llama.cpp has side by side, into
    the two halves of a head."""
    heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
    if (found := re.search(r"self_attn\.([qk])_proj\.", name)) is None:
        return None
    count = heads[found[1]]

    def restore(parts: Sequence[np.ndarray]) -> np.ndarray:
        (whole,) = parts
        rows = whole.reshape(count, -1, 2, whole.shape[-1] if len(whole) > 1 else 1)
        return rows.swapaxes(1, 2).reshape(whole.shape)

    return Restored(restore)


RESTORED: dict[str, Callable[[ModelConfig, str], Restored | None]] = {
    "llama": _unpermuted,
    "deepseek2": _latent,
    "granitemoe": _granite,
    "qwen3next": gated_delta_tensor,
    "qwen35moe": gated_delta_tensor,
}
"""general.architecture → what its converter did to a tensor; None: nothing."""

"""A checkpoint whose tensors have the names that transformers uses: safetensors files, or another
program's Orbax tree by a name map."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from host_offload.memory.record_source import NO_BLOCKS, RecordSource
from host_offload.policies.precision.precision_names import CHECKPOINT
from host_offload.versions.encoders import NUMPY_DTYPES
from moejax.checkpoints.checkpoint import ArraySink, Checkpoint, ExpertTask, RecordSink, Task
from moejax.checkpoints.gguf_tensors import GgufFile, open_gguf
from moejax.checkpoints.orbax.layout import DENSE
from moejax.checkpoints.quantized_tensors import (
    QuantizedShard,
    check_orders,
    find_quantized,
    missing_scales,
)
from moejax.checkpoints.shards import (
    Shard,
    TensorFile,
    TensorReader,
    find_shards,
    renamed,
    reshaped,
    selected,
)
from moejax.checkpoints.tensor_tasks import EXPONENTS, OpenTensor
from moejax.checkpoints.tensors import (
    TABLES,
    ExpertPlace,
    ParamPlace,
    Place,
    check_experts,
    expected_tensors,
    is_ignored,
    turn_experts,
)
from moejax.errors import UserError
from moejax.models.config import ModelConfig, load_config
from moejax.models.families import FAMILIES
from moejax.models.gguf_config import FLOATS
from moejax.models.gguf_header import read_gguf
from moejax.models.next_token import predictor_of
from moejax.models.quantization import Quantization
from pallas_kernels.cpu.gguf import BIASES, FIELDS, KINDS
from pallas_kernels.cpu.sources import SOURCE
from pallas_kernels.linear.coded import CODED_DTYPES, CodedLayers, CodedRows, lay_out
from pallas_kernels.records import RecordFormat
from pallas_kernels.records.format import MATRICES, join_names

log = logging.getLogger("moejax")
PRODUCTS = frozenset(
    {
        *("lm_head", "qkv", "q", "q_a", "q_b", "kv_a", "o", "attention_gate", "state_in"),
        *("gate_up", "up", "down", "shared_gate_up", "shared_up", "shared_down"),
        *("latent_in", "latent_out", "eh_proj"),
    }
)
"""Parameters that only `linear` reads, under the names of LoadedModel.params."""

_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class TensorCheckpoint(Checkpoint):
    """A checkpoint of named tensors.

    files: the files, whose tensors all have a place or are ignored. places: tensor → its place.
    """

    files: Sequence[TensorFile]
    places: Mapping[str, Place]

    def hold(self, dtype: str, versions: Sequence[str]) -> dict[str, Sequence[int]]:
        """Chooses the versions that the files have if CHECKPOINT is asked for; else dense. Returns
        and raises as Checkpoint.hold."""
        if CHECKPOINT not in versions:
            return {DENSE: range(sum(self.config.moe_layers))}
        return {**self.config.expert_layers}

    def coded_params(self, dtype: str) -> dict[str, tuple[CodedLayers, int]]:
        found: dict[str, tuple[CodedLayers, int]] = {}
        for key, leaf in self.params.items() if dtype in CODED_DTYPES else ():
            if key.rpartition(".")[2] not in PRODUCTS:
                continue
            chunks = [self._rows_of(key, chunk) for chunk in leaf.chunks]
            versions = [[_version_of(file, name) for file, name in chunk] for chunk in chunks]
            if {*itertools.chain(*versions)} <= {DENSE, None} or None in itertools.chain(*versions):
                continue
            parts = [
                [(str(version), self.places[name].shape[0]) for version, (_, name) in pairs]
                for pairs in map(zip, versions, chunks)
            ]
            with contextlib.suppress(ValueError):  # a width that the format does not hold in planes
                found[key] = lay_out(parts, leaf.shape[-1], dtype)
        return found

    def _rows_of(self, key: str, chunk: int) -> list[tuple[TensorFile, str]]:
        """The tensors of a parameter's chunk in the order of their rows."""

        def first_row(tensor: tuple[TensorFile, str]) -> int:
            place = self.places[tensor[1]]
            assert isinstance(place, ParamPlace)
            return place.row

        return sorted(self.param_tensors[key, chunk], key=first_row)

    def record_files(
        self,
        dtype: str,
        versions: Sequence[str],
        held: Mapping[str, Sequence[int]],
        verify: bool,
        as_stored: bool,
    ) -> dict[str, RecordSource]:
        own = {*versions} <= {DENSE} or [*versions] == [CHECKPOINT]
        if not own:
            raise UserError(
                f"{self.directory}: store='file' reads experts as the checkpoint has them, or "
                "others from what `moejax quantize` wrote"
            )
        experts = self.config.num_experts
        version_of = {layer: version for version, layers in held.items() for layer in layers}
        tensors: dict[tuple[int, int], list[ExpertTensor]] = {}
        for file, name in self.expert_tensors:
            place = self.places[name]
            assert isinstance(place, ExpertPlace)
            if as_stored:
                self._require_as_stored(file, name, place, dtype, version_of[place.layer])
            for expert in range(experts) if place.expert is None else (place.expert,):
                tensors.setdefault((place.layer, expert), []).append((file, name, place))
        dense = self.config.expert_layout(NUMPY_DTYPES[dtype].itemsize)
        return {
            version: TensorRecords(
                dense
                if version == DENSE
                else dataclasses.replace(dense, version=version, dtype=dtype),
                (len(layers), experts),
                {
                    (i, e): tensors[layer, e]
                    for i, layer in enumerate(layers)
                    for e in range(experts)
                },
                dtype,
            )
            for version, layers in held.items()
        }

    def _require_as_stored(
        self, file: TensorFile, name: str, place: ExpertPlace, dtype: str, version: str
    ) -> None:
        """Raises UserError for a tensor that native threads cannot bring into a record of this
        version: its bytes are not those of a dense one, nor blocks of a GGUF file."""
        if version != DENSE and isinstance(file, GgufFile):
            why, options = _why_not_blocks(file, name, place, dtype)
        else:
            why, options = _why_not_dense(file, name, place, dtype, version)
        if why:
            raise UserError(
                f"{file.path}: store='file' reads experts as they are, and tensor {name} {why}; "
                f"write another one with `moejax convert {self.directory} DST{options}`"
            )

    def count_bytes(self, held: Mapping[str, Sequence[int]]) -> int:
        tensors = [*self.expert_tensors] if held else []
        tensors += [each for chunk in self.param_tensors.values() for each in chunk]
        headers = (file.tensors[name] for file, name in tensors)
        return sum(math.prod(h.shape) * np.dtype(h.dtype).itemsize for h in headers)

    @contextlib.contextmanager
    def open(self) -> Iterator[TensorCheckpointReader]:
        with contextlib.ExitStack() as stack:
            yield TensorCheckpointReader(self, stack)

    @functools.cached_property
    def left_out(self) -> dict[str, int]:
        """How many tensors of the files the model does not use, by what they begin with: of images,
        or of layers that predict several tokens."""
        names = [name for file in self.files for name in file.tensors]
        unused = [name for name in names if is_ignored(self.config, name)]
        return dict(Counter(_group_name(name) for name in unused))

    @functools.cached_property
    def expert_tensors(self) -> list[tuple[TensorFile, str]]:
        """(file, name) of each tensor of experts, in the order of the files."""
        owned = ((file, name) for file in self.files for name in file.tensors)
        return [(f, name) for f, name in owned if isinstance(self.places.get(name), ExpertPlace)]

    @functools.cached_property
    def param_tensors(self) -> dict[tuple[str, int], list[tuple[TensorFile, str]]]:
        """(key, chunk) of a parameter → (file, name) of its tensors, in the order of the files."""
        found: dict[tuple[str, int], list[tuple[TensorFile, str]]] = {}
        for file in self.files:
            for name in file.tensors:
                place = self.places.get(name)
                if isinstance(place, ParamPlace):
                    run = "" if place.run is None else f"runs.{place.run}."
                    found.setdefault((run + place.key, place.layer), []).append((file, name))
        return found


class TensorCheckpointReader:
    """A CheckpointReader. It opens a file when it yields the file's first task, and `stack` closes
    all files."""

    def __init__(self, checkpoint: TensorCheckpoint, stack: contextlib.ExitStack):
        self._checkpoint, self._stack = checkpoint, stack
        self._readers: dict[Path, TensorReader] = {}

    def read_param(self, key: str, chunk: int, out: np.ndarray) -> Iterator[Task]:
        for file, name in self._checkpoint.param_tensors[key, chunk]:
            place = self._checkpoint.places[name]
            assert isinstance(place, ParamPlace)
            yield from self._open_tensor(file, name).read_param(place, out)

    def read_coded(
        self, key: str, chunk: int, rows: Sequence[CodedRows], elements: np.ndarray
    ) -> Iterator[Task]:
        for (file, name), part in zip(self._checkpoint._rows_of(key, chunk), rows, strict=True):
            record = elements[part.first : part.first + part.format.rows * part.format.hidden]
            yield from self._open_tensor(file, name).read_coded(part.format, record)

    def read_experts(
        self, version: str, layers: Sequence[int], sink: RecordSink, dtype: np.dtype
    ) -> Iterator[ExpertTask]:
        for file, name in self._checkpoint.expert_tensors:
            place = self._checkpoint.places[name]
            assert isinstance(place, ExpertPlace)
            if place.layer in layers:
                tensor, layer = self._open_tensor(file, name), layers.index(place.layer)
                yield from tensor.read_experts(place, layer, sink, dtype)

    def _open_tensor(self, file: TensorFile, name: str) -> OpenTensor:
        if file.path not in self._readers:
            self._readers[file.path] = self._stack.enter_context(file.open())
        return OpenTensor(file, self._readers[file.path], name)


def _version_of(file: TensorFile, name: str) -> str | None:
    """The record format of a tensor, "dense" among them; None: its rows are made of others."""
    if isinstance(file, GgufFile) and file.sources[name].restore is not None:
        return None
    quantized = isinstance(file, QuantizedShard | GgufFile)
    return (file.version_of(name) if quantized else None) or DENSE


def _why_not_dense(
    file: TensorFile, name: str, place: ExpertPlace, dtype: str, version: str
) -> tuple[str, str]:
    """Why a tensor does not lie in its file as in a dense record, and the options of a conversion
    after which it does; twice "" if it does."""
    stored = _type_of(file, name)
    if place.is_bias:
        return "is a bias, which is read so only beside codes of a GGUF file", ""
    if place.turned:
        return "is stored transposed", ""
    if version != DENSE or not isinstance(file, Shard | GgufFile):
        return "has its codes in another order", ""
    return ("", "") if stored == dtype else (f"is in {stored}, not {dtype}", f" --dtype {dtype}")


def _why_not_blocks(file: GgufFile, name: str, place: ExpertPlace, dtype: str) -> tuple[str, str]:
    """The same of a tensor that goes into a record of codes."""
    stored = _type_of(file, name)
    if place.is_bias:
        return "" if stored == "float32" else f"is a bias in {stored}, not float32", ""
    if stored not in KINDS:
        return "is not quantized, as others of its expert are", ""
    if dtype == "float16":
        return "may have scales that float16 cannot hold", " --dtype bfloat16"
    return "", ""


def _type_of(file: TensorFile, name: str) -> str:
    """A tensor's dtype, or the type of a GGUF file's blocks."""
    if not isinstance(file, GgufFile):
        return file.tensors[name].dtype
    type_ = file.sources[name].tensor.type
    return FLOATS.get(type_, type_)


ExpertTensor = tuple[TensorFile, str, ExpertPlace]
"""File, name and place of a tensor."""


@dataclasses.dataclass(frozen=True)
class TensorRecords:
    """A RecordSource that makes records of the tensors in files. The files have no checksums, but
    one that has changed since its header was read is an error.

    tensors: (layer, expert) → the tensors with its weights. dtype: the run's.
    """

    format: RecordFormat
    shape: tuple[int, int]
    tensors: Mapping[tuple[int, int], Sequence[ExpertTensor]]
    dtype: str

    verify = False

    @property
    def first_file(self) -> str:
        return str(self.tensors[0, 0][0][0].path)

    def read(self, layer: int, expert: int, record: np.ndarray) -> None:
        sink, dtype = ArraySink(self.format, record[None]), NUMPY_DTYPES[self.dtype]
        try:
            for file, name, place in self.tensors[layer, expert]:
                with file.open() as reader:
                    OpenTensor(file, reader, name).read_record(place, expert, (0, 0), sink, dtype)
        except UserError as error:
            raise OSError(str(error)) from error

    def holds(self, layer: int, expert: int, record: np.ndarray) -> bool:
        found = np.empty_like(record)
        self.read(layer, expert, found)
        return np.array_equal(found, record)

    @property
    def turned(self) -> tuple[int, int, int]:
        if not self._is_dense:
            return 0, 0, 0
        itemsize = NUMPY_DTYPES[self.dtype].itemsize
        return self.format.width * itemsize, itemsize, EXPONENTS[self.dtype]

    @property
    def _is_dense(self) -> bool:
        return self.format.version == DENSE

    @property
    def blocks(self) -> np.ndarray:
        found, row = NO_BLOCKS.copy(), 2 * self.format.hidden
        for file, name, place in () if self._is_dense else self.tensors[0, 0]:
            assert isinstance(file, GgufFile), "others are read through a cache"
            mine, tensor = found[self._piece_of(place.matrix)], file.sources[name].tensor
            mine["rows"], mine["width"] = math.prod(place.shape[:-1]), place.shape[-1]
            mine["bytes"], mine["down"] = tensor.nbytes // tensor.shape[0], place.matrix == "down"
            if place.is_bias:
                mine["kind"], span = BIASES[self.dtype], self.format.spans[place.matrix]
                mine["places"][0], mine["sizes"][0] = row * span[0], row * span[1]
                continue
            mine["kind"] = KINDS[tensor.type]
            for i, field in enumerate(FIELDS):
                if span := self.format.spans.get(f"{place.matrix}_{field}"):
                    mine["places"][i], mine["sizes"][i] = row * span[0], row * span[1]
        return found

    def _piece_of(self, matrix: str) -> int:
        """The index of a matrix, or after all of them of a bias, in SOURCE."""
        matrices = self.format.matrices
        return [*matrices, *(f"{each}_bias" for each in matrices)].index(matrix)

    def locate(self, number_file: Callable[[str], int]) -> np.ndarray:
        table = np.zeros(self.shape, SOURCE)
        itemsize = NUMPY_DTYPES[self.dtype].itemsize
        for key, tensors in self.tensors.items():
            for file, name, place in tensors:
                path, first = file.path, 0
                if isinstance(file, GgufFile):
                    tensor = file.sources[name].tensor
                    first = tensor.begin + key[1] * (tensor.nbytes // tensor.shape[0])
                    path = file.sources[name].parts[0][0].path
                else:
                    assert isinstance(file, Shard), "others are read through a cache"
                    stacked = key[1] if place.expert is None else 0
                    first = file.begins[name] + stacked * math.prod(place.shape[-2:]) * itemsize
                for number, part in enumerate(map(self._piece_of, place.matrices)):
                    table["place"][key][part] = first + number * self.format.waited[0]
                    table["file"][key][part] = number_file(str(path))
        return table


def open_tensors(
    directory: Path,
    kind: str,
    step: int | str | None = None,
    name_map: str | os.PathLike | None = None,
    predictor: bool = False,
) -> TensorCheckpoint:
    """Opens a checkpoint. It reads headers, weights only to compare an lm_head with the embeddings
    that it is tied to, and of GPTQ the order of columns of one matrix of each file.

    - `kind`: the result of checkpoint_format, "safetensors", "orbax" or "gguf".
    - `step`, `name_map`, `predictor`: as in load_checkpoint.

    Raises UserError for names, shapes and dtypes that are not those of config.json.
    """
    if kind == "orbax":
        # Here, since tensorstore takes 60 ms to import.
        from moejax.checkpoints.foreign.mapped_tensors import open_mapped

        config, mapped = open_mapped(directory, step, name_map)
        files: Sequence[TensorFile] = (mapped,)
        directory = mapped.path
    elif kind == "gguf":
        config = load_config(directory)
        files = open_gguf(read_gguf(directory), config)
    else:
        config, files = load_config(directory), find_shards(directory)
        if (family := FAMILIES[config.architecture]).renamed:
            files = tuple(renamed(shard, family.own_name) for shard in files)
        if predictor:
            every = {name for file in files for name in file.tensors}
            config, names = predictor_of(config, every, str(directory))
            files = tuple(selected(shard, names) for shard in files)
        if family.shape_of is not None:
            files = tuple(reshaped(shard, family.shape_of, config) for shard in files)
        if config.quantization is not None:
            names = {name for file in files for name in file.tensors}
            wanted = expected_tensors(config, names)
            files = find_quantized(
                config.quantization,
                files,
                lambda name: wanted[name].shape if name in wanted else None,
            )
            check_orders(files)
    owner = {name: file for file in files for name in file.tensors}
    check_experts(config, str(directory))
    shapes = {name: file.tensors[name].shape for name, file in owner.items()}
    places = turn_experts(config, expected_tensors(config, owner), shapes)
    _check_names(config, owner, places, str(directory))
    if config.dtype is None:
        config = dataclasses.replace(config, dtype=owner[_EMBED].tensors[_EMBED].dtype)
    if (quantization := config.quantization) is not None:
        quantization = _with_versions(quantization, config, places, files)
        config = dataclasses.replace(config, quantization=quantization)
    opened = TensorCheckpoint(directory, config, str(config.dtype), files, places)
    if opened.left_out:
        parts = ", ".join(f"{count} of {name}" for name, count in opened.left_out.items())
        log.info("%s: tensors that the text model does not use are left out: %s", directory, parts)
    return opened


def _group_name(name: str) -> str:
    """What a tensor belongs to: its layer, or the module outside of layers."""
    found = re.match(r"model\.layers\.\d+|(model\.)?[^.]+", name)
    return name if found is None else found[0]


def _with_versions(
    quantization: Quantization,
    config: ModelConfig,
    places: Mapping[str, Place],
    files: Sequence[TensorFile],
) -> Quantization:
    """Returns the quantization with the version of each MoE layer's experts: that of their
    matrices. A layer whose experts differ is dense, and counted."""
    found: list[dict[str, set[str]]] = [{m: set() for m in MATRICES} for _ in config.moe_versions]
    nbytes = [0] * len(found)
    for file in files:
        for name, place in ((name, places.get(name)) for name in file.tensors):
            if isinstance(place, ExpertPlace) and not place.is_bias:
                quantized = isinstance(file, QuantizedShard | GgufFile)
                version = file.version_of(name) if quantized else None
                for matrix in place.matrices:
                    found[place.layer][matrix].add(version or DENSE)
                if isinstance(file, QuantizedShard):
                    nbytes[place.layer] += file.count_bytes(name)
    for layer in found:  # without a gate it is up's
        layer["gate"] = layer["gate"] or layer["up"]
    alike = [all(len(names) == 1 for names in layer.values()) for layer in found]
    versions = (
        join_names([*itertools.chain(*layer.values())]) if same else DENSE
        for layer, same in zip(found, alike, strict=True)
    )
    uneven = [count for count, same in zip(nbytes, alike, strict=True) if not same]
    return dataclasses.replace(
        quantization,
        versions=tuple(versions),
        uneven_layers=len(uneven),
        uneven_bytes=sum(uneven),
    )


def _check_names(
    config: ModelConfig, owner: Mapping[str, TensorFile], places: Mapping[str, Place], source: str
) -> None:
    for name, file in owner.items():
        shape, dtype = file.tensors[name].shape, file.tensors[name].dtype
        if is_ignored(config, name):
            continue
        place = places.get(name)
        is_table = isinstance(place, ParamPlace) and place.key in TABLES
        if dtype not in NUMPY_DTYPES and not (is_table and np.dtype(dtype).kind == "i"):
            if config.quantization and (scales := missing_scales(config.quantization, name, dtype)):
                raise UserError(
                    f"{file.path}: tensor {name} has dtype {dtype}, and its scales "
                    f"{' or '.join(scales)} are missing, which config.json's quantization "
                    f"({config.quantization.method}) needs; download the checkpoint again"
                )
            raise UserError(
                f"{file.path}: tensor {name} has dtype {dtype}, but config.json names no "
                "quantization that has it there; use a checkpoint in one of the formats of "
                "docs/how-to/quantized_checkpoints.md, or in bfloat16"
            )
        if name == _HEAD and config.tie_word_embeddings:
            continue
        if name not in places:
            # transformers writes the matrices of zero shared experts.
            if 0 in shape and ".shared_experts." in name:
                continue
            raise UserError(
                f"{file.path}: unknown tensor {name}: {config.architecture} with "
                "this config.json has none of that name"
            )
        if shape != places[name].shape:
            raise UserError(
                f"{file.path}: tensor {name} has shape {list(shape)}, but "
                f"config.json asks for {list(places[name].shape)}"
            )
    missing = [name for name in places if name not in owner]
    if missing:
        others = f" (and {len(missing) - 1} others)" if len(missing) > 1 else ""
        raise UserError(f"{source}: tensor {missing[0]} is missing{others}")
    if config.tie_word_embeddings and _HEAD in owner:
        _check_tied(owner[_HEAD], owner[_EMBED])


def _check_tied(head: TensorFile, embed: TensorFile) -> None:
    """Raises UserError for an lm_head that differs from the embeddings that config.json ties it to.
    transformers 5 would use such an lm_head, against its config."""
    found = [(head, _HEAD), (embed, _EMBED)]
    rows, width = embed.tensors[_EMBED].shape  # checked: it has the config's sizes
    same = head.tensors[_HEAD].shape == (rows, width)
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(file.open()).rows(name) for file, name in found]
        dtypes = [NUMPY_DTYPES[file.tensors[name].dtype] for file, name in found]
        for first in range(0, rows if same else 0, 4096):
            pieces = [np.empty((min(4096, rows - first), width), dtype) for dtype in dtypes]
            for read, piece in zip(readers, pieces, strict=True):
                read(first, piece)
            same = same and np.array_equal(pieces[0], pieces[1])
    if not same:
        raise UserError(
            f"{head.path}: tensor {_HEAD} differs from {_EMBED}, though "
            "config.json ties them; set tie_word_embeddings to false to use it"
        )

"""Converts a Hugging Face checkpoint to an Orbax checkpoint in which every expert is a chunk.

The conversion writes into DST.partial, unit by unit: a parameter, or the experts of a MoE layer. A
journal there lists the units that are whole. At the end the journal becomes the manifest, and
DST.partial becomes DST. So DST is never half-written, and an interrupted conversion continues where
its journal ends.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import logging
import os
import pathlib
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np

from host_offload.memory.bounded_reads import reading_pool
from host_offload.versions.encoders import NUMPY_DTYPES, WORKERS, EncodingError, decode
from host_offload.versions.store_versions import as_weights, relative_error
from moejax.checkpoints.checkpoint import ArraySink, Checkpoint, in_order, run_tasks
from moejax.checkpoints.foreign.mapped_tensors import MappedTensors
from moejax.checkpoints.load import check_orbax_options, checkpoint_format
from moejax.checkpoints.loaded_model import (
    count_progress,
    require_host_memory,
    run_dtype,
)
from moejax.checkpoints.orbax.destination import free_destination, require_space, write_beside
from moejax.checkpoints.orbax.layout import DENSE, Leaf, StoredModel, orbax_files
from moejax.checkpoints.orbax.manifest import (
    JOURNAL,
    MANIFEST,
    Manifest,
    as_bytes,
    file_checksum,
    read_file,
    read_manifest,
    write_file,
    write_manifest,
)
from moejax.checkpoints.orbax.own import MOST_FILES, open_stored
from moejax.checkpoints.tensor_checkpoint import TensorCheckpoint, open_tensors
from moejax.errors import UserError
from moejax.models.directory import checkpoint_directory, require_own_file
from moejax.models.gguf_config import config_fields
from moejax.models.gguf_header import read_gguf
from moejax.models.quantization import KEYS as QUANTIZATION_KEYS
from moejax.models.quantization import write_quantization
from moejax.requests.gguf_tokenizer import load_gguf_tokenizer
from moejax.requests.tokenizer import FILES, TEMPLATES
from pallas_kernels.cpu.checksums import checksum as native_checksum
from pallas_kernels.cpu.library import why_not_cpu

log = logging.getLogger("moejax")


COPIED = (
    "config.json",
    "generation_config.json",
    *FILES,
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "LICENSE",
    "LICENSE.txt",
    "NOTICE",
    "README.md",
)
"""Files of the model that are copied where the source has them. All files in TEMPLATES are copied
too."""


@dataclasses.dataclass(frozen=True)
class Source(StoredModel):
    """A checkpoint that a conversion reads. `dtype` is that of the result."""

    checkpoint: Checkpoint
    files: dict[str, list[int]]
    """Size and time of change (ns) of each file that decides the result."""
    copied: dict[str, bytes]
    """Path → content of the files to copy. config.json has the dtype of the result."""
    coded: bool = False
    """Whether experts keep the codes that the checkpoint is quantized to; else they are dense."""

    @property
    def held(self) -> dict[str, tuple[Leaf, ...]]:
        """Version → the leaves of the experts that are copied."""
        if not self.coded:
            return {DENSE: self.layers()}
        return {
            version: tuple(self.layers(version)[layer] for layer in layers)
            for version, layers in self.config.expert_layers.items()
        }

    def chunks(self, leaf: Leaf) -> Iterator[np.ndarray]:
        """Yields the chunks of a leaf: those of a parameter are read one at a time, the experts of
        a layer all at once."""
        kind, _, key = leaf.name.partition(".")
        with (
            self.checkpoint.open() as reader,
            reading_pool(WORKERS) as pool,
        ):
            if kind == "params":
                for chunk in leaf.chunks:
                    array = np.empty(leaf.shape[1:] if leaf.stacked else leaf.shape, leaf.dtype)
                    run_tasks(pool, reader.read_param(key, chunk, array))
                    yield array
                return
            version, _, layer = key.rpartition(".")
            sink = ArraySink(self.layout(version), np.empty(leaf.shape, leaf.dtype))
            tasks = reader.read_experts(version, [int(layer)], sink, NUMPY_DTYPES[self.dtype])
            run_tasks(pool, (task for _, task in tasks))
            assert sink.written.all(), "rows without a tensor"
            yield from sink.records


def open_source(
    directory: pathlib.Path,
    kind: str,
    dtype: str = "auto",
    coded: bool = False,
    step: int | str | None = None,
    name_map: str | os.PathLike[str] | None = None,
) -> Source:
    """Opens a checkpoint that moejax did not write and checks the names, shapes and dtypes of its
    tensors.

    - `kind`: the result of checkpoint_format, "safetensors", "gguf" or "orbax".
    - `dtype`, `step`, `name_map`: as in load_checkpoint.
    - `coded`: as in Source, if the checkpoint's experts are quantized.

    Raises UserError as load_checkpoint does.
    """
    opened = open_tensors(directory, kind, step, name_map)
    dtype, own = run_dtype(dtype, opened.dtype), opened.config.quantization
    coded = coded and own is not None and [*opened.config.expert_layers] != [DENSE]
    paths = [file.path for file in opened.files]
    if kind == "gguf":
        copied = _files_of_gguf(directory)
    elif kind == "orbax":
        copied = _files_of_run(directory, opened)
        paths = [path for path in opened.directory.rglob("*") if path.is_file()]
    else:
        copied = read_copied_files(directory)
        paths += map(directory.joinpath, copied)
    if opened.config.dtype != dtype or own is not None or kind == "orbax":
        fields = json.loads(copied["config.json"])
        for key in ("torch_dtype", *QUANTIZATION_KEYS):
            fields.pop(key, None)
        if coded and own is not None:
            fields[QUANTIZATION_KEYS[0]] = write_quantization(own)
        copied["config.json"] = json.dumps({**fields, "dtype": dtype}, indent=2).encode()
    times = file_times(paths, directory.parent if kind == "gguf" else directory)
    return Source(directory, opened.config, dtype, opened, times, copied, coded)


def orbax_source(directory: pathlib.Path) -> Source:
    """Opens what `moejax convert` or `moejax quantize` wrote, with its parameters and dense experts
    in the dtype they have.

    Raises UserError for files that are missing or damaged. The contents of chunks are verified only
    when they are read.
    """
    stored = open_stored(directory)
    stored.hold(stored.dtype, (DENSE,))
    names = (n for n in stored.manifest.files if n in COPIED or n.startswith(f"{TEMPLATES}/"))
    copied = {name: (directory / name).read_bytes() for name in names}
    # The manifest has the checksums of all other files.
    files = file_times([directory / MANIFEST], directory)
    return Source(directory, stored.config, stored.dtype, stored, files, copied)


def file_times(paths: Iterable[pathlib.Path], directory: pathlib.Path) -> dict[str, list[int]]:
    """Path within the directory → size and time of change (ns)."""
    found = {path.relative_to(directory).as_posix(): path.stat() for path in sorted(paths)}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in found.items()}


def read_copied_files(directory: pathlib.Path) -> dict[str, bytes]:
    """Reads the files of COPIED and TEMPLATES. Returns path within the directory → content. Raises
    UserError for a link to a file outside the checkpoint."""
    paths = [directory / name for name in COPIED]
    paths = [path for path in paths if os.path.lexists(path)]
    paths += directory.glob(f"{TEMPLATES}/*")
    copied, left = {}, MOST_FILES
    for path in paths:
        left -= require_own_file(path, directory, left, "all files but the weights")
        copied[path.relative_to(directory).as_posix()] = path.read_bytes()
    return copied


def _files_of_gguf(path: pathlib.Path) -> dict[str, bytes]:
    """Name → content of the files that a Hugging Face directory would have: config.json and, where
    the GGUF file has one, the tokenizer."""
    files = {"config.json": json.dumps(config_fields(read_gguf(path)), indent=2).encode()}
    if (tokenizer := load_gguf_tokenizer(path)) is not None:
        with tempfile.TemporaryDirectory() as made:
            tokenizer.save_pretrained(made)
            files |= {name.name: name.read_bytes() for name in pathlib.Path(made).iterdir()}
    return files


def _files_of_run(directory: pathlib.Path, opened: TensorCheckpoint) -> dict[str, bytes]:
    """Path → content of the files to copy of a training run: those of its root, its step and its
    item, and config.json, wherever it is."""
    inside = [opened.directory, *opened.directory.parents]
    copied: dict[str, bytes] = {}
    for place in reversed([place for place in inside if place.is_relative_to(directory)]):
        copied |= read_copied_files(place)
    (mapped,) = opened.files
    assert isinstance(mapped, MappedTensors)
    return copied | {"config.json": json.dumps(mapped.config).encode()}


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What `convert` did.

    formats: of the experts as copied. nbytes: bytes of weights in the result. kept: how many of
    them an earlier, interrupted conversion had written.
    """

    directory: pathlib.Path
    dtype: str
    formats: tuple[str, ...]
    nbytes: int
    kept: int


@dataclasses.dataclass(frozen=True)
class Encoding:
    """A version that is written beside the dense one.

    quantizer: the name in the manifest of how the version was made. encode: called with a MoE layer
    and its weights [E, 3·I, D] in the checkpoint's dtype, returns the records uint16[E, rows, D];
    raises EncodingError where the layer has to stay dense.
    """

    quantizer: str
    encode: Callable[[int, np.ndarray], np.ndarray]


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    dtype: str = "auto",
    progress: Callable[[int, int], None] | None = None,
    step: int | str | None = None,
    name_map: str | os.PathLike[str] | None = None,
) -> Conversion:
    """Writes the Hugging Face checkpoint, GGUF file or training run `source` as the Orbax
    checkpoint `destination`. Experts that are quantized keep their codes and scales.

    It needs host memory for one MoE layer and the part of the shards that the layer comes from.
    After an interruption of any kind the same call writes what is missing.

    - `dtype`, `step`, `name_map`: as in load_checkpoint.
    - `progress`: called with (done, total) bytes.

    Raises UserError for a source with a wrong name, shape or dtype (all are checked before anything
    is written), and for a destination that exists or cannot be written.
    """
    src = checkpoint_directory(source)
    kind = checkpoint_format(src)
    if kind == "moejax-orbax":
        raise UserError(
            f"{src}: its format is {kind}; convert reads safetensors and GGUF files and training "
            "runs"
        )
    check_orbax_options(src, kind, step, name_map)
    dst = free_destination(destination)
    opened = open_source(src, kind, dtype, True, step, name_map)
    return write_checkpoint(opened, dst, progress=progress)


def write_checkpoint(
    source: Source,
    destination: pathlib.Path,
    encodings: Mapping[str, Encoding] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Writes a checkpoint whose tensors are checked.

    - `destination`: the result of free_destination.
    - `encodings`: version → how to encode it, for the versions written beside the dense one.
    - `progress`: as in convert.
    """
    with write_beside(destination) as work:
        nbytes, kept = _complete(source, work, encodings or {}, progress)
    return Conversion(destination, source.dtype, (*source.held,), nbytes, kept)


def _complete(
    source: Source,
    work: pathlib.Path,
    encodings: Mapping[str, Encoding],
    progress: Callable[[int, int], None] | None,
) -> tuple[int, int]:
    """Writes into `work` what it lacks, and at the end the manifest. Returns the bytes of all
    weights, and of those that were already there."""
    layers = source.held | {version: source.layers(version) for version in encodings}
    experts = [*chain(*source.held.values())]
    copied = [*source.params.values(), *experts]
    leaves = [*copied, *(leaf for version in encodings for leaf in layers[version])]
    total = sum(leaf.nbytes for leaf in leaves)
    advance = count_progress(progress, total)
    manifest = _begin(source, work, encodings, layers)
    tree = work / manifest.tree
    kept = sum(leaf.nbytes for leaf in leaves if manifest.checksums(leaf))
    advance(kept)
    require_space(work, total - kept)
    at_once = [leaf.chunk_bytes for leaf in source.params.values()]
    at_once += [leaf.nbytes for leaf in experts]
    require_host_memory(max(at_once), str(source.directory))
    for leaf in copied:
        if not manifest.checksums(leaf):
            manifest.put(leaf, *_write_chunks(tree, leaf, source.chunks(leaf)))
            write_manifest(work / JOURNAL, manifest)
            advance(leaf.nbytes)
    for layer, leaf in enumerate(experts if encodings else ()):
        missing = [
            version
            for version in encodings
            if not manifest.checksums(layers[version][layer])
            and layer not in manifest.dense_layers.get(version, ())
        ]
        if missing:
            records = _read_chunks(tree, leaf, manifest.checksums(leaf))
            weights = as_weights(records, source.layout(), source.dtype)
        for version in missing:
            made = layers[version][layer]
            try:
                encoded = encodings[version].encode(layer, weights)
            except EncodingError as error:
                log.warning("%s: MoE layer %d stays dense: %s", version, layer, error)
                lacking = {layer, *manifest.dense_layers.get(version, ())}
                manifest.dense_layers[version] = tuple(sorted(lacking))
            else:
                manifest.put(made, *_write_chunks(tree, made, iter(encoded)))
                errors = relative_error(weights, decode(encoded, source.layout(version)))
                rounded = tuple(float(f"{error:.6g}") for error in errors)
                manifest.errors.setdefault(version, {})[layer] = rounded
            write_manifest(work / JOURNAL, manifest)
            advance(made.nbytes)
    left_out = [layers[v][i] for v, lacking in manifest.dense_layers.items() for i in lacking]
    if left_out:
        _leave_out(source, work, manifest, layers)
    os.replace(work / JOURNAL, work / MANIFEST)
    return total - sum(leaf.nbytes for leaf in left_out), kept


def _leave_out(
    source: Source, work: pathlib.Path, manifest: Manifest, layers: Mapping[str, Sequence[Leaf]]
) -> None:
    """Removes the layers that stay dense from the description of the tree. Raises UserError for a
    version that no layer has."""
    held = {
        version: {
            layer: leaf
            for layer, leaf in enumerate(each)
            if layer not in manifest.dense_layers.get(version, ())
        }
        for version, each in layers.items()
    }
    for version, kept in held.items():
        if not kept:
            raise UserError(
                f"{source.directory}: {version} cannot hold an expert in every MoE layer, so there "
                "is nothing to gain; leave this version out"
            )
    _, described = orbax_files(source.params_tree(source.params.values()), held)
    _write_files(work, manifest, described | source.copied)


def _begin(
    source: Source,
    work: pathlib.Path,
    encodings: Mapping[str, Encoding],
    layers: Mapping[str, Sequence[Leaf]],
) -> Manifest:
    """The journal to continue with: the existing one without its damaged leaves, or a new one.
    Raises UserError for the journal of another conversion."""
    # The path counts too: in some container images the files of another model have the same sizes
    # and times.
    origin = {"source": str(source.directory.resolve()), "files": source.files}
    quantizers = {version: encoding.quantizer for version, encoding in encodings.items()}
    if (work / MANIFEST).exists():  # killed between the last two steps
        os.replace(work / MANIFEST, work / JOURNAL)
    if (work / JOURNAL).exists():
        try:
            manifest = read_manifest(work / JOURNAL)
        except UserError as error:
            raise UserError(f"{error}; or delete {work} to begin anew") from None
        found = {key: manifest.provenance.get(key) for key in origin}
        if (found, manifest.dtype) != (origin, source.dtype):
            raise UserError(
                f"{work}: an unfinished conversion of {manifest.provenance.get('source')} to "
                f"{manifest.dtype}, whose files have changed or are others; delete it to begin anew"
            )
        if manifest.quantizers != quantizers:
            began = ", ".join(f"{v} by {q}" for v, q in manifest.quantizers.items())
            raise UserError(
                f"{work}: an unfinished conversion with {began or 'no version but dense'}; ask for "
                "the same, or delete it to begin anew"
            )
        if all(_checksum_of(work / name) == found for name, found in manifest.files.items()):
            if manifest.files:
                _forget_damaged(work, manifest, [*source.params.values(), *chain(*layers.values())])
                return manifest
        else:
            log.warning("%s: the part that was written is damaged; it is written again", work)
    numbered = {
        version: {int(leaf.name.rpartition(".")[2]): leaf for leaf in each}
        for version, each in layers.items()
    }
    tree, files = orbax_files(source.params_tree(source.params.values()), numbered)
    provenance = {
        **origin,
        "dtype": source.config.dtype,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {
            name: installed_version(name) for name in ("moejax", "orbax-checkpoint", "jax")
        },
    }
    manifest = Manifest(
        provenance,
        source.dtype,
        tree,
        experts={version: {} for version in layers},
        quantizers=quantizers,
    )
    write_manifest(work / JOURNAL, manifest)
    _write_files(work, manifest, files | source.copied)
    return manifest


def _forget_damaged(work: pathlib.Path, manifest: Manifest, leaves: Sequence[Leaf]) -> None:
    """Removes from the manifest the leaves whose checksums on disk differ."""
    tree = work / manifest.tree
    with reading_pool(WORKERS) as pool:
        for leaf in leaves:
            expected = manifest.checksums(leaf)
            files = [leaf.file(tree, chunk) for chunk in leaf.chunks]
            if expected and tuple(pool.map(_checksum_of, files)) != expected:
                log.warning(
                    "%s: the part that was written is damaged; it is written again",
                    tree / leaf.name,
                )
                manifest.put(leaf, ())


def _write_files(work: pathlib.Path, manifest: Manifest, files: Mapping[str, bytes]) -> None:
    """Writes all files except the chunks, and removes earlier ones with other names."""
    for name in manifest.files.keys() - files.keys():
        (work / name).unlink(missing_ok=True)
    for name in files:
        (work / name).parent.mkdir(parents=True, exist_ok=True)
    manifest.files = {name: write_file(work / name, files[name]) for name in files}
    write_manifest(work / JOURNAL, manifest)


def _write_chunks(
    tree: pathlib.Path, leaf: Leaf, chunks: Iterator[np.ndarray]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Writes the chunks of a leaf, several at once. Returns their checksums, and for experts the
    CRC-32C of each, where the native library is built."""
    crcs = leaf.name.startswith("experts.") and why_not_cpu() is None

    def write(numbered: tuple[int, np.ndarray]) -> tuple[str, str]:
        number, chunk = numbered
        path = leaf.file(tree, number)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = as_bytes(chunk)
        return write_file(path, content), native_checksum("crc32c", content) if crcs else ""

    with ThreadPoolExecutor(WORKERS) as pool:
        written = list(in_order(pool, write, zip(leaf.chunks, chunks, strict=True)))
    return tuple(each for each, _ in written), tuple(crc for _, crc in written if crc)


def _read_chunks(tree: pathlib.Path, leaf: Leaf, checksums: Sequence[str]) -> np.ndarray:
    """Reads back a stacked leaf. Raises UserError where its bytes are not those that were
    written."""
    array = np.empty(leaf.shape, leaf.dtype)
    for number in leaf.chunks:
        path = leaf.file(tree, number)
        if read_file(path, as_bytes(array[number])) != checksums[number]:
            path.unlink()  # the next conversion then writes this chunk again
            raise UserError(
                f"{path}: read back, it is not what was written: the disk or the memory is at "
                "fault. Run the same command again, which writes this piece anew"
            )
    return array


def _checksum_of(path: pathlib.Path) -> str | None:
    try:
        return file_checksum(path)
    except FileNotFoundError:
        return None


def installed_version(name: str) -> str:
    """The version of an installed package, or "unknown" for one that is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"

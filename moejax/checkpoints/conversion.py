"""A Hugging Face checkpoint becomes an Orbax checkpoint in which every expert is a chunk.

Everything is written into DST.partial, unit by unit (a parameter, a MoE layer's experts). A journal
there lists the units that are whole; at the end it becomes the manifest, and the directory DST. So
nothing half-written ever lies at DST, and an interrupted conversion goes on where its journal ends.
"""

from __future__ import annotations

import dataclasses
import datetime
import importlib.metadata
import json
import logging
import os
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np

from host_offload.versions.encoders import NUMPY_DTYPES, WORKERS, EncodingError, decode
from host_offload.versions.store_versions import as_weights, relative_error
from moejax.checkpoints.checkpoint import ArraySink, Checkpoint, in_order, run_tasks
from moejax.checkpoints.load import checkpoint_format
from moejax.checkpoints.loaded_model import (
    count_progress,
    require_host_memory,
    run_dtype,
    warn_nonfinite,
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
from moejax.checkpoints.tensor_checkpoint import open_tensors
from moejax.errors import UserError
from moejax.models.directory import checkpoint_directory, read_json, require_own_file
from moejax.models.quantization import KEYS as QUANTIZATION_KEYS
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
"""Files of the source that belong to the model; those that are there are copied, and what is in
TEMPLATES."""


@dataclasses.dataclass(frozen=True)
class Source(StoredModel):
    """A checkpoint to be written as ours, in the dtype that the result has."""

    checkpoint: Checkpoint
    files: dict[str, list[int]]
    """Size and time of change (ns) of each file that decides the result."""
    copied: dict[str, bytes]
    """The files to copy; config.json with the dtype that the weights have in the result."""

    def chunks(self, leaf: Leaf) -> Iterator[np.ndarray]:
        """The chunks of a parameter, one at a time, or the dense experts of a layer, which are in
        memory at once."""
        kind, _, key = leaf.name.partition(".")
        with (
            self.checkpoint.open() as reader,
            ThreadPoolExecutor(WORKERS) as pool,
        ):
            if kind == "params":
                for chunk in leaf.chunks:
                    array = np.empty(leaf.shape[1:] if leaf.stacked else leaf.shape, leaf.dtype)
                    run_tasks(pool, reader.read_param(key, chunk, array))
                    yield array
                return
            layer = int(key.rpartition(".")[2])
            sink = ArraySink(self.layout(), np.empty(leaf.shape, leaf.dtype))
            tasks = reader.read_experts(DENSE, [layer], sink, NUMPY_DTYPES[self.dtype])
            run_tasks(pool, tasks)
            assert sink.written.all(), "rows without a tensor"
            yield from sink.records


def open_source(directory: pathlib.Path, dtype: str) -> Source:
    """A Hugging Face checkpoint whose tensors are all checked. dtype: as in load_checkpoint.
    Raises UserError as that does."""
    opened = open_tensors(directory, "safetensors")
    dtype = run_dtype(dtype, opened.dtype)
    copied = _read_copied_files(directory)
    if opened.config.dtype != dtype or opened.config.quantization is not None:
        fields = read_json(directory / "config.json")
        for key in ("torch_dtype", *QUANTIZATION_KEYS):
            fields.pop(key, None)
        copied["config.json"] = json.dumps({**fields, "dtype": dtype}, indent=2).encode()
    paths = [*(file.path for file in opened.files), *map(directory.joinpath, copied)]
    return Source(directory, opened.config, dtype, opened, file_times(paths, directory), copied)


def orbax_source(directory: pathlib.Path) -> Source:
    """The parameters and dense experts of what `moejax convert` or `moejax quantize` wrote, in the
    dtype they have. Raises UserError for whatever is missing or damaged but contents of chunks,
    which are verified when they are read."""
    stored = open_stored(directory)
    stored.hold(stored.dtype, (DENSE,))
    names = (n for n in stored.manifest.files if n in COPIED or n.startswith(f"{TEMPLATES}/"))
    copied = {name: (directory / name).read_bytes() for name in names}
    # The manifest has checksums of all others.
    files = file_times([directory / MANIFEST], directory)
    return Source(directory, stored.config, stored.dtype, stored, files, copied)


def file_times(paths: Iterable[pathlib.Path], directory: pathlib.Path) -> dict[str, list[int]]:
    """Path within the directory → size and time of change (ns)."""
    found = {path.relative_to(directory).as_posix(): path.stat() for path in sorted(paths)}
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in found.items()}


def _read_copied_files(directory: pathlib.Path) -> dict[str, bytes]:
    """The files of COPIED by their path within the directory. Raises UserError for a link out of
    the checkpoint, whose target is nobody's to copy."""
    paths = [directory / name for name in COPIED]
    paths = [path for path in paths if os.path.lexists(path)]
    paths += directory.glob(f"{TEMPLATES}/*")
    copied, left = {}, MOST_FILES
    for path in paths:
        left -= require_own_file(path, directory, left, "all files but the weights")
        copied[path.relative_to(directory).as_posix()] = path.read_bytes()
    return copied


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What `convert` did. nbytes: of weights in the result. kept: of them, those that an earlier,
    interrupted conversion had written."""

    directory: pathlib.Path
    dtype: str
    nbytes: int
    kept: int


@dataclasses.dataclass(frozen=True)
class Encoding:
    """A version to be written beside the dense one.

    quantizer: what the manifest says of how it was made. encode(layer, weights [E, 3·I, D] in the
    checkpoint's dtype): the records uint16[E, rows, D] of a MoE layer; raises EncodingError where
    the layer has to stay dense.
    """

    quantizer: str
    encode: Callable[[int, np.ndarray], np.ndarray]


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    dtype: str = "auto",
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Writes the Hugging Face checkpoint `source` as the Orbax checkpoint `destination`, streaming.

    Host memory is one MoE layer and the part of the shards that it comes from. dtype: as in
    load_checkpoint. progress: called with (done, total) bytes. After an interruption of any kind
    the same call goes on with what is missing.

    Raises UserError where the source is wrong (all names, shapes and dtypes are checked first),
    where the destination is there already, and where it cannot be written.
    """
    src = checkpoint_directory(source)
    kind = checkpoint_format(src)
    if kind != "safetensors":
        raise UserError(f"{src}: its format is {kind}; convert reads safetensors checkpoints")
    dst = free_destination(destination)
    opened = open_source(src, dtype)
    return write_checkpoint(opened, dst, progress=progress)


def write_checkpoint(
    source: Source,
    destination: pathlib.Path,
    encodings: Mapping[str, Encoding] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Writes a checkpoint whose tensors are checked. destination: of free_destination. encodings:
    by version, what is written beside the dense one. The rest as in convert."""
    with write_beside(destination) as work:
        nbytes, kept = _complete(source, work, encodings or {}, progress)
    return Conversion(destination, source.dtype, nbytes, kept)


def _complete(
    source: Source,
    work: pathlib.Path,
    encodings: Mapping[str, Encoding],
    progress: Callable[[int, int], None] | None,
) -> tuple[int, int]:
    """Brings `work` from whatever it is to its manifest; returns bytes, of weights and of those
    that were there."""
    layers = {version: source.layers(version) for version in (DENSE, *encodings)}
    dense = [*source.params.values(), *layers[DENSE]]
    leaves = [*dense, *(leaf for version in encodings for leaf in layers[version])]
    total = sum(leaf.nbytes for leaf in leaves)
    advance = count_progress(progress, total)
    manifest = _begin(source, work, encodings, layers)
    tree = work / manifest.tree
    kept = sum(leaf.nbytes for leaf in leaves if manifest.checksums(leaf))
    advance(kept)
    require_space(work, total - kept)
    at_once = [leaf.chunk_bytes for leaf in source.params.values()]
    at_once += [leaf.nbytes for leaf in layers[DENSE]]
    require_host_memory(max(at_once), str(source.directory))
    for leaf in dense:
        if not manifest.checksums(leaf):
            manifest.put(leaf, *_write_chunks(tree, leaf, source.chunks(leaf)))
            manifest.nonfinite |= source.checkpoint.nonfinite
            write_manifest(work / JOURNAL, manifest)
            advance(leaf.nbytes)
    warn_nonfinite(str(source.directory), manifest.nonfinite)
    for layer, leaf in enumerate(layers[DENSE]):
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
    """Takes what stays dense out of the tree's description. Raises UserError for a version of which
    nothing is left."""
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
    """The journal to go on with: what is whole of the one that is there, or a new one."""
    # The path too: files of another model may have the same sizes and, in some images, times.
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
            log.warning("%s: damaged since; everything is written again", work)
    numbered = {version: dict(enumerate(each)) for version, each in layers.items()}
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
        nonfinite=dict(source.checkpoint.nonfinite),
        quantizers=quantizers,
    )
    write_manifest(work / JOURNAL, manifest)
    _write_files(work, manifest, files | source.copied)
    return manifest


def _forget_damaged(work: pathlib.Path, manifest: Manifest, leaves: Sequence[Leaf]) -> None:
    """Takes the leaves that are not on disk as the manifest says out of it."""
    tree = work / manifest.tree
    with ThreadPoolExecutor(WORKERS) as pool:
        for leaf in leaves:
            expected = manifest.checksums(leaf)
            files = [leaf.file(tree, chunk) for chunk in leaf.chunks]
            if expected and tuple(pool.map(_checksum_of, files)) != expected:
                log.warning("%s: damaged since; written again", tree / leaf.name)
                manifest.put(leaf, ())


def _write_files(work: pathlib.Path, manifest: Manifest, files: Mapping[str, bytes]) -> None:
    """Writes all files but the chunks, in place of those that are there."""
    for name in manifest.files.keys() - files.keys():
        (work / name).unlink(missing_ok=True)
    for name in files:
        (work / name).parent.mkdir(parents=True, exist_ok=True)
    manifest.files = {name: write_file(work / name, files[name]) for name in files}
    write_manifest(work / JOURNAL, manifest)


def _write_chunks(
    tree: pathlib.Path, leaf: Leaf, chunks: Iterator[np.ndarray]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Writes a leaf, several chunks at once; returns their checksums, and CRC-32C of experts where
    the native library is there to compute it."""
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
    """A stacked leaf that was written. Raises UserError where the disk has changed it."""
    array = np.empty(leaf.shape, leaf.dtype)
    for number in leaf.chunks:
        path = leaf.file(tree, number)
        if read_file(path, as_bytes(array[number])) != checksums[number]:
            path.unlink()  # so that the next conversion does not take its checksum's word
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
    """A package's version; "unknown" where it is run from its source."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"

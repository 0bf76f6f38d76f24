"""A Hugging Face checkpoint becomes an Orbax checkpoint in which every expert is a chunk.

Everything is written into DST.partial, unit by unit (a parameter, a MoE layer's experts). A journal
there lists the units that are whole; at the end it becomes the manifest, and the directory DST. So
nothing half-written ever lies at DST, and an interrupted conversion goes on where its journal ends.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import datetime
import importlib.metadata
import itertools
import logging
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from host_offload.memory.layout import ExpertLayout
from host_offload.versions.encoders import EncodingError, decode
from host_offload.versions.store_versions import as_weights, relative_error
from moejax.checkpoints.conversion_source import Source, open_source
from moejax.checkpoints.formats import checkpoint_format
from moejax.checkpoints.loaded_model import counted, warn_nonfinite
from moejax.checkpoints.orbax.destination import free_destination, require_space, written_beside
from moejax.checkpoints.orbax.layout import DENSE, Leaf, expert_leaves
from moejax.checkpoints.orbax.manifest import (
    JOURNAL,
    MANIFEST,
    Manifest,
    StoredLeaf,
    as_bytes,
    file_checksum,
    read_file,
    read_manifest,
    replace_file,
    to_bytes,
    write_file,
)
from moejax.checkpoints.orbax.metadata import orbax_files
from moejax.checkpoints.placement import WORKERS, in_order
from moejax.checkpoints.safetensors.shards import NUMPY_DTYPES, find_shards
from moejax.checkpoints.tensors import abstract_params
from moejax.errors import UserError
from moejax.models.config import load_config
from moejax.models.directory import checkpoint_directory

log = logging.getLogger("moejax")


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

    layout: of its records. quantizer: what the manifest says of how it was made. encode(layer,
    weights [E, 3·I, D] in the checkpoint's dtype): the records uint16[E, rows, D] of a MoE layer;
    raises EncodingError where the layer has to stay dense.
    """

    layout: ExpertLayout
    quantizer: str
    encode: Callable[[int, np.ndarray], np.ndarray]


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    dtype: str = "auto",
    verify: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Writes the Hugging Face checkpoint `source` as the Orbax checkpoint `destination`, streaming.

    Host memory is one MoE layer and the part of the shards that it comes from. dtype: as in
    load_checkpoint. verify: read everything back and compare it with the source, bit for bit,
    before the destination appears. progress: called with (done, total) bytes. After an interruption
    of any kind the same call goes on with what is missing.

    Raises UserError where the source is wrong (all names, shapes and dtypes are checked first),
    where the destination is there already, and where it cannot be written.
    """
    src = checkpoint_directory(source)
    kind = checkpoint_format(src)
    if kind != "safetensors":
        raise UserError(f"{src}: its format is {kind}; convert reads safetensors checkpoints")
    dst = free_destination(destination)
    opened = open_source(src, load_config(src), find_shards(src), dtype)
    return write_checkpoint(opened, dst, verify=verify, progress=progress)


def write_checkpoint(
    source: Source,
    destination: pathlib.Path,
    encodings: Mapping[str, Encoding] | None = None,
    verify: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> Conversion:
    """Writes a checkpoint whose tensors are checked. destination: of free_destination. encodings:
    by version, what is written beside the dense one. The rest as in convert."""
    with written_beside(destination) as work:
        nbytes, kept = _complete(source, work, encodings or {}, verify, progress)
    return Conversion(destination, source.dtype, nbytes, kept)


def _complete(
    source: Source,
    work: pathlib.Path,
    encodings: Mapping[str, Encoding],
    verify: bool,
    progress: Callable[[int, int], None] | None,
) -> tuple[int, int]:
    """Brings `work` from whatever it is to its manifest; returns bytes, of weights and of those
    that were there."""
    params, layers = source.params, _layers(source, encodings)
    dense = layers[DENSE]
    total = sum(leaf.nbytes for leaf in [*params.values(), *itertools.chain(*layers.values())])
    compared = sum(leaf.nbytes for leaf in [*params.values(), *dense]) if verify else 0
    advance = counted(progress, total + compared)
    manifest = _begin(source, work, encodings)
    tree = work / manifest.tree
    kept = sum(params[key].nbytes for key in manifest.params)
    kept += sum(layers[v][i].nbytes for v, written in manifest.experts.items() for i in written)
    advance(kept)
    require_space(work, total - kept)
    nonfinite: collections.Counter[str] = collections.Counter()
    for key, leaf in params.items():
        if key not in manifest.params:
            checksums = _write_chunks(tree, leaf, source.param_chunks(key, nonfinite))
            stored = StoredLeaf(leaf.dtype.name, leaf.shape, checksums)
            manifest = manifest.with_param(key, stored).with_nonfinite(nonfinite)
            _record(work, manifest)
            advance(leaf.nbytes)
    for layer, leaf in enumerate(dense):
        if layer not in manifest.experts[DENSE]:
            checksums = _write_chunks(tree, leaf, source.expert_chunks(layer, nonfinite))
            manifest = manifest.with_layer(DENSE, layer, checksums).with_nonfinite(nonfinite)
            _record(work, manifest)
            advance(leaf.nbytes)
    warn_nonfinite(str(source.directory), manifest.nonfinite)
    for layer, leaf in enumerate(dense):
        missing = [version for version in encodings if not manifest.has(version, layer)]
        if missing:
            records = _read_chunks(tree, leaf, manifest.experts[DENSE][layer])
        for version in missing:
            encoding, made = encodings[version], layers[version][layer]
            weights = as_weights(records, source.layout, source.dtype)
            try:
                encoded = encoding.encode(layer, weights)
            except EncodingError as error:
                log.warning("%s: MoE layer %d stays dense: %s", version, layer, error)
                manifest = _record(work, manifest.with_dense_layer(version, layer))
                advance(made.nbytes)
                continue
            errors = relative_error(weights, decode(encoded, encoding.layout.format))
            checksums = _write_chunks(tree, made, iter(encoded))
            manifest = manifest.with_layer(version, layer, checksums)
            manifest = _record(work, manifest.with_errors(version, layer, errors))
            advance(made.nbytes)
    left_out = [(v, i) for v, lacking in manifest.dense_layers.items() for i in lacking]
    if left_out:
        manifest = _without(source, work, manifest, layers)
    if verify:
        for key, leaf in params.items():
            _compare_chunks(tree, leaf, source.param_chunks(key, None))
            advance(leaf.nbytes)
        for layer, leaf in enumerate(dense):
            _compare_chunks(tree, leaf, source.expert_chunks(layer, None))
            advance(leaf.nbytes)
    os.replace(work / JOURNAL, work / MANIFEST)
    return total - sum(layers[version][layer].nbytes for version, layer in left_out), kept


def _without(
    source: Source, work: pathlib.Path, manifest: Manifest, layers: Mapping[str, Sequence[Leaf]]
) -> Manifest:
    """Takes what stays dense out of the tree's description. Raises UserError for a version of which
    nothing is left."""
    held = {
        version: [i for i in range(len(each)) if i not in manifest.dense_layers.get(version, ())]
        for version, each in layers.items()
    }
    for version, numbers in held.items():
        if not numbers:
            raise UserError(
                f"{source.directory}: {version} cannot hold an expert in every MoE layer, so there "
                "is nothing to gain; leave this version out"
            )
    experts = [layers[version][i] for version, numbers in held.items() for i in numbers]
    params = abstract_params(source.config, NUMPY_DTYPES[source.dtype])
    _, described = orbax_files(params, held, [*source.params.values(), *experts])
    for name in manifest.files.keys() - described.keys() - source.copied.keys():
        (work / name).unlink(missing_ok=True)
    checksums = {name: write_file(work / name, content) for name, content in described.items()}
    kept = {n: c for n, c in manifest.files.items() if n in source.copied}
    return _record(work, dataclasses.replace(manifest, files=kept | checksums))


def _layers(source: Source, encodings: Mapping[str, Encoding]) -> dict[str, tuple[Leaf, ...]]:
    """By version, the leaves of its MoE layers."""
    made = {v: expert_leaves(source.config, encoding.layout) for v, encoding in encodings.items()}
    return {DENSE: source.layers, **made}


def _begin(source: Source, work: pathlib.Path, encodings: Mapping[str, Encoding]) -> Manifest:
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
                return _whole(source, work, manifest, encodings)
        else:
            log.warning("%s: damaged since; everything is written again", work)
    layers = _layers(source, encodings)
    leaves = [*source.params.values(), *itertools.chain(*layers.values())]
    params = abstract_params(source.config, NUMPY_DTYPES[source.dtype])
    tree, files = orbax_files(params, {v: range(len(e)) for v, e in layers.items()}, leaves)
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
        nonfinite=source.nonfinite,
        quantizers=quantizers,
    )
    _record(work, manifest)
    checksums = {}
    for name, content in (files | source.copied).items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        checksums[name] = write_file(path, content)
    return _record(work, manifest.with_files(checksums))


def _whole(
    source: Source, work: pathlib.Path, manifest: Manifest, encodings: Mapping[str, Encoding]
) -> Manifest:
    """The manifest without the units that are not on disk as it says."""
    tree, params, layers = work / manifest.tree, source.params, _layers(source, encodings)
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:

        def is_whole(leaf: Leaf, checksums: Sequence[str]) -> bool:
            found = pool.map(_checksum_of, [tree / leaf.name / chunk for chunk in leaf.chunks])
            whole = tuple(found) == tuple(checksums)
            if not whole:
                log.warning("%s: damaged since; written again", tree / leaf.name)
            return whole

        return dataclasses.replace(
            manifest,
            params={k: v for k, v in manifest.params.items() if is_whole(params[k], v.checksums)},
            experts={
                v: {i: c for i, c in written.items() if is_whole(layers[v][i], c)}
                for v, written in manifest.experts.items()
            },
        )


def _record(work: pathlib.Path, manifest: Manifest) -> Manifest:
    replace_file(work / JOURNAL, to_bytes(manifest))
    return manifest


def _write_chunks(tree: pathlib.Path, leaf: Leaf, chunks: Iterator[np.ndarray]) -> tuple[str, ...]:
    """Writes a leaf, several chunks at once; returns their checksums."""

    def write(named: tuple[str, np.ndarray]) -> str:
        name, chunk = named
        path = tree / leaf.name / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_file(path, as_bytes(chunk))

    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        return tuple(in_order(pool, write, zip(leaf.chunks, chunks, strict=True)))


def _read_chunks(tree: pathlib.Path, leaf: Leaf, checksums: Sequence[str]) -> np.ndarray:
    """A stacked leaf that was written. Raises UserError where the disk has changed it."""
    array = np.empty(leaf.shape, leaf.dtype)
    for index, (name, expected) in enumerate(zip(leaf.chunks, checksums, strict=True)):
        path = tree / leaf.name / name
        if read_file(path, as_bytes(array[index])) != expected:
            raise _misread(path, "was written")
    return array


def _compare_chunks(tree: pathlib.Path, leaf: Leaf, chunks: Iterator[np.ndarray]) -> None:
    """Raises UserError if a chunk on disk is not the source's, and takes it from the disk."""
    for name, chunk in zip(leaf.chunks, chunks, strict=True):
        path = tree / leaf.name / name
        with open(path, "rb") as file:
            if hasattr(os, "posix_fadvise"):  # else memory would answer for the disk
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            found = np.fromfile(file, np.uint8)
        if not np.array_equal(found, chunk.reshape(-1).view(np.uint8)):
            raise _misread(path, "the source has")


def _misread(path: pathlib.Path, expected: str) -> UserError:
    """What to raise for a chunk that the disk has changed, which goes."""
    path.unlink()  # so that the next conversion does not take its checksum's word
    return UserError(
        f"{path}: read back, it is not what {expected}: the disk or the memory is at fault. Run "
        "the same command again, which writes this piece anew"
    )


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

"""A Hugging Face checkpoint becomes an Orbax checkpoint in which every expert is a chunk.

Everything is written into DST.partial, unit by unit (a parameter, a MoE layer's experts). A journal
there lists the units that are whole; at the end it becomes the manifest, and the directory DST. So
nothing half-written ever lies at DST, and an interrupted conversion goes on where its journal ends.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import datetime
import errno
import fcntl
import importlib.metadata
import logging
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from moejax.checkpoint import warn_nonfinite
from moejax.checkpoints.conversion_source import (
    Source,
    copied_files,
    expert_chunks,
    open_source,
    param_chunks,
    source_files,
)
from moejax.checkpoints.directory import checkpoint_directory
from moejax.checkpoints.formats import checkpoint_format
from moejax.checkpoints.orbax_layout import DENSE, Leaf
from moejax.checkpoints.orbax_manifest import (
    JOURNAL,
    MANIFEST,
    Manifest,
    StoredLeaf,
    as_bytes,
    file_checksum,
    read_manifest,
    replace_file,
    to_bytes,
    write_file,
)
from moejax.checkpoints.orbax_metadata import orbax_files
from moejax.checkpoints.params import abstract_params
from moejax.checkpoints.placement import WORKERS
from moejax.checkpoints.shards import NUMPY_DTYPES, find_shards
from moejax.errors import UserError
from moejax.models.config import load_config

log = logging.getLogger("moejax")

LOCK = "moejax.lock"
"""In DST.partial, locked while a conversion writes there."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclasses.dataclass(frozen=True)
class Conversion:
    """What `convert` did. nbytes: of weights in the result. kept: of them, those that an earlier,
    interrupted conversion had written."""

    directory: pathlib.Path
    dtype: str
    nbytes: int
    kept: int


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
    src, dst = checkpoint_directory(source), _resolved(destination)
    kind = checkpoint_format(src)
    if kind != "safetensors":
        raise UserError(f"{src}: its format is {kind}; convert reads safetensors checkpoints")
    if dst.exists() and not (dst.is_dir() and not any(dst.iterdir())):
        raise UserError(f"{dst}: already there; delete it or choose another destination")
    opened = open_source(src, load_config(src), find_shards(src), dtype)
    work = dst.with_name(dst.name + ".partial")
    if dst.exists():
        _remove_empty(dst)
    try:
        work.mkdir(parents=True, exist_ok=True)
        _require_ours(work)
        with _locked(work):
            nbytes, kept = _complete(opened, work, verify, progress)
            os.rename(work, dst)
            # Not before: while the directory is at DST.partial, its lock must be there.
            (dst / LOCK).unlink()
            _sync_directory(dst.parent)
    except OSError as error:
        raise _write_error(work, error) from error
    return Conversion(dst, opened.dtype, nbytes, kept)


def _complete(
    source: Source,
    work: pathlib.Path,
    verify: bool,
    progress: Callable[[int, int], None] | None,
) -> tuple[int, int]:
    """Brings `work` from whatever it is to its manifest; returns bytes, of weights and of those
    that were there."""
    params, layers = source.params, source.layers
    total = sum(leaf.nbytes for leaf in [*params.values(), *layers])
    done = 0

    def advance(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total * (1 + verify))

    manifest = _begin(source, work)
    tree = work / manifest.tree
    kept = sum(params[key].nbytes for key in manifest.params)
    kept += sum(layers[i].nbytes for i in manifest.experts[DENSE])
    advance(kept)
    _require_space(work, total - kept)
    nonfinite: collections.Counter[str] = collections.Counter()
    for key, leaf in params.items():
        if key not in manifest.params:
            checksums = _write_chunks(tree, leaf, param_chunks(source, key, nonfinite))
            stored = StoredLeaf(leaf.dtype.name, leaf.shape, checksums)
            manifest = manifest.with_param(key, stored).with_nonfinite(nonfinite)
            _record(work, manifest)
            advance(leaf.nbytes)
    for layer, leaf in enumerate(layers):
        if layer not in manifest.experts[DENSE]:
            checksums = _write_chunks(tree, leaf, expert_chunks(source, layer, nonfinite))
            manifest = manifest.with_layer(DENSE, layer, checksums).with_nonfinite(nonfinite)
            _record(work, manifest)
            advance(leaf.nbytes)
    warn_nonfinite(str(source.directory), manifest.nonfinite)
    if verify:
        for key, leaf in params.items():
            _compare_chunks(tree, leaf, param_chunks(source, key))
            advance(leaf.nbytes)
        for layer, leaf in enumerate(layers):
            _compare_chunks(tree, leaf, expert_chunks(source, layer))
            advance(leaf.nbytes)
    os.replace(work / JOURNAL, work / MANIFEST)
    return total, kept


def _resolved(destination: str | os.PathLike[str]) -> pathlib.Path:
    """Without links, since one could not be replaced by a directory in the end."""
    try:
        return pathlib.Path(destination).expanduser().resolve()
    except (OSError, RuntimeError) as error:
        raise UserError(f"{destination}: cannot be resolved: {error}") from None


def _remove_empty(dst: pathlib.Path) -> None:
    """Now rather than by the rename at the end, which may be hours away."""
    try:
        dst.rmdir()
    except OSError as error:
        raise UserError(
            f"{dst}: the empty directory cannot be replaced, as mount points cannot "
            f"({error.strerror}); give a directory below it, {dst / 'model'}"
        ) from None


def _require_ours(work: pathlib.Path) -> None:
    names = {path.name for path in work.iterdir()}
    strangers = sorted(names - {f"{JOURNAL}.new", LOCK})
    if strangers and not names & {JOURNAL, MANIFEST}:
        raise UserError(
            f"{work}: the conversion needs this directory, but it holds {strangers[0]!r} and no "
            "unfinished conversion; choose another destination, or move it away"
        )


def _begin(source: Source, work: pathlib.Path) -> Manifest:
    """The journal to go on with: what is whole of the one that is there, or a new one."""
    # The path too: files of another model may have the same sizes and, in some images, times.
    origin = {"source": str(source.directory.resolve()), "files": source_files(source)}
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
        if all(_checksum_of(work / name) == found for name, found in manifest.files.items()):
            if manifest.files:
                return _whole(source, work, manifest)
        else:
            log.warning("%s: damaged since; everything is written again", work)
    leaves = [*source.params.values(), *source.layers]
    params = abstract_params(source.config, NUMPY_DTYPES[source.dtype])
    tree, files = orbax_files(params, {DENSE: len(source.layers)}, leaves)
    provenance = {
        **origin,
        "dtype": source.config.dtype,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {name: _version(name) for name in ("moejax", "orbax-checkpoint", "jax")},
    }
    manifest = _record(work, Manifest(provenance, source.dtype, tree, experts={DENSE: {}}))
    checksums = {}
    for name, content in (files | copied_files(source)).items():
        path = work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        checksums[name] = write_file(path, content)
    return _record(work, manifest.with_files(checksums))


def _whole(source: Source, work: pathlib.Path, manifest: Manifest) -> Manifest:
    """The manifest without the units that are not on disk as it says."""
    tree, params, layers = work / manifest.tree, source.params, source.layers
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
                DENSE: {i: c for i, c in manifest.experts[DENSE].items() if is_whole(layers[i], c)}
            },
        )


def _record(work: pathlib.Path, manifest: Manifest) -> Manifest:
    replace_file(work / JOURNAL, to_bytes(manifest))
    return manifest


def _write_chunks(tree: pathlib.Path, leaf: Leaf, chunks: Iterator[np.ndarray]) -> tuple[str, ...]:
    """Writes a leaf, several chunks at once; returns their checksums."""

    def write(name: str, chunk: np.ndarray) -> str:
        path = tree / leaf.name / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return write_file(path, as_bytes(chunk))

    checksums: list[str] = []
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        writing: collections.deque[concurrent.futures.Future[str]] = collections.deque()
        for name, chunk in zip(leaf.chunks, chunks, strict=True):
            if len(writing) > WORKERS:  # no more chunks in memory than are being written
                checksums.append(writing.popleft().result())
            writing.append(pool.submit(write, name, chunk))
        return (*checksums, *(each.result() for each in writing))


def _compare_chunks(tree: pathlib.Path, leaf: Leaf, chunks: Iterator[np.ndarray]) -> None:
    """Raises UserError if a chunk on disk is not the source's, and takes it from the disk."""
    for name, chunk in zip(leaf.chunks, chunks, strict=True):
        path = tree / leaf.name / name
        with open(path, "rb") as file:
            if hasattr(os, "posix_fadvise"):  # else memory would answer for the disk
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            found = np.fromfile(file, np.uint8)
        if not np.array_equal(found, chunk.reshape(-1).view(np.uint8)):
            path.unlink()  # so that the next conversion does not take its checksum's word
            raise UserError(
                f"{path}: read back, it is not what the source has: the disk or the memory is at "
                "fault. Run the same command again, which writes this piece anew"
            )


def _checksum_of(path: pathlib.Path) -> str | None:
    try:
        return file_checksum(path)
    except FileNotFoundError:
        return None


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:  # run from its source
        return "unknown"


@contextlib.contextmanager
def _locked(work: pathlib.Path) -> Iterator[None]:
    """Holds a lock, which ends with the process however it ends."""
    # Not the directory's own: NFS locks only what is open for writing.
    with open(work / LOCK, "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{work}: another conversion is writing it; wait for its end") from None
        except OSError as error:
            log.warning(
                "%s: this filesystem has no locks (%s); run no second conversion to the same place",
                work,
                error.strerror,
            )
        yield


def _sync_directory(path: pathlib.Path) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _require_space(work: pathlib.Path, nbytes: int) -> None:
    free = shutil.disk_usage(work).free
    if free < nbytes:
        raise UserError(
            f"{work}: {nbytes / 2**30:.1f} GiB are still to be written, but the disk has "
            f"{free / 2**30:.1f} GiB free; free some, or choose another destination"
        )


def _write_error(work: pathlib.Path, error: OSError) -> UserError:
    path = error.filename or work
    if error.errno in _NO_SPACE:
        return UserError(
            f"{path}: {error.strerror}: the disk is full, or a limit on files is reached. What is "
            f"whole in {work} is kept: free some space and run the same command again"
        )
    return UserError(f"{path}: cannot be read or written: {error.strerror or error}")

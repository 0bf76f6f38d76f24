"""The directory that a conversion writes into: DST.partial, which becomes DST at the end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import pathlib
import shutil
from collections.abc import Iterator

from moejax.checkpoints.orbax.manifest import JOURNAL, MANIFEST
from moejax.errors import UserError

log = logging.getLogger("moejax")

LOCK = "moejax.lock"
"""A file in DST.partial that is locked while a conversion writes there."""

_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def free_destination(destination: str | os.PathLike[str]) -> pathlib.Path:
    """The path of a new checkpoint, with its links resolved. Raises UserError if it exists and is
    not an empty directory."""
    try:
        # Links are resolved, since the rename at the end cannot replace a link by a directory.
        dst = pathlib.Path(destination).expanduser().resolve()
    except (OSError, RuntimeError) as error:
        raise UserError(f"{destination}: cannot be resolved: {error}") from None
    if dst.exists() and not (dst.is_dir() and not any(dst.iterdir())):
        raise UserError(f"{dst}: already there; delete it or choose another destination")
    return dst


@contextlib.contextmanager
def write_beside(dst: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields DST.partial, locked. It becomes DST when the block ends, unless the block raises.

    - `dst`: the result of free_destination.

    Raises UserError for errors of the filesystem, and for a DST.partial that holds other files.
    """
    work = dst.with_name(dst.name + ".partial")
    try:
        if dst.exists():  # so that an error comes now, not at the rename hours later
            dst.rmdir()
    except OSError as error:
        raise UserError(
            f"{dst}: the empty directory cannot be replaced, as mount points cannot "
            f"({error.strerror}); give a directory below it, {dst / 'model'}"
        ) from None
    try:
        work.mkdir(parents=True, exist_ok=True)
        _require_ours(work)
        with _hold_lock(work):
            yield work
            os.rename(work, dst)
            # Only now, since a second conversion needs the lock as long as DST.partial exists.
            (dst / LOCK).unlink()
            directory = os.open(dst.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
    except OSError as error:
        raise _write_error(work, error) from error


def _require_ours(work: pathlib.Path) -> None:
    names = {path.name for path in work.iterdir()}
    strangers = sorted(names - {f"{JOURNAL}.new", LOCK})
    if strangers and not names & {JOURNAL, MANIFEST}:
        raise UserError(
            f"{work}: the conversion needs this directory, but it holds {strangers[0]!r} and no "
            "unfinished conversion; choose another destination, or move it away"
        )


@contextlib.contextmanager
def _hold_lock(work: pathlib.Path) -> Iterator[None]:
    """Holds a lock, which the kernel releases when the process ends. Raises UserError where another
    conversion holds it."""
    # A file is locked, not the directory: NFS locks only files that are open for writing.
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


def require_space(work: pathlib.Path, nbytes: int) -> None:
    """Raises UserError where the disk has fewer than `nbytes` free."""
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

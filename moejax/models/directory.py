"""The checkpoint's directory and the gate that each of its files passes: they come from strangers.

Whatever opens a file of a checkpoint opens it by open_regular or read_bounded, or, where another
library opens it, after require_own_file.
"""

from __future__ import annotations

import importlib.resources
import io
import os
import pathlib
import stat

from moejax.errors import UserError
from moejax.models.json_values import parse_json

FOLLOW_LINKS = "MOEJAX_FOLLOW_LINKS"
"""Environment variable; "1" allows files that are links out of the checkpoint's directory."""

MOST_JSON = 100 * 2**20
"""Bytes of a JSON file; the index of a checkpoint with 100,000 tensors has 10 MB."""

EMBEDDED = importlib.resources.files("moejax") / "demo"
"""The checkpoint "demo"."""


def checkpoint_directory(path: str | os.PathLike) -> pathlib.Path:
    """The path as a pathlib.Path; UserError, saying what was expected, if it is no directory."""
    directory = pathlib.Path(path).expanduser()
    try:
        if directory.is_dir():
            return directory
    except OSError as error:  # a parent that may not be searched, a name that is too long
        raise UserError(f"{path}: cannot be opened ({error.strerror})") from error
    expected = "expected a local directory with config.json and model.safetensors"
    if directory.exists():
        raise UserError(f"{path}: not a directory; {expected}")
    unfinished = directory.with_name(directory.name + ".partial")
    if unfinished.is_dir():
        raise UserError(
            f"{path}: no such directory, but {unfinished}: if that is an unfinished conversion, "
            "run the same `moejax convert` again"
        )
    raise UserError(f"{path}: no such directory; {expected}")


def open_regular(
    path: pathlib.Path, most: int | None = None, what: str = "a checkpoint"
) -> io.FileIO:
    """A file of at most so many bytes, opened for reading, without a buffer. what: it is for
    messages.

    Raises OSError, and at once UserError for a larger file or one that is not regular: opening a
    pipe would wait for a writer.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        check_size(path, os.fstat(descriptor), most, what)
    except UserError:
        os.close(descriptor)
        raise
    return io.FileIO(descriptor)


def read_bounded(path: pathlib.Path, most: int, what: str) -> bytes:
    """The bytes of a file. Arguments and errors as in open_regular."""
    with io.BufferedReader(open_regular(path, most, what)) as file:
        # No more than is there: a reader takes memory for all that it is asked for.
        return file.read(min(most, os.fstat(file.fileno()).st_size))


def require_own_file(
    path: pathlib.Path,
    directory: pathlib.Path | None = None,
    most: int | None = None,
    what: str = "a checkpoint",
) -> int:
    """The size of a file. Raises UserError unless path is a regular file of the checkpoint, of at
    most so many bytes.

    directory: the checkpoint's (default: path's parent). A link must lead to where may_lead_to
    allows: a checkpoint from a stranger must not make moejax read, or copy into a converted
    checkpoint, other files of this machine. what: it is, for messages.
    """
    try:
        status = path.stat()
        real = path.resolve()
        home = (path.parent if directory is None else directory).resolve()
    except FileNotFoundError:
        what = "a link to nothing" if path.is_symlink() else "no such file"
        raise UserError(f"{path}: {what}; download it again") from None
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: a loop of links
        raise UserError(f"{path}: cannot be read: {error}") from None
    check_size(path, status, most, what)
    if not may_lead_to(real, home):
        raise UserError(
            f"{path}: a link out of the checkpoint's directory, to {real}; put the file itself "
            f"there, or, if you made that link, set the environment variable {FOLLOW_LINKS}=1"
        )
    return status.st_size


def check_size(
    path: pathlib.Path, status: os.stat_result, most: int | None, what: str = "a checkpoint"
) -> None:
    """Raises UserError for a file that is not regular, or larger. Arguments as in open_regular."""
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        found = "a directory" if kind == stat.S_IFDIR else "a pipe, socket or device"
        raise UserError(f"{path}: {found}, where a file is expected")
    if most is not None and status.st_size > most:
        raise UserError(f"{path}: {status.st_size} bytes are too many for {what}; at most {most}")


def may_lead_to(real: pathlib.Path, home: pathlib.Path) -> bool:
    """Whether a checkpoint's link may lead to `real`: into the checkpoint, or, in the hub's cache
    (``models--*/snapshots``), to one of the cache's blobs. FOLLOW_LINKS allows all.

    real, home: without links; home: the checkpoint's directory or one in it.
    """
    if real.is_relative_to(home) or os.environ.get(FOLLOW_LINKS) == "1":
        return True
    return any(
        real.is_relative_to(cache / "blobs") and home.is_relative_to(cache / "snapshots")
        for cache in home.parents
        if cache.name.startswith("models--")
    )


def read_json(path: pathlib.Path, nan: bool = False) -> dict:
    """The JSON object in a file; UserError if it is missing, malformed or something else. nan: as
    in parse_json."""
    if not os.path.lexists(path):
        raise UserError(f"{path}: no such file; is {path.parent} a Hugging Face checkpoint?")
    require_own_file(path)
    try:
        value = parse_json(read_bounded(path, MOST_JSON, "a checkpoint's JSON file"), nan)
    except UserError:
        raise
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value

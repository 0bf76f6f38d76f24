"""The checkpoint's directory, and checks of its files, which come from strangers.

Code opens a file of a checkpoint by open_regular or read_bounded. If another library opens it, call
require_own_file first.
"""

from __future__ import annotations

import importlib.resources
import io
import os
import pathlib
import shlex
import stat

from host_offload.memory.bounded_reads import BoundedFile, open_within, read_within
from moejax.errors import UserError
from moejax.models.json_values import parse_json

FOLLOW_LINKS = "MOEJAX_FOLLOW_LINKS"
"""Environment variable; "1" allows files that are links out of the checkpoint's directory."""

MOST_JSON = 100 * 2**20
"""Most bytes of a JSON file. The index of a checkpoint with 100,000 tensors has 10 MB."""

EMBEDDED = importlib.resources.files("moejax") / "demo"
"""The checkpoint "demo"."""


def checkpoint_directory(path: str | os.PathLike) -> pathlib.Path:
    """The path as a pathlib.Path. Raises UserError, which says what is expected, for no directory
    and no GGUF file."""
    directory = pathlib.Path(path).expanduser()

    def is_one() -> bool:
        return directory.is_dir() or (directory.suffix == ".gguf" and directory.is_file())

    try:
        if read_within(directory, is_one):
            return directory
    except OSError as error:  # a parent without permission to search, a name that is too long
        raise UserError(f"{path}: cannot be opened ({error.strerror})") from error
    expected = (
        "expected a local directory with config.json and model.safetensors, or a GGUF file "
        "whose name ends in .gguf"
    )
    if _begins_as_gguf(directory):
        named = directory.with_suffix(
            ".gguf" if directory.suffix == ".bin" else f"{directory.suffix}.gguf"
        )
        raise UserError(
            f"{path}: a GGUF file whose name does not end in .gguf; rename it: "
            f"{shlex.join(['mv', str(path), str(named)])}"
        )
    if directory.exists():
        raise UserError(f"{path}: not a directory; {expected}")
    unfinished = directory.with_name(directory.name + ".partial")
    if unfinished.is_dir():
        raise UserError(
            f"{path}: no such directory, but {unfinished}: if that is an unfinished conversion, "
            "run the same `moejax convert` again"
        )
    missing = "file" if directory.suffix == ".gguf" else "directory"
    raise UserError(f"{path}: no such {missing}; {expected}")


def _begins_as_gguf(path: pathlib.Path) -> bool:
    try:
        with io.BufferedReader(open_regular(path)) as file:
            return file.read(4) == b"GGUF"
    except (OSError, UserError):
        return False


def open_regular(
    path: pathlib.Path, most: int | None = None, what: str = "a checkpoint"
) -> BoundedFile:
    """Opens a file of at most `most` bytes for reading, without a buffer and with a deadline.

    - `what`: the file's content, for messages.

    Raises OSError. Raises UserError at once for a larger file and for one that is not regular,
    since opening a pipe would wait for a writer.
    """
    descriptor = open_within(path)
    try:
        check_size(path, os.fstat(descriptor), most, what)
    except UserError:
        os.close(descriptor)
        raise
    return BoundedFile(path, descriptor)


def stamp_of(status: os.stat_result) -> tuple[int, ...]:
    """Size in bytes and times in ns of the last write and change of a file, which show whether it
    has changed since its header was read."""
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def read_bounded(path: pathlib.Path, most: int, what: str) -> bytes:
    """The bytes of a file. Arguments and errors: see open_regular."""
    with io.BufferedReader(open_regular(path, most, what)) as file:
        # Asks for the size of the file only, since a reader allocates all bytes that it is asked
        # for.
        return file.read(min(most, os.fstat(file.fileno()).st_size))


def require_own_file(
    path: pathlib.Path,
    directory: pathlib.Path | None = None,
    most: int | None = None,
    what: str = "a checkpoint",
) -> int:
    """The size of a regular file of the checkpoint.

    A link must lead to a place that may_lead_to allows: a checkpoint from a stranger must not make
    moejax read other files of this machine, or copy them into a converted checkpoint.

    - `most`: bytes.
    - `what`: the file's content, for messages.
    - `directory`: of the checkpoint (default: path's parent).

    Raises UserError for any other file, and for more bytes.
    """
    try:
        status, real, home = read_within(
            path,
            lambda: (path.stat(), path.resolve(), (directory or path.parent).resolve()),
        )
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
    """Raises UserError for a larger file or one that is not regular. Arguments: see
    open_regular."""
    kind = stat.S_IFMT(status.st_mode)
    if kind != stat.S_IFREG:
        found = "a directory" if kind == stat.S_IFDIR else "a pipe, socket or device"
        raise UserError(f"{path}: {found}, where a file is expected")
    if most is not None and status.st_size > most:
        raise UserError(f"{path}: {status.st_size} bytes are too many for {what}; at most {most}")


def may_lead_to(real: pathlib.Path, home: pathlib.Path) -> bool:
    """Whether a checkpoint's link may lead to `real`: into the checkpoint or, in the hub's cache
    (``models--*/snapshots``), to a blob of the cache. FOLLOW_LINKS allows every place.

    - `real`: the target, without links.
    - `home`: the checkpoint's directory or one in it, without links.
    """
    if real.is_relative_to(home) or os.environ.get(FOLLOW_LINKS) == "1":
        return True
    return any(
        real.is_relative_to(cache / "blobs") and home.is_relative_to(cache / "snapshots")
        for cache in home.parents
        if cache.name.startswith("models--")
    )


def read_json(path: pathlib.Path, nan: bool = False) -> dict:
    """The JSON object in a file. Raises UserError for a missing or malformed file and for another
    value.

    - `nan`: see parse_json.
    """
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

"""Policies in files of users: their classes, and which files decide what they do."""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.machinery
import importlib.util
import os
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from host_offload.policies.registry import setting_readers
from moejax.errors import UserError, as_user_error, user_errors
from pallas_kernels.option_text import parse_pairs

INSTALLED = (
    *(Path(sysconfig.get_path(n)) for n in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(Path(__file__).parents[3] / n for n in ("moejax", "host_offload", "pallas_kernels")),
)
"""Folders of what is installed, whose versions a record names; files elsewhere have digests."""

_reading = threading.local()


def _note_open(event: str, args: tuple[Any, ...]) -> None:
    if event == "open" and (found := getattr(_reading, "found", None)) is not None:
        path, mode = args[0], args[1] or "r"
        if isinstance(path, str | os.PathLike) and not {*"wax+"} & {*mode}:
            found.append(Path(os.path.abspath(path)))


@functools.cache  # an audit hook stays for the life of a process, so there is one
def _listen() -> None:
    sys.addaudithook(_note_open)


@contextlib.contextmanager
def record_reads() -> Iterator[list[Path]]:
    """Yields a list that gets the path of each file that this thread opens through Python."""
    _listen()
    before, _reading.found = getattr(_reading, "found", None), []
    try:
        yield _reading.found
    finally:
        _reading.found = before


def load_module(path: Path, where: str) -> ModuleType:
    """Runs the file of a policy, which finds modules beside it, and returns its module. The same
    content is run once.

    - `where`: the beginning of messages.

    Raises UserError for a file that is missing and for whatever it raises.
    """
    if not path.is_file():
        raise UserError(f"{where}there is no file {path}")
    module_name = f"moejax_policy_{path.stem}_{file_digest(path)[:12]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module  # dataclasses look their module up there
    sys.path.insert(0, str(path.parent))
    try:
        with as_user_error(f"{where}{path} cannot be read"), record_reads() as reads:
            spec.loader.exec_module(module)
        module.__moejax_reads__ = reads  # type: ignore[attr-defined]
    except BaseException:
        del sys.modules[module_name]
        raise
    finally:
        sys.path.remove(str(path.parent))
    return module


def find_class(module: ModuleType, name: str, where: str) -> type:
    """Returns a class of the module. Raises UserError if it has none of the name."""
    kinds = {n: v for n, v in vars(module).items() if isinstance(v, type)}
    if name not in kinds:
        has = ", ".join(sorted(n for n, kind in kinds.items() if hasattr(kind, "decide")))
        raise UserError(
            f"{where}{module.__file__} has no class {name}; it has {has or 'no policy'}"
        )
    return kinds[name]


def make_policy(
    name: str, pairs: str, made: Callable[..., Any], where: str, build: Callable[[dict], Any]
) -> tuple[Any, list[Path]]:
    """Parses the settings of a policy as `made` takes them, and builds it.

    - `pairs`: the text of its settings, "window=4,…".
    - `where`: begins the message of an error.
    - `build`: called with the settings.

    Returns (the policy, the files that it read). Raises UserError for unknown settings and for
    what building it raises.
    """
    with user_errors(where=where):
        settings = parse_pairs(name, pairs, setting_readers(made))
    with as_user_error(f"{where}{name} fails"), record_reads() as reads:
        return build(settings), reads


def digests_of(module: ModuleType, reads: list[Path]) -> dict[str, str]:
    """Returns the SHA-256 of the policy's file, of the modules that it imports and of the data that
    it read, by path; without what is installed.

    - `reads`: files that making the policy opened.
    """
    path = Path(str(module.__file__))
    found = {path: None, **dict.fromkeys(_imports(path, path.parent, {path}))}
    for read in (*module.__moejax_reads__, *reads):
        if read.suffix != ".pyc" and read.is_file() and not _is_installed(read):
            found[read] = None
    return {str(each): file_digest(each) for each in found}


def _imports(path: Path, home: Path, seen: set[Path]) -> Iterator[Path]:
    """Yields the files of the modules that a file imports, and of those that they import."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        names = []
        if isinstance(node, ast.Import):
            names = [each.name for each in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
        for name in names:
            file = _file_of(name, home)
            if file is not None and file not in seen and not _is_installed(file):
                seen.add(file)
                yield file
                yield from _imports(file, home, seen)


def _file_of(name: str, home: Path) -> Path | None:
    """Returns the file of a module; None for one that is not Python source or not there."""
    places: Any = [str(home), *sys.path]
    file = None
    for part in name.split("."):
        spec = importlib.machinery.PathFinder.find_spec(part, places)
        if spec is None:
            return None
        file, places = spec.origin, spec.submodule_search_locations
        if places is None:
            break
    return Path(file) if file and file.endswith(".py") else None


def _is_installed(path: Path) -> bool:
    return any(path.is_relative_to(folder) for folder in INSTALLED)


def file_digest(path: Path) -> str:
    """Returns the SHA-256 of a file, as hexadecimal digits; for a trace's directory that of its
    trace.json, which has the trace's id. Raises UserError if it cannot be read."""
    path = path / "trace.json" if path.is_dir() else path
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None

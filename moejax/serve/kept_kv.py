"""KV that outlives the process: sessions and the cached beginnings of prompts, in a directory.

Pages are bound to everything that decides their bits, so KV of another model, or of other options
that change bits, has another place. What one process holds at its end is what the next one finds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from host_offload.memory.arena import OutOfPages
from host_offload.memory.kv_cache import Block
from host_offload.memory.sequence_blocks import SequenceBlocks
from moejax.engine.loop import Engine
from moejax.errors import UserError
from moejax.requests.request import Session
from moejax.start.fields import Option
from moejax.start.options import OPTIONS, Config
from moejax.start.provenance import DEFAULTS, by_content, weights_of
from moejax.step.step_parts import StepSpec

_AT_ONCE = 256
"""Pages that are copied to the host at once."""

_PAGES = "tokens of a head side by side"
"""The layout of pages: those of a moejax that had another one are not read."""


class KeptKV:
    """The place of one model's KV in a directory: an index, and a file of pages that it names.

    - `directory`: the option `kv_dir`.
    - `options`, `steps`: with the weights and the machine they decide KV's bits.
    """

    def __init__(self, directory: str | os.PathLike[str], options: Config, steps: StepSpec):
        self._bound_to = _what_decides(options, steps)
        name = hashlib.sha256(json.dumps(self._bound_to).encode()).hexdigest()[:32]
        self._place = Path(directory).expanduser() / name
        self._index = self._place / "index.json"

    def save(self, engine: Engine) -> None:
        """Writes the KV of all sessions and all cached blocks, in place of what the directory held.
        Raises UserError if the files cannot be written; then those of before stay."""
        try:
            self._place.mkdir(parents=True, exist_ok=True, mode=0o700)
            with engine.undisturbed(), self._alone():
                self._save(engine)
        except OSError as error:
            raise UserError(f"{self._place}: KV cannot be kept ({error.strerror})") from error

    def _save(self, engine: Engine) -> None:
        cache, sessions = engine.scheduler.cache, engine.scheduler.sessions.all
        published = cache.published
        holders = [block for session in sessions for block in session.blocks]
        numbers = {block: i for i, block in enumerate(dict.fromkeys([*holders, *published]))}
        name = f"pages-{os.getpid()}-{os.urandom(4).hex()}.bin"
        index = {
            "bound_to": self._bound_to,
            "pages": name,
            "page_bytes": cache.page_bytes,
            "digests": self._write_pages(self._place / name, engine, [*numbers]),
            "published": [(numbers[block], key.hex()) for block, key in published.items()],
            "sessions": [_describe(session, numbers) for session in sessions],
        }
        text = json.dumps(index)
        partial = self._place / f"{name}.index"
        partial.write_text(f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}")
        partial.replace(self._index)
        for file in self._place.glob("pages-*"):
            if file.name != name:
                file.unlink(missing_ok=True)

    def _write_pages(self, path: Path, engine: Engine, blocks: Sequence[Block]) -> list[str]:
        """Writes the blocks' pages. Returns a digest of each."""
        digests = []
        try:
            with open(path, "xb") as file:
                for i in range(0, len(blocks), _AT_ONCE):
                    for page in engine.scheduler.cache.contents(blocks[i : i + _AT_ONCE]):
                        data = np.asarray(page).tobytes()
                        digests.append(_digest(data))
                        file.write(data)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return digests

    def restore(self, engine: Engine) -> int:
        """Gives an engine that has not run yet the sessions and cached blocks of the directory, as
        far as there is room: sessions first, the longest unused ones to host memory. Returns the
        tokens of their pages. Raises UserError for damaged files, by name."""
        if not self._index.exists():
            return 0
        with engine.undisturbed(), self._alone():
            index = self._read_index()
            with open(self._pages(index), "rb") as file:
                return _Restoring(engine, index, Path(file.name), file).run()

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Waits until no other process reads or writes here: each deletes the pages of others."""
        with open(self._place / "lock", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _read_index(self) -> dict[str, Any]:
        try:
            digest, _, text = self._index.read_text().partition("\n")
            index = json.loads(text)
        except (OSError, ValueError):
            raise _damaged(self._index) from None
        # Also that of a directory which somebody renamed.
        whole = hashlib.sha256(text.encode()).hexdigest() == digest
        if not whole or index["bound_to"] != json.loads(json.dumps(self._bound_to)):
            raise _damaged(self._index)
        return index

    def _pages(self, index: dict[str, Any]) -> Path:
        path = self._place / index["pages"]
        size = len(index["digests"]) * index["page_bytes"]
        if not path.is_file() or path.stat().st_size != size:
            raise _damaged(path)
        return path


class _Restoring:
    """One reading of the files of kept KV into an engine."""

    def __init__(self, engine: Engine, index: dict[str, Any], path: Path, file: Any):
        self._engine, self._index, self._path, self._file = engine, index, path, file
        self._cache, self._sessions = engine.scheduler.cache, engine.scheduler.sessions
        self._blocks: dict[int, Block] = {}
        """Blocks that have their page again, by number."""

    def run(self) -> int:
        for about in self._index["sessions"]:
            self._restore_session(about)
        keys = dict(self._index["published"])
        for number, block in self._blocks.items():
            if number in keys:
                self._cache.publish(block, bytes.fromhex(keys[number]))
        # Blocks that were used last come last.
        others = [number for number in keys if number not in self._blocks]
        others = others[len(others) - min(len(others), self._cache.available) :]
        for i in range(0, len(others), _AT_ONCE):
            some = others[i : i + _AT_ONCE]
            blocks = self._cache.adopt(self._read(some))
            for number, block in zip(some, blocks, strict=True):
                self._blocks[number] = block
                self._cache.publish(block, bytes.fromhex(keys[number]))
            for block in blocks:  # one by one: the first ones stay the longest unused
                self._cache.release([block])
        return len(self._blocks) * self._cache.arena.layout.page.block_size

    def _restore_session(self, about: dict[str, Any]) -> None:
        """Makes a session with its blocks, unless they have no room even where others are moved to
        the host."""
        numbers = [n for row in (about["state"], *about["rows"]) for n in row if n is not None]
        new = [number for number in dict.fromkeys(numbers) if number not in self._blocks]
        while self._cache.available < len(new) and self._sessions.overflow == "swap":
            if not self._sessions.evict():
                break
        try:
            blocks = self._cache.adopt(self._read(new))
        except OutOfPages:
            return
        self._cache.hold(self._blocks[n] for n in dict.fromkeys(numbers) if n in self._blocks)
        self._blocks |= dict(zip(new, blocks, strict=True))
        of = self._blocks.get
        session = self._sessions[about["session_id"]]
        restored = SequenceBlocks(
            self._sessions.page,
            [[None if number is None else of(number) for number in row] for row in about["rows"]],
            [self._blocks[number] for number in about["state"]],
        )
        restored.trim(len(about["tokens"]))
        self._sessions.replace(session, restored)
        session.tokens, session.pure = about["tokens"], about["pure"]
        session.dropped = about["dropped"]

    def _read(self, numbers: Sequence[int]) -> list[jax.Array]:
        size, pages = self._index["page_bytes"], []
        for number in numbers:
            self._file.seek(number * size)
            data = self._file.read(size)
            if _digest(data) != self._index["digests"][number]:
                raise _damaged(self._path)
            pages.append(np.frombuffer(data, np.uint16))
        return self._engine.runner.host_pages(pages)


def _describe(session: Session, numbers: dict[Block, int]) -> dict[str, Any]:
    """A session as JSON, its blocks as numbers."""
    blocks = session.blocks
    rows = [blocks.at(i) for i in range(len(blocks))]
    return {
        "session_id": session.session_id,
        "tokens": [*map(int, session.tokens)],
        "pure": session.pure,
        "dropped": session.dropped,
        "state": [numbers[block] for block in blocks.state],
        "rows": [[None if block is None else numbers[block] for block in row] for row in rows],
    }


def _what_decides(options: Config, steps: StepSpec) -> list[Any]:
    """What decides the bits of KV: weights, options, compiled steps, machine."""
    groups = (getattr(options, field.name) for field in dataclasses.fields(options))
    values = {name: value for group in groups for name, value in vars(group).items()}
    changing = {n: values[n] for n, one in OPTIONS.items() if _changes_kv(n, one)}
    shapes = steps.config, steps.dtype, steps.ops, steps.layout, steps.shapes
    return [
        _PAGES,
        weights_of(options.model.model, options.model.step),
        {name: str(value) for name, value in sorted(by_content(changing).items())},
        str(DEFAULTS),
        [str(shape) for shape in shapes],
        [steps.device_kind, steps.runtime, jax.__version__],
    ]


def _changes_kv(name: str, option: Option) -> bool:
    # A model is its weights, and seeds only draw tokens.
    return option.changes_bits and name not in ("model", "seed")


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _damaged(path: Path) -> UserError:
    return UserError(
        f"{path} is damaged or missing; delete {path.parent}, and its KV is computed again"
    )


def require_writable(path: str | os.PathLike[str]) -> None:
    """Makes the directory. Raises UserError if it cannot be made or written."""
    directory = Path(path).expanduser()
    with contextlib.suppress(OSError):
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not os.access(directory, os.W_OK | os.X_OK):
        raise UserError(f"kv_dir={str(path)!r} is no directory that can be written")

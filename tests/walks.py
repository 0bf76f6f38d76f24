"""Follows a value through running code: which functions of the packages get it, in which order.

A program under `follow` is run with a profile function. A call gets the value if one of its
arguments, but for self, is the value or holds it: in a sequence, a mapping, a field of a dataclass
or a NamedTuple, up to DEPTH deep. So a walk is read from what the code does, not from a list.
"""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from tests.conftest import REPOSITORY

PACKAGES = ("pallas_kernels", "host_offload", "moejax")
DEPTH = 4
MANY = 256
"""Items of a sequence or mapping that are looked at."""


@dataclasses.dataclass(frozen=True)
class Stop:
    """A function that got the value."""

    file: str
    function: str

    def __str__(self) -> str:
        return f"{self.file} {self.function}"


@dataclasses.dataclass(frozen=True)
class Walk:
    """What a value passed."""

    stops: tuple[Stop, ...]
    """The functions, each once, in the order of the first call that had the value."""
    chains: frozenset[tuple[Stop, ...]]
    """The functions that had the value at the same time, each called by the one before it or by
    what that one called."""

    def returns(self) -> set[tuple[Stop, ...]]:
        """Chains that enter a file for the second time, each cut off there."""
        found = set()
        for chain in self.chains:
            files = [stop.file for stop in chain]
            for i in range(1, len(files)):
                if files[i] != files[i - 1] and files[i] in files[:i]:
                    found.add(chain[: i + 1])
                    break
        return found


def holds(value: Any, is_it: Callable[[Any], bool], depth: int = DEPTH) -> bool:
    """Whether a value is the one that is followed, or has it inside."""
    if is_it(value):
        return True
    if depth == 0 or isinstance(value, str | bytes | int | float | type(None)):
        return False
    return any(holds(part, is_it, depth - 1) for part in parts(value))


def parts(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        yield from list(value.values())[:MANY]
    elif isinstance(value, Sequence) and len(value) <= MANY:
        yield from value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        yield from (getattr(value, name) for name in names if hasattr(value, name))


class _Follower:
    """The calls of one thread."""

    def __init__(self, is_it: Callable[[Any], bool]) -> None:
        self.is_it = is_it
        self.stack: list[Stop | None] = []
        self.stops: dict[Stop, None] = {}
        self.chains: set[tuple[Stop, ...]] = set()
        self.places: dict[CodeType, Stop | None] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and self.stack:
            self.stack.pop()
        if event != "call":
            return
        stop = self._stop(frame.f_code)
        if stop is None or not self._is_given(frame):
            self.stack.append(None)
            return
        self.stack.append(stop)
        self.stops.setdefault(stop)
        chain = [stop for stop in self.stack if stop is not None]
        self.chains.add(tuple(s for i, s in enumerate(chain) if i == 0 or s != chain[i - 1]))

    def _stop(self, code: CodeType) -> Stop | None:
        if code not in self.places:
            path = Path(code.co_filename)
            inside = path.is_relative_to(REPOSITORY)
            file = path.relative_to(REPOSITORY) if inside else path
            ours = inside and file.parts[0] in PACKAGES and not code.co_name.startswith("<")
            self.places[code] = Stop(str(file), code.co_qualname) if ours else None
        return self.places[code]

    def _is_given(self, frame: FrameType) -> bool:
        code = frame.f_code
        count = code.co_argcount + code.co_kwonlyargcount
        names = [name for name in code.co_varnames[:count] if name not in ("self", "cls")]
        given = frame.f_locals
        return any(holds(given[name], self.is_it) for name in names if name in given)


def follow(is_it: Callable[[Any], bool], run: Callable[[], Any]) -> Walk:
    """Runs `run` and follows what `is_it` recognises, in this thread and those that it starts."""
    followers: list[_Follower] = []

    def begin(frame: FrameType, event: str, arg: Any) -> None:
        follower = _Follower(is_it)
        followers.append(follower)
        sys.setprofile(follower)
        follower(frame, event, arg)

    main = _Follower(is_it)
    followers.append(main)
    threading.setprofile(begin)
    sys.setprofile(main)
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    stops = tuple(dict.fromkeys(stop for follower in followers for stop in follower.stops))
    return Walk(stops, frozenset(c for follower in followers for c in follower.chains))

"""Follows a value through running code: which functions of the packages get it, in which order.

A program under `follow` is run with a profile function. A call has the value if one of its
arguments, but for self, is the value or holds it, when the call begins or when it ends (a buffer
that it fills): in a sequence, a mapping, a field of a dataclass or a NamedTuple, up to DEPTH deep.
So a walk is read from what the code does, not from a list.
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


@dataclasses.dataclass
class _Call:
    """A call of a function of the packages; stop: None for others."""

    stop: Stop | None
    has_value: bool
    inner: list[_Call] = dataclasses.field(default_factory=list)
    """The calls within it that have the value; those within calls that do not are here too."""


class _Follower:
    """The calls of one thread."""

    def __init__(self, is_it: Callable[[Any], bool]) -> None:
        self.is_it = is_it
        self.stack = [_Call(None, False)]
        self.places: dict[CodeType, Stop | None] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            stop = self._stop(frame.f_code)
            self.stack.append(_Call(stop, stop is not None and self._is_given(frame)))
        elif event == "return" and len(self.stack) > 1:
            call = self.stack.pop()
            call.has_value |= call.stop is not None and self._is_given(frame)
            self.stack[-1].inner += [call] if call.has_value else call.inner

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


def chains_of(calls: list[_Call], before: tuple[Stop, ...] = ()) -> Iterator[tuple[Stop, ...]]:
    """Every chain of calls that have the value, in the order of calls."""
    for call in calls:
        assert call.stop is not None
        chain = before if before[-1:] == (call.stop,) else (*before, call.stop)
        yield chain
        yield from chains_of(call.inner, chain)


def follow(is_it: Callable[[Any], bool], run: Callable[[], Any]) -> Walk:
    """Runs `run` and follows what `is_it` recognises, in this thread and those that it starts."""
    followers = [_Follower(is_it)]

    def begin(frame: FrameType, event: str, arg: Any) -> None:
        followers.append(_Follower(is_it))
        sys.setprofile(followers[-1])
        followers[-1](frame, event, arg)

    threading.setprofile(begin)
    sys.setprofile(followers[0])
    try:
        run()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    chains = [chain for follower in followers for chain in chains_of(follower.stack[0].inner)]
    return Walk(tuple(dict.fromkeys(chain[-1] for chain in chains)), frozenset(chains))

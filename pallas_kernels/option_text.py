"""The grammar of options that are text: ``NAME[=PATH][,KEY=VALUE…]``.

`parse_option` and `parse_pairs` read ``placement=prescope,per_token=20us``,
``precision=dynaexq,alpha=0.9``, ``prefetch=learned=FILE`` and ``ops=plan=xla,route=pallas``. So all
mistakes get one form of message, with the nearest word that exists. `reads` turns such a text into
an object.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")

Reader = Callable[[str], Any]
"""Reads a value. Raises ValueError whose text ends the sentence "KEY='text' is not …"."""


class OptionText(NamedTuple):
    """An option that was read."""

    name: str
    path: str | None
    """The text after ``NAME=``; None: there is none."""
    settings: dict[str, Any]


def parse_option(
    option: str,
    text: str,
    settings: Mapping[str, Mapping[str, Reader]],
    *,
    paths: Iterable[str] = (),
    known: Iterable[str] = (),
) -> OptionText:
    """Reads ``NAME[=PATH][,KEY=VALUE…]``.

    - `option`: its name in messages, such as "precision".
    - `settings`: name → readers of its keys.
    - `paths`: names that take ``=PATH``.
    - `known`: further names for messages, which are read elsewhere.

    Raises ValueError for an unknown name or key, a key that is given twice, a value that its reader
    refuses, and a path for a name that takes none.
    """
    first, *pairs = text.split(",")
    name, equals, path = (part.strip() for part in first.partition("="))
    if name not in settings:
        raise ValueError(unknown(option, name, (*settings, *known)))
    if equals and name not in set(paths):
        raise ValueError(f"{option} {name!r} takes no file; leave out ={path}")
    if equals and not settings[name]:
        # Nothing can follow the path, so a comma is a part of it.
        return OptionText(name, text.partition("=")[2].strip() or None, {})
    found = parse_pairs(f"{option} {name!r}", ",".join(pairs), settings[name])
    return OptionText(name, path or None, found)


def parse_pairs(whose: str, text: str, readers: Mapping[str, Reader]) -> dict[str, Any]:
    """Reads ``KEY=VALUE,…``; "" is {}.

    - `whose`: the owner of the keys in messages.

    Raises ValueError as parse_option.
    """
    found: dict[str, Any] = {}
    for pair in text.split(",") if text else ():
        key, equals, value = (part.strip() for part in pair.partition("="))
        if key in readers and not equals:
            raise ValueError(f"{whose}: {key} needs a value; write {key}=…")
        if key not in readers:
            keys = ", ".join(f"{key}=…" for key in readers) or "none"
            raise ValueError(
                f"{whose} has no setting {pair.strip()!r}{nearest(key, readers)}; known: {keys}"
            )
        if key in found:
            raise ValueError(f"{whose}: {key} is given twice; leave one of them out")
        found[key] = read_value(f"{whose}: {key}=", value, readers[key])
    return found


def read_value(whose: str, text: str, reader: Reader) -> Any:
    """Reads one value.

    - `whose`: words before the value in messages, such as ``--epsilon ``.

    Raises ValueError for a text that the reader refuses.
    """
    try:
        return reader(text)
    except ValueError as error:
        raise ValueError(f"{whose}{text!r} is not {error}") from None


def reads(
    option: str, kind: type[T], settings: Mapping[str, Mapping[str, Reader]]
) -> Callable[[str | T], T]:
    """Makes a function that reads an option's text as an object: ``NAME,KEY=VALUE…`` becomes
    kind(NAME, KEY=VALUE…). An object passes unchanged. The function raises ValueError as
    parse_option and the class do."""
    made: Any = kind

    def read(given: str | T) -> T:
        if isinstance(given, str):
            name, _, found = parse_option(option, given, settings)
            return made(name, **found)
        if not isinstance(given, kind):
            raise ValueError(f"{option} is a name, such as {next(iter(settings))}, not {given!r}")
        return given

    return read


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """The message for an unknown name: ``unknown eviction policy 'lruu', did you mean 'lru'?;
    known: …``."""
    known = list(known)
    return f"unknown {what} {name!r}{nearest(name, known)}; known: {', '.join(known)}"


def nearest(word: str, known: Iterable[str]) -> str:
    """``, did you mean 'WORD'?`` with the nearest known word, or "" if no known word is near."""
    close = difflib.get_close_matches(word[:100], list(known), 1, 0.7)
    return f", did you mean {close[0]!r}?" if close else ""


# ---- readers


def one_of(*names: str) -> Reader:
    """Reads one of these words."""

    def read(text: str) -> str:
        if text not in names:
            raise ValueError(f"one of {', '.join(names)}{nearest(text, names)}")
        return text

    return read


def whole(least: int = 0) -> Reader:
    """Reads a whole number, `least` or more."""

    def read(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise ValueError(f"a whole number, {least} or more")
        return int(text)

    return read


def number(text: str) -> float:
    """Reads a number, such as 0.9 or 1e-3."""
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def share(text: str) -> float:
    """Reads a share: 0.25 or 25%."""
    digits = text.removesuffix("%")
    try:
        found = float(digits) / (1 if digits == text else 100)
    except ValueError:
        found = -1.0
    if not 0 <= found <= 1:
        raise ValueError("a share from 0 to 1 or in %")
    return found


def words(text: str) -> tuple[str, ...]:
    """Reads several words: probs+gate_input."""
    if not all(found := tuple(word.strip() for word in text.split("+"))):
        raise ValueError("words with + between them")
    return found


def yes(text: str) -> bool:
    """Reads true or false."""
    if text not in ("true", "false"):
        raise ValueError("true or false")
    return text == "true"


_IN_A_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "µs": 1e6, "ns": 1e9, "": 1.0}
_TIME = re.compile(r"([0-9.]+(?:e-?[0-9]+)?) *(s|ms|us|µs|ns|)", re.ASCII)


def seconds(text: str) -> float:
    """Reads a time in seconds: 20us, 1.5ms, or a number of seconds."""
    found = _TIME.fullmatch(text)
    try:
        return float(found[1]) / _IN_A_SECOND[found[2]] if found else number("")
    except ValueError:
        raise ValueError("a time; write 20us, 1.5ms or 0.002s") from None

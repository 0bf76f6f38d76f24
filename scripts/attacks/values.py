"""Hostile values: of the type that a field says, of other types, and as the text of JSON."""

from __future__ import annotations

import dataclasses
import decimal
import fractions
import json
import random
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from moejax import SamplingParams


def fields_of(kind: type) -> dict[str, Any]:
    """Name → type of every field of a dataclass that its caller gives."""
    hints = typing.get_type_hints(kind)
    return {f.name: hints[f.name] for f in dataclasses.fields(kind) if f.init}


FIELDS = fields_of(SamplingParams)
"""A field that is new is attacked unasked."""

POWERS = tuple(2**n + d for n in (7, 8, 15, 16, 31, 32, 53, 63, 64, 128) for d in (-1, 0, 1))
ENORMOUS = (10**20, 10**400, 10**4299, 2**20000)
"""The last has more digits than Python prints."""
FLOATS = (
    *(float("nan"), float("inf"), float("-inf"), 1e308, -1e308, 5e-324, 1e-320, 1e-30, -0.0),
    *(0.0, 1e-6, 0.5, 0.999999, 1.0, 1.0000001, 2.0, 2.1, -1.0, -2.0, 3.5e38, 1e9, 100.0),
)
TEXTS = (
    *("", "\0", "a\0b", "\ud800", "\udfff\ud800", "\ufffd", "\u202e", "é", "e", " a", "\n", "%s"),
    *("{}", "{{ 7*7 }}", "<|endoftext|>", "NaN", "1e400", "٣", "²", "-1", "0x10", "../../etc"),
)


def pick(rng: random.Random, among: Sequence[Any]) -> Any:
    return among[rng.randrange(len(among))]


def integer(rng: random.Random) -> int:
    """Small ones, edges of machine types, and ones that no machine type holds."""
    draw = rng.random()
    if draw < 0.4:
        return rng.randrange(-3, 40)
    if draw < 0.5:
        return rng.randrange(4000, 4200)  # about the vocabulary's end
    if draw < 0.9:
        return pick(rng, POWERS) * pick(rng, (1, 1, 1, -1))
    return pick(rng, ENORMOUS) * pick(rng, (1, -1))


def number(rng: random.Random) -> Any:
    draw = rng.random()
    if draw < 0.6:
        return pick(rng, FLOATS)
    return rng.uniform(-3, 3) if draw < 0.8 else integer(rng)


def text(rng: random.Random) -> str:
    draw = rng.random()
    if draw < 0.7:
        return pick(rng, TEXTS)
    if draw < 0.95:
        return "".join(chr(rng.randrange(0x3000)) for _ in range(rng.randrange(1, 60)))
    return pick(rng, TEXTS) * pick(rng, (1000, 300_000))


def nested(depth: int) -> list:
    """A list in a list in a list."""
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


def _itself() -> list:
    value: list = []
    value.append(value)
    return value


OTHERS: tuple[Any, ...] = (
    *(None, True, False, b"", b"\xff" * 9, object(), type, ..., _itself(), nested(100_000)),
    *([], {}, set(), [[]], [None], {"a": {}}, {None: None}, range(0), range(10**9)),
    *(np.int32(3), np.uint64(2**64 - 1), np.float32("nan"), np.float16(1), np.bool_(True)),
    *(np.zeros(0), np.zeros((2, 2)), np.arange(3), np.array("a"), np.array(2**40)),
    *(fractions.Fraction(10**400, 3), decimal.Decimal("1e400"), decimal.Decimal("NaN")),
    *(1j, "x" * 1_000_000, [1.5, "a"], memoryview(b"abc"), {"x": 1}.keys(), bytearray(3)),
)


def other(rng: random.Random) -> Any:
    """A value of no type that anybody expects."""
    return pick(rng, (*OTHERS, integer(rng), number(rng), text(rng)))


def of_type(rng: random.Random, hint: Any) -> Any:
    """A value of that type, mostly at the edges of what it can be."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return of_type(rng, pick(rng, arguments))
    if hint is bool:
        return rng.random() < 0.5
    if hint is int:
        return integer(rng)
    if hint is float:
        return number(rng)
    if hint is str:
        return text(rng)
    if hint in (None, type(None)):
        return None
    count = pick(rng, (0, 1, 2, 3, 20, 128, 129, 300, 301, 5000))
    if origin is tuple:
        return tuple(of_type(rng, argument) for argument in arguments if argument is not ...)
    if origin is Mapping or origin is dict:
        return {of_type(rng, arguments[0]): of_type(rng, arguments[1]) for _ in range(count)}
    if origin in (Sequence, Iterable, list):
        return [of_type(rng, arguments[0]) for _ in range(count)]
    return other(rng)


def hostile(rng: random.Random, hint: Any) -> Any:
    """A value for a field of that type: three of four times of this type."""
    return of_type(rng, hint) if rng.random() < 0.75 else other(rng)


def plain(rng: random.Random) -> dict[str, Any]:
    """Fields of a request that runs."""
    fields: dict[str, Any] = {"max_tokens": rng.randrange(1, 12), "seed": rng.randrange(2**31)}
    fields["temperature"] = pick(rng, (0.0, 0.7, 1.0))
    if rng.random() < 0.2:
        fields |= {"repetition_penalty": 1.2, "logprobs": rng.randrange(4)}
    return fields


def attacked(rng: random.Random) -> dict[str, Any]:
    """Fields of a request, one to four of them hostile."""
    names = rng.sample(sorted(FIELDS), pick(rng, (1, 1, 1, 2, 4)))
    return plain(rng) | {name: hostile(rng, FIELDS[name]) for name in names}


def shown(value: object) -> str:
    """A value for a message: short, and the same whenever it is drawn again."""
    if isinstance(value, int) and not -(10**50) < value < 10**50:
        return f"an integer of {value.bit_length()} bits"
    plain = isinstance(value, int | float | str | None)
    return f"{value!r:.60}" if plain else type(value).__name__


# ---- as JSON, with what json.dumps would not write

RAW = (
    *("1" + "0" * 400, "-1" + "0" * 400, "9" * 5000, "1e400", "-1e400", "1e-400", "NaN", "-0"),
    *("Infinity", "01", "1.", "--1", "+1", "1e", "true", "null", '""', '"\\u0000"', '"\\ud800"'),
    *('"\\ud800\\udc00"', '"' + "a" * 100_000 + '"', '"\0"', '"\\x"', '"\t"', "[]", "{}", "[[]]"),
    *('{"a": 1, "a": 2}', '{"1": 1e400}', '{"1": ' + "1" + "0" * 400 + "}", '{"²": 1}'),
    *('{"\\ud800": 1}', "[" * 2000 + "]" * 2000, "[" * 200_000, '{"a":' * 100_000, "undefined"),
    *("[1, 2", "[1,]", "[1.5]", "[true]", "[-1]", f"[{2**31}]", f"[{2**63}]", "[4096]", "/*", ""),
)


def raw_json(rng: random.Random, hint: Any = None) -> str:
    """The text of a JSON value, or of something that looks like one."""
    if rng.random() < 0.5:
        return pick(rng, RAW)
    value = hostile(rng, hint) if hint is not None else pick(rng, (integer, number, text))(rng)
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return pick(rng, RAW)

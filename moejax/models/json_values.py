"""JSON from strangers: what is accepted, and which numbers its values are."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, TypeGuard


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer; true and false, which Python counts as such, are none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    return is_integer(value) or isinstance(value, float)


def parse_json(text: str | bytes, nan: bool = False) -> Any:
    """The value of a JSON text as the standard has it; ValueError otherwise.

    Unlike json.loads, refuses a key given twice (readers disagree on which one counts), NaN and
    infinite numbers and names that are not Unicode, and brackets nested beyond Python's stack.
    nan: NaN and infinite numbers are allowed.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        return json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=float if nan else _refuse_constant,
            parse_float=float if nan else _finite,
        )
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None


def _object(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for key, item in pairs:
        if key in value:
            raise ValueError(f"the key {key!a} is there twice")
        if not key.isascii():
            key.encode()  # UnicodeEncodeError, a ValueError, for half a surrogate pair
        value[key] = item
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits[:40]} is too large")
    return value

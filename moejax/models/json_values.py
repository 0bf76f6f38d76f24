"""Reads JSON and YAML from strangers, within limits."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from typing import Any, TypeGuard

import yaml

from moejax.errors import UserError

MOST_VALUES = 4_000_000
"""Most values of a JSON text: a few seconds of parsing. A header of 100,000 tensors has 800,000."""

MOST_YAML = 256 << 10
"""Most characters of a YAML text: a few seconds of parsing."""


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer. True and False are not, although Python counts them as
    integers."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> TypeGuard[int | float]:
    return is_integer(value) or isinstance(value, float)


def parse_json(text: str | bytes, nan: bool = False) -> Any:
    """The value of a standard JSON text. Raises ValueError for anything else.

    Unlike json.loads it refuses a key given twice (readers disagree on which one counts), NaN and
    infinite numbers, names that are not Unicode, brackets nested beyond Python's stack, and more
    than MOST_VALUES values. Infinity, which older files of transformers have, becomes what newer
    ones have for it, an object.

    - `nan`: allow NaN and infinite numbers.
    """
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    values = sum(map(text.count, ",[{")) if len(text) > MOST_VALUES else 0
    if values > MOST_VALUES:
        raise ValueError(f"about {values} values; at most {MOST_VALUES} are read")
    try:
        return json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=float if nan else _read_constant,
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


def _read_constant(name: str) -> dict[str, str]:
    if name == "Infinity":
        return {"__float__": name}
    raise ValueError(f"{name} is not a JSON number")


def _finite(digits: str) -> float:
    value = float(digits)
    if math.isinf(value):
        raise ValueError(f"the number {digits[:40]} is too large")
    return value


def parse_yaml(text: str) -> Any:
    """The value of a YAML text. Aliases are refused, since they make an endless value of a short
    text.

    Raises ValueError for aliases, more than MOST_YAML characters, and invalid YAML.
    """
    if len(text) > MOST_YAML:
        raise ValueError(f"{len(text)} characters of YAML; at most {MOST_YAML} are read")
    try:
        return yaml.load(text, _PlainLoader)
    except RecursionError:
        raise ValueError("brackets are nested too deeply") from None
    except Exception as error:  # errors of YAML, int, float and datetime
        raise ValueError(str(error) or repr(error)) from None


def read_yaml_mapping(path: str | os.PathLike[str], of: str) -> dict[str, Any]:
    """The mapping in a YAML or JSON file.

    - `of`: what the mapping holds, for messages.

    Raises UserError for a file that cannot be read or holds something else.
    """
    try:
        with open(path, "rb") as file:  # which may be a pipe
            found = parse_yaml(file.read(MOST_YAML + 1).decode())
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise UserError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} must be a mapping {of}, not {type(found).__name__}")
    return found


class _PlainLoader(yaml.SafeLoader):
    """Reads YAML's plain values, and integers that Python can print."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases (*name) are not read; write the value out")
        return super().compose_node(parent, index)

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        value = super().construct_yaml_int(node)
        if abs(value) >= 1 << 63:
            raise ValueError("an integer of more than 64 bits")
        return value


_PlainLoader.add_constructor("tag:yaml.org,2002:int", _PlainLoader.construct_yaml_int)

"""What a request with structured outputs asks for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from moejax.errors import UserError, shown

MAX_GRAMMAR = 1 << 18
"""Most characters of a schema, expression or grammar."""


@dataclasses.dataclass(frozen=True)
class StructuredOutputsParams:
    """What the text of an answer must be: exactly one of these. Names are vLLM's.

    Raises UserError for values of wrong types.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema; the text is JSON that fits it. Stored as text."""
    regex: str | None = None
    """A regular expression that the whole text matches, without look-around or back-references."""
    choice: Sequence[str] | None = None
    """The text is one of these. Stored as a tuple."""
    grammar: str | None = None
    """A grammar in llguidance's variant of Lark's syntax."""
    json_object: bool | None = None
    """True: the text is any JSON object."""

    def __post_init__(self):
        given = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) is not None]
        if len(given) != 1:
            names = ", ".join(f.name for f in dataclasses.fields(self))
            found = " and ".join(given) or "none"
            raise UserError(f"structured_outputs needs exactly one of {names}, found {found}")
        (name,), value = given, getattr(self, given[0])
        if name == "json_object":
            if value is not True:
                raise UserError(f"structured_outputs: json_object must be true, got {shown(value)}")
            return
        if name == "json" and isinstance(value, Mapping):
            try:
                value = json.dumps(value, allow_nan=False)
            except (TypeError, ValueError, RecursionError) as error:
                raise UserError(f"structured_outputs: json is no JSON schema ({error})") from None
        if name == "choice":
            value = _choices(value)
        elif not isinstance(value, str):
            raise UserError(f"structured_outputs: {name} must be a string, got {shown(value)}")
        if sum(map(len, value)) > MAX_GRAMMAR:
            raise UserError(f"structured_outputs: {name} has more than {MAX_GRAMMAR} characters")
        object.__setattr__(self, name, value)


def _choices(value: object) -> tuple[str, ...]:
    if not isinstance(value, str | bytes | Mapping) and isinstance(value, Iterable):
        found = tuple(value)
        if found and all(isinstance(text, str) and text for text in found):
            return found
    raise UserError(
        f"structured_outputs: choice must be a list of strings that are not empty, got "
        f"{shown(value)}"
    )

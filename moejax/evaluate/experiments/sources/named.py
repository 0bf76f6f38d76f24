"""Names with settings, as definitions write them: NAME or NAME(key=value, …)."""

from __future__ import annotations

import ast
from typing import Any

from moejax.errors import UserError


def named(text: str, what: str) -> tuple[str, dict[str, Any]]:
    """(name, settings) of a text. what: for messages, such as "policy 'lru(2)'". Raises UserError
    for settings that are not plain values by name."""
    name, bracket, rest = text.partition("(")
    if not bracket:
        return name.strip(), {}
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError
        return name.strip(), {str(k.arg): ast.literal_eval(k.value) for k in call.keywords if k.arg}
    except (SyntaxError, ValueError):
        raise UserError(
            f"{what}: settings are written as NAME(key=value), with plain values"
        ) from None

"""Parses byte counts, rates and shares."""

from __future__ import annotations

import contextlib
import operator
import re
from fractions import Fraction

from host_offload.memory.budget import Share
from moejax.errors import UserError

_PREFIXES = "kmgt"
_SIZE = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*(?:([kmgt])(i?b)?|b)?", re.IGNORECASE | re.ASCII)
_PERCENT = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*%", re.ASCII)


def parse_size(value: int | str) -> int:
    """Parses bytes from ``"6GiB"``, ``"512MB"``, ``"1.5g"``, ``"4096"`` or an int.

    Upper and lower case mean the same. As in GNU coreutils, K, M, G, T and KiB, MiB, GiB, TiB are
    powers of 1024, and KB, MB, GB, TB are powers of 1000. A number without a unit is bytes. A
    fraction of a byte is dropped.

    Raises UserError for anything else.
    """
    if isinstance(value, str):
        match = _SIZE.fullmatch(value.strip())
        if match and (match[2] or "." not in match[1]):
            base = 1000 if (match[3] or "").lower() == "b" else 1024
            power = _PREFIXES.index(match[2].lower()) + 1 if match[2] else 0
            return int(Fraction(match[1]) * base**power)
    elif not isinstance(value, bool) and hasattr(value, "__index__") and value >= 0:
        return operator.index(value)
    raise UserError(
        f"{value!r} is not a size; write bytes as a whole number or with a unit, "
        f'such as "6GiB", "512MB" or "1.5G"'
    )


def parse_rate(value: int | float | str) -> float:
    """Parses bytes per second from "25GB/s", with the units of parse_size, or from a number. Raises
    UserError for anything else and for 0."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if 0 < value < float("inf"):
            return value
    elif isinstance(value, str):
        number, slash, unit = value.partition("/")
        with contextlib.suppress(UserError):
            if slash and unit.strip() == "s" and (rate := parse_size(number)):
                return rate
    raise UserError(f'{value!r} is not a rate; write bytes per second, such as "25GB/s"')


def size(text: str) -> int:
    """Parses a size of at least one byte; the Reader of such a setting
    (pallas_kernels.option_text). Raises ValueError."""
    with contextlib.suppress(UserError):
        if found := parse_size(text):
            return found
    raise ValueError("a size; write 512KiB, 16GiB or another number of bytes from 1 on")


def rate(text: str) -> float:
    """Parses a rate; the Reader of such a setting (pallas_kernels.option_text). Raises
    ValueError."""
    with contextlib.suppress(UserError):
        return parse_rate(text)
    raise ValueError('a rate; write bytes per second, such as "25GB/s"')


def parse_expert_budget(value: int | str | Share) -> int | Share:
    """Parses bytes, or a share of the experts: ``"25%"``, ``"6GiB"``, ``0``, ``Share(0.25)``.

    A float is refused, since 0.25 could be a share or, rounded down, 0 bytes.

    Raises UserError for anything else.
    """
    if isinstance(value, Share):
        return value
    if isinstance(value, str) and (match := _PERCENT.fullmatch(value.strip())):
        fraction = Fraction(match[1]) / 100
        if fraction > 1:
            raise UserError(f"{value!r} is more than all experts; a share is from 0% to 100%")
        return Share(float(fraction))
    try:
        return parse_size(value)
    except UserError:
        raise UserError(
            f"{value!r} is not an expert budget; write a share of the experts such as "
            f'"25%", or bytes such as "6GiB" or 0'
        ) from None

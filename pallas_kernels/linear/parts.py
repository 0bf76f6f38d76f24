"""Products that come as parts, each over some of the depth."""

from __future__ import annotations

import functools
import operator
from typing import Any


def sum_of_parts(parts: Any) -> Any:
    """[T, N] of parts [S, T, N], or what loads them one by one: added in ascending order, as an
    explicit chain, since a reduction would leave the order to the compiler."""
    return functools.reduce(operator.add, (parts[s] for s in range(len(parts))))

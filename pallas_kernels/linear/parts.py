"""Products in parts, each over a part of the depth."""

from __future__ import annotations

import functools
import operator
from typing import Any


def sum_of_parts(parts: Any) -> Any:
    """Adds parts [S, T, N] (or a ref that loads them one by one) to [T, N], in ascending order. An
    explicit chain of sums, since a reduction would leave the order to the compiler."""
    return functools.reduce(operator.add, (parts[s] for s in range(len(parts))))

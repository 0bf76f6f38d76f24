"""jax's Triton dialect of Pallas, imported when a kernel first uses it: an import takes 70 ms, and
a CPU's ops need none."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax.experimental.pallas.triton import *  # noqa: F403  # pyright: ignore


def __getattr__(name: str) -> Any:
    from jax.experimental.pallas import triton

    return getattr(triton, name)

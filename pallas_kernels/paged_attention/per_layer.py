"""What attention reads of each layer beside pages."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.triton import scalar

NO_WINDOW = 2**31 - 1
"""The window of a layer without one, where other layers have windows."""


class PerLayer(NamedTuple):
    """Sinks and windows, stacked over layers, or a kernel's refs to them."""

    index: Int[Array, ""] | int = 0
    """The layer's place in the stacks. int32[1] in kernels."""
    sinks: Float[Array, "L H"] | None = None
    """For each query head a score without key and value, which joins the denominator of the softmax
    (gpt-oss); None: there are none."""
    windows: Int[Array, " L"] | None = None
    """Keys at distance ≥ window are masked, and those that no query sees are not read
    (`sliding_window`); None: no layer has a window."""

    def operand(self) -> PerLayer | None:
        """What a kernel takes; None: nothing."""
        if self.sinks is None and self.windows is None:
            return None
        return self._replace(index=scalar(self.index))

    def check(self, heads: int) -> None:
        """Raises ValueError for shapes that do not fit so many query heads."""
        sinks, windows = self.sinks, self.windows
        if sinks is not None and (sinks.ndim != 2 or sinks.shape[1] != heads):
            raise ValueError(f"sinks are [L, {heads}] for {heads} query heads, not {sinks.shape}")
        if windows is not None and (windows.ndim != 1 or windows.dtype != jnp.int32):
            raise ValueError(f"windows are int32[L], not {windows.dtype}{[*windows.shape]}")


PLAIN = PerLayer()
"""Layers without sinks and windows."""

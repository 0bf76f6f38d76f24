"""What attention reads of each layer beside pages."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.triton import scalar

NO_WINDOW = 2**31 - 1
"""The window of a layer without one, where other layers have windows."""


class Indexer(NamedTuple):
    """What chooses the tokens that each query attends to (DeepSeek-V3.2, arXiv:2512.02556): the
    `topk` with the largest Σ_h weights_h · relu(q_h · k), of equal ones those that came first."""

    q: Float[Array, "T h P"]
    """Its queries, as wide as a row's values behind the latent ones, which are its keys."""
    weights: Float[Array, "T h"]
    """float32."""
    topk: int


class PerLayer(NamedTuple):
    """Sinks and windows, stacked over layers, or a kernel's refs to them; and an indexer."""

    index: Int[Array, ""] | int = 0
    """The layer's place in the stacks. int32[1] in kernels."""
    sinks: Float[Array, "L H"] | None = None
    """For each query head a score without key and value, which joins the denominator of the softmax
    (gpt-oss); None: there are none."""
    windows: Int[Array, " L"] | None = None
    """Keys at distance ≥ window are masked, and those that no query sees are not read
    (`sliding_window`); None: no layer has a window."""
    indexer: Indexer | None = None
    """Of the queries of this call; None: they attend to all tokens that they see."""

    def operand(self) -> PerLayer | None:
        """What a kernel takes; None: nothing."""
        if self.sinks is None and self.windows is None:
            return None
        return self._replace(index=scalar(self.index))

    def check(self, heads: int) -> None:
        """Raises ValueError for shapes that do not fit so many query heads."""
        _, sinks, windows, _ = self
        if sinks is not None and (sinks.ndim != 2 or sinks.shape[1] != heads):
            raise ValueError(f"sinks are [L, {heads}] for {heads} query heads, not {sinks.shape}")
        if windows is not None and (windows.ndim != 1 or windows.dtype != jnp.int32):
            raise ValueError(f"windows are int32[L], not {windows.dtype}{[*windows.shape]}")


PLAIN = PerLayer()
"""Layers without sinks and windows."""

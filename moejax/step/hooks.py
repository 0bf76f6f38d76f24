"""What may happen between the parts of a layer with driver="host"."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import jax
import numpy as np

from pallas_kernels.stage import Entries


class Hooks(Protocol):
    """How the engine asks policies between the parts of a MoE layer; layers count over MoE layers.

    Entries that a hook returns (int32[STAGES] each, of any layers) are carried out right there,
    before what the walk dispatches next. Those that do not fit the tables are skipped:
    LayerWalk.transfers says which. A layer whose experts this step has yet to compute needs none
    of its cells before its plan, so there an entry may also replace an expert that the step before
    used. An exception ends the step and aborts its requests.
    """

    def after_embedding(self, embedding: jax.Array | None) -> Entries | None:
        """The step's tokens were embedded, no layer was dispatched. embedding: float16[T, D], where
        steps give it out."""
        ...

    def before_routing(self, layer: int) -> Entries | None:
        """The layer's attention was dispatched, its router not yet."""
        ...

    def after_routing(self, layer: int, ids: np.ndarray, weights: np.ndarray) -> Entries | None:
        """ids int32[T, K], ascending, E for padding; weights float32[T, K]: what the step uses.
        T: rows of the decode bucket, or tokens of the largest prefill step."""
        ...

    def before_experts(self, layer: int) -> Entries | None:
        """The last moment before the layer's plan, fills and expert compute."""
        ...


class LayerTransfers(NamedTuple):
    """A list of transfers that a hook returned."""

    entries: Entries
    done: jax.Array
    """int32[STAGES]: 1 for each entry that was carried out."""

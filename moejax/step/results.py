"""The results that the host reads of every step, in one array. Reading ten numbers takes as long as
reading a thousand, and each further array takes that time again."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.step.experts import Paging, missed_bits
from pallas_kernels.plan.record import counts_size

_NONE = np.zeros(1, np.int32)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class ResultShape:
    """The layout of the results int32[size]. All steps of an engine share it."""

    rows: int
    """Decode rows R."""
    routes: int
    """Places for missed routes: the larger of R and the chunks of a prefill step."""
    layers: int
    """MoE layers L."""
    experts: int
    """Experts of a layer E."""
    versions: int = 1
    """Versions V."""

    @property
    def size(self) -> int:
        """How many int32 values the results have."""
        counts = self.layers * counts_size(self.experts, self.versions)
        return self.rows + self.routes + counts + 1

    def pack(
        self,
        tokens: Any,
        missed_routes: Any,
        counts: Any,
        writes: Any = _NONE,
    ) -> Any:
        """Returns the results of a step.

        - `tokens`: int32[R], current after the step.
        - `missed_routes`: int32, one for each row or chunk that the step computes.
        - `counts`: int32[L, counts_size], of experts.page_and_compute.
        - `writes`: int32[1].
        """
        missing = self.routes - missed_routes.shape[0]
        missed_routes = jnp.pad(missed_routes, (0, missing))
        parts = tokens, missed_routes, counts.reshape(-1), writes
        return jnp.concatenate(parts)

    def with_tokens(self, results: jax.Array, tokens: jax.Array) -> jax.Array:
        """Returns the results of a step with other tokens int32[R]."""
        return jnp.concatenate((tokens, results[self.rows :]))


@dataclasses.dataclass(frozen=True, eq=False)
class Results:
    """The results of a step on the host."""

    shape: ResultShape
    values: np.ndarray
    """int32[shape.size]."""

    @property
    def tokens(self) -> np.ndarray:
        """int32[R]: current after the step; those of rows without a sequence are meaningless."""
        return self.values[: self.shape.rows]

    @property
    def missed_routes(self) -> np.ndarray:
        """int32[routes]: how many routed (layer, expert) pairs were not resident, by row, or by
        chunk in prefill; 0 beyond the step's rows or chunks."""
        return self.values[self.shape.rows : self.shape.rows + self.shape.routes]

    @property
    def paging(self) -> Paging:
        """Counts of each layer, int32[L] a field."""
        return Paging(*self._counts.T[: len(Paging._fields)])

    @functools.cached_property
    def totals(self) -> tuple[int, ...]:
        """The sum of each field of Paging over the layers."""
        return tuple(self._counts[:, : len(Paging._fields)].sum(axis=0).tolist())

    @property
    def missed(self) -> np.ndarray:
        """bool[L, E]: active experts that were not resident when their layer began."""
        return missed_bits(self._counts, self.shape.experts)

    @property
    def demand(self) -> np.ndarray | None:
        """int32[L, 2, V]: fills and experts read through, by version; None with one version."""
        if self.shape.versions == 1:
            return None
        by_version = self._counts[:, counts_size(self.shape.experts) :]
        return by_version.reshape(self.shape.layers, 2, -1)

    @property
    def writes(self) -> int:
        """Writes of an owned arena up to the step's end (ArenaMemory.failures); 0 without a queue
        of transfers."""
        return int(self.values[-1].view(np.uint32))

    @property
    def _counts(self) -> np.ndarray:
        counts = self.values[self.shape.rows + self.shape.routes : -1]
        return counts.reshape(self.shape.layers, -1)

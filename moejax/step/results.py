"""What the host reads of every step, in one array: reading costs as much for ten numbers as for a
thousand, and several arrays cost it several times."""

from __future__ import annotations

import dataclasses
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
    """Where in the results int32[size] is what; the same for all steps of an engine."""

    rows: int
    """Decode rows R."""
    routes: int
    """Places for missed routes: the larger of R and the chunks of a prefill step."""
    layers: int
    """MoE layers L."""
    experts: int
    """E, a layer's."""
    versions: int = 1
    """V."""

    @property
    def size(self) -> int:
        """int32 values of the results."""
        counts = self.layers * counts_size(self.experts, self.versions)
        return self.rows + self.routes + counts + 1

    def pack(
        self,
        tokens: Any,
        missed_routes: Any,
        counts: Any,
        writes: Any = _NONE,
    ) -> Any:
        """The results of a step. tokens int32[R]: current after it. missed_routes:
        int32, of as many rows or chunks as the step computes. counts [L, counts_size]: of
        experts.page_and_compute. writes: int32[1]."""
        missing = self.routes - missed_routes.shape[0]
        missed_routes = jnp.pad(missed_routes, (0, missing))
        parts = tokens, missed_routes, counts.reshape(-1), writes
        return jnp.concatenate(parts)

    def with_tokens(self, results: jax.Array, tokens: jax.Array) -> jax.Array:
        """The results of a step with other tokens int32[R]."""
        return jnp.concatenate((tokens, results[self.rows :]))


@dataclasses.dataclass(frozen=True, eq=False)
class Results:
    """The results of a step on the host. values int32[shape.size]."""

    shape: ResultShape
    values: np.ndarray

    @property
    def tokens(self) -> np.ndarray:
        """int32[R]: current after the step; of rows without a sequence they mean nothing."""
        return self.values[: self.shape.rows]

    @property
    def missed_routes(self) -> np.ndarray:
        """int32[routes], by row or in prefill by chunk: routed (layer, expert) pairs that were not
        resident; 0 beyond those of the step."""
        return self.values[self.shape.rows : self.shape.rows + self.shape.routes]

    @property
    def paging(self) -> Paging:
        """int32[L] each."""
        return Paging(*self._counts.T[: len(Paging._fields)])

    @property
    def totals(self) -> tuple[int, ...]:
        """The sums of each field of Paging over the layers."""
        return tuple(self._counts[:, : len(Paging._fields)].sum(axis=0).tolist())

    @property
    def missed(self) -> np.ndarray:
        """bool[L, E]: active experts that were not resident when their layer began."""
        return missed_bits(self._counts, self.shape.experts)

    @property
    def demand(self) -> np.ndarray | None:
        """int32[L, 2, V]: fills and experts read through by version; None of one version."""
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

"""Which program a step of so many rows, pages and chunks takes."""

from __future__ import annotations

import dataclasses

import numpy as np

from moejax.requests.request import PrefillKind
from moejax.step.programs import ProgramKey
from moejax.step.step_parts import StepShapes


@dataclasses.dataclass(frozen=True)
class StepKeys:
    """The decode and prefill steps of an engine."""

    shapes: StepShapes
    block_size: int
    """Tokens of a KV page."""
    prefill_buckets: bool
    """Whether prefill steps have as many chunks as they need."""

    @property
    def decodes(self) -> list[ProgramKey]:
        """A decode step in every bucket, those of the shortest contexts first."""
        buckets = self.shapes.buckets or (self.shapes.rows,)
        contexts = self.shapes.contexts or (self.shapes.blocks,)
        found = [self._decode(rows, pages) for pages in contexts for rows in buckets]
        return list(dict.fromkeys(found))

    @property
    def prefills(self) -> list[ProgramKey]:
        """A prefill step of every number of chunks, the fewest first."""
        buckets = self.shapes.prefills or (self.shapes.prefill_chunks,)
        return list(dict.fromkeys(self.prefill("prefill", chunks) for chunks in buckets))

    def bucket(self, rows: int) -> int | None:
        """ProgramKey.rows of programs for so many rows."""
        bucket = self.shapes.bucket(rows)
        return None if bucket == self.shapes.rows else bucket

    def prefill(self, kind: PrefillKind, chunks: int) -> ProgramKey:
        """The smallest prefill step that holds so many chunks. What scores targets has one alone,
        as it is given many at once."""
        bucket = self.shapes.prefill(chunks)
        smaller = bucket < self.shapes.prefill_chunks
        if kind != "prefill" or not self.prefill_buckets or not smaller:
            return ProgramKey(kind)
        return ProgramKey(kind, bucket)

    def decode(self, positions: np.ndarray) -> ProgramKey:
        """The smallest decode step that holds these positions int32[R], −1: an empty row."""
        rows = self.shapes.rows
        if len(self.shapes.buckets) > 1:
            rows = int(np.max(np.flatnonzero(positions >= 0), initial=-1)) + 1
        longest = int(np.max(positions, initial=0))
        return self._decode(rows, longest // self.block_size + 1)

    def _decode(self, rows: int, pages: int) -> ProgramKey:
        """The decode step for so many rows, of sequences with so many pages at most."""
        context = self.shapes.context(pages)
        known = None if context == self.shapes.blocks else context
        return ProgramKey("decode", self.bucket(rows), context=known)

"""What the scheduler wants the next step to compute, and the step that was made of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np

from host_offload.memory.kv_cache import Block
from moejax.requests.request import Request
from moejax.step.hooks import LayerTransfers
from moejax.step.parts import PrefillBatch, StepOutput, StepShapes, empty_prefill
from pallas_kernels.stage import Entries


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Tokens [start + skip, start + length) of a request; start is a multiple of the chunk size."""

    request: Request
    row: int
    start: int
    skip: int
    length: int
    samples: bool
    """The request's first token is sampled from the chunk's last one."""
    last: bool
    """The prompt ends here."""


@dataclasses.dataclass(frozen=True)
class ScheduledWork:
    """The next step: `chunks` for a prefill step, else `rows` for a decode step."""

    chunks: tuple[Chunk, ...] = ()
    rows: tuple[tuple[int, Request], ...] = ()
    placed: tuple[Request, ...] = ()
    """Requests that got a row since the step before."""
    published: tuple[Block, ...] = ()
    """Blocks whose bytes this step writes and others may use from now on."""

    def sampled(self) -> list[tuple[int, Request]]:
        """The requests that get a token, each with its row."""
        if self.rows:
            return list(self.rows)
        return [(chunk.row, chunk.request) for chunk in self.chunks if chunk.samples]

    def requests(self) -> set[Request]:
        return {r for _, r in self.rows} | {c.request for c in self.chunks}


@dataclasses.dataclass(frozen=True)
class Step:
    """A dispatched step whose results have not been read."""

    number: int
    work: ScheduledWork
    output: StepOutput
    tokens: jax.Array
    logprobs: tuple | None
    dispatched_s: float
    compiled: bool
    """It is the first step of its executable."""
    positions: np.ndarray
    """int32[R]: of the decoded tokens, −1 elsewhere."""
    stages: Entries | None
    """Its list of transfers."""
    between: Sequence[LayerTransfers]
    """What was carried out between its layers."""

    @property
    def kind(self) -> str:
        return "prefill" if self.work.chunks else "decode"

    def sampled(self) -> list[tuple[int, Request]]:
        """The requests that got a token, each with the row it had."""
        return self.work.sampled()


def prefill_batch(work: ScheduledWork, shapes: StepShapes) -> PrefillBatch:
    """What the step of the work's chunks is given."""
    prefill = empty_prefill(shapes)._replace(count=np.int32(len(work.chunks)))
    for i, chunk in enumerate(work.chunks):
        request, end = chunk.request, chunk.start + chunk.length
        prefill.tokens[i, : chunk.length] = request.tokens(chunk.start, end)
        prefill.row[i], prefill.start[i] = chunk.row, chunk.start
        prefill.skip[i], prefill.length[i] = chunk.skip, chunk.length
        if request.targets is not None:
            prefill.targets[i, : chunk.length] = request.targets[chunk.start : end]
        elif request.params.prompt_logprobs is not None:
            following = request.prompt[chunk.start + 1 : end + 1]
            prefill.targets[i, : len(following)] = following
        if chunk.samples:
            prefill.last[chunk.row] = i * shapes.chunk + chunk.length - 1
    return prefill

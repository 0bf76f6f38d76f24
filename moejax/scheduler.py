"""Which requests run, and what the next step is: a prefill sweep or a decode step."""

from __future__ import annotations

import dataclasses
import heapq
from collections import deque

import numpy as np

from host_offload.arena import OutOfPages, SlotArena
from moejax.errors import UserError
from moejax.outputs import FinishReason, Logprob
from moejax.sampling_params import SamplingParams
from moejax.step import StepShapes


@dataclasses.dataclass(eq=False)
class Request:
    """One sequence on its way through the engine. Counts run ahead of `output`: a step is
    dispatched before the tokens of the one before it have been read."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    arrival_s: float
    row: int | None = None
    """Row in the decode batch and the block table while it runs."""
    pages: list[int] = dataclasses.field(default_factory=list)
    prefilled: int = 0
    """Prompt tokens dispatched."""
    dispatched: int = 0
    """Generated tokens dispatched."""
    output: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[tuple[Logprob, dict[int, Logprob]]] = dataclasses.field(default_factory=list)
    """Per token its own log-probability and the likeliest tokens', when asked for."""
    targets: list[int] | None = None
    """Scoring: the token to score at each prompt position. The request then generates nothing."""
    scores: list[float] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    finished_s: float | None = None

    @property
    def to_generate(self) -> int:
        return 0 if self.targets is not None else self.params.max_tokens

    @property
    def prefill_done(self) -> bool:
        return self.prefilled == len(self.prompt)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Prompt tokens [start, start + length) of a request."""

    request: Request
    start: int
    length: int

    @property
    def is_last(self) -> bool:
        return self.start + self.length == len(self.request.prompt)


@dataclasses.dataclass(frozen=True)
class Work:
    """The next step: `chunks` for a sweep, else `rows` for a decode step."""

    chunks: tuple[Chunk, ...] = ()
    rows: tuple[Request, ...] = ()


class Scheduler:
    """First come, first served: admission by free rows and free KV pages, prompts before decode.

    A request gets all pages it can ever need when it is admitted, so a running one never waits.
    """

    def __init__(self, arena: SlotArena, shapes: StepShapes, max_num_seqs: int, max_model_len: int):
        self.arena, self.max_model_len = arena, max_model_len
        self.chunk, self.sweep_chunks = shapes.chunk, shapes.sweep_chunks
        self.block_size = arena.layout.page.block_size
        self.waiting: deque[Request] = deque()
        self.running: dict[int, Request] = {}
        # The lowest free row first: rows in use stay in few tiles.
        self.free_rows = list(range(max_num_seqs))
        self.block_table = np.zeros((shapes.rows, shapes.blocks), np.int32)
        self.block_table_version = 0
        self.peak_pages = 0

    def pages_for(self, prompt_tokens: int, to_generate: int) -> int:
        """Pages of a sequence; the last generated token is never attended to."""
        return -(-(prompt_tokens + max(to_generate - 1, 0)) // self.block_size)

    def check(self, prompt_tokens: int, to_generate: int) -> None:
        """Refuses, with sizes, what could never run, whatever else finishes first: raises UserError
        when prompt + max_tokens exceeds max_model_len or needs more KV than the budget."""
        total = prompt_tokens + to_generate
        if total > self.max_model_len:
            raise UserError(
                f"prompt ({prompt_tokens} tokens) + max_tokens ({to_generate}) is "
                f"{total} tokens, max_model_len is {self.max_model_len}; shorten the prompt, lower "
                f"max_tokens or raise max_model_len"
            )
        needed = self.pages_for(prompt_tokens, to_generate)
        if needed > self.arena.pages:
            page = self.arena.layout.page.nbytes
            raise UserError(
                f"the request needs KV for {total} tokens ({needed} pages, {needed * page} bytes), "
                f"the KV budget holds {self.arena.pages} pages "
                f"({self.arena.pages * self.block_size} tokens, {self.arena.pages * page} bytes); "
                f"raise kv_budget or lower max_tokens"
            )

    def add(self, request: Request) -> None:
        """Queues a request that passed check."""
        self.waiting.append(request)

    def admit(self) -> None:
        """Moves waiting requests into rows as long as rows and pages last, strictly in order."""
        while self.waiting and self.free_rows:
            request = self.waiting[0]
            try:
                wanted = self.pages_for(len(request.prompt), request.to_generate)
                request.pages = self.arena.allocate_pages(wanted)
            except OutOfPages:
                return
            self.waiting.popleft()
            request.row = heapq.heappop(self.free_rows)
            self.running[request.row] = request
            self.block_table[request.row] = 0
            self.block_table[request.row, : len(request.pages)] = request.pages
            self.block_table_version += 1
            self.peak_pages = max(self.peak_pages, self.arena.pages - self.arena.free_pages)

    def next_work(self) -> Work | None:
        """The next step's work, counted as dispatched; None when nothing can be dispatched."""
        self.admit()
        chunks = self._next_chunks()
        if chunks:
            for chunk in chunks:
                chunk.request.prefilled += chunk.length
                if chunk.is_last and chunk.request.to_generate:
                    chunk.request.dispatched = 1
            return Work(chunks=tuple(chunks))
        rows = [r for r in self.running.values() if 0 < r.dispatched < r.to_generate]
        for request in rows:
            request.dispatched += 1
        return Work(rows=tuple(rows)) if rows else None

    def _next_chunks(self) -> list[Chunk]:
        chunks: list[Chunk] = []
        # A sweep scores or it does not: they are two executables.
        pending = [r for r in self.running.values() if not r.prefill_done]
        for request in pending:
            if (request.targets is None) != (pending[0].targets is None):
                continue
            for start in range(request.prefilled, len(request.prompt), self.chunk):
                if len(chunks) == self.sweep_chunks:
                    return chunks
                length = min(self.chunk, len(request.prompt) - start)
                chunks.append(Chunk(request, start, length))
        return chunks

    def release(self, request: Request) -> None:
        """Takes a request out, wherever it is. Steps already dispatched run before any that will
        use its pages, so they are free at once."""
        if request.row is None:
            if request in self.waiting:
                self.waiting.remove(request)
            return
        del self.running[request.row]
        heapq.heappush(self.free_rows, request.row)
        self.arena.release_pages(request.pages)
        request.row, request.pages = None, []

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

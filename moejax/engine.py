"""The host loop: schedule, dispatch a step, and read the step before it."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import jax
import numpy as np

from moejax.errors import UserError
from moejax.interrupt import deferred_interrupt
from moejax.outputs import FinishReason, Logprob
from moejax.runner import Runner
from moejax.sampler import GREEDY_BELOW
from moejax.sampling_params import SamplingParams
from moejax.scheduler import Request, Scheduler, Work
from moejax.statistics import Statistics
from moejax.step import StepOutput, Sweep


@dataclasses.dataclass(frozen=True)
class Step:
    """A dispatched step whose results have not been read."""

    number: int
    work: Work
    output: StepOutput
    tokens: jax.Array
    logprobs: tuple | None

    @property
    def kind(self) -> str:
        return "prefill" if self.work.chunks else "decode"

    def sampled(self) -> list[Request]:
        """The requests that got a token."""
        if self.work.rows:
            return list(self.work.rows)
        return [c.request for c in self.work.chunks if c.is_last and c.request.to_generate]


@dataclasses.dataclass(frozen=True)
class Event:
    """A line of the event log."""

    what: str
    """`dispatch` or `read`."""
    step: int
    seconds: float


Listener = Callable[[Step], None]


class Engine:
    """Continuous batching over a Runner: a request joins and leaves at any step.

    seed: of requests that bring none; such a request draws from it and from its number in the
    engine's life. listener: called with each step after its dispatch (for tests, recorders and
    integrity checks); it may wait for the device, which only costs time. Not for several threads.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        statistics: Statistics,
        *,
        eos_token_ids: Iterable[int],
        seed: int = 0,
        listener: Listener | None = None,
    ):
        self.runner, self.scheduler, self.statistics = runner, scheduler, statistics
        self.eos_token_ids = frozenset(eos_token_ids)
        self.seed, self.listener = seed, listener
        self.events: deque[Event] = deque(maxlen=1000)
        self._pending: Step | None = None
        self._requests = itertools.count()
        self._steps = itertools.count()
        self._block_table: tuple[int, jax.Array] | None = None

    # ---- requests

    def add(
        self, prompt: list[int], params: SamplingParams, targets: list[int] | None = None
    ) -> Request:
        """Queues a request. targets: score these tokens, one a prompt position, generate nothing.

        Raises UserError for what could never run: an empty prompt, ids outside of the vocabulary,
        and what Scheduler.check refuses.
        """
        self.check(prompt, params, targets)
        number = next(self._requests)
        # An unseeded request's draws depend on the engine's seed and its place in the order.
        derived = np.random.SeedSequence([self.seed, number]).generate_state(1)[0]
        request = Request(
            request_id=str(number),
            prompt=list(prompt),
            params=params,
            seed=int(derived) if params.seed is None else params.seed,
            arrival_s=time.perf_counter(),
            targets=targets,
        )
        if self.idle:
            self.statistics.start(request.arrival_s)
        self.scheduler.add(request)
        self.statistics.add_request(request)
        return request

    def check(
        self, prompt: list[int], params: SamplingParams, targets: list[int] | None = None
    ) -> None:
        """Raises UserError, as add does, for a request that could never run."""
        if not prompt:
            raise UserError("the prompt is empty; give at least one token")
        vocabulary = self.runner.config.vocab_size
        bad = [t for t in (*prompt, *(targets or ())) if not 0 <= t < vocabulary]
        if bad:
            raise UserError(f"token id {bad[0]} is outside of the vocabulary of {vocabulary}")
        self.scheduler.check(len(prompt), 0 if targets is not None else params.max_tokens)

    def abort(self, requests: Iterable[Request]) -> None:
        """Takes requests out; their rows and pages are free at once."""
        for request in requests:
            if request.finish_reason is None:
                request.finish_reason = "abort"
                self.scheduler.release(request)

    def set_budget(self, cells_per_layer: Sequence[int], kv_slots: int) -> None:
        """Moves the line between experts and KV of an idle engine, by table contents only: nothing
        is allocated or compiled, and no bit of any later result changes.

        cells_per_layer: dense experts that each MoE layer keeps. kv_slots: arena slots for KV.
        Raises ValueError, as SlotArena's grants, for what the arena cannot give, and when requests
        are running.
        """
        self.drain()
        if not self.idle:
            raise ValueError("requests are running; budgets change between them")
        arena, cells = self.scheduler.arena, list(cells_per_layer)
        layers, bound = arena.cell_row.shape
        if len(cells) != layers or any(not 0 <= n <= bound for n in cells):
            raise ValueError(f"cells per layer must be {layers} numbers of 0…{bound}: {cells}")
        if kv_slots < 0 or sum(cells) + kv_slots > arena.slots:
            raise ValueError(f"{sum(cells)} cells + {kv_slots} KV slots of {arena.slots} slots")
        have = np.sum(arena.cell_row >= 0, axis=1).tolist()
        # Shrink before grow: at no moment do both sides hold a slot.
        shrunk = [min(*pair) for pair in zip(have, cells, strict=True)]
        self.runner.grant_cells(arena.grant_cells(shrunk))
        arena.grant_kv_slots(kv_slots)
        self.runner.grant_cells(arena.grant_cells(cells))

    # ---- the loop

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and self._pending is None

    def step(self) -> list[Request]:
        """Dispatches the next step, then reads the one before it; returns the requests that got
        tokens or finished by that. Ctrl-C waits for the end of it: in the middle, donated buffers
        would be lost. A step that fails aborts its requests, and no others."""
        with deferred_interrupt():
            previous, self._pending = self._pending, None
            try:
                work = self.scheduler.next_work()
                if work is None and previous is None and not self.scheduler.idle:
                    raise RuntimeError("requests are waiting but no step can be made of them")
                if work is not None:
                    self._pending = self._dispatch(work)
            finally:
                touched = [] if previous is None else self._read(previous)
            if self.listener is not None and self._pending is not None:
                self.listener(self._pending)
            return touched

    def drain(self) -> None:
        """Reads a step that is still pending although no request is left: one that had been
        dispatched before the last request was found to have ended."""
        if self.scheduler.idle and self._pending is not None:
            previous, self._pending = self._pending, None
            self._read(previous)

    def _dispatch(self, work: Work) -> Step:
        try:
            return self._dispatched(work)
        except BaseException:
            self.abort({*work.rows, *(chunk.request for chunk in work.chunks)})
            raise

    def _dispatched(self, work: Work) -> Step:
        number = next(self._steps)
        if work.chunks:
            score = work.chunks[0].request.targets is not None
            output = self.runner.prefill(self._sweep(work), self._device_block_table(), score=score)
        else:
            positions = np.full(self.runner.shapes.rows, -1, np.int32)
            for request in work.rows:
                # The token fed is the one before last of those counted.
                positions[request.row] = len(request.prompt) + request.dispatched - 2
            output = self.runner.decode(positions, self._device_block_table())
        step = Step(number, work, output, self.runner.tokens, None)
        sampled = step.sampled()
        if sampled:
            tokens = self._choose(output.logits, sampled)
            wanted = any(r.params.logprobs is not None for r in sampled)
            values = self.runner.token_logprobs(output.logits, tokens) if wanted else None
            step = dataclasses.replace(step, tokens=tokens, logprobs=values)
        self.events.append(Event("dispatch", number, time.perf_counter()))
        return step

    def _device_block_table(self) -> jax.Array:
        version = self.scheduler.block_table_version
        if self._block_table is None or self._block_table[0] != version:
            table = jax.device_put(self.scheduler.block_table.copy(), self.runner.tokens.sharding)
            self._block_table = version, table
        return self._block_table[1]

    def _sweep(self, work: Work) -> Sweep:
        shapes = self.runner.shapes
        sweep = Sweep(
            tokens=np.zeros((shapes.sweep_chunks, shapes.chunk), np.int32),
            row=np.zeros(shapes.sweep_chunks, np.int32),
            start=np.zeros(shapes.sweep_chunks, np.int32),
            length=np.zeros(shapes.sweep_chunks, np.int32),
            count=np.int32(len(work.chunks)),
            last=np.full(shapes.rows, -1, np.int32),
            targets=np.zeros((shapes.sweep_chunks, shapes.chunk), np.int32),
        )
        for i, chunk in enumerate(work.chunks):
            request, span = chunk.request, slice(chunk.start, chunk.start + chunk.length)
            sweep.tokens[i, : chunk.length] = request.prompt[span]
            sweep.row[i], sweep.start[i], sweep.length[i] = request.row, chunk.start, chunk.length
            if request.targets is not None:
                sweep.targets[i, : chunk.length] = request.targets[span]
            if chunk.is_last:
                sweep.last[request.row] = i * shapes.chunk + chunk.length - 1
        return sweep

    def _choose(self, logits: jax.Array, sampled: list[Request]) -> jax.Array:
        rows = self.runner.shapes.rows
        update = np.zeros(rows, bool)
        temperature, min_p = np.zeros(rows, np.float32), np.zeros(rows, np.float32)
        top_k, top_p = np.zeros(rows, np.int32), np.ones(rows, np.float32)
        seed, position = np.zeros(rows, np.uint32), np.zeros(rows, np.int32)
        for request in sampled:
            row, params = request.row, request.params
            update[row] = True
            temperature[row], min_p[row] = params.temperature, params.min_p
            top_k[row], top_p[row], seed[row] = params.top_k, params.top_p, request.seed
            position[row] = len(request.prompt) + request.dispatched - 1
        if (temperature < GREEDY_BELOW).all():
            return self.runner.choose(logits, update, None)
        params = (temperature, top_k, top_p, min_p, seed, position)
        return self.runner.choose(logits, update, params)

    # ---- results

    def _read(self, step: Step) -> list[Request]:
        tokens = np.asarray(step.tokens)
        logprobs = None if step.logprobs is None else [np.asarray(v) for v in step.logprobs]
        paging = jax.tree.map(np.asarray, step.output.paging)
        now = time.perf_counter()
        self.events.append(Event("read", step.number, now))
        self.statistics.add_step(step.kind, paging, now)
        touched = []
        if step.output.scores is not None:
            scores = np.asarray(step.output.scores)
            for i, chunk in enumerate(step.work.chunks):
                chunk.request.scores.extend(scores[i, : chunk.length].tolist())
                if chunk.is_last and chunk.request.finish_reason is None:
                    self._finish(chunk.request, "length", now)
                    touched.append(chunk.request)
        for request in step.sampled():
            # A request may have ended by a token of the step before, or been aborted: the step
            # was dispatched without knowing, its result is dropped.
            if request.finish_reason is None:
                self._append(request, tokens, logprobs, now)
                touched.append(request)
        return touched

    def _append(self, request: Request, tokens: np.ndarray, logprobs, now: float) -> None:
        row, token = request.row, int(tokens[request.row])
        self.statistics.add_token(request, now)
        request.output.append(token)
        if request.params.logprobs is not None:
            chosen, rank, top_ids, top = (values[row] for values in logprobs)
            likeliest = {
                int(top_ids[i]): Logprob(float(top[i]), i + 1)
                for i in range(min(request.params.logprobs, len(top)))
            }
            request.logprobs.append((Logprob(float(chosen), int(rank)), likeliest))
        if token in self.eos_token_ids and not request.params.ignore_eos:
            self._finish(request, "stop", now)
        elif len(request.output) == request.params.max_tokens:
            self._finish(request, "length", now)

    def _finish(self, request: Request, reason: FinishReason, now: float) -> None:
        request.finish_reason, request.finished_s = reason, now
        self.scheduler.release(request)

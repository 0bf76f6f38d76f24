"""The host loop: it schedules and dispatches a step, then reads the step before it."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import jax
import numpy as np

from host_offload.control.control import Control
from host_offload.control.controller import Controller
from host_offload.control.interface import Policy, Spec
from host_offload.control.step_record import LinkUse
from host_offload.memory.arena import SlotClass
from host_offload.memory.kv_cache import Block
from moejax.engine.control import StepHooks, control_of, layer_hooks
from moejax.engine.drafts import Drafts
from moejax.engine.residency_planner import ResidencyPlanner
from moejax.engine.resize import ArenaResizer, cells_of, check_grant, check_one_version, grant
from moejax.engine.sampling import TokenSampler
from moejax.engine.scheduler import Scheduler
from moejax.engine.statistics import Statistics, page_use, step_glance
from moejax.engine.step_work import (
    Draft,
    Guess,
    ScheduledWork,
    Step,
    placed_rows,
    prefill_batch,
    step_record,
)
from moejax.errors import OutOfKV, UserError, as_user_error, fallbacks, shown
from moejax.interrupt import RunningStep, deferred_interrupt
from moejax.requests.first_check import require_room
from moejax.requests.outputs import FinishReason
from moejax.requests.request import Request, append_logprobs, append_prompt_logprobs
from moejax.requests.sampling_params import SamplingParams
from moejax.requests.stopping import Ending, Finish, require_tokenizer
from moejax.requests.token_rules import RuleBook
from moejax.step.executor import Executor
from moejax.step.programs import ProgramKey
from moejax.step.results import Results
from moejax.traces.tracer import Tracer
from pallas_kernels.cpu.arena import TransferFailure
from pallas_kernels.stage import Entries

if TYPE_CHECKING:
    from moejax.requests.tokenizer import Tokenizer

log = logging.getLogger("moejax")

Listener = Callable[[Step], None]


class Engine:
    """Continuous batching over an Executor: a request may join and leave at any step. Use it from
    one thread at a time.

    - `seed`: seeds requests without a seed of their own, together with their number.
    - `control`: asks the policies; None without policies.
    - `resizer`: carries out the budgets of `control` (default: a new one).
    - `tracer`: gets a record of every step.
    - `tokenizer`: finds stop strings; without it, requests with stop strings are refused.
    - `planner`: moves experts between tiers.
    - `drafts`: guesses tokens that decode steps verify; None: steps compute one token a request.
    """

    def __init__(
        self,
        runner: Executor,
        scheduler: Scheduler,
        statistics: Statistics,
        *,
        eos_token_ids: Iterable[int],
        seed: int = 0,
        control: Control | None = None,
        resizer: ArenaResizer | None = None,
        tracer: Tracer | None = None,
        tokenizer: Tokenizer | None = None,
        planner: ResidencyPlanner | None = None,
        drafts: Drafts | None = None,
    ):
        self.runner, self.scheduler, self.statistics = runner, scheduler, statistics
        self.planner, self.drafts = planner, drafts
        self.eos_token_ids = frozenset(eos_token_ids)
        self.seed, self.control = seed, control
        self.listener: Listener | None = None
        """Called with each step after its dispatch. It may wait for the device."""
        self.running = RunningStep()
        self.resizer = ArenaResizer(runner, scheduler) if resizer is None else resizer
        self.tracer, self.tokenizer = tracer, tokenizer
        self.hooks: StepHooks | None = None if control is None else layer_hooks(control, runner)
        self._sampler = TokenSampler(runner, self.eos_token_ids)
        vocabulary = runner.config.vocab_size
        self.rules = RuleBook(tokenizer, vocabulary, self.eos_token_ids)
        self._pending: Step | None = None
        self._requests = itertools.count()
        self._steps = itertools.count()
        self._block_table: tuple[int, jax.Array] | None = None
        self._compiled: set[ProgramKey] = set()
        self._lock, self._busy = threading.RLock(), False
        self._ahead: set[Request] = set()
        """Requests whose last token is not the current token of their row: a draft's row chose
        it."""
        self._abandoned: list[Request] = []
        """Requests to abort at the end of the running `undisturbed` block."""

    @contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Guards a block that changes the engine, or reads its tables, which changes donate.

        Ctrl-C waits for the end of the block, since in the middle donated arrays would be lost or
        pages given away twice. Other threads wait too. So do aborts by iterators over results,
        which Python may collect, and so close, anywhere.
        """
        with deferred_interrupt(), self._lock:
            if self._busy:
                yield
                return
            self._busy = True
            try:
                yield
            finally:
                self._busy = False
                if self._abandoned:
                    abandoned, self._abandoned = self._abandoned, []
                    self.abort(abandoned)
                    self.drain()

    # ---- requests

    def add(
        self,
        prompt: list[int],
        params: SamplingParams,
        targets: list[int] | None = None,
        *,
        session_id: str | None = None,
        priority: int = 0,
        checked: bool = False,
    ) -> Request:
        """Queues a request.

        - `prompt`: kept, not copied.
        - `targets`: tokens to score, one for each prompt position; then nothing is generated.
        - `session_id`: makes the request the next turn of that session, see `LLM.generate`.
        - `priority`: lower runs first.
        - `checked`: whether `check` was called with the same arguments.

        Raises UserError for a request that could never run: an empty prompt, ids outside of the
        vocabulary, and what Scheduler.check refuses.
        """
        if not checked:
            self.check(prompt, params, targets, session_id=session_id)
        if params.max_tokens is None:
            params = dataclasses.replace(params, max_tokens=self._room(prompt))
        with self.undisturbed():
            number = next(self._requests)
            # An unseeded request draws by the engine's seed and its own number.
            derived = np.random.SeedSequence([self.seed, number]).generate_state(1)[0]
            request = Request(
                request_id=str(number),
                number=number,
                prompt=prompt,
                params=params,
                seed=int(derived) if params.seed is None else params.seed,
                arrival_s=time.perf_counter(),
                priority=priority,
                session=None if session_id is None else self.scheduler.sessions[session_id],
                targets=targets,
                ending=Ending(params, self.eos_token_ids, self.tokenizer, prompt),
                rules=self.rules.rules(params),
            )
            if self.idle:
                self.statistics.last_read_s = request.arrival_s
                if self.planner is not None:
                    self.planner.rest()
            self.scheduler.add(request)
            self.statistics.requests += 1
            self.statistics.prompt_tokens += len(prompt)
            return request

    def check(
        self,
        prompt: list[int],
        params: SamplingParams,
        targets: list[int] | None = None,
        *,
        session_id: str | None = None,
    ) -> None:
        """Raises UserError, as `add` does, for a request that could never run."""
        if not prompt:
            raise UserError("the prompt is empty; give at least one token")
        vocabulary = self.runner.config.vocab_size
        for tokens in filter(None, (prompt, targets)):
            if min(tokens) < 0 or max(tokens) >= vocabulary:
                bad = next(t for t in tokens if not 0 <= t < vocabulary)
                raise UserError(
                    f"token id {shown(bad)} is outside of the vocabulary of {vocabulary}"
                )
        self._sampler.check(params)
        require_tokenizer(params, self.tokenizer)
        self.rules.rules(params)
        if session_id is not None and (targets is not None or params.prompt_logprobs is not None):
            raise UserError(
                "log-probabilities of a prompt need all of it computed, and a session's turn takes "
                "over what is there; leave out session_id or prompt_logprobs"
            )
        if targets is None:
            require_room(len(prompt), params.max_tokens, self.scheduler.max_model_len)
        most = self._room(prompt) if params.max_tokens is None else params.max_tokens
        self.scheduler.check(
            len(prompt), 0 if targets is not None else max(most, params.min_tokens)
        )

    def _room(self, prompt: Sequence[int]) -> int:
        """Returns the tokens that the context leaves room for. Not the KV budget, on which no text
        depends."""
        return max(self.scheduler.max_model_len - len(prompt), 1)

    def abort(self, requests: Iterable[Request]) -> None:
        """Takes requests out. Their rows and pages are free at once, or at the end of the step if
        this is called within a step, where an iterator may be collected."""
        if self._busy:
            self._abandoned += requests
            return
        with self.undisturbed():
            self._abort(requests)

    def _abort(self, requests: Iterable[Request]) -> None:
        for request in requests:
            if request.finish_reason is None:
                self._finish(request, "abort", None, time.perf_counter())

    def end_session(self, session_id: str) -> None:
        """Forgets a session and frees its KV. Raises UserError for a session that does not exist or
        has a turn that has not ended."""
        with self.undisturbed():
            self.scheduler.sessions.end(session_id)

    def set_budget(self, cells_per_layer: Sequence[int], kv_slots: int) -> None:
        """Moves the split between experts and KV of an idle engine, by table contents only.
        Nothing is allocated or compiled, and no bit of any later result changes.

        - `cells_per_layer`: dense experts that each MoE layer keeps.
        - `kv_slots`: arena slots of KV.

        Raises ValueError for a split that the arena cannot have, if requests are running, for cells
        if experts are read in place, and if experts stream.
        """
        with self.undisturbed():
            self._drain()
            if not self.idle:
                raise ValueError("requests are running; budgets change between them")
            self._check_cells_move(cells_per_layer)
            arena = self.scheduler.arena
            check_grant(arena.cell_row.shape, arena.slots, cells_per_layer, kv_slots)
            # A slot that changes sides must be empty.
            self.scheduler.move_out_all()
            grant(self.runner, self.scheduler.arena, cells_per_layer, kv_slots)
            self._trace_budget(None)

    def move_budget(self, cells_per_layer: Sequence[int], kv_slots: int) -> bool:
        """Moves the split towards the one that `set_budget` would set, also while requests run, as
        far as it can move before the next step. Returns whether it is there. Call it before later
        steps until it is.

        Raises ValueError as `set_budget` does, and if policies move the split or experts have two
        versions.
        """
        with self.undisturbed():
            self._check_cells_move(cells_per_layer)
            check_one_version(self.runner)
            if self.control is not None and {"cells", "kv_pages"} & self.control.controller.writes:
                raise ValueError(
                    "policies move the split between experts and KV; leave out resize and policy"
                )
            arena = self.scheduler.arena
            check_grant(arena.cell_row.shape, arena.slots, cells_per_layer, kv_slots)
            pages = kv_slots * arena.layout.pages_per_slot
            moved = self.resizer.move(np.asarray(cells_per_layer), pages)
            self._trace_budget(None, moved.settled)
            return moved.settled

    def _check_cells_move(self, cells_per_layer: Sequence[int]) -> None:
        """Raises ValueError where layers have no cells of their own."""
        if self.runner.steps.in_place and any(cells_per_layer):
            raise ValueError(
                "every expert is read where it lies in the store and has no cell; start with "
                "eviction='lru' for experts in cells"
            )
        if self.runner.steps.window:
            raise ValueError(
                "experts stream through a window of two layers, whose cells are no layer's; "
                "start with driver='device' for cells of each layer"
            )

    def begin_anew(
        self, spec: Spec, policies: Sequence[Policy], cells_per_layer: Sequence[int]
    ) -> None:
        """Resets an idle engine, as if it had just started with these policies and cells.

        Nothing is resident, the policies have seen nothing, and steps and requests count from 0.
        Only contents of tables change. Programs compile only if no policy before needed them, such
        as steps with stage lists. KV keeps its slots, and cached prefixes and sessions stay.

        - `spec`: facts for the policies.
        - `cells_per_layer`: see `set_budget`.

        Raises PolicyError, or the error of a policy's `init`, and then leaves an engine without
        policies. Raises ValueError as `set_budget` does, and for a traced engine or experts in two
        versions, and then changes nothing.
        """
        with self.undisturbed():
            if self.tracer is not None:
                raise ValueError("a trace records one run; close it first")
            check_one_version(self.runner)
            kv_slots = self.scheduler.arena.count(SlotClass.KV)
            self.set_budget(cells_per_layer, kv_slots)
            self.control, self.hooks = None, None
            self._steps, self._requests = itertools.count(), itertools.count()
            self.runner.forget_experts()
            controller = Controller(spec, policies)
            self.control = control_of(self.runner, controller, self.resizer)
            self.hooks = None if self.control is None else layer_hooks(self.control, self.runner)
            self.runner.wait_compiled()

    def _trace_budget(self, step: int | None, settled: bool = False) -> None:
        if self.tracer is not None:
            arena = self.scheduler.arena
            self.tracer.budget(cells_of(arena), arena.pages, step=step, settled=settled)

    def _any_waits(self) -> bool:
        """Whether the next step must wait for the tokens of the step before: the next token must
        fit them, or a session's state must not advance past the end of its turn."""
        return any(
            (request.rules is not None and request.rules.waits)
            or (request.session is not None and request.blocks.state)
            for request in self.scheduler.running.values()
        )

    def _drafts_now(self, requests: int) -> bool:
        """Whether a decode step of so many requests looks for drafts."""
        drafts = self.drafts
        return drafts is not None and bool(self.scheduler.free_rows) and drafts.wanted(requests)

    @property
    def _hooks_look(self) -> bool:
        """Whether hooks have something to do in the next step. If not, it need not wait for each
        layer."""
        control = self.control
        return self.hooks is not None and (control is None or control.looks_between_layers)

    # ---- the loop

    @property
    def idle(self) -> bool:
        return self.scheduler.idle and self._pending is None

    def step(self) -> list[Request]:
        """Dispatches the next step, then reads the step before it. Returns the requests that got
        tokens or finished.

        With hooks that look it reads first: they make the dispatch take as long as the step's
        layers, and tokens would wait for that. It also does so for structured outputs, for sessions
        of models with state, and for drafts, which follow the last token. Ctrl-C waits for the end
        of the call. A step that fails aborts its requests, and no others.
        """
        with self.undisturbed(), self.running.running():
            previous, self._pending = self._pending, None
            begun, touched = previous is not None, []
            drafting = self.drafts is not None and self._drafts_now(self.scheduler.decoding)
            if previous is not None and (
                drafting or previous.work.drafts or self._hooks_look or self._any_waits()
            ):
                touched, previous = self._read(previous), None
            try:
                if self.planner is not None:
                    self.planner.before_step()
                work = self._next_work()
                if work is None and not begun and not self.scheduler.idle:
                    work = self._make_room()
                if work is not None:
                    self._pending = self._dispatch(work, drafting)
            finally:
                touched = touched if previous is None else self._read(previous)
            if self.listener is not None and self._pending is not None:
                self.listener(self._pending)
            return touched

    def drain(self) -> None:
        """Reads a step that is still pending although no request is left. It was dispatched before
        the last request was found to have ended."""
        if not self._busy:  # a busy engine drains at its end, if it aborts requests
            with self.undisturbed():
                self._drain()

    def _drain(self) -> None:
        if self.scheduler.idle and self._pending is not None:
            previous, self._pending = self._pending, None
            self._read(previous)

    def _next_work(self) -> ScheduledWork | None:
        try:
            return self.scheduler.next_work()
        except BaseException:
            # Pages could not be moved, so work that was counted as dispatched never was.
            self._give_up(self.scheduler.in_step, self.scheduler.published)
            self.scheduler.release_states()
            raise

    def _make_room(self) -> ScheduledWork:
        """Gives up states that requests found, then takes slots from experts, if policies move the
        split, until work can be dispatched. Returns that work. Raises OutOfKV if there is none."""
        while self.scheduler.begin_anew():
            if (work := self._next_work()) is not None:
                return work
        control = self.control
        if control is not None and "kv_pages" in control.controller.writes:
            while self.resizer.take_slot():
                self._trace_budget(None)
                if (work := self._next_work()) is not None:
                    return work
        cache = self.scheduler.cache
        raise OutOfKV(
            f"requests wait for KV pages and none can be freed: {cache.swapped} pages of "
            f"{cache.page_bytes} bytes are swapped out, swap_space is {cache.swap_bytes} bytes; "
            f"raise swap_space or kv_budget, or end sessions"
        )

    def _dispatch(self, work: ScheduledWork, drafting: bool) -> Step:
        try:
            # Of the requests some may have ended by the tokens that were read since.
            drafts = self.drafts
            if drafts is not None and drafting and self._drafts_now(len(work.rows)):
                guesses: Mapping[Request, Guess] = {}
                with self._drafts_may_fail():
                    guesses = drafts.guess(work, len(self.scheduler.free_rows))
                work = self.scheduler.add_drafts(work, guesses, drafts.length(len(work.rows)))
            step = self._dispatch_step(work)
            if drafts is not None and drafts is self.drafts:
                with self._drafts_may_fail():
                    drafts.after_dispatch(step)
            return step
        except BaseException:
            self._give_up(work.requests() | {*work.placed}, work.published)
            self.scheduler.release_states()
            raise

    @contextmanager
    def _drafts_may_fail(self) -> Iterator[None]:
        """Turns drafts off if they fail in a block: no request needs them."""
        try:
            yield
        except Exception as error:
            fallbacks.warning("drafts failed, so decoding goes on without them: %s", shown(error))
            log.info("where drafts failed", exc_info=True)
            self.drafts = None

    def _give_up(self, requests: set[Request], published: Sequence[Block]) -> None:
        """Aborts the requests of a failed step and all requests with blocks that it should have
        written, and withdraws those blocks."""
        blocks = set(published)
        holders = (r for r in self._holders() if not blocks.isdisjoint(r.blocks))
        self._abort(requests.union(holders))
        self.scheduler.cache.forget(published)

    def _holders(self) -> list[Request]:
        """Returns requests that run or were moved out."""
        queued = (request for _, request in self.scheduler.queue if request.finish_reason is None)
        return [*self.scheduler.running.values(), *queued]

    def _dispatch_step(self, work: ScheduledWork) -> Step:
        number, runner, rows = next(self._steps), self.runner, self.runner.shapes.rows
        self._place(work)
        stages = self._before_step(number)
        self.scheduler.share_tables(work.drafts)
        positions = np.full(rows, -1, np.int32)
        positions[[row for row, _ in work.rows]] = [r.computed - 1 for _, r in work.rows]
        for draft in work.drafts:
            positions[[*draft.rows]] = draft.request.computed + np.arange(len(draft.rows))
        hooks = placed = None
        if self.hooks is not None:
            placed = placed_rows(work, positions, runner.shapes)
            if self._hooks_look:
                hooks = self.hooks(placed)
        table = self._device_block_table()
        if work.chunks:
            kind = work.chunks[0].request.prefill_kind
            program = runner.keys.prefill(kind, len(work.chunks))
            batch = prefill_batch(work, runner.shapes)
            output = runner.prefill(batch, table, kind=kind, stages=stages, hooks=hooks)
        else:
            kind, program = "decode", runner.keys.decode(positions)
            output = runner.decode(positions, table, stages=stages, hooks=hooks)
        if self.control is not None:
            self.control.after_dispatch(number)
        logprobs, draws = None, work.draws()
        if draws:
            _, logprobs = self._sampler.sample(output.logits, draws)
        when = time.perf_counter(), program not in self._compiled
        self._compiled.add(program)
        results, moved = runner.tokens.results, (stages, runner.walk.transfers)
        assert results is not None
        if work.drafts:
            placed = None  # what is accepted is among them too
        return Step(number, work, output, results, logprobs, *when, positions, *moved, placed)

    def _before_step(self, number: int) -> Entries | None:
        """Carries out what policies want before a step. Returns the step's list of transfers."""
        control = self.control
        if control is None:
            return None
        try:
            return self.runner.stage_list(control.before_step(number))
        finally:
            if control.resized is not None:
                self._trace_budget(number, control.resized.settled)

    def _place(self, work: ScheduledWork) -> None:
        """Prepares the rows of requests that just got a row or tokens of a draft, and those of
        drafts."""
        if not (work.placed or self._ahead or work.drafts):
            return
        current: dict[int, int] = {}
        now = time.perf_counter()
        for request in self._ahead:
            if request.row is not None:
                current[request.row] = request.output[-1]
                self._sampler.recount(request)
        for request in work.placed:
            if request.scheduled_s is None:
                request.scheduled_s = now
            if request.output and request.row is not None:  # it was moved out while it generated
                current[request.row] = request.output[-1]
            self._sampler.place(request)
        for draft in work.drafts:
            current |= dict(zip(draft.rows, draft.tokens, strict=True))
        if current:
            values = np.zeros(self.runner.shapes.rows, np.int32)
            update = np.zeros(self.runner.shapes.rows, bool)
            values[[*current]], update[[*current]] = [*current.values()], True
            self.runner.tokens.place(values, update)
        self._ahead = set()  # now, as the step may fail before, and not be one of these requests'

    def _device_block_table(self) -> jax.Array:
        version = self.scheduler.block_table_version
        if self._block_table is None or self._block_table[0] != version:
            table = jax.device_put(self.scheduler.block_table.copy(), self.runner.buffers.sharding)
            self._block_table = version, table
        return self._block_table[1]

    # ---- results

    def _read(self, step: Step) -> list[Request]:
        logprobs, began = step.logprobs, time.perf_counter()
        try:
            if logprobs is not None:  # begins all copies before it waits for one
                step.results.copy_to_host_async()
                logprobs = jax.device_get(logprobs)
            results = Results(step.output.shape, np.asarray(step.results))
            self.runner.store.check()
        except BaseException:  # errors on the device, and of reading experts, are raised here
            self._give_up(step.work.requests(), step.work.published)
            if step.work.drafts:  # no step was dispatched since
                self.scheduler.release_states()
            raise
        now = time.perf_counter()
        self.statistics.device_s += now - began
        since = None if step.compiled else self.statistics.last_read_s
        failures = self.runner.failures(results.writes)
        self.statistics.add_step(step.kind, results.totals, now, results.demand)
        if self.planner is not None:
            self.planner.after_read(step.kind, len(step.work.rows), now)
        touched = self._end_lost(step, failures) if failures else []
        # Lists of Python numbers: single reads of arrays would take as long as all the rest.
        tokens, missed = results.tokens.tolist(), results.missed_routes.tolist()
        for row, request in step.work.rows:
            request.missed_routes += missed[row]
        for i, chunk in enumerate(step.work.chunks):
            chunk.request.missed_routes += missed[i]
        if step.output.scores is not None:
            touched += self._read_scores(step, now)
        drafts = {draft.request: draft for draft in step.work.drafts}
        for row, request in step.sampled():
            # A request may have ended by a token of the step before, or been aborted, after this
            # step was dispatched. Its result is dropped.
            if request.finish_reason is None:
                try:
                    with as_user_error("this request failed, the others go on"):
                        self._append(request, row, tokens, logprobs, now)
                        if request in drafts:
                            self._accept(drafts[request], tokens, missed, logprobs, now)
                except UserError as error:
                    request.error = error
                    self._finish(request, "abort", None, now)
                touched.append(request)
        if step.work.drafts:  # no step was dispatched since
            self.scheduler.release_states()
        changed: str | None = None
        if self.drafts is not None:
            with self._drafts_may_fail():
                self.drafts.observe(step)
                seconds = None if since is None else now - since
                changed = self.drafts.after_read(step.work, seconds, len(step.positions))
        if changed is not None:
            log.info("step %d: %s", step.number, changed)
            if self.tracer is not None:
                self.tracer.add_drafts(step.number, changed)
        if self.tracer is not None or self.control is not None:
            self._tell(step, results, now, touched)
        return touched

    def _tell(self, step: Step, results: Results, now: float, touched: list[Request]) -> None:
        """Tells policies and the tracer of a step that was read."""
        control, asked = self.control, False
        if control is not None and control.controller.all_rest:
            scheduler, missed, asked = self.scheduler, sum(results.totals[2:]), True
            requests = len(scheduler.running), scheduler.totals.requests
            seconds = control.seconds(step.dispatched_s, now)
            if control.controller.skip(bool(step.work.rows), *requests, missed) or control.rests(
                step.number, step_glance(step, self.runner.shapes, missed, seconds, scheduler)
            ):
                control = None
        if control is None and self.tracer is None:
            return
        needs = None if self.tracer is not None or control is None else control.controller.needs
        linked = needs is None or not needs.isdisjoint(LinkUse._fields)
        use = page_use(self.scheduler, self.runner.link_use() if linked else None)
        record = step_record(step, self.runner, results, now, touched, use, needs)
        if control is not None:
            control.after_read(record, needed=asked)
        if self.tracer is not None:
            self.tracer.after_read(record)  # last, since it raises if the disk is full

    def _end_lost(self, step: Step, failures: Sequence[TransferFailure]) -> list[Request]:
        """Ends the requests of a step that missed experts' bytes. Returns the requests.

        Blocks that the step wrote are wrong, and so are blocks that the next step, dispatched
        since, wrote for these requests. So requests that share such blocks end too. Others go on.
        """
        first, more = failures[0], len(failures) - 1
        error = UserError(
            f"expert {first.expert} of layer {first.layer} could not be read: {first.message}"
            f"{f' (and {more} more)' if more else ''}; this request failed, the others go on"
        )
        lost = step.work.requests()
        wrong = {*step.work.published}
        later = ScheduledWork() if self._pending is None else self._pending.work
        while True:
            lost |= {r for r in self._holders() if not wrong.isdisjoint(r.blocks)}
            lost |= {c.request for c in later.chunks if not wrong.isdisjoint(c.read)}
            theirs = {block for request in lost for block in request.blocks}
            theirs |= {block for c in later.chunks if c.request in lost for block in c.copy}
            if not (more_wrong := ({*later.published} & theirs) - wrong):
                break
            wrong |= more_wrong
        lost = {r for r in lost if r.finish_reason is None}
        for request in lost:
            request.error = error
        self._give_up(lost, [*wrong])
        return [*lost]

    def _read_scores(self, step: Step, now: float) -> list[Request]:
        scores, ended = jax.device_get(step.output.scores), []
        for i, chunk in enumerate(step.work.chunks):
            request = chunk.request
            if request.finish_reason is not None:
                continue
            # A prompt that is computed again has returned some of its scores before.
            if request.targets is None:
                first = max(len(request.prompt_logprobs) - chunk.start, 0)
                last = min(chunk.length, len(request.prompt) - 1 - chunk.start)
                append_prompt_logprobs(request, scores, i, range(first, last))
                continue
            first = max(len(request.scores) - chunk.start, 0)
            request.scores.extend(scores[i, first : chunk.length].tolist())
            if chunk.last:
                self._finish(request, "length", None, now)
                ended.append(request)
        return ended

    def _accept(
        self, draft: Draft, tokens: list[int], missed: list[int], logprobs, now: float
    ) -> None:
        """Adds what the rows of a draft chose, as far as the draft is what was chosen before."""
        request = draft.request
        for row, guessed, state in zip(draft.rows, draft.tokens, draft.states, strict=True):
            if request.finish_reason is not None or request.output[-1] != guessed:
                return
            draft.accepted += 1
            self.scheduler.take_state(request, state)
            request.computed += 1
            request.dispatched += 1
            request.missed_routes += missed[row]
            self._ahead.add(request)
            self._append(request, row, tokens, logprobs, now)

    def _append(self, request: Request, row: int, tokens: list[int], logprobs, now: float) -> None:
        token = tokens[row]
        self.statistics.add_token(request, now)
        request.output.append(token)
        if request.params.logprobs is not None:
            append_logprobs(request, logprobs, row)
        ended = request.ending.push(token)
        if (
            ended is None
            and request.rules is not None
            and request.rules.push(token, request.output)
        ):
            request.ending.close()
            ended = Finish("stop", None)
        if ended is not None:
            self._finish(request, *ended, now)

    def _finish(
        self, request: Request, reason: FinishReason, stop_reason: int | str | None, now: float
    ) -> None:
        request.finish_reason, request.stop_reason, request.finished_s = reason, stop_reason, now
        self.scheduler.release(request)

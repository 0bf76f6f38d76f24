"""Chooses which requests run, the work of the next step, and whose KV is on the device."""

from __future__ import annotations

import dataclasses
import heapq
import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from host_offload.memory.kv_cache import Block, KVCache
from host_offload.memory.sequence_blocks import SequenceBlocks
from moejax.engine.prefix_cache import PrefixCache
from moejax.engine.step_work import Draft, Guess, PromptChunk, ScheduledWork
from moejax.errors import UserError
from moejax.requests.first_check import require_room
from moejax.requests.request import PrefillKind, Request
from moejax.requests.sessions import Sessions
from moejax.step.step_parts import StepShapes

HELD_STEPS = 32
"""Most decode steps for which new prompts wait, so that more of them share a prefill step."""


class WaitingTotals:
    """Totals of the requests that wait. No step walks the queue for them."""

    def __init__(self):
        self.requests = self.prompt_tokens = 0
        self._pages: Counter[int] = Counter()

    @property
    def most_pages(self) -> int:
        """The pages that the longest of them may need."""
        return max(self._pages, default=0)

    def add(self, request: Request, pages: int) -> None:
        self.requests += 1
        self.prompt_tokens += len(request.prompt)
        self._pages[pages] += 1

    def remove(self, request: Request, pages: int) -> None:
        self.requests -= 1
        self.prompt_tokens -= len(request.prompt)
        self._pages[pages] -= 1
        if not self._pages[pages]:
            del self._pages[pages]


class Scheduler:
    """Admits requests by priority, then by arrival. A request that does not fit waits, and so do
    all requests after it.

    Prefill steps and decode steps alternate while there is work for both. Pages are taken as they
    are needed. When none is left, idle shared blocks are dropped first, then sessions between turns
    are moved out (the longest unused first), then running requests (the last in order first).

    - `overflow`: how KV is moved out: `swap` copies it to host memory, `recompute` drops it and
      changes bits.
    - `prefill_share`: most tokens of one prompt in a prefill step that others wait for.
    - `admission`: free rows to wait for before new prompts are admitted while others decode. A
      prefill step reads nearly every expert, however few prompts are in it.
    """

    def __init__(
        self,
        cache: KVCache,
        shapes: StepShapes,
        max_num_seqs: int,
        max_model_len: int,
        *,
        overflow: str = "swap",
        prefix_caching: bool = True,
        prefill_share: int | None = None,
        admission: int = 1,
    ):
        self.cache, self.arena, self.max_model_len = cache, cache.arena, max_model_len
        self.chunk, self.prefill_chunks = shapes.chunk, shapes.prefill_chunks
        self.page = self.arena.layout.page
        self.block_size = self.page.block_size
        self.max_num_seqs = self.max_running = max_num_seqs
        self.admission = min(admission, max_num_seqs)
        self.overflow, self.prefixes = overflow, PrefixCache(cache, prefix_caching)
        share = self.prefill_chunks * self.chunk // 4 if prefill_share is None else prefill_share
        self.share_chunks = max(share // self.chunk, 1)
        self.queue: list[tuple[tuple[int, int], Request]] = []
        self.totals = WaitingTotals()
        self._preempted: dict[Request, None] = {}  # in the queue, and may hold pages
        self.running: dict[int, Request] = {}
        # The lowest free row is taken first, so that rows in use stay in few tiles.
        self.free_rows = list(range(max_num_seqs))
        self.table_blocks, self._reads_states = shapes.blocks, shapes.read_pages > 0
        columns = self.page.groups * shapes.blocks + self.page.state_pages + shapes.read_pages
        self.block_table = np.zeros((shapes.rows, columns), np.int32)
        self.block_table_version = self.peak_pages = 0
        self.sessions = Sessions(cache, overflow)
        self._prefilled = False
        # The step that is being made:
        self._placed: list[Request] = []
        self.published: list[Block] = []
        """Blocks that the step writes and other requests may already hold."""
        self.states: list[Block] = []
        """Blocks of states that the step reads or writes beside those of its requests, pinned."""
        self.in_step: set[Request] = set()
        """Requests that the step computes."""
        self._held_steps = 0
        self.admitted_pages = 0  # most pages that admitted requests may need
        self.counts = {"session_hit_tokens": 0, "preemptions": 0, "pages_behind_windows": 0}

    # ---- requests

    def pages_for(self, prompt_tokens: int, to_generate: int) -> int:
        """Returns the pages that a sequence needs at a time. The last generated token needs no
        KV."""
        return self.page.pages(prompt_tokens + max(to_generate - 1, 0))

    def check(self, prompt_tokens: int, to_generate: int) -> None:
        """Raises UserError for a request that could never run, because prompt + max_tokens exceeds
        max_model_len or needs more KV than the budget."""
        require_room(prompt_tokens, to_generate, self.max_model_len)
        total = prompt_tokens + to_generate
        needed = self.pages_for(prompt_tokens, to_generate)
        if needed > self.arena.pages:
            page, tokens = self.page.nbytes, self.page.tokens(self.arena.pages)
            raise UserError(
                f"the request needs KV for {total} tokens ({needed} pages, {needed * page} bytes), "
                f"the KV budget holds {self.arena.pages} pages "
                f"({tokens} tokens, {self.arena.pages * page} bytes); "
                f"raise kv_budget or lower max_tokens"
            )

    def add(self, request: Request) -> None:
        """Queues a request that passed `check`. A turn of a session waits for the end of the turn
        before it."""
        request.prefill_to = len(request.prompt)
        request.blocks = SequenceBlocks(self.page)
        self.totals.add(request, self._most_pages(request))
        session = request.session
        if session is not None and session.turn is not None:
            session.queue.append(request)
            return
        if session is not None:
            session.turn = request
        heapq.heappush(self.queue, (request.order, request))

    @property
    def waiting(self) -> list[Request]:
        """Requests that were not admitted yet, or were moved out, in no order."""
        queued = [r for s in self.sessions.all for r in s.queue]
        return [r for _, r in self.queue if r.finish_reason is None] + queued

    def release(self, request: Request) -> None:
        """Takes a request out, whether it runs or waits. Its pages are free at once, or pass to its
        session: steps that were dispatched run before any step that reuses the pages."""
        if request.row is not None:
            self._free_row(request)
        else:
            self._leave_queue(request)
        # A waiting request stays in the heap until _forget_finished finds its finish_reason.
        self.admitted_pages -= request.admitted_pages
        request.admitted_pages = 0
        blocks, request.blocks = request.blocks, SequenceBlocks(self.page)
        session = request.session
        if session is None:
            self.cache.release(blocks)
            return
        following = self.sessions.end_turn(request, session, blocks)
        if following is not None:
            heapq.heappush(self.queue, (following.order, following))

    def first_waiting(self, most: int) -> list[Request]:
        """Returns the requests that are admitted next, in order, at most so many."""
        found: list[Request] = []
        places = [(self.queue[0], 0)] if self.queue else []  # a heap of the next ones in the heap
        while places and len(found) < most:
            (_, request), place = heapq.heappop(places)
            if request.finish_reason is None:
                found.append(request)
            for below in range(2 * place + 1, min(2 * place + 3, len(self.queue))):
                heapq.heappush(places, (self.queue[below], below))
        return found

    def _most_pages(self, request: Request) -> int:
        return self.pages_for(len(request.prompt), request.to_generate)

    def _leave_queue(self, request: Request) -> None:
        self.totals.remove(request, self._most_pages(request))
        self._preempted.pop(request, None)

    @property
    def idle(self) -> bool:
        self._forget_finished()
        return not self.queue and not self.running

    # ---- the next step

    def next_work(self) -> ScheduledWork | None:
        """Returns the next step's work, counted as dispatched; None if nothing can be
        dispatched."""
        self.published, self.in_step = [], set()
        self.release_states()
        for request in self.running.values():
            self._release_unseen(request)
        # Decode goes on between two prefill steps.
        rows = self._decode_rows() if self._prefilled else []
        chunks = [] if rows else self._next_chunks()
        if not rows and not chunks:
            rows = self._decode_rows()  # also of requests that just got a row back
        self._prefilled = bool(chunks)
        if not rows and not chunks:
            return None
        self.peak_pages = max(self.peak_pages, self.arena.pages - self.cache.available)
        # Also requests that were placed for a step that failed before it was made.
        placed, self._placed = [r for r in self._placed if r.row is not None], []
        return ScheduledWork(tuple(chunks), tuple(rows), tuple(placed), tuple(self.published))

    @property
    def decoding(self) -> int:
        """Requests that the next decode step computes, if none of them ends or is moved out."""
        return sum(1 for _ in self._decoding())

    def _decoding(self) -> Iterator[Request]:
        # prefill_done is written out, since this runs for every running request in every step.
        return (
            r
            for r in self.running.values()
            if r.computed >= r.prefill_to and 0 < r.dispatched < r.to_generate
        )

    def _decode_rows(self) -> list[tuple[int, Request]]:
        rows, size = [], self.block_size
        for request in sorted(self._decoding(), key=_order):
            if request.row is None:  # moved out for an earlier request
                continue
            full = request.computed == len(request.blocks) * size
            if full and not self.extend(request, 1):
                continue
            request.computed += 1
            request.dispatched += 1
            rows.append((request.row, request))
            self.in_step.add(request)
        return rows

    def add_drafts(
        self, work: ScheduledWork, guesses: Mapping[Request, Guess], length: int
    ) -> ScheduledWork:
        """Returns a decode step that also verifies guesses, as far as rows and pages are left that
        no request uses. Requests share the rows evenly.

        - `guesses`: of requests in the step, with at most as many tokens as each may still
          generate after the step's own.
        - `length`: most tokens of a draft that were looked for.
        """
        rows, given = sorted(self.free_rows), dict.fromkeys(guesses, 0)
        room = {request: self._draft_room(request, len(g.tokens)) for request, g in guesses.items()}
        left = len(rows)
        while left and (more := [r for r, count in given.items() if count < room[r]]):
            for request in more[:left]:
                given[request] += 1
                left -= 1
        drafts = []
        for request in sorted(given, key=_row, reverse=True):
            # A state advances from row to row, the lowest first.
            free = [row for row in rows if not self.page.state_pages or row > _row(request)]
            # Earlier drafts took rows and pages.
            count = self._draft_room(request, min(given[request], len(free)))
            if not count:
                continue
            taken, guess = tuple(free[:count]), guesses[request]
            rows = [row for row in rows if row not in taken]
            missing = self._missing_blocks(request, count)
            if missing:
                self.extend(request, missing)
            parts = tuple(guess.tokens[:count]), tuple(guess.words[:count])
            drafts.append(Draft(request, taken, *parts, self._states_of_draft(count)))
        return dataclasses.replace(work, drafting=length, drafts=tuple(drafts))

    def _missing_blocks(self, request: Request, count: int) -> int:
        """Returns how many blocks more a request needs for a draft of `count` tokens."""
        return max(-(-(request.computed + count) // self.block_size) - len(request.blocks), 0)

    def _draft_room(self, request: Request, most: int) -> int:
        """Returns how many tokens of a draft the request's pages and idle pages hold."""
        groups, states = self.page.groups, self.page.state_pages
        while most and (
            self._missing_blocks(request, most) * groups + most * states > self.cache.available
        ):
            most -= 1
        return most

    def _states_of_draft(self, count: int) -> tuple[tuple[Block, ...], ...]:
        """Takes pages for the state after each token of a draft, until the next step."""
        pages = self.page.state_pages
        blocks = self.cache.allocate(count * pages)
        self.cache.pin(blocks)
        self.states += blocks
        return tuple(tuple(blocks[i * pages : (i + 1) * pages]) for i in range(count))

    def take_state(self, request: Request, state: Sequence[Block]) -> None:
        """Makes the state after a token of a draft, which proved right, that of its request."""
        if not state:
            return
        taken = {*state}
        self.states = [block for block in self.states if block not in taken] + request.blocks.state
        request.blocks.state = [*state]
        self.write_table(request, len(request.blocks))

    def share_tables(self, drafts: Sequence[Draft]) -> None:
        """Gives the rows of drafts the block tables of their requests, each with a state of its
        own. Call it when no page moves any more before the step."""
        pages = self.page.state_pages
        for draft in drafts:
            table = self.block_table[draft.request.row].copy()
            for row, state in zip(draft.rows, draft.states, strict=True):
                if pages:
                    table[-2 * pages : -pages] = table[-pages:]  # from the row before
                    state_rows: Any = [block.row for block in state]
                    table[-pages:] = state_rows
                if not np.array_equal(self.block_table[row], table):
                    self.block_table[row] = table
                    self.block_table_version += 1

    def _next_chunks(self) -> list[PromptChunk]:
        decoding = next(self._decoding(), None) is not None
        chunks: list[PromptChunk] = []
        kind: PrefillKind | None = None
        for request in self._prefilling(decoding, chunks):
            if kind not in (None, request.prefill_kind):
                continue  # kinds of prefill are different executables
            room = self.prefill_chunks - len(chunks)
            others = decoding or self.queue or len(self.running) > 1
            more = self._chunks_of(request, min(room, self.share_chunks) if others else room)
            if more:
                kind = request.prefill_kind
            chunks += more
        if not decoding:  # no request waits for the step, so the rest of it is filled in order
            for request in sorted({c.request for c in chunks}, key=_order):
                chunks += self._chunks_of(request, self.prefill_chunks - len(chunks))
        return chunks

    def _prefilling(self, decoding: bool, chunks: list[PromptChunk]) -> Iterator[Request]:
        """Yields requests with a prompt to compute, in order, until the prefill step is full. It
        admits waiting requests on the way."""
        pending = sorted((r for r in self.running.values() if not r.prefill_done), key=_order)
        for request in pending:
            if len(chunks) < self.prefill_chunks and request.row is not None:  # None: moved out
                yield request
        self._forget_finished()
        if decoding and self._holds_back():
            return
        while self.queue and self.free_rows and len(chunks) < self.prefill_chunks:
            request = self.queue[0][1]
            if not self._admit(request):
                return
            if not request.prefill_done:
                yield request
            self._forget_finished()

    def _holds_back(self) -> bool:
        """Whether new prompts wait for more prompts to share their step. They wait at most
        HELD_STEPS steps, and not if they are more urgent than a running request."""
        wanted = min(self.admission, len(self.queue))
        few = len(self.free_rows) < wanted and self._held_steps < HELD_STEPS
        if few:
            first = self.queue[0][1]
            few = not first.preemptions and first.priority >= min(
                request.priority for request in self.running.values()
            )
        self._held_steps = self._held_steps + 1 if few else 0
        return few

    def _forget_finished(self) -> None:
        while self.queue and self.queue[0][1].finish_reason is not None:
            heapq.heappop(self.queue)

    def _admit(self, request: Request) -> bool:
        """Gives a waiting request a row, and its KV back if it had any. Returns False if that is
        not possible now."""
        if len(self.running) >= self.max_running or request.dispatched > len(request.output):
            return False  # enough requests run, or a moved-out request's last token is not read yet
        session = request.session
        first = request.admitted_pages == 0
        if first and not self._can_end(request):
            return False
        dropped = session is not None and session.dropped
        if session is not None and first and not self.sessions.begin_turn(request, session):
            return False
        if not self._bring_back(request):
            if session is not None and first:
                self._drop_kv(request)  # its turn has not begun after all
            return False
        heapq.heappop(self.queue)
        self._leave_queue(request)
        request.row = heapq.heappop(self.free_rows)
        self.running[request.row] = request
        if first:
            request.admitted_pages = self._most_pages(request)
            self.admitted_pages += request.admitted_pages
            request.recomputed = dropped
            self.counts["session_hit_tokens"] += request.cached_tokens
        if request.output and request.computed == 0:
            request.prefill_to = len(request.prompt) + len(request.output) - 1
            request.recomputed = True
        self.write_table(request, 0)
        self._placed.append(request)
        return True

    def _drop_kv(self, request: Request) -> None:
        self.cache.release(request.blocks)
        request.blocks = SequenceBlocks(self.page)
        request.computed = request.cached_tokens = request.pure = 0

    def _can_end(self, request: Request) -> bool:
        """Whether the admitted requests and this one can have all pages that they may need, on the
        device or swapped out. Otherwise they could wait for each other for ever."""
        if self.overflow == "recompute" or self.admitted_pages == 0:
            return True
        worst = self.admitted_pages + self._most_pages(request)
        return worst + self.sessions.pages <= self.arena.pages + self.cache.swap_pages

    def _bring_back(self, request: Request) -> bool:
        """Frees the pages that the request needs to go on, and swaps its own pages in. Returns
        whether that was possible."""
        swapped, held = self.cache.missing(request.blocks), request.blocks.pages
        wanted = swapped + max(self.page.pages(request.prefill_to) - held, 0)
        # One block more to decode into, so that the request is not the next to be moved out.
        wanted += self.page.groups * (request.dispatched > 0)
        wanted -= self.prefixes.held(request)
        limit = self.arena.pages - (held - swapped)
        self.cache.pin(request.blocks)  # its pages must not be moved out to make room for it
        there = False
        try:
            there = self._free_pages(min(wanted, limit))
            if there and swapped:
                self.cache.swap_in(request.blocks)
                self.sessions.returned(request.blocks)
            if there and len(request.blocks.state) < self.page.state_pages:
                state = self.cache.allocate(self.page.state_pages)
                self.cache.pin(state)
                request.blocks.state = state
        except BaseException:
            self.cache.unpin(request.blocks)
            if request.admitted_pages == 0:
                self._drop_kv(request)
            raise
        if not there:
            self.cache.unpin(request.blocks)
        return there

    def _chunks_of(self, request: Request, most: int) -> list[PromptChunk]:
        chunks: list[PromptChunk] = []
        row = request.row
        assert row is not None
        while len(chunks) < most and not request.prefill_done:
            if found := self.prefixes.find(request):
                self.write_table(request, len(request.blocks) - found)
            start = request.computed // self.chunk * self.chunk
            end = min(start + self.chunk, request.prefill_to)
            missing = -(-end // self.block_size) - len(request.blocks)
            if missing > 0 and not self.extend(request, missing):
                break
            skip = request.computed - start
            if request.pure == request.computed:
                request.pure = end
                self.published += self.prefixes.publish(request, start + skip, end)
            read, copy = self._read_and_copy(request, end)
            request.computed = end
            last = end == request.prefill_to
            samples = last and request.to_generate > 0 and request.dispatched == 0
            if samples:
                request.dispatched = 1
            place = row, start, skip, end - start
            chunks.append(PromptChunk(request, *place, samples, last, read, copy))
            self.in_step.add(request)
        return chunks

    def _read_and_copy(
        self, request: Request, end: int
    ) -> tuple[tuple[Block, ...], tuple[Block, ...]]:
        """Returns `read` and `copy` of a chunk that ends at `end`."""
        read, request.blocks.resumed = request.blocks.resumed, []
        copy = self.prefixes.publish_state(request, end)
        self.cache.pin(copy)
        self.states += [*read, *copy]
        self.published += copy
        return tuple(read), tuple(copy)

    def release_states(self) -> None:
        """Frees the pages of states that the step before read or wrote beside those of requests."""
        states, self.states = self.states, []
        self.cache.unpin(states)
        self.cache.release(states)

    def begin_anew(self) -> bool:
        """Lets a running request that found a state compute its prompt instead, where nothing can
        be dispatched: what it found takes pages beside its own. Returns False if there is no such
        request."""
        found = [r for r in self.running.values() if r.blocks.resumed]
        if not found:
            return False
        request = min(found, key=_order)
        state, request.blocks.state = request.blocks.state, []
        self.cache.unpin(request.blocks)
        self._drop_kv(request)
        request.blocks.state = state
        request.block_keys = []  # or it would find the state again
        return True

    # ---- pages

    def extend(self, request: Request, count: int) -> bool:
        """Gives a running request pages for `count` more blocks, and moves out requests behind it
        if need be. Returns False if there are not enough."""
        pages = count * self.page.groups
        if not self._free_pages(pages, behind=request):
            return False
        first, blocks = len(request.blocks), self.cache.allocate(pages)
        self.cache.pin(blocks)
        request.blocks.append(blocks)
        self.write_table(request, first)
        return True

    def write_table(self, request: Request, first: int) -> None:
        """Writes a running request's block table from block `first` on. Blocks behind a window have
        any page there, since no token reads them."""
        for group in range(self.page.groups):
            blocks = request.blocks.of_group(group, first)
            kv_rows: Any = [0 if b is None else b.row for b in blocks]  # all are on the device
            start = group * self.table_blocks + first
            self.block_table[request.row, start : start + len(blocks)] = kv_rows
        if state := request.blocks.state:
            state_rows: Any = [block.row for block in state]
            self.block_table[request.row, -len(state) :] = state_rows
            if self._reads_states:
                self.block_table[request.row, -2 * len(state) : -len(state)] = state_rows
        self.block_table_version += 1

    def _release_unseen(self, request: Request) -> None:
        """Gives up blocks behind the windows of a request's next tokens."""
        # A session goes on from its last token, which may be the one before the last dispatched.
        gone = request.blocks.trim(max(request.computed - 1, 0))
        if request.row is not None:
            self.cache.unpin(gone)
        self.cache.release(gone)
        self.counts["pages_behind_windows"] += len(gone)

    def _free_pages(self, count: int, behind: Request | None = None) -> bool:
        """Makes so many pages available. Returns whether that was possible.

        - `behind`: running requests that come after this one may be moved out.
        """
        while self.cache.available < count:
            if not (self.sessions.evict() or self.evict_waiting() or self._preempt_last(behind)):
                return False
        return True

    def evict_waiting(self, most: int | None = None) -> bool:
        """Moves out pages of preempted requests that stayed because another request ran on them."""
        for request in self._preempted:
            if movable := self.cache.movable(request.blocks):
                return self.cache.swap_out(movable[:most]) > 0
        return False

    def _preempt_last(self, behind: Request | None) -> bool:
        """Moves out the last running request that is not in the step, if it comes after `behind`.
        It waits, and keeps its place in the order."""
        candidates = [r for r in self.running.values() if r not in self.in_step]
        if behind is None or not candidates:
            return False
        request = max(candidates, key=_order)
        if request.order <= behind.order:
            return False
        self._release_unseen(request)
        movable = self.cache.movable(request.blocks, pins=1)
        if self.overflow == "swap" and movable and self.cache.swap_room == 0:
            return False
        # Queued before its pages move, so that the request is not lost if that fails.
        self._free_row(request)
        heapq.heappush(self.queue, (request.order, request))
        self.totals.add(request, self._most_pages(request))
        self._preempted[request] = None
        request.preemptions += 1
        self.counts["preemptions"] += 1
        if request in self._placed:
            self._placed.remove(request)
        if self.overflow == "swap":
            self.cache.swap_out(request.blocks)
        else:
            # Prefill will recompute KV of generated tokens of its session.
            request.recomputed |= request.computed > request.pure
            self._drop_kv(request)
        return True

    def _free_row(self, request: Request) -> None:
        assert request.row is not None
        self.cache.unpin(request.blocks)
        del self.running[request.row]
        heapq.heappush(self.free_rows, request.row)
        request.row = None

    def move_out_all(self) -> None:
        """Empties the arena's KV while no request runs: moves sessions out, drops idle blocks."""
        self.release_states()
        while self.sessions.evict():
            pass
        self.cache.drop_idle()


_order = operator.attrgetter("order")
_row = operator.attrgetter("row")

"""The scheduler over a model of the device: pages hold, for each token, a digest of it, its path
and the one before, and the next token is a digest of all that a sequence's pages hold. So a page
that is missing, stale, shared wrongly or computed by the other path shows as another token, in a
hundredth of the time that a model would need. Layers with a window are a group of pages of their
own, of which only what the window shows is digested."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

from host_offload.memory.arena import SlotArena
from host_offload.memory.kv_cache import KVCache
from host_offload.memory.layout import Window, slot_layout
from moejax.engine.scheduler import Scheduler
from moejax.engine.step_work import ScheduledWork
from moejax.requests.request import Request
from moejax.requests.sampling_params import SamplingParams
from moejax.requests.stopping import Ending
from moejax.step.step_parts import StepShapes
from scripts.check.kv_faults import kv_faults

EOS = 0
BLOCK = 16
CHUNK = 64
LAYOUT = slot_layout(
    hidden=64, width=64, itemsize=2, layers=1, rows_per_token=2, row_values=64, block_size=BLOCK
)


class Stateful(tuple):
    """Windows of groups of pages, beside layers with a state of so many pages."""

    state_pages = 2


WINDOWS = {
    "none": (None,),
    "all": (Window(40),),
    "alternating": (None, Window(40)),
    "chunked": (Window(128, chunked=True), None, Window(1)),
    "state": Stateful((None,)),
}


@dataclasses.dataclass(frozen=True)
class Turn:
    """A request. prompt: what a turn adds to its session's history, which ends in the answers."""

    prompt: tuple[int, ...]
    max_tokens: int
    session: str | None = None
    priority: int = 0
    arrival: int = 0
    abort: int | None = None
    """Steps after which it is cancelled."""
    rewrite: int = 0
    """Tokens of the history's end that this turn leaves out."""
    fork: str | None = None
    """A session whose history stands before the prompt, of a request that is no turn of it."""


class Device:
    """Scheduler, pages and requests; `step` does what Engine.step does."""

    def __init__(
        self, *, pages: int, rows: int, prefill_chunks: int, max_model_len: int, **options
    ):
        self.windows = options.pop("windows", (None,))
        self.state_pages = getattr(self.windows, "state_pages", 0)
        groups = {"windows": self.windows, "state_pages": self.state_pages}
        page = dataclasses.replace(LAYOUT.page, **groups)
        layout = dataclasses.replace(LAYOUT, page=page)
        pages *= len(self.windows)
        per_slot = LAYOUT.pages_per_slot
        slots = -(-pages // per_slot)
        arena = options.pop("arena", None) or SlotArena(layout, slots, 1, 1, 1)
        arena.grant_kv_slots(slots)
        # Slots hold several pages; what is left of the last one is nobody's.
        self.spare = arena.allocate_pages(slots * per_slot - pages)
        swap_bytes = options.pop("swap_bytes", 10**9)
        longest = -(-max_model_len // BLOCK)
        shapes = StepShapes(rows, CHUNK, prefill_chunks, longest, self.state_pages)
        cache = KVCache(arena, self._read, self._write, self._move, swap_bytes)
        self.scheduler = Scheduler(cache, shapes, rows, max_model_len, **options)
        self.pages: dict[int, list] = {}
        self.tokens = [-1] * rows
        self.pending: tuple[ScheduledWork, dict[int, int]] | None = None
        self.number = 0
        self.works: list[ScheduledWork | None] = []
        """Of each step."""

    def _read(self, rows: Sequence[int]) -> list:
        return [list(self.pages.get(row, [None] * BLOCK)) for row in rows]

    def _write(self, pages: Sequence, rows: Sequence[int]) -> None:
        for page, row in zip(pages, rows, strict=True):
            self.pages[row] = list(page)

    def _move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self._write(self._read(sources), targets)

    def add(self, prompt: Sequence[int], turn: Turn) -> Request:
        params = SamplingParams(max_tokens=turn.max_tokens, temperature=0)
        session = None if turn.session is None else self.scheduler.sessions[turn.session]
        request = Request(
            request_id=str(self.number),
            number=self.number,
            prompt=list(prompt),
            params=params,
            seed=0,
            arrival_s=0.0,
            ending=Ending(params, (EOS,), None),
            priority=turn.priority,
            session=session,
        )
        self.number += 1
        self.scheduler.check(len(request.prompt), turn.max_tokens)
        self.scheduler.add(request)
        return request

    def step(self) -> None:
        previous, self.pending = self.pending, None
        running = self.scheduler.running.values()
        if previous and any(r.session and r.blocks.state for r in running):
            self._finish(*previous)
            previous = None
        work = self.scheduler.next_work()
        self.works.append(work)
        if work is None and previous is None and not self.scheduler.idle:
            work = self.unblocked()
            if work is None:
                raise RuntimeError("stuck")
        if work is not None:
            self.pending = work, self._run(work)
        if previous is not None:
            self._finish(*previous)

    def unblocked(self) -> ScheduledWork | None:
        """Asked when requests wait and nothing can be dispatched."""
        while self.scheduler.begin_anew():
            if (work := self.scheduler.next_work()) is not None:
                return work
        return None

    def _finish(self, work: ScheduledWork, sampled: dict[int, int]) -> None:
        pairs = work.rows or [(c.row, c.request) for c in work.chunks if c.samples]
        for row, request in pairs:
            if request.finish_reason is not None:
                continue
            request.output.append(sampled[row])
            finish = request.ending.push(sampled[row])
            if finish is not None:
                request.finish_reason = finish.finish_reason
                self.scheduler.release(request)

    def abort(self, request: Request) -> None:
        if request.finish_reason is None:
            request.finish_reason = "abort"
            self.scheduler.release(request)

    # ---- the device

    def _run(self, work: ScheduledWork) -> dict[int, int]:
        table = self.scheduler.block_table.copy()
        for request in work.placed:
            request.scheduled_s = 0.0
            if request.output:
                self.tokens[request.row] = request.output[-1]
        sampled: dict[int, int] = {}

        blocks = self.scheduler.table_blocks

        def place(row, position, group):
            return int(table[row, group * blocks + position // BLOCK]), position % BLOCK

        def at(row, position, group):
            page, offset = place(row, position, group)
            value = self.pages[page][offset]
            assert value is not None, f"position {position} of row {row} was never written"
            return value

        def first(position, group):
            window = self.windows[group]
            return 0 if window is None else window.first(position)

        def put(row, position, token, path):
            # What the token sees last and first, in every group.
            seen = [
                (at(row, position - 1, group), at(row, first(position, group), group))
                for group in range(len(self.windows))
                if first(position, group) < position
            ]
            for group in range(len(self.windows)):
                page, offset = place(row, position, group)
                of_page = self.pages.setdefault(page, [None] * BLOCK)
                of_page[offset] = _number((seen, token, path, group))

        def own(row):
            return table[row, table.shape[1] - self.state_pages :].tolist()

        def advance(row, position, token, path, read=()):
            """Advances the state of a row, or that in the blocks `read`."""
            rows = [block.row for block in read] or own(row)
            before = [self.pages[page][0] for page in rows] if position else 0
            for i, page in enumerate(own(row)):
                self.pages[page] = [_number((before, token, path, i))] * BLOCK

        def digest(row, length, start):
            """Of what a step from `start` on reads."""
            state = [self.pages[page][0] for page in own(row)]
            seen = [
                [at(row, position, group) for position in range(first(start, group), length)]
                for group in range(len(self.windows))
            ]
            return _number((seen, state) if state else seen) % 97

        for chunk in work.chunks:
            assert chunk.start % CHUNK == 0
            assert 0 <= chunk.skip < chunk.length <= CHUNK
            stop = chunk.start + chunk.length
            for position in range(chunk.start + chunk.skip, stop):
                token = chunk.request.tokens(position, position + 1)[0]
                put(chunk.row, position, token, "prompt")
                read = chunk.read if position == chunk.start + chunk.skip else ()
                advance(chunk.row, position, token, "prompt", read)
            for block, page in zip(chunk.copy, own(chunk.row), strict=bool(chunk.copy)):
                self.pages[block.row] = list(self.pages[page])
        for chunk in work.chunks:
            if chunk.samples:
                sampled[chunk.row] = digest(chunk.row, chunk.start + chunk.length, chunk.start)
        for row, request in work.rows:
            put(row, request.computed - 1, self.tokens[row], "generated")
            advance(row, request.computed - 1, self.tokens[row], "generated")
        for row, request in work.rows:
            sampled[row] = digest(row, request.computed, request.computed - 1)
        for row, token in sampled.items():
            self.tokens[row] = token
        return sampled


def _number(value: object) -> int:
    return int.from_bytes(hashlib.blake2b(repr(value).encode(), digest_size=6).digest(), "little")


def run(device: Device, turns: Sequence[Turn], *, check: bool = True) -> list:
    """Runs the turns, a session's in their order; returns their requests."""
    requests: list[Request | None] = [None] * len(turns)
    history: dict[str, list[int]] = {}
    started: dict[int, int] = {}
    step = 0
    while True:
        for i, request in enumerate(requests):
            if request is None:
                continue
            turn = turns[i]
            if turn.abort is not None and step - started[i] >= turn.abort:
                device.abort(request)
            if turn.session is not None and request.finish_reason in ("stop", "length"):
                # The latest is the last to be built on: turns end in their order.
                history[turn.session] = request.prompt + request.output
        for i, turn in enumerate(turns):
            if requests[i] is not None or turn.arrival > step:
                continue
            earlier = [
                requests[j] for j in range(i) if turn.session and turns[j].session == turn.session
            ]
            if any(r is None or r.finish_reason is None for r in earlier):
                continue
            told = history.get(turn.session or turn.fork or "", [])
            prompt = told[: max(len(told) - turn.rewrite, 0)] + list(turn.prompt)
            requests[i] = device.add(prompt, turn)
            started[i] = step
        if all(r is not None and r.finish_reason is not None for r in requests):
            break
        device.step()
        step += 1
        if check:
            faults = kv_faults(device.scheduler)
            faults = [f for f in faults if "pages held" not in f or not device.spare]
            assert not faults, faults
        assert step < 100_000, "no end"
    while device.pending is not None:
        device.step()
    return requests

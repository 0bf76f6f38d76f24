"""Conversations whose KV is kept between turns."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np

from host_offload.memory.kv_cache import Block, KVCache
from host_offload.memory.sequence_blocks import SequenceBlocks
from moejax.errors import UserError
from moejax.requests.request import Request, Session


class Sessions:
    """All conversations and the KV that they hold between turns, the longest unused first.

    - `overflow`: whether KV that makes room is swapped or dropped; see Scheduler.
    """

    def __init__(self, cache: KVCache, overflow: str):
        self.cache, self.overflow, self.evicted = cache, overflow, 0
        self.page = cache.arena.layout.page
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._numbers = 0
        self.pages = 0
        """Pages of all sessions, on the device and in host memory."""
        self._resting: OrderedDict[str, Session] = OrderedDict()
        """Sessions that may have pages on the device, the longest unused first."""
        self._away: dict[Block, list[Session]] = {}
        """Blocks of the others, which are on the host."""

    @property
    def all(self) -> tuple[Session, ...]:
        return tuple(self._sessions.values())

    def __getitem__(self, session_id: str) -> Session:
        """The session of that name, a new one if there is none."""
        if session_id not in self._sessions:
            self._sessions[session_id] = Session(
                session_id, self._numbers, SequenceBlocks(self.page)
            )
            self._numbers += 1
        return self._sessions[session_id]

    def end(self, session_id: str) -> None:
        """Forgets a session and frees its KV. Raises UserError for an unknown session, or while one
        of its turns waits or runs."""
        session = self._sessions.get(session_id)
        if session is None:
            raise UserError(f"there is no session {session_id!r}")
        if session.turn is not None:
            raise UserError(f"session {session_id!r} has a turn that has not ended")
        del self._sessions[session_id]
        self.cache.release(self.replace(session, SequenceBlocks(self.page)))

    def replace(self, session: Session, blocks: SequenceBlocks) -> SequenceBlocks:
        """Gives a session other blocks and returns those that it had."""
        self._recall(session)
        old, session.blocks = session.blocks, blocks
        self.pages += blocks.pages - old.pages
        if blocks:
            self._resting[session.session_id] = session
        return old

    def returned(self, blocks: Iterable[Block]) -> None:
        """Learns that blocks came back to the device, where sessions may hold them too."""
        for block in blocks:
            for session in [*self._away.get(block, ())]:
                self._recall(session)
                self._resting[session.session_id] = session
                self._resting.move_to_end(session.session_id, last=False)

    def _recall(self, session: Session) -> None:
        if self._resting.pop(session.session_id, None) is not None:
            return
        for block in session.blocks:
            if (others := self._away.get(block)) and session in others:
                others.remove(session)
                if not others:
                    del self._away[block]

    def begin_turn(self, request: Request, session: Session) -> bool:
        """Shares the session's KV with the request, as far as the tokens agree, or nothing if they
        differ so early that a window no longer holds what comes before. Returns False if there is
        no room for a copy of the blocks in which they differ, or of the state; try again later."""
        if self.page.state_pages and session.blocks:
            return self._continue_state(request, session)
        same, size = common_prefix(session.tokens, request.prompt[:-1]), self.page.block_size
        rewritten = same < len(session.tokens)
        if rewritten and same <= session.pure:
            same = same // size * size  # cheaper than a copy, and the same bits
        blocks = session.blocks.split(-(-same // size))[0]
        if not blocks.is_covered(same):
            same, blocks = 0, SequenceBlocks(self.page)
        if rewritten and same % size:
            # The rest of these pages belongs to the session until the turn has ended.
            copies: list[Block] = []
            last = [block for block in blocks.at(len(blocks) - 1) if block is not None]
            for block in last:
                if (copy := self.cache.copy(block)) is None:
                    self.cache.release(copies)
                    return False
                copies.append(copy)
            self.cache.hold(block for block in blocks if block not in last)
            blocks.replace_last(copies)
        else:
            self.cache.hold(blocks)
        request.blocks = blocks
        request.computed = request.cached_tokens = same
        request.pure = min(session.pure, same)
        return True

    def _continue_state(self, request: Request, session: Session) -> bool:
        """begin_turn, with a state: the turn goes on from the end of the turn before or, if its
        tokens differ, from nothing, since a state cannot go back."""
        same = len(session.tokens)
        if request.prompt[:-1][:same] != session.tokens:
            return True
        copies: list[Block] = []
        for block in session.blocks.state:  # which stays as it is until the turn has ended
            if (copy := self.cache.copy(block)) is None:
                self.cache.release(copies)
                return False
            copies.append(copy)
        blocks = session.blocks.split(len(session.blocks))[0]
        self.cache.hold(block for block in blocks if block not in blocks.state)
        blocks.state = copies
        request.blocks = blocks
        request.computed = request.cached_tokens = same
        request.pure = min(session.pure, same)
        return True

    def end_turn(
        self, request: Request, session: Session, blocks: SequenceBlocks
    ) -> Request | None:
        """Gives the request's blocks to the session. Returns the next turn, if one waits. An
        aborted turn leaves its session as it was."""
        if session.turn is not request:
            if request in session.queue:
                session.queue.remove(request)
            return None
        if blocks and request.finish_reason != "abort":
            tokens = len(request.prompt) + len(request.output) - 1
            kept, spare = blocks.split(-(-tokens // self.page.block_size))
            self.cache.release([*spare, *kept.trim(tokens)])
            blocks = self.replace(session, kept)
            session.tokens, session.pure = request.tokens(0, tokens), min(request.pure, tokens)
            session.dropped = request.recomputed
        elif request.finish_reason != "abort":
            session.dropped = True  # its KV was dropped before its last token was read
        self.cache.release(blocks)
        session.turn = session.queue.popleft() if session.queue else None
        for sessions in (self._sessions, self._resting):
            if session.session_id in sessions:
                sessions.move_to_end(session.session_id)
        return session.turn

    def evict(self, most: int | None = None) -> bool:
        """Moves out the longest unused session with a movable page, or `most` of its pages. Returns
        whether that made room."""
        if self.overflow == "swap" and self.cache.swap_room < 1:
            return False
        away: list[Session] = []
        try:
            for session in self._resting.values():
                if not (movable := self.cache.movable(session.blocks)):
                    # Pages that another request reads can be moved later.
                    if self.cache.missing(session.blocks) == session.blocks.pages:
                        away.append(session)
                elif self._move_out(session, movable[:most]):
                    self.evicted += 1
                    return True
            return False
        finally:
            for session in away:
                self._resting.pop(session.session_id)
                for block in session.blocks:
                    self._away.setdefault(block, []).append(session)

    def _move_out(self, session: Session, blocks: Sequence[Block]) -> bool:
        before = self.cache.available
        if self.overflow == "recompute":
            old = session.blocks
            self.pages -= old.pages
            session.blocks, session.tokens, session.pure = SequenceBlocks(self.page), [], 0
            session.dropped = True
            self.cache.release(old)
        else:
            self.cache.swap_out(blocks)
        return self.cache.available > before


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of equal leading tokens."""
    n = min(len(a), len(b))
    different = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(different[0]) if len(different) else n

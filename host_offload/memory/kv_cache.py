"""A cache of KV pages: shared by content, evicted when idle, swapped to the host when live.

Blocks are named by opaque keys. The code that publishes a block chooses its key, and so decides
which blocks are equal.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from host_offload.memory.arena import OutOfPages, SlotArena

HostPage = Any
"""A page's bytes in host memory, of the type that `KVCache.read` returns."""


@dataclasses.dataclass(eq=False, slots=True)
class Block:
    """`block_size` tokens' KV: a page on the device, or its copy on the host."""

    row: int | None
    """KV row of the page; None: swapped out."""
    host: HostPage | None = None
    refs: int = 1
    """How many sequences and sessions hold the block."""
    pins: int = 0
    """How many of these run, so that a step may read the page."""
    key: bytes | None = None
    """The key under which the block is published. A published block is never written again."""


@dataclasses.dataclass
class KVCache:
    """Books which sequences hold which pages. Blocks count their references, and idle blocks are
    kept while there is room.

    - `read`: copies the pages at these KV rows to the host.
    - `write`: copies host pages to these KV rows.
    - `move`: copies the pages at the first KV rows to the second ones.
    - `swap_bytes`: most bytes of host memory for pages.

    All copies run in the order of the engine's steps.
    """

    arena: SlotArena
    read: Callable[[Sequence[int]], list[HostPage]]
    write: Callable[[Sequence[HostPage], Sequence[int]], None]
    move: Callable[[Sequence[int], Sequence[int]], None]
    swap_bytes: int
    swapped: int = 0
    """Blocks on the host now."""
    swapped_out: int = 0
    """Pages copied to the host so far."""
    swapped_in: int = 0
    dropped: int = 0
    """Idle blocks that were dropped because their page was needed."""
    moved: int = 0
    """Pages that were moved to another slot."""
    _published: dict[bytes, Block] = dataclasses.field(default_factory=dict)
    _idle: OrderedDict[bytes, Block] = dataclasses.field(default_factory=OrderedDict)
    _in_slot: dict[int, dict[Block, None]] = dataclasses.field(default_factory=dict)
    """Blocks with a page in a slot, by slot, in the order in which they came."""

    @property
    def page_bytes(self) -> int:
        return self.arena.layout.page.nbytes

    @property
    def available(self) -> int:
        """Pages that are free, or held by idle blocks only."""
        return self.arena.free_pages + len(self._idle)

    @property
    def idle(self) -> int:
        """Blocks without a holder, kept in case the same content comes again."""
        return len(self._idle)

    # ---- single blocks

    def allocate(self, count: int) -> list[Block]:
        """Returns new blocks. Raises OutOfPages, taking nothing, if too few are available."""
        rows = self._rows(count)
        blocks = [Block(None) for _ in rows]
        self._place(blocks, rows)
        return blocks

    def _rows(self, count: int) -> list[int]:
        if count > self.available:
            raise OutOfPages(f"{count} pages wanted, {self.available} available")
        while self.arena.free_pages < count:
            self._drop_longest_idle()
        return self.arena.allocate_pages(count)

    def _place(self, blocks: Sequence[Block], rows: Sequence[int]) -> None:
        for block, row in zip(blocks, rows, strict=True):
            block.row, block.host = row, None
            self._in_slot.setdefault(row // self.arena.layout.kv_rows_per_slot, {})[block] = None

    def _free(self, blocks: Sequence[Block]) -> None:
        """Gives back the pages of blocks."""
        self.arena.release_pages([block.row for block in blocks if block.row is not None])
        for block in blocks:
            assert block.row is not None
            slot = block.row // self.arena.layout.kv_rows_per_slot
            del self._in_slot[slot][block]
            if not self._in_slot[slot]:
                del self._in_slot[slot]
            block.row = None

    def _drop_longest_idle(self) -> None:
        key, block = self._idle.popitem(last=False)
        del self._published[key]
        block.key = None
        self._free([block])
        self.dropped += 1

    def publish(self, block: Block, key: bytes) -> None:
        """Lets others find a block by its key; it must not change any more. Of two equal blocks,
        the first stays published."""
        if block.key is None and key not in self._published:
            block.key = key
            self._published[key] = block

    def lookup(self, key: bytes) -> Block | None:
        """Returns the block published as `key`, with one more reference; None if there is none on
        the device."""
        block = self._published.get(key)
        if block is None or block.row is None:
            return None
        self._idle.pop(key, None)
        block.refs += 1
        return block

    @staticmethod
    def hold(blocks: Iterable[Block]) -> None:
        """Adds a reference to each block."""
        for block in blocks:
            block.refs += 1

    def has(self, key: bytes) -> bool:
        """Whether lookup would find a block."""
        block = self._published.get(key)
        return block is not None and block.row is not None

    def held(self, key: bytes) -> bool:
        """Whether lookup would find a block that takes no available page."""
        block = self._published.get(key)
        return block is not None and block.row is not None and block.refs > 0

    @staticmethod
    def pin(blocks: Iterable[Block]) -> None:
        """Keeps blocks on the device, until they are unpinned as often."""
        for block in blocks:
            block.pins += 1

    @staticmethod
    def unpin(blocks: Iterable[Block]) -> None:
        for block in blocks:
            block.pins -= 1

    def release(self, blocks: Iterable[Block]) -> None:
        """Gives up a reference to each block. A block without a holder is kept idle if it was
        published, otherwise freed. Of idle ones, the last of the sequence is dropped first."""
        for block in reversed(list(blocks)):
            assert block.refs > 0
            block.refs -= 1
            if block.refs:
                continue
            if block.row is None:
                self._forget(block)
                block.host = None
                self.swapped -= 1
            elif block.key is not None:
                self._idle[block.key] = block
            else:
                self._free([block])

    def _forget(self, block: Block) -> None:
        if block.key is not None:
            del self._published[block.key]
            block.key = None

    def forget(self, blocks: Iterable[Block]) -> None:
        """Withdraws published blocks whose bytes are wrong."""
        for block in blocks:
            if block.key is not None and block.refs == 0:
                self._idle.pop(block.key)
                self._free([block])
            self._forget(block)

    def drop_idle(self) -> None:
        """Frees the pages of all idle blocks."""
        while self._idle:
            self._drop_longest_idle()

    # ---- keeping

    @property
    def published(self) -> dict[Block, bytes]:
        """Published blocks and their keys: those without a holder, the longest unused first, then
        the others."""
        every = self._idle | self._published
        return {block: key for key, block in every.items()}

    def contents(self, blocks: Sequence[Block]) -> list[HostPage]:
        """Copies the blocks' pages to the host."""
        there = [block for block in blocks if block.row is not None]
        pages = dict(
            zip(there, self.read([b.row for b in there if b.row is not None]), strict=True)
        )
        return [pages.get(block, block.host) for block in blocks]

    def adopt(self, pages: Sequence[HostPage]) -> list[Block]:
        """Returns new blocks with these pages. Raises OutOfPages, taking nothing, if too few are
        available."""
        rows = self._rows(len(pages))
        with self._returned_on_failure(rows):
            self.write(pages, rows)
        blocks = [Block(None) for _ in rows]
        self._place(blocks, rows)
        return blocks

    # ---- swapping

    def copy(self, block: Block) -> Block | None:
        """Copies a block to the host, or to the device if the host has no room. Returns the copy;
        None if neither has room."""
        if self.swap_room < 1:
            return self._copy_on_device(block) if self.available else None
        host = self.read([block.row])[0] if block.row is not None else block.host
        self.swapped += 1
        return Block(None, host)

    def _copy_on_device(self, block: Block) -> Block:
        rows = self._rows(1)
        with self._returned_on_failure(rows):
            if block.row is None:
                self.write([block.host], rows)
            else:
                self.move([block.row], rows)
        copy = Block(None)
        self._place([copy], rows)
        return copy

    @contextlib.contextmanager
    def _returned_on_failure(self, rows: Sequence[int]) -> Iterator[None]:
        """Gives pages back if the copy into them fails."""
        try:
            yield
        except BaseException:
            self.arena.release_pages(rows)
            raise

    @property
    def swap_pages(self) -> int:
        """Pages that fit into swap_bytes of host memory."""
        return self.swap_bytes // self.page_bytes

    @property
    def swap_room(self) -> int:
        """How many more pages fit into host memory."""
        return self.swap_pages - self.swapped

    def movable(self, blocks: Iterable[Block], pins: int = 0) -> list[Block]:
        """Returns the blocks on the device with at most `pins` pins."""
        return [b for b in blocks if b.row is not None and b.pins <= pins]

    def swap_out(self, blocks: Iterable[Block]) -> int:
        """Moves blocks that are not pinned to the host, for all their holders, as far as there is
        room. Returns how many pages that freed."""
        moving = self.movable(blocks)[: self.swap_room]
        pages = self.read([b.row for b in moving if b.row is not None])
        self._free(moving)
        for block, page in zip(moving, pages, strict=True):
            block.row, block.host = None, page
        self.swapped += len(moving)
        self.swapped_out += len(moving)
        return len(moving)

    def missing(self, blocks: Iterable[Block]) -> int:
        """Counts the blocks that are on the host."""
        return sum(b.row is None for b in blocks)

    def swap_in(self, blocks: Iterable[Block]) -> None:
        """Moves blocks from the host back to the device. Raises OutOfPages, moving nothing, if too
        few pages are available."""
        moving = [b for b in blocks if b.row is None]
        rows = self._rows(len(moving))
        with self._returned_on_failure(rows):
            self.write([b.host for b in moving], rows)
        self._place(moving, rows)
        self.swapped -= len(moving)
        self.swapped_in += len(moving)

    # ---- emptying slots

    @property
    def slots_in_use(self) -> int:
        """KV slots that are not empty."""
        return len(self._in_slot)

    def holds(self, slot: int) -> bool:
        """Whether a block has a page in a slot."""
        return slot in self._in_slot

    def empty_slot(self, most: int, given: int | None = None) -> list[Block]:
        """Moves pages out of a KV slot into other slots. If those are full, it drops the longest
        idle blocks.

        - `most`: most pages to move.
        - `given`: the slot; None: the slot with the fewest pages.

        Returns the moved blocks, none if the slot is empty or the other slots have no room.
        """
        while self._in_slot if given is None else self.holds(given):
            slot = given
            if slot is None:
                slot = min(self._in_slot, key=lambda slot: (len(self._in_slot[slot]), -slot))
            held = [*self._in_slot[slot]]
            elsewhere = self.arena.free_pages - self.arena.layout.pages_per_slot + len(held)
            if elsewhere >= len(held):
                self._move(held[:most], slot)
                return held[:most]
            if not self._idle:
                break
            self._drop_longest_idle()
        return []

    def _move(self, blocks: Sequence[Block], slot: int) -> None:
        """Moves blocks out of their slot."""
        rows = [block.row for block in blocks if block.row is not None]
        targets = self.arena.allocate_pages(len(rows), but=slot)
        with self._returned_on_failure(targets):
            self.move(rows, targets)
        self._free(blocks)
        self._place(blocks, targets)
        self.moved += len(rows)

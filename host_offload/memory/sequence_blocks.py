"""The blocks of a sequence, of all groups of pages."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from host_offload.memory.kv_cache import Block
from host_offload.memory.layout import PageLayout


class SequenceBlocks:
    """The blocks that hold a sequence's KV: for every `block_size` tokens one of each group of
    pages. Of groups with a window, blocks that no later token sees are None.

    - `state`: the blocks of the sequence's state, in models with state. If `resumed` is not empty,
      these blocks have the state, and the next step copies it.

    Iterates over the blocks that are held: those of the states, then of the first tokens first.
    """

    def __init__(
        self,
        page: PageLayout,
        rows: Iterable[list[Block | None]] = (),
        state: Sequence[Block] = (),
    ):
        self.page, self.state = page, list(state)
        self.resumed: list[Block] = []
        self._rows: list[list[Block | None]] = list(rows)
        self._first = [0] * page.groups
        """The first block of each group that may be held."""

    def __len__(self) -> int:
        """Returns for how many times `block_size` tokens there are blocks."""
        return len(self._rows)

    def __iter__(self) -> Iterator[Block]:
        first = min(self._first)
        blocks = (block for row in self._rows[first:] for block in row if block is not None)
        return itertools.chain(self.state, self.resumed, blocks)

    @property
    def pages(self) -> int:
        """Blocks that are held."""
        states = len(self.state) + len(self.resumed)
        return states + len(self._rows) * self.page.groups - sum(self._first)

    def at(self, index: int) -> list[Block | None]:
        """Returns the blocks of each group for tokens from ``index · block_size`` on."""
        return self._rows[index]

    def of_group(self, group: int, first: int = 0) -> list[Block | None]:
        """Returns a group's blocks from block `first` on."""
        return [row[group] for row in self._rows[first:]]

    def append(self, blocks: Sequence[Block]) -> None:
        """Adds blocks behind the last ones, each group's in turn."""
        for i in range(0, len(blocks), self.page.groups):
            self._rows.append([*blocks[i : i + self.page.groups]])

    def append_seen(self, rows: Sequence[list[Block | None]], position: int) -> list[Block]:
        """Adds rows of blocks behind the last ones. None stands for blocks that no step from
        `position` on reads. Removes and returns blocks of that kind that it had before."""
        gone = self.trim(position) if rows else []
        self._rows += rows
        self.trim(position if rows else 0)  # counts what the rows leave out
        return gone

    def replace_last(self, blocks: Sequence[Block | None]) -> None:
        """Puts other blocks of each group in the place of the last ones."""
        self._rows[-1] = list(blocks)

    def is_covered(self, position: int) -> bool:
        """Whether all blocks are held that a step from `position` on reads."""
        return all(
            first <= self.page.first_block(group, position)
            for group, first in enumerate(self._first)
        )

    def trim(self, position: int) -> list[Block]:
        """Removes and returns the blocks that no step from `position` on reads."""
        gone: list[Block] = []
        for group in range(self.page.groups):
            end = min(self.page.first_block(group, position), len(self._rows))
            for row in self._rows[self._first[group] : end]:
                block, row[group] = row[group], None
                if block is not None:
                    gone.append(block)
            self._first[group] = max(self._first[group], end)
        return gone

    def split(self, blocks: int) -> tuple[SequenceBlocks, SequenceBlocks]:
        """Returns the first `blocks` blocks of each group with the state, and the others."""
        head = SequenceBlocks(self.page, [list(row) for row in self._rows[:blocks]], self.state)
        head._first = [min(first, len(head._rows)) for first in self._first]
        tail = SequenceBlocks(self.page, [list(row) for row in self._rows[blocks:]])
        tail._first = [max(first - blocks, 0) for first in self._first]
        return head, tail

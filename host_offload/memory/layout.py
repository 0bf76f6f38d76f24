"""The layout of expert records and KV pages inside a slot, as plain numbers.

The arena is one ``uint16[num_rows, hidden]``. A *row* is ``hidden`` uint16 elements, whatever the
model's dtype; a 32-bit value takes two elements, so a float32 weight row takes two arena rows.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

from pallas_kernels.records import RecordFormat

BLOCK_SIZES = (16, 32, 64)
"""Tokens a KV page may hold. Attention reduces over spans of 64 tokens, so each divides 64."""

PREFILL_STEP = 64
"""Prompt tokens of the smallest prefill step; steps begin at multiples of it in their sequence."""

_DTYPES = {2: "bfloat16", 4: "float32"}


def default_dtype(itemsize: int) -> str:
    """Returns the default dtype of values of so many bytes. Raises ValueError unless 2 or 4."""
    if itemsize not in _DTYPES:
        raise ValueError(f"expert weights are 2 or 4 bytes a value, not {itemsize}")
    return _DTYPES[itemsize]


class Window(NamedTuple):
    """The tokens that a query sees: the last `tokens`, itself included, or, if `chunked`, those
    since the last multiple of `tokens`."""

    tokens: int
    chunked: bool = False

    def first(self, position: int) -> int:
        """Returns the first position that a query at `position` sees."""
        if self.chunked:
            return position // self.tokens * self.tokens
        return max(position - self.tokens + 1, 0)


@dataclasses.dataclass(frozen=True)
class PageLayout:
    """One KV page: `block_size` tokens of every layer of a group, in rows of `row_values` values.

    A model's layers are one group, or several with a block table each: layers of one group have
    equal KV and one window. Pages of all groups have one size. A group whose layers need less of it
    leaves the rest unused. Within a page, the group's layer l owns ``rows_per_layer`` KV rows from
    ``l · rows_per_layer``; there, row r of token t is at ``r · block_size + t``. The model's kind
    of attention defines their contents (`pallas_kernels.kv_write.KVPage`).
    """

    layers: int
    rows_per_token: int
    row_values: int
    itemsize: int
    block_size: int
    windows: tuple[Window | None, ...] = (None,)
    """The window of each group; None: its layers see all tokens."""
    state_pages: int = 0
    """Pages that the state of a sequence takes beside its keys and values."""

    @property
    def groups(self) -> int:
        return len(self.windows)

    def first_block(self, group: int, position: int) -> int:
        """Returns the first block of a group that a step from `position` on reads or writes. Steps
        begin at multiples of PREFILL_STEP."""
        window = self.windows[group]
        if window is None:
            return 0
        return window.first(position // PREFILL_STEP * PREFILL_STEP) // self.block_size

    def pages(self, tokens: int) -> int:
        """Returns the pages that a sequence of so many tokens holds at a time, if it is computed in
        steps of PREFILL_STEP tokens: of a group with a window those that the window touches."""
        blocks = -(-tokens // self.block_size)

        def held(window: Window | None) -> int:
            if window is None:
                return blocks
            # The window of a step's first token, the step, and a step that is not read yet.
            most = window.tokens + 2 * PREFILL_STEP
            return min(blocks, -(-most // self.block_size) + 1)

        return self.state_pages + sum(map(held, self.windows))

    def tokens(self, pages: int) -> int:
        """Returns the tokens of the longest sequence that so many pages hold, in whole blocks; of
        all if every group has a window: those of no window."""
        whole = self.windows.count(None) or self.groups
        pages = max(pages - self.state_pages, 0)
        blocks = pages // self.groups
        most = pages // whole
        while blocks < most:
            middle = (blocks + most + 1) // 2
            if self.pages(middle * self.block_size) <= pages + self.state_pages:
                blocks = middle
            else:
                most = middle - 1
        return blocks * self.block_size

    @property
    def row_elements(self) -> int:
        """uint16 elements of one KV row."""
        return self.row_values * self.itemsize // 2

    @property
    def rows_per_layer(self) -> int:
        return self.block_size * self.rows_per_token

    @property
    def rows(self) -> int:
        """KV rows of one page."""
        return self.layers * self.rows_per_layer

    @property
    def nbytes(self) -> int:
        return self.rows * self.row_elements * 2


@dataclasses.dataclass(frozen=True)
class SlotLayout:
    """The fixed size of a slot, and how it is cut into experts or pages."""

    records: tuple[RecordFormat, ...]
    """Resident versions; the index is the version number in the tables."""
    page: PageLayout
    slot_rows: int
    """Arena rows of one slot."""

    @property
    def hidden(self) -> int:
        return self.records[0].hidden

    @functools.cached_property
    def slot_bytes(self) -> int:
        return self.slot_rows * self.hidden * 2

    @property
    def cells_per_slot(self) -> tuple[int, ...]:
        """How many cells of each version one slot holds."""
        return tuple(self.slot_rows // record.rows for record in self.records)

    @functools.cached_property
    def pages_per_slot(self) -> int:
        return self.slot_bytes // self.page.nbytes

    @property
    def kv_rows_per_slot(self) -> int:
        """KV rows between the starts of two slots, in the view ``[-1, page.row_elements]``."""
        return self.slot_rows * self.hidden // self.page.row_elements

    def page_row(self, slot: int, page: int) -> int:
        """Returns the KV row of a page of a slot."""
        return slot * self.kv_rows_per_slot + page * self.page.rows


def slot_layout(
    *,
    hidden: int,
    width: int,
    itemsize: int,
    layers: int,
    rows_per_token: int,
    row_values: int,
    block_size: int | None = None,
    versions: Sequence[str] = ("dense",),
    dtype: str | None = None,
    biases: bool = False,
    gated: bool = True,
    windows: tuple[Window | None, ...] = (None,),
) -> SlotLayout:
    """Chooses the slot of a model. It holds one record of the largest version and as many whole
    pages as fit. It is rounded up to whole smaller records if that wastes less.

    If not even one page of the smallest block fits into a record (few narrow experts, many layers),
    the slot grows to hold one. Arguments are those of RecordFormat and PageLayout.

    - `itemsize`: bytes of a value, of weights and of KV.
    - `layers`: layers of a page.
    - `block_size`: tokens of a page (default: the one of 16, 32, 64 that wastes least of a slot,
      the smaller of equals).
    - `versions`: versions that can be resident, in the order of their numbers.

    Raises ValueError for a block_size that is not legal, without a version, for a version named
    twice, and for what RecordFormat and PageLayout refuse.
    """
    if block_size is not None and block_size not in BLOCK_SIZES:
        raise ValueError(f"block_size must be one of {BLOCK_SIZES}, not {block_size}")
    if not versions or len(set(versions)) < len(versions):
        raise ValueError(f"name each resident version once, not {', '.join(versions) or 'none'}")
    dtype = default_dtype(itemsize) if dtype is None else dtype
    records = tuple(RecordFormat(name, hidden, width, dtype, biases, gated) for name in versions)
    if records[0].itemsize != itemsize:
        raise ValueError(f"a value of {dtype} does not have {itemsize} bytes")
    pages = [
        PageLayout(layers, rows_per_token, row_values, itemsize, size, windows)
        for size in ((block_size,) if block_size else BLOCK_SIZES)
    ]
    row_elements = pages[0].row_elements
    rows = max(_whole_records(records), -(-pages[0].nbytes // (hidden * 2)))
    # A slot must begin at a whole KV row, or page addresses would not be integers.
    step = row_elements // math.gcd(row_elements, hidden)
    # A slot must also begin at an even row, so that 32-bit views of the arena see whole values.
    step = math.lcm(step, 2)
    slot_rows = -(-rows // step) * step
    slot_bytes = slot_rows * hidden * 2
    fitting = [page for page in pages if page.nbytes <= slot_bytes]
    page = min(fitting, key=lambda p: (slot_bytes % p.nbytes, p.block_size))
    return SlotLayout(records, page, slot_rows)


def _whole_records(records: Sequence[RecordFormat]) -> int:
    """Returns the rows of a slot that wastes least, summed over slots of each version: those of the
    largest record, or rounded up to whole records of another version."""
    largest = max(record.rows for record in records)
    rounded = {-(-largest // record.rows) * record.rows for record in records}

    def waste(rows: int) -> tuple[float, int]:
        return sum(rows % record.rows / rows for record in records), rows

    return min(rounded | {largest}, key=waste)

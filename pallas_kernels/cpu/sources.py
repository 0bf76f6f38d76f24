"""Where the records of experts are, for a queue that copies them into an owned arena."""

from __future__ import annotations

import dataclasses

import numpy as np

PIECES = 6
"""The most pieces of a record that lie apart: gate, up and down, and their biases."""

SOURCE = np.dtype(
    [
        ("place", np.int64, PIECES),
        ("checksum", np.uint64),
        ("file", np.int32, PIECES),
        ("check", np.int32),
    ],
    align=True,
)
"""One record for the library (`SourceRecord` of supply.h), with its parts, or pieces, one by one.

- `place`: an address, or the offset of the first byte in a file.
- `file`: the queue's number of the file (NativeQueue.file_number), MEMORY or NOWHERE.
- `checksum`: of the whole record.
- `check`: 1: the first 64 bits of SHA-256; 2: CRC-32C; 0: nothing is checked.
"""

MEMORY, NOWHERE = -1, -2
"""Values of `file` for a record in memory, and for a layer that the version lacks."""


@dataclasses.dataclass(frozen=True, eq=False)
class Sources:
    """The records of all versions. Their memory and files must stay as long as they are read.

    Raises ValueError for tables that do not fit together.
    """

    records: np.ndarray
    """SOURCE[V, L, E], L counted over MoE layers."""
    parts: tuple[tuple[int, ...], ...]
    """By version, the bytes of a record's parts in order: the matrices of a dense record, one part
    of any other."""

    turned: tuple[tuple[int, int, int], ...]
    """By version, of records whose last part is stored transposed: bytes of a row and of a number,
    and the bits that are all set in NaN and infinity, which are refused. All 0: of others."""

    blocks: tuple[np.ndarray, ...] = ()
    """By version, BLOCK_MATRIX[PIECES] of gate, up and down where each lies in blocks of a file,
    and of their biases, so that SOURCE says where they begin, and the record is one part; all zero:
    it does not. Empty: none does."""

    def __post_init__(self):
        if self.records.dtype != SOURCE or self.records.ndim != 3:
            raise ValueError(f"records are SOURCE[V, L, E], not {self.records.dtype}")
        if len(self.parts) != len(self.records):
            raise ValueError(f"{len(self.records)} versions, parts of {len(self.parts)}")
        for parts in self.parts:
            if len(parts) not in (1, 2, 3) or min(parts) < 1:
                raise ValueError(f"a record has one to three parts, each of some bytes: {parts}")

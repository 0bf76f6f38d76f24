"""Where the records of experts lie, for a queue that brings them into an owned arena."""

from __future__ import annotations

import dataclasses

import numpy as np

SOURCE = np.dtype(
    [
        ("place", np.int64, 3),
        ("checksum", np.uint64),
        ("file", np.int32, 3),
        ("check", np.int32),
    ]
)
"""How a record is named (`SourceRecord` of supply.h), its parts one by one. place: an address, or
with a file the place of the first byte there. file: the queue's number of it
(NativeQueue.file_number), MEMORY or NOWHERE. checksum: of the whole record, its first 64 bits where
check is 1 (SHA-256), or 2 (CRC-32C); 0 checks nothing.
"""

MEMORY, NOWHERE = -1, -2
"""What `file` says instead: an address; the version lacks the layer."""


@dataclasses.dataclass(frozen=True, eq=False)
class Sources:
    """The records of all versions, whose memory and files must stay as long as they are read.
    Raises ValueError for tables that do not fit together."""

    records: np.ndarray
    """SOURCE[V, L, E], L counted over MoE layers."""
    parts: tuple[tuple[int, ...], ...]
    """The bytes of a record's parts in order, by version: gate, up and down of a dense one, of
    others all at once."""

    turned: tuple[tuple[int, int], ...]
    """Bytes of a row and of a number of the last part as it lies, by version, which comes
    transposed; (0, 0): it does not."""

    def __post_init__(self):
        if self.records.dtype != SOURCE or self.records.ndim != 3:
            raise ValueError(f"records are SOURCE[V, L, E], not {self.records.dtype}")
        if len(self.parts) != len(self.records):
            raise ValueError(f"{len(self.records)} versions, parts of {len(self.parts)}")
        for parts in self.parts:
            if len(parts) not in (1, 3) or min(parts, default=0) < 1:
                raise ValueError(f"a record has one part or three, each of some bytes: {parts}")

"""Where the records of experts in files lie, for a queue that brings them into an arena."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from host_offload.memory.store import RecordFiles
from host_offload.queue.native import NativeQueue
from host_offload.queue.sources import record_parts
from pallas_kernels.cpu.sources import SOURCE, Sources
from pallas_kernels.records.format import RecordFormat

_SHA256, _CRC32C = 1, 2


def file_sources(
    files: Sequence[RecordFiles], records: Sequence[RecordFormat], queue: NativeQueue
) -> Sources:
    """Sources of these versions, each with every layer. Each file is looked at now, for which it is
    opened, and must stay as it is: device, inode, size and time are compared at every read.

    records: what the files of each version hold. Raises QueueError, naming it, for a file that
    cannot be read.
    """
    table = np.zeros((len(files), *files[0].checksums.shape), SOURCE)
    for mine, version in zip(table, files, strict=True):
        mine["file"] = [[queue.file_number(path) for path in layer] for layer in version.paths]
        if version.verify and version.crcs is not None:
            mine["checksum"], mine["check"] = version.crcs, _CRC32C
        elif version.verify:
            mine["checksum"], mine["check"] = version.checksums, _SHA256
    return Sources(table, tuple(map(record_parts, records)))

"""What every format of checkpoint is to those who load or convert it: parameters and records, which
are read by tasks that several threads carry out."""

from __future__ import annotations

import abc
import collections
import concurrent.futures
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import numpy as np

from host_offload.memory.record_source import RecordSource
from host_offload.versions.encoders import WORKERS
from moejax.checkpoints.orbax.layout import StoredModel
from pallas_kernels.records import RecordFormat

T, S = TypeVar("T"), TypeVar("S")

Task = Callable[[], int]
"""Reads some bytes into their place and returns how many. Called once, from any thread. Raises
UserError, naming the file, for what cannot be read or held."""


class RecordSink(Protocol):
    """Takes expert records; host_offload.memory.store.StoreBuilder is one."""

    @property
    def layout(self) -> RecordFormat: ...

    def piece(
        self, layer: int, first_expert: int, experts: int, first_row: int, rows: int
    ) -> AbstractContextManager[np.ndarray]:
        """uint16[experts, rows, D] to be filled, from any thread."""
        ...


class ArraySink:
    """A RecordSink into the records uint16[E, rows, D] of one layer."""

    def __init__(self, layout: RecordFormat, records: np.ndarray):
        self.layout, self.records = layout, records
        self.written = np.zeros(records.shape[:2], bool)

    @contextlib.contextmanager
    def piece(
        self, layer: int, first_expert: int, experts: int, first_row: int, rows: int
    ) -> Iterator[np.ndarray]:
        place = np.s_[first_expert : first_expert + experts, first_row : first_row + rows]
        yield self.records[place]
        self.written[place] = True


class CheckpointReader(Protocol):
    """An open checkpoint."""

    def read_param(self, key: str, chunk: int, out: np.ndarray) -> Iterator[Task]:
        """Fills a chunk of a parameter (orbax.layout.Leaf), in the dtype of `out`. key: of
        StoredModel.params."""
        ...

    def read_experts(
        self, version: str, layers: Sequence[int], sink: RecordSink, dtype: np.dtype
    ) -> Iterator[Task]:
        """Fills layer i of the sink with the records of MoE layer layers[i], in the order that
        suits the files. dtype: of the weights in dense ones."""
        ...


@dataclasses.dataclass(frozen=True)
class Checkpoint(StoredModel, abc.ABC):
    """A checkpoint of which headers alone are read, and checked. config: with a dtype."""

    nonfinite: Counter[str] = dataclasses.field(default_factory=Counter, kw_only=True)
    """Tensors with values that are NaN or infinite → how many, as far as they are read."""
    quantizers: Mapping[str, str] = dataclasses.field(default_factory=dict, kw_only=True)
    """Version → how it was made from the dense one."""

    @abc.abstractmethod
    def hold(self, dtype: str, versions: Sequence[str]) -> dict[str, Sequence[int]]:
        """Version → MoE layers that a run in this dtype loads to have these versions, or dense,
        from which they can be made. Raises UserError for files that are missing or too short."""
        ...

    @abc.abstractmethod
    def record_files(
        self,
        dtype: str,
        versions: Sequence[str],
        held: Mapping[str, Sequence[int]],
        verify: bool,
        as_stored: bool,
    ) -> Mapping[str, RecordSource]:
        """The experts where they are, by version. held: of `hold`. verify: what is read has a
        checksum that is compared. as_stored: nobody converts what is read. Raises UserError where
        a run in this dtype with these versions cannot compute with them as the files hold them."""
        ...

    @abc.abstractmethod
    def count_bytes(self, held: Mapping[str, Sequence[int]]) -> int:
        """What reading all parameters and these experts reads."""
        ...

    @abc.abstractmethod
    def open(self) -> AbstractContextManager[CheckpointReader]:
        """Raises UserError at either end of the `with` for files that have changed."""
        ...


def run_tasks(
    pool: concurrent.futures.Executor,
    tasks: Iterable[Task],
    advance: Callable[[int], object] = lambda nbytes: None,
) -> None:
    """Carries out all tasks. advance: called with the bytes of each."""
    with contextlib.closing(in_order(pool, lambda task: task(), tasks)) as read:
        for nbytes in read:
            advance(nbytes)


def in_order(
    pool: concurrent.futures.Executor, function: Callable[[T], S], items: Iterable[T]
) -> Generator[S, None, None]:
    """What the function makes of each item, computed by the pool. No more than a few are under way,
    so that little waits in memory and an error ends it soon."""
    waiting: collections.deque[concurrent.futures.Future[S]] = collections.deque()
    try:
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * WORKERS:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        for future in waiting:
            future.cancel()

"""The interface of all checkpoint formats, for loading and conversion.

A checkpoint has parameters and expert records. Tasks read them, and several threads run the tasks.
"""

from __future__ import annotations

import abc
import collections
import concurrent.futures
import contextlib
import dataclasses
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

import numpy as np

from host_offload.memory.record_source import RecordSource
from host_offload.versions.encoders import WORKERS
from moejax.checkpoints.orbax.layout import StoredModel
from pallas_kernels.linear.coded import CodedLayers, CodedRows
from pallas_kernels.records import RecordFormat

T, S, K = TypeVar("T"), TypeVar("S"), TypeVar("K")

Task = Callable[[], int]
"""Reads some bytes into their place and returns how many. A task is called once, from any thread.

Raises UserError that names the file, where it cannot be read or has values that the run's dtype
cannot hold.
"""


ExpertTask = tuple[tuple[int, int], Task]
"""Layer and expert of a sink, and a task that fills the record or a part of it."""


class RecordSink(Protocol):
    """Takes expert records; host_offload.memory.store.StoreBuilder is one."""

    @property
    def layout(self) -> RecordFormat: ...

    def piece(
        self, layer: int, first_expert: int, experts: int, first_row: int, rows: int
    ) -> AbstractContextManager[np.ndarray]:
        """Yields memory uint16[experts, rows, D], to be filled by any thread.

        - `layer`: the sink's layer.
        - `first_expert`, `experts`: the first expert, and how many.
        - `first_row`, `rows`: the rows of each record.
        """
        ...


class ArraySink:
    """A RecordSink that fills the records uint16[E, rows, D] of one layer."""

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
        """Yields the tasks that fill `out` with one chunk of a parameter, in the dtype of `out`.

        - `key`: a key of StoredModel.params.
        - `chunk`: the number of the chunk (orbax.layout.Leaf.chunks).
        """
        ...

    def read_coded(
        self, key: str, chunk: int, rows: Sequence[CodedRows], elements: np.ndarray
    ) -> Iterator[Task]:
        """Yields the tasks that fill the records of one chunk of a parameter.

        - `rows`: those of the chunk, as coded_params placed them in `elements`.
        """
        ...

    def read_experts(
        self, version: str, layers: Sequence[int], sink: RecordSink, dtype: np.dtype
    ) -> Iterator[ExpertTask]:
        """Yields the tasks that fill layer i of the sink with the records of MoE layer layers[i].
        They come in the order of the files.

        - `dtype`: of the weights in dense records.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Checkpoint(StoredModel, abc.ABC):
    """A checkpoint whose headers are read and checked, and whose weights are not yet read. Its
    config always has a dtype."""

    quantizers: Mapping[str, str] = dataclasses.field(default_factory=dict, kw_only=True)
    """Version → how it was made from the dense one."""

    @abc.abstractmethod
    def hold(self, dtype: str, versions: Sequence[str]) -> dict[str, Sequence[int]]:
        """Chooses what a run in this dtype loads so that it has these versions. A version that the
        checkpoint lacks is made from dense, which is then loaded.

        Returns version → the MoE layers to load. Raises UserError for files that are missing or too
        short.
        """
        ...

    def coded_params(self, dtype: str) -> Mapping[str, tuple[CodedLayers, int]]:
        """The matrices of products that can stay in the checkpoint's codes in a run in this dtype:
        key → the rows of its chunks, and how many elements they have."""
        return {}

    @abc.abstractmethod
    def record_files(
        self,
        dtype: str,
        versions: Sequence[str],
        held: Mapping[str, Sequence[int]],
        verify: bool,
        as_stored: bool,
    ) -> Mapping[str, RecordSource]:
        """The experts in their files, by version.

        - `held`: the result of `hold`.
        - `verify`: compare each record that is read with its checksum, where there is one.
        - `as_stored`: records are used as the files hold them, without conversion to `dtype`.

        Raises UserError where a run in this dtype and with these versions would need a conversion.
        """
        ...

    @abc.abstractmethod
    def count_bytes(self, held: Mapping[str, Sequence[int]]) -> int:
        """Bytes of all parameters and of the experts in `held`, the result of `hold`."""
        ...

    @abc.abstractmethod
    def open(self) -> AbstractContextManager[CheckpointReader]:
        """Opens the files. Raises UserError at either end of the `with` for files that have
        changed."""
        ...


def run_tasks(
    pool: concurrent.futures.Executor,
    tasks: Iterable[Task],
    advance: Callable[[int], object] = lambda nbytes: None,
) -> None:
    """Runs all tasks in the pool's threads.

    - `advance`: called with the bytes that each task has read.
    """
    with contextlib.closing(in_order(pool, lambda task: task(), tasks)) as read:
        for nbytes in read:
            advance(nbytes)


def wanted_first(
    tasks: Iterable[tuple[K, Task]], next_wanted: Callable[[], K | None]
) -> Iterator[tuple[Task, bool]]:
    """Yields each task, and whether it was wanted: those of wanted records before the others, which
    come in their order.

    - `tasks`: by record.
    - `next_wanted`: returns a record that is wanted, or None.
    """
    left, of_record = collections.OrderedDict(enumerate(tasks)), collections.defaultdict(list)
    for number, (record, _) in left.items():
        of_record[record].append(number)
    wanted: collections.deque[int] = collections.deque()
    while left:
        if not wanted and (record := next_wanted()) is not None:
            wanted.extend(number for number in of_record[record] if number in left)
        urgent = bool(wanted)
        number = wanted.popleft() if urgent else next(iter(left))
        yield left.pop(number)[1], urgent


def in_order(
    pool: concurrent.futures.Executor, function: Callable[[T], S], items: Iterable[T]
) -> Generator[S, None, None]:
    """Yields function(item) for each item, in the items' order, computed in the pool's threads.

    Few calls run at once, so that few results wait in memory and an error ends the loop soon.
    """
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

"""Experts paged from the safetensors files that people download, without a conversion."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from host_offload.versions.encoders import NUMPY_DTYPES
from moejax.checkpoints.checkpoint import ArraySink
from moejax.checkpoints.safetensors.shards import Shard
from moejax.checkpoints.tensor_tasks import OpenTensor
from moejax.checkpoints.tensors import ExpertPlace
from moejax.errors import UserError
from pallas_kernels.cpu.sources import SOURCE
from pallas_kernels.records import RecordFormat


@dataclasses.dataclass(frozen=True)
class ShardRecords:
    """A RecordSource of dense records: gate's and up's rows as they lie, down's transposed, in the
    run's dtype. Shards have no checksums; each must stay what it was when its header was read.

    tensors: (MoE layer, expert) → those with its weights. dtype: the run's.
    """

    format: RecordFormat
    shape: tuple[int, int]
    tensors: Mapping[tuple[int, int], Sequence[tuple[Shard, str, ExpertPlace]]]
    dtype: str

    verify = False

    @property
    def first_file(self) -> str:
        return str(self.tensors[0, 0][0][0].path)

    def read(self, layer: int, expert: int, record: np.ndarray) -> None:
        sink, dtype = ArraySink(self.format, record[None]), NUMPY_DTYPES[self.dtype]
        try:
            for shard, name, place in self.tensors[layer, expert]:
                with shard.open() as reader:
                    tensor = OpenTensor(shard, reader, name, Counter())
                    tensor.read_record(place, expert, (0, 0), sink, dtype)
        except UserError as error:
            raise OSError(str(error)) from error

    def holds(self, layer: int, expert: int, record: np.ndarray) -> bool:
        found = np.empty_like(record)
        self.read(layer, expert, found)
        return np.array_equal(found, record)

    @property
    def turned(self) -> tuple[int, int]:
        itemsize = NUMPY_DTYPES[self.dtype].itemsize
        return self.format.width * itemsize, itemsize

    def locate(self, number_file: Callable[[str], int]) -> np.ndarray:
        table = np.zeros(self.shape, SOURCE)
        matrix, (_, itemsize) = self.format.waited[0], self.turned
        for key, tensors in self.tensors.items():
            for shard, name, place in tensors:
                stacked = key[1] if place.expert is None else 0
                first = shard.begins[name] + stacked * math.prod(place.shape[-2:]) * itemsize
                for number, part in enumerate(_PARTS[place.matrix]):
                    table["place"][key][part] = first + number * matrix
                    table["file"][key][part] = number_file(str(shard.path))
        return table


_PARTS = {"gate": (0,), "up": (1,), "down": (2,), "gate_up": (0, 1)}
"""Of a tensor, the parts of a record that it has, one after the other."""

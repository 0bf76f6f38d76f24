"""Experts encoded into records of any version, and decoded again, in numpy.

What the records mean is in pallas_kernels.records.format; `decode` here and there give the same
bits. Work goes through the processor's cache in tiles, expert by expert in several threads.
"""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from host_offload.versions import lossless
from host_offload.versions.packing import pack, part, unpack
from host_offload.versions.quantizers import (
    ScaleRule,
    UnquantizableError,
    dequantize,
    quantize,
    rtn,
)
from pallas_kernels.records.format import MATRICES, RecordFormat

WORKERS = min(8, os.cpu_count() or 1)
"""Threads, unless the caller says otherwise."""

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}


class EncodingError(ValueError):
    """Experts that a version cannot hold. experts: their places among what was to be encoded."""

    def __init__(self, experts: tuple[int, ...], reason: str):
        super().__init__(f"experts {', '.join(map(str, experts[:8]))}: {reason}")
        self.experts, self.reason = experts, reason


def encode(
    weights: np.ndarray,
    fmt: RecordFormat,
    rule: ScaleRule = rtn,
    out: np.ndarray | None = None,
    workers: int = WORKERS,
) -> np.ndarray:
    """uint16[n, rows, D]: the records of n experts.

    weights: [n, 3·I, D] of the format's dtype: gate rows, up rows, rows of down^T. rule: chooses
    the scales of the int versions. out: where the records go.

    Raises EncodingError for experts with weights that no scale holds (NaN, infinities, beyond
    float16) in a lossy version, or with more escapes than lossless12's tables hold; ValueError for
    weights of another shape or dtype.
    """
    shape, dtype = (len(weights), 3 * fmt.width, fmt.hidden), DTYPES[fmt.dtype]
    if weights.shape != shape or weights.dtype != dtype:
        raise ValueError(
            f"weights must be {dtype.name}[n, {3 * fmt.width}, {fmt.hidden}], not "
            f"{weights.dtype.name}{list(weights.shape)}"
        )
    records = np.empty((len(weights), fmt.rows, fmt.hidden), np.uint16) if out is None else out

    def one(expert: int) -> str | None:
        matrices = weights[expert].reshape(3, fmt.width, fmt.hidden)
        try:
            encode_expert(matrices, fmt, rule, records[expert])
        except (UnquantizableError, lossless.EscapeOverflowError) as error:
            return str(error)
        return None

    failed = {i: reason for i, reason in enumerate(_each(one, len(weights), workers)) if reason}
    if failed:
        raise EncodingError(tuple(failed), next(iter(failed.values())))
    return records


def decode(records: np.ndarray, fmt: RecordFormat, workers: int = WORKERS) -> np.ndarray:
    """[n, 3·I, D] of the format's dtype, the weights of n experts.

    records: uint16[n, rows, D]. Raises ValueError for another shape or dtype.
    """
    if records.shape[1:] != (fmt.rows, fmt.hidden) or records.dtype != np.uint16:
        raise ValueError(
            f"records of {fmt.version} are uint16[n, {fmt.rows}, {fmt.hidden}], not "
            f"{records.dtype.name}{list(records.shape)}"
        )
    dtype = DTYPES[fmt.dtype]
    weights = np.empty((len(records), 3, fmt.width, fmt.hidden), dtype)

    def one(expert: int) -> None:
        record, into = records[expert], weights[expert]
        if fmt.version == "dense":
            into.reshape(-1).view(np.uint16)[:] = record.reshape(-1)
        elif fmt.version == "lossless12":
            lossless.decode_expert(record, fmt, into.view(np.uint16))
        else:
            for matrix, values in zip(MATRICES, into, strict=True):
                _narrow(_dequantized(record, fmt, matrix), values)

    _each(one, len(records), workers)
    return weights.reshape(len(records), 3 * fmt.width, fmt.hidden)


def encode_expert(
    matrices: np.ndarray, fmt: RecordFormat, rule: ScaleRule, record: np.ndarray
) -> None:
    """Writes a record, uint16[rows, D]. matrices: [3, I, D], gate, up, down^T."""
    if fmt.version == "dense":
        record.reshape(-1)[:] = matrices.reshape(-1).view(np.uint16)
    elif fmt.version == "lossless12":
        lossless.encode_expert(matrices.view(np.uint16), fmt, record)
    else:
        pack_quantized(
            {
                matrix: quantize(weights, *reduced_axis(fmt, matrix), fmt.bits, rule)
                for matrix, weights in zip(MATRICES, matrices, strict=True)
            },
            fmt,
            record,
        )


def pack_quantized(
    matrices: dict[str, tuple[np.ndarray, np.ndarray]], fmt: RecordFormat, record: np.ndarray
) -> None:
    """Writes a record, uint16[rows, D], of an int version. matrices: "gate", "up" and "down" → its
    codes uint8[I, D] and scales float16, of gate and up [I, groups_in], of down [groups_out, D]."""
    record[sum(rows for _, rows in fmt.parts.values()) :] = 0
    for matrix, (codes, scales) in matrices.items():
        pack(codes, fmt.bits, matrix == "down", part(record, fmt, f"{matrix}_codes"))
        flat = part(record, fmt, f"{matrix}_scales")
        flat[: scales.size] = scales.reshape(-1).view(np.uint16)
        flat[scales.size :] = 0


def reduced_axis(fmt: RecordFormat, matrix: str) -> tuple[int, int]:
    """(the axis that a matrix [I, D] is reduced over, how many of its weights share a scale)."""
    return (0, fmt.group_out) if matrix == "down" else (1, fmt.group_in)


def _dequantized(record: np.ndarray, fmt: RecordFormat, matrix: str) -> np.ndarray:
    """float32[I, D]"""
    axis, group = reduced_axis(fmt, matrix)
    shape = (fmt.width, fmt.hidden)
    codes = unpack(part(record, fmt, f"{matrix}_codes"), fmt.bits, axis == 0, shape)
    groups = (fmt.groups_out, fmt.hidden) if axis == 0 else (fmt.width, fmt.groups_in)
    scales = part(record, fmt, f"{matrix}_scales")[: groups[0] * groups[1]]
    return dequantize(codes, scales.view(np.float16).reshape(groups), axis, group, fmt.bits)


def _narrow(weights: np.ndarray, into: np.ndarray) -> None:
    """Rounds finite float32 to `into`'s dtype, to nearest, ties to even."""
    if into.dtype.name != "bfloat16":
        np.copyto(into, weights, casting="unsafe")
        return
    bits = weights.view(np.uint32)  # its own memory; numpy's conversion is many times slower
    bits += 0x7FFF + ((bits >> 16) & 1)
    bits >>= 16
    np.copyto(into.view(np.uint16), bits, casting="unsafe")


def _each(one: Callable[[int], Any], count: int, workers: int) -> list[Any]:
    if workers == 1 or count == 1:
        return [one(i) for i in range(count)]
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        return list(pool.map(one, range(count)))

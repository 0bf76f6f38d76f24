"""Experts encoded into records of any version, in numpy, and decoded again.

What the records mean is in pallas_kernels.records.format. Work goes through the processor's cache
in tiles, expert by expert in several threads.
"""

from __future__ import annotations

import concurrent.futures
import os

import jax
import ml_dtypes
import numpy as np

from host_offload.versions import lossless
from host_offload.versions.packing import pack, part
from host_offload.versions.quantized import put_scales
from host_offload.versions.quantizers import (
    ScaleRule,
    UnquantizableError,
    quantize,
    rtn,
)
from pallas_kernels import records
from pallas_kernels.records.format import MATRICES, RecordFormat

WORKERS = min(8, os.cpu_count() or 1)
"""Threads that encode, or that read: a disk of this age wants several requests at once."""

NUMPY_DTYPES = {
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
    shape, dtype = (len(weights), 3 * fmt.width, fmt.hidden), NUMPY_DTYPES[fmt.dtype]
    if weights.shape != shape or weights.dtype != dtype:
        raise ValueError(
            f"weights must be {dtype.name}[n, {3 * fmt.width}, {fmt.hidden}], not "
            f"{weights.dtype.name}{list(weights.shape)}"
        )
    made = np.empty((len(weights), fmt.rows, fmt.hidden), np.uint16) if out is None else out

    def one(expert: int) -> str | None:
        matrices = weights[expert].reshape(3, fmt.width, fmt.hidden)
        try:
            encode_expert(matrices, fmt, rule, made[expert])
        except (UnquantizableError, lossless.EscapeOverflowError) as error:
            return str(error)
        return None

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        reasons = enumerate(pool.map(one, range(len(weights))))
        failed = {i: reason for i, reason in reasons if reason}
    if failed:
        raise EncodingError(tuple(failed), next(iter(failed.values())))
    return made


def decode(stored: np.ndarray, fmt: RecordFormat) -> np.ndarray:
    """[n, 3·I, D] of the format's dtype, the weights of n experts.

    stored: uint16[n, rows, D], their records. Raises ValueError for another shape or dtype.
    """
    if stored.shape[1:] != (fmt.rows, fmt.hidden) or stored.dtype != np.uint16:
        raise ValueError(
            f"records of {fmt.version} are uint16[n, {fmt.rows}, {fmt.hidden}], not "
            f"{stored.dtype.name}{list(stored.shape)}"
        )
    # One by one: what decoding takes beside is of one expert.
    return np.stack([np.asarray(_decoded(record, fmt)) for record in stored])


_decoded = jax.jit(records.decode, static_argnums=1)


def encode_expert(
    matrices: np.ndarray, fmt: RecordFormat, rule: ScaleRule, record: np.ndarray
) -> None:
    """Writes a record, uint16[rows, D]. matrices: [3, I, D], gate, up, down^T."""
    if "weights" in fmt.encoding.fields:
        record.reshape(-1)[:] = matrices.reshape(-1).view(np.uint16)
    elif "tables" in fmt.encoding.fields:
        lossless.encode_expert(matrices.view(np.uint16), fmt, record)
    else:
        pack_quantized(
            {
                matrix: quantize(weights, *reduced_axis(fmt, matrix), fmt.encoding, rule)
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
        put_scales(scales, part(record, fmt, f"{matrix}_scales"))


def reduced_axis(fmt: RecordFormat, matrix: str) -> tuple[int, int]:
    """(the axis that a matrix [I, D] is reduced over, how many of its weights share a scale)."""
    return (0, fmt.group_out) if matrix == "down" else (1, fmt.group_in)

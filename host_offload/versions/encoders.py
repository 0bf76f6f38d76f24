"""Encodes experts into records of any version, and decodes them, in numpy.

pallas_kernels.records.format defines the records. Each thread encodes one expert at a time, in
tiles that stay in the processor's cache.
"""

from __future__ import annotations

import concurrent.futures
import os

import jax
import ml_dtypes
import numpy as np

from host_offload.versions import lossless
from host_offload.versions.packing import pack, part
from host_offload.versions.quantized import put_values
from host_offload.versions.quantizers import (
    ScaleRule,
    UnquantizableError,
    quantize,
    rtn,
)
from pallas_kernels import records
from pallas_kernels.records.format import RecordFormat

WORKERS = min(8, os.cpu_count() or 1)
"""Threads that encode, or that read: a disk of today is fast only with several requests at once."""

NUMPY_DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}


class EncodingError(ValueError):
    """A version cannot hold some experts. experts: their indices among the experts to encode."""

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
    """Encodes n experts into records uint16[n, rows, D].

    - `weights`: [n, fmt.weight_rows, D] of the format's dtype: gate rows, up rows, rows of down^T,
      rows of biases, which every version keeps as they are.
    - `rule`: chooses the scales of the int versions.
    - `out`: memory for the records; None: new memory.
    - `workers`: the number of threads.

    Raises EncodingError for a lossy version and weights that no scale holds (NaN, infinite, or too
    large for float16 scales), and for lossless12 and experts with more escapes than its tables
    hold; ValueError for weights of another shape or dtype.
    """
    shape, dtype = (len(weights), fmt.weight_rows, fmt.hidden), NUMPY_DTYPES[fmt.dtype]
    if weights.shape != shape or weights.dtype != dtype:
        raise ValueError(
            f"weights must be {dtype.name}[n, {fmt.weight_rows}, {fmt.hidden}], not "
            f"{weights.dtype.name}{list(weights.shape)}"
        )
    made = np.empty((len(weights), fmt.rows, fmt.hidden), np.uint16) if out is None else out

    def one(expert: int) -> str | None:
        count = len(fmt.matrices)
        matrices, biases = np.split(weights[expert], [count * fmt.width])
        try:
            encode_expert(matrices.reshape(count, fmt.width, fmt.hidden), fmt, rule, made[expert])
        except (UnquantizableError, lossless.EscapeOverflowError) as error:
            return str(error)
        if fmt.biases:
            rows = made[expert, fmt.parts[f"{fmt.matrices[0]}_bias"][0] :].reshape(-1)
            rows[: biases.nbytes // 2] = biases.reshape(-1).view(np.uint16)
        return None

    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        reasons = enumerate(pool.map(one, range(len(weights))))
        failed = {i: reason for i, reason in reasons if reason}
    if failed:
        raise EncodingError(tuple(failed), next(iter(failed.values())))
    return made


def decode(stored: np.ndarray, fmt: RecordFormat) -> np.ndarray:
    """Decodes the records of n experts into weights [n, fmt.weight_rows, D] of the format's dtype,
    as encode takes them.

    - `stored`: uint16[n, rows, D].

    Raises ValueError for another shape or dtype.
    """
    if stored.shape[1:] != (fmt.rows, fmt.hidden) or stored.dtype != np.uint16:
        raise ValueError(
            f"records of {fmt.version} are uint16[n, {fmt.rows}, {fmt.hidden}], not "
            f"{stored.dtype.name}{list(stored.shape)}"
        )
    # One by one, so that decoding needs temporary memory for one expert only.
    return np.stack([np.asarray(_decoded(record, fmt)) for record in stored])


_decoded = jax.jit(records.decode, static_argnums=1)


def encode_expert(
    matrices: np.ndarray, fmt: RecordFormat, rule: ScaleRule, record: np.ndarray
) -> None:
    """Encodes one expert into its record.

    - `matrices`: [3, I, D], gate, up, down^T, or [2, I, D] without gate.
    - `rule`: as in encode.
    - `record`: uint16[rows, D], is filled.

    Raises UnquantizableError and EscapeOverflowError.
    """
    if "weights" in fmt.encoding.fields:
        record.reshape(-1)[: matrices.nbytes // 2] = matrices.reshape(-1).view(np.uint16)
    elif "tables" in fmt.encoding.fields:
        lossless.encode_expert(matrices.view(np.uint16), fmt, record)
    else:
        pack_quantized(
            {
                matrix: quantize(weights, *reduced_axis(fmt, matrix), fmt.encoding, rule)
                for matrix, weights in zip(fmt.matrices, matrices, strict=True)
            },
            fmt,
            record,
        )


def pack_quantized(
    matrices: dict[str, tuple[np.ndarray, np.ndarray]], fmt: RecordFormat, record: np.ndarray
) -> None:
    """Packs codes and scales into a record of an int version.

    - `matrices`: those of fmt.matrices → codes uint8[I, D] and scales float16, [I, groups_in] of
      gate and up, [groups_out, D] of down.
    - `record`: uint16[rows, D], is filled.
    """
    record[sum(rows for _, rows in fmt.parts.values()) :] = 0
    for matrix, (codes, scales) in matrices.items():
        pack(codes, fmt.bits, matrix == "down", part(record, fmt, f"{matrix}_codes"))
        put_values(scales, part(record, fmt, f"{matrix}_scales"))


def reduced_axis(fmt: RecordFormat, matrix: str) -> tuple[int, int]:
    """The axis of [I, D] that a matrix is reduced over, and how many weights along it share a
    scale."""
    return (0, fmt.group_out) if matrix == "down" else (1, fmt.group_in)

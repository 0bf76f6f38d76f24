"""Records decoded in numpy: a second reading of the formats beside that of pallas_kernels.records,
with the same bits."""

from __future__ import annotations

import numpy as np

from host_offload.versions.encoders import NUMPY_DTYPES, reduced_axis
from host_offload.versions.packing import part
from pallas_kernels.records.encoding import ZEROS
from pallas_kernels.records.format import BLOCK, ESCAPE, MATRICES, RecordFormat


def decode(records: np.ndarray, fmt: RecordFormat) -> np.ndarray:
    """[n, fmt.weight_rows, D] of the format's dtype, the weights of n experts and, after them, the
    rows of their biases. records: uint16[n, rows, D]."""
    whole = np.empty((len(records), fmt.weight_rows, fmt.hidden), NUMPY_DTYPES[fmt.dtype])
    for record, all_rows in zip(records, whole, strict=True):
        count = len(fmt.matrices)
        into = all_rows[: count * fmt.width].reshape(count, fmt.width, fmt.hidden)  # a view
        if fmt.biases:
            rows = all_rows[count * fmt.width :].reshape(-1).view(np.uint16)
            rows[:] = record[fmt.parts[f"{fmt.matrices[0]}_bias"][0] :].reshape(-1)[: rows.size]
        if fmt.version == "dense":
            flat = into.reshape(-1).view(np.uint16)
            flat[:] = record.reshape(-1)[: flat.size]
        elif fmt.version == "lossless12":
            _decode_lossless(record, fmt, into.view(np.uint16))
        else:
            for matrix, values in zip(fmt.matrices, into, strict=True):
                _narrow(_dequantized(record, fmt, matrix), values)
    return whole


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


def _decode_lossless(record: np.ndarray, fmt: RecordFormat, bits: np.ndarray) -> None:
    """Fills the bits uint16[n, I, D] of a record's weights."""
    tables = _tables(record, fmt)
    rows = np.arange(fmt.width) // BLOCK
    for into, matrix in zip(bits, fmt.matrices, strict=True):
        code, byte = (
            _unpacked(record, fmt, matrix, "codes", 4),
            _unpacked(record, fmt, matrix, "bytes", 8),
        )
        table = tables[MATRICES.index(matrix)]
        np.subtract(table[rows, :1], code, out=into, casting="unsafe")
        into <<= 7
        wide = byte.astype(np.uint16)
        into |= wide & 0x7F
        wide &= 0x80
        wide <<= 8
        into |= wide
        row, column = np.nonzero(code == ESCAPE)
        into[row, column] = table[rows[row], 1 + byte[row, column].astype(np.intp)]


def _unpacked(
    record: np.ndarray, fmt: RecordFormat, matrix: str, name: str, bits: int
) -> np.ndarray:
    """uint8[I, D]"""
    shape = (fmt.width, fmt.hidden)
    return unpack(part(record, fmt, f"{matrix}_{name}"), bits, matrix == "down", shape)


def _tables(record: np.ndarray, fmt: RecordFormat) -> np.ndarray:
    """uint16[3, blocks, 1 + escapes]"""
    shape = (3, fmt.blocks, 1 + fmt.escapes)
    return part(record, fmt, "tables")[: np.prod(shape)].reshape(shape)


def unpack(part: np.ndarray, bits: int, down: bool, shape: tuple[int, int]) -> np.ndarray:
    """uint8[I, D]: the codes that `pack` wrote. shape: [I, D]."""
    planes, (rows, columns) = 16 // bits, shape
    height, width = (-(-rows // planes), columns) if down else (rows, columns // planes)
    packed = part[: height * width].reshape(height, width)
    codes = np.empty(shape, np.uint8)
    for j in range(planes):
        into = codes[j * height :][:height] if down else codes[:, j * width :][:, :width]
        np.copyto(into, packed[: len(into)] >> (bits * j), casting="unsafe")
    if bits < 8:
        codes &= (1 << bits) - 1
    return codes


def dequantize(codes: np.ndarray, scales: np.ndarray, axis: int, group: int, bits: int):
    """float32 weights, exact: products of 8 and 11 bits. Arguments as `quantize` has them."""
    weights = codes.astype(np.float32)
    weights -= np.float32(ZEROS[bits])
    wide = np.repeat(scales.astype(np.float32), group, axis)
    weights *= wide[: codes.shape[0], : codes.shape[1]]
    return weights

"""Encodes the version `lossless12` in numpy: bfloat16 weights in 12 bits, decoded to the same bits.

pallas_kernels.records.format defines the format. This module chooses the base of each block: its
largest exponent. If too many weights are then too small for a code, it takes the window of 15
exponents that leaves out the fewest distinct values.
"""

from __future__ import annotations

import numpy as np

from host_offload.versions.packing import pack, part
from pallas_kernels.records.format import BLOCK, ESCAPE, MATRICES, RecordFormat

_TILE = 1 << 16
"""Weights encoded at once, so that a tile and its temporaries stay in the processor's cache."""

_EXPONENT = 0x7F80


class EscapeOverflowError(ValueError):
    """A block has more distinct values outside of its window than its table has entries."""


def encode_expert(matrices: np.ndarray, fmt: RecordFormat, record: np.ndarray) -> None:
    """Encodes one expert into its record.

    - `matrices`: uint16[n, I, D], the bits of fmt.matrices.
    - `record`: uint16[rows, D], is filled.

    Raises EscapeOverflowError.
    """
    width, hidden = fmt.width, fmt.hidden
    record[sum(rows for _, rows in fmt.parts.values()) :] = 0
    part(record, fmt, "tables")[:] = 0
    shape = (3, fmt.blocks, 1 + fmt.escapes)
    tables = part(record, fmt, "tables")[: np.prod(shape)].reshape(shape)
    byte, code = np.empty((2, width, hidden), np.uint8)
    step = max(1, _TILE // (BLOCK * hidden)) * BLOCK
    for matrix, weights in zip(fmt.matrices, matrices, strict=True):
        table = tables[MATRICES.index(matrix)]
        for first in range(0, width, step):
            rows = slice(first, min(first + step, width))
            blocks = slice(first // BLOCK, -(-rows.stop // BLOCK))
            _encode_rows(weights[rows], table[blocks], byte[rows], code[rows])
        down = matrix == "down"
        pack(byte, 8, down, part(record, fmt, f"{matrix}_bytes"))
        pack(code, 4, down, part(record, fmt, f"{matrix}_codes"))


def _encode_rows(bits: np.ndarray, tables: np.ndarray, byte: np.ndarray, code: np.ndarray) -> None:
    """Fills tables, bytes and codes of whole blocks. The last block may be shorter.

    - `bits`: uint16[rows, D], the bits of the weights.
    - `tables`: uint16[blocks, 1 + escapes], all zero.
    - `byte`, `code`: uint8[rows, D].

    Raises EscapeOverflowError.
    """
    whole = len(bits) // BLOCK
    for first, last in ((0, whole), (whole, len(tables))):
        if first == last:
            continue
        rows = slice(first * BLOCK, min(last * BLOCK, len(bits)))
        blocks = bits[rows].reshape(last - first, -1)
        exponents = blocks & np.uint16(_EXPONENT)
        bases = exponents.max(1)
        escapes = _encode_blocks(blocks, exponents, bases, byte[rows], code[rows])
        table = tables[first:last]
        crowded = _fill_tables(escapes, table[:, 1:], byte[rows])
        if crowded.size:
            for block in crowded:
                bases[block] = _best_base(blocks[block])
            table[:, 1:] = 0
            escapes = _encode_blocks(blocks, exponents, bases, byte[rows], code[rows])
            if _fill_tables(escapes, table[:, 1:], byte[rows]).size:
                raise EscapeOverflowError(
                    "too many weights are outside of 15 consecutive exponents for lossless12"
                )
        table[:, 0] = bases >> 7


def _encode_blocks(blocks, exponents, bases, byte, code) -> tuple[np.ndarray, ...]:
    """Fills byte and code. A weight outside of its block's window is an escape and gets code 15.

    - `blocks`: uint16[n, weights].
    - `exponents`: uint16[n, weights], the exponent bits at their place in the weight.
    - `bases`: uint16[n], the largest exponent of each window, in the same form.

    Returns of all escapes the block, the index in the flat `byte`, and the bits.
    """
    # The difference of an exponent above the base wraps around to a large number.
    below = np.subtract(bases[:, None], exponents)
    below >>= 7
    codes = code.reshape(blocks.shape)
    outside = below >= ESCAPE
    np.copyto(codes, below, casting="unsafe")
    signs = blocks >> 8
    signs &= 0x80
    signs |= blocks & 0x7F
    np.copyto(byte.reshape(blocks.shape), signs, casting="unsafe")
    at = np.flatnonzero(outside)
    codes.reshape(-1)[at] = ESCAPE
    return at // blocks.shape[1], at, blocks.reshape(-1)[at]


def _fill_tables(escapes, tables: np.ndarray, byte: np.ndarray) -> np.ndarray:
    """Writes the distinct escapes of each block into its table, ascending, and their places in the
    table into the bytes. Returns the blocks whose table is too short; their tables and bytes are
    then wrong."""
    block, at, bits = escapes
    if not at.size:
        return at
    keys, inverse = np.unique((block << 16) | bits, return_inverse=True)
    owner = keys >> 16
    place = np.arange(len(keys)) - np.searchsorted(owner, owner)
    fits = place < tables.shape[1]
    tables[owner[fits], place[fits]] = keys[fits] & 0xFFFF
    byte.reshape(-1)[at] = np.minimum(place, 255)[inverse]
    return np.unique(owner[~fits])


def _best_base(block: np.ndarray) -> int:
    """The largest exponent of the window of 15 that leaves out the fewest distinct values, at its
    place in the weight. Of equal windows the highest is taken."""
    distinct = np.bincount((np.unique(block) & _EXPONENT) >> 7, minlength=256)
    inside = np.convolve(distinct, np.ones(ESCAPE, int))[:256]
    return (255 - int(np.argmax(inside[::-1]))) << 7

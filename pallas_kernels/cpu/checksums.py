"""Checksums of bytes in memory, by the native library."""

from __future__ import annotations

import ctypes

import numpy as np

from pallas_kernels.cpu.library import library

KINDS = {"sha256": 1, "crc32c": 2}
"""Kind → its number in the library (`Check` of checksums.h)."""


def checksum(kind: str, data: bytes | memoryview) -> str:
    """The checksum of bytes in hex: the first 64 bits of SHA-256, or CRC-32C.

    - `kind`: one of KINDS.

    Raises ValueError if the library cannot run here.
    """
    function, held = library().moejax_checksum, np.frombuffer(data, np.uint8)
    function.restype = ctypes.c_uint64
    function.argtypes = ctypes.c_int32, ctypes.c_void_p, ctypes.c_int64
    value = function(KINDS[kind], held.ctypes.data, held.size)
    return f"{value:0{16 if kind == 'sha256' else 8}x}"

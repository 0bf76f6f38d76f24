"""Dense records made the plain way, to compare with."""

from __future__ import annotations

import numpy as np


def record_of(gate: np.ndarray, up: np.ndarray, down: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The dense record uint16[rows, D] of one expert: gate rows, up rows, down^T rows.

    gate, up: [I, D]; down: [D, I]; any float dtype, converted to dtype (float32, float16 or
    ml_dtypes' bfloat16).
    """
    rows = [np.ascontiguousarray(part.astype(dtype, copy=False)) for part in (gate, up, down.T)]
    return np.concatenate([part.view(np.uint16).reshape(-1, gate.shape[1]) for part in rows])

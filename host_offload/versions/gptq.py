"""GPTQ (Frantar et al. 2022, arXiv 2210.17323): codes that keep what a matrix gives out.

Of all inputs x that a matrix W sees, the sum of ‖(W − Ŵ)x‖² is quadratic in W − Ŵ with the Hessian
H = Σ x xᵀ. Columns are rounded one after the other, and the error of each is made up for by those
that are still to come.
"""

from __future__ import annotations

import numpy as np

from host_offload.versions.quantizers import ScaleRule, finite_scales, mse, nearest_codes
from pallas_kernels.records.format import ZEROS, RecordFormat

_BLOCK = 128
"""Columns whose errors reach the columns behind them in one product; the paper's B. The lengths of
groups divide it."""

DAMPING = 0.01
"""The part of the mean diagonal element that is added to the diagonal (the paper's 1%)."""


def gptq(
    weights: np.ndarray,
    hessian: np.ndarray,
    group: int,
    bits: int,
    rule: ScaleRule = mse,
) -> tuple[np.ndarray, np.ndarray]:
    """(codes uint8[R, C], scales float16[R, ⌈C/group⌉]) of a matrix that is multiplied with inputs
    of C values (the paper's algorithm 1, columns in their own order).

    weights: float32[R, C]. hessian: [C, C], Σ x xᵀ; where it is zero nothing is known and the codes
    are the nearest ones. rule: chooses a group's scales, from what errors have made of its weights
    when its first column's turn comes. Raises UnquantizableError.
    """
    rows, columns = weights.shape
    factor = _inverse_factor(hessian)
    rest = np.array(weights.T, np.float32, order="C")  # a column's weights side by side
    codes = np.empty((columns, rows), np.uint8)
    scales = np.empty((-(-columns // group), rows), np.float16)
    errors = np.empty((_BLOCK, rows), np.float32)
    for first in range(0, columns, _BLOCK):
        last = min(first + _BLOCK, columns)
        for column in range(first, last):
            if column % group == 0:
                scale = rule(rest[column : min(column + group, last)], 0, bits)[0]
                scales[column // group] = scale
            codes[column] = nearest_codes(rest[column], scale, bits)
            decoded = (codes[column] - np.float32(ZEROS[bits])) * scale.astype(np.float32)
            error = errors[column - first]
            np.divide(rest[column] - decoded, factor[column, column], out=error)
            behind = factor[column, column + 1 : last]
            rest[column + 1 : last] -= behind[:, None] * error
        rest[last:] -= factor[first:last, last:].T @ errors[: last - first]
    return np.ascontiguousarray(codes.T), np.ascontiguousarray(scales.T)


def _inverse_factor(hessian: np.ndarray) -> np.ndarray:
    """float32, upper triangular: U with Uᵀ U = H⁻¹, H damped."""
    damped = hessian.astype(np.float64, copy=True)
    mean = float(np.mean(damped.diagonal()))
    damped.flat[:: len(damped) + 1] += DAMPING * mean if mean > 0 else 1.0
    inverse = np.linalg.inv(np.linalg.cholesky(damped))
    return np.linalg.cholesky(inverse.T @ inverse).T.astype(np.float32)


def gptq_expert(
    matrices: np.ndarray, inputs: np.ndarray, hidden: np.ndarray, fmt: RecordFormat
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """An expert's codes and scales, for host_offload.versions.encoders.pack_quantized.

    matrices: float32[3, I, D], gate, up, down^T. inputs: float32[n, D], what gate and up see of the
    calibration text. hidden: float32[n, I], what down sees.
    """

    def rule(weights: np.ndarray, axis: int, bits: int) -> np.ndarray:
        return finite_scales(mse(weights, axis, bits), bits, fmt.dtype)

    both = matrices[:2].reshape(-1, fmt.hidden)
    codes, scales = gptq(both, inputs.T @ inputs, fmt.group_in, fmt.bits, rule)
    gate, up = slice(0, fmt.width), slice(fmt.width, None)
    down_codes, down_scales = gptq(matrices[2].T, hidden.T @ hidden, fmt.group_out, fmt.bits, rule)
    return {
        "gate": (codes[gate], scales[gate]),
        "up": (codes[up], scales[up]),
        "down": (np.ascontiguousarray(down_codes.T), np.ascontiguousarray(down_scales.T)),
    }

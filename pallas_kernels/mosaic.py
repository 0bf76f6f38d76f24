"""Mosaic GPU, Pallas's other compiler for NVIDIA GPUs: where its kernels run, and the function that
calls them.

Importing it takes most of a second, so this module and the ops' `api` do so only when a kernel is
traced.
"""

# pyright: reportAttributeAccessIssue=false, reportPrivateImportUsage=false
# The oldest jax lacks some names, and refuses these kernels by name.

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.triton import KERNEL_DTYPES, is_interpreted

LEAST_JAX = (0, 12)
"""The first jax whose Mosaic compiles without a GPU and has mma.sync and stores to device memory:
0.10 compiles kernels only when they run, 0.11 has no `store`."""

UNITS = {"rms_norm": 128, "linear": 64, "expert_ffn": 128}
"""Op → what its widths must be multiples of: threads that hold a row, or a tile of a product."""


def why_not_mosaic() -> str | None:
    """Why this jax has no Mosaic kernels; None: it has them."""
    if jax.__version_info__[:2] >= LEAST_JAX:
        return None
    least = ".".join(map(str, LEAST_JAX))
    return f"Mosaic kernels need jax {least} or newer, and this is jax {jax.__version__}"


def why_not_widths(op: str, widths: Iterable[int]) -> str | None:
    """Why the kernel of an op does not take these widths; None: it takes them."""
    unit = UNITS[op]
    wrong = next((width for width in widths if width % unit), None)
    if wrong is None:
        return None
    return f"its Mosaic kernel takes widths that are multiples of {unit}, not {wrong}"


def check_mosaic(op: str, widths: Iterable[int], *dtypes: jax.typing.DTypeLike) -> None:
    """Raises ValueError unless the kernel of an op takes these widths, and operands of these
    dtypes, which are the same one."""
    names = dict.fromkeys(jnp.dtype(dtype).name for dtype in dtypes)
    reason = why_not_mosaic()
    if reason is None and (len(names) > 1 or names.keys() - KERNEL_DTYPES):
        reason = f"it takes one of {KERNEL_DTYPES}, not {' and '.join(names)}"
    reason = reason or why_not_widths(op, widths)
    if reason is not None:
        raise ValueError(f"{op} 'mosaic': {reason}; 'xla' takes it")


def mosaic_call(
    kernel: Callable[..., None],
    *,
    name: str,
    grid: Mapping[str, int],
    out_type: Any,
    scratch: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Makes a callable over whole arrays and jax.new_ref's refs, which are updated in place. The
    kernel gets a ref to each of them and to each result, in device memory.

    - `kernel`: takes refs to operands, then to results, and scratch by name.
    - `name`: in profiles and HLO.
    - `grid`: axis → programs along it.
    - `out_type`: jax.ShapeDtypeStruct, or () if the kernel only updates operands.
    """
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        scratch_types=dict(scratch or {}),
        kernel_name=name,
        interpret=plgpu.InterpretGPUParams() if is_interpreted() else None,
    )

"""A check: one kernel configuration against the reference, on inputs made when it runs."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
import numpy as np

from pallas_kernels.route import RouteRule
from pallas_kernels.tolerances import TOLERANCES


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """What of a model decides the kernels' configurations."""

    hidden: int
    width: int
    experts: int
    rule: RouteRule
    heads: int
    kv_heads: int
    head_dim: int
    products: tuple[tuple[int, int, bool, str], ...]
    """The shapes of `linear`: outputs, inputs, whether there is a bias, the result's dtype."""
    block_size: int
    window: int | None
    activation: str
    dtype: str
    qk_norm: bool = True
    """Whether the heads of queries and keys are normalised as they are written."""
    latent: int = 0
    """As KVPage.latent of its pages."""
    up_projection: tuple[int, int] = (0, 0)
    """Values of a head's key and of its value that are products with the latent, by head_linear."""
    interleave: bool = False
    """As latent_write's."""
    correction: bool = False
    """Whether routers add a correction to the scores they choose by."""
    norm: str = "rms_norm"
    """The op of the norms before attention, experts and logits: rms_norm or layer_norm."""
    other_norms: tuple[int, ...] = ()
    """Widths of rms_norms beside `hidden`: of compressed queries, of all heads of q or k."""
    versions: tuple[tuple[str, str], ...] = (("dense", "dense"),)
    """The versions of experts, by number: in a cell, in the store."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One kernel configuration against the reference."""

    op: str
    key: str
    """Op, shapes and dtype in words: the name of the check in tables."""
    operands: Callable[[], tuple]
    """Makes the inputs, on the device or in pinned host memory, when the check runs."""
    run: Callable[..., object]
    """(implementation, *operands) -> results."""
    tolerance: float
    """The largest |got − want| / (1 + |want|) that passes; 0: exact."""

    def error(self, device: jax.Device) -> float:
        """Largest deviation of the kernel from the reference, as `tolerance` measures it; infinite
        where one has a NaN that the other has not."""
        with jax.default_device(device):
            operands = self.operands()
            got, want = (
                jax.tree.leaves(jax.jit(functools.partial(self.run, name))(*operands))
                for name in ("pallas", "xla")
            )
            return max(_deviation(g, w) for g, w in zip(got, want, strict=True))


def _deviation(result: jax.Array, reference: jax.Array) -> float:
    got, want = np.asarray(result), np.asarray(reference)
    if got.dtype.kind in "iub":
        return 0.0 if np.array_equal(got, want) else float("inf")
    a, b = got.astype(np.float64), want.astype(np.float64)
    if not np.array_equal(np.isnan(a), np.isnan(b)):
        return float("inf")
    return float(np.nanmax(np.abs(a - b) / (1 + np.abs(b)), initial=0.0))


def draw(
    seed: int, shape: tuple[int, ...], dtype: str, scale: float | jax.Array = 1.0
) -> jax.Array:
    return (jax.random.normal(jax.random.key(seed), shape) * scale).astype(dtype)


def make_check(
    op: str,
    what: str,
    dtype: str,
    operands: Callable[[], tuple],
    run: Callable[..., object],
    out: str = "",
) -> Check:
    """out: the result's dtype, if it is not dtype."""
    # Twice the table's: kernel and reference round each for itself. A float32 result only differs
    # by the order of its sum.
    tolerance = 2 * TOLERANCES.get(op, {}).get(dtype, 0.0)
    if "float32" in (out, dtype):
        tolerance = 2e-5
    return Check(op, f"{op} {what} {dtype}", operands, run, tolerance)

"""The checks that a model's kernels must pass on a device."""

from __future__ import annotations

from collections.abc import Iterator

from pallas_kernels.dispatch import Ops
from pallas_kernels.verification.attention import attention_checks
from pallas_kernels.verification.check import Check, ModelShape
from pallas_kernels.verification.dense import dense_checks, table_checks
from pallas_kernels.verification.latent import head_checks, latent_checks
from pallas_kernels.verification.records import record_checks
from pallas_kernels.verification.sampling import sampling_check
from pallas_kernels.verification.states import state_checks

WIDE_BYTES = (1 << 32) + (1 << 28)
"""Bytes of arrays above 4 GiB: Pallas addresses those with 64-bit offsets, by other kernels."""


def checks(shape: ModelShape, ops: Ops, wide_bytes: int = WIDE_BYTES) -> list[Check]:
    """The checks of every kernel that `ops` runs for a model of this shape. Nothing is computed or
    allocated before a check runs.

    - `wide_bytes`: size of the arrays that need 64-bit offsets.
    """
    # Products of equal sizes are one check.
    every = {check.key: check for check in _all(shape, ops, wide_bytes)}
    found = []
    for check in every.values():
        if ops.are_kernels(check.op, *check.beside):
            found.append(check)
        elif ops.chosen()[check.op] == "mosaic" and not check.beside:  # Mosaic's fuse nothing
            found.append(check.of_mosaic())
    return found


def _all(shape: ModelShape, ops: Ops, wide_bytes: int) -> Iterator[Check]:
    shared_kib = ops.shared_kib
    yield from dense_checks(shape, shared_kib)
    yield from table_checks(shape, shared_kib)
    yield from head_checks(shape)
    if shape.vocabulary:
        yield sampling_check(shape)
    for least in (0, wide_bytes):
        yield from record_checks(shape, ops, least)
        yield from state_checks(shape, least)
        if shape.latent:
            yield from latent_checks(shape, least)
        else:
            yield from attention_checks(shape, shared_kib, least)

"""Classes of GPUs by the shared memory that one program can have: what decides how many tiles a
kernel may have in flight, and so its `num_stages`, never its sums.

A kernel whose tiles would not fit everywhere has a table of stages by class, and gets the class as
`shared_kib`. Tiles and their order along the summed axis are the same in all classes.
"""

from __future__ import annotations

import jax

CLASSES = (99, 163, 227)
"""KiB a program, ascending: GeForce RTX 30 to 50, RTX A6000, L4, L40S; A100, Jetson Orin; H100,
H200, B200."""

_BY_CAPABILITY = {"8.0": 163, "8.7": 163, "9.0": 227, "10.0": 227, "10.3": 227, "11.0": 227}
"""Compute capability → class; every other one from 8.0 on has 99 KiB (CUDA C++ Programming Guide,
technical specifications per compute capability)."""


def shared_class(device: jax.Device) -> int:
    """The class of a device: the largest of CLASSES that it has room for, as it says itself
    (`shared_memory_per_block_optin`), else by its compute capability; the smallest for a GPU that
    says neither, or that has room for none. Where nothing but the interpreter runs kernels, on a
    CPU, the largest.
    """
    if device.platform != "gpu":
        return CLASSES[-1]
    nbytes = getattr(device, "shared_memory_per_block_optin", None)
    if nbytes is None:
        capability = str(getattr(device, "compute_capability", ""))
        return _BY_CAPABILITY.get(capability, CLASSES[0])
    return max((kib for kib in CLASSES if kib * 1024 <= nbytes), default=CLASSES[0])

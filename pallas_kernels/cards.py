"""Classes of GPUs by the shared memory of one program.

The class decides how many tiles a kernel has in flight (`num_stages`) and never changes a sum. A
kernel whose tiles do not fit every GPU has a table of stages by class and gets the class as
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
    """The largest of CLASSES that fits the device.

    A GPU reports its shared memory (`shared_memory_per_block_optin`); otherwise its compute
    capability decides, and without either the smallest class is taken. On a CPU, where only the
    interpreter runs kernels, it is the largest class.
    """
    if device.platform != "gpu":
        return CLASSES[-1]
    nbytes = getattr(device, "shared_memory_per_block_optin", None)
    if nbytes is None:
        capability = str(getattr(device, "compute_capability", ""))
        return _BY_CAPABILITY.get(capability, CLASSES[0])
    return max((kib for kib in CLASSES if kib * 1024 <= nbytes), default=CLASSES[0])

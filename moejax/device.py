"""Chooses the device, and checks it before anything is loaded."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import jax
from jax._src import xla_bridge

from host_offload.memory.device_memory import host_available_bytes
from host_offload.memory.store import STAGING_BYTES
from moejax.cache import checked_folder
from moejax.errors import NotPinned, UserError
from pallas_kernels.verification.table import left_over

PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""Environment variable that caps jax's pool of pinned host memory. jax reads it when its backend
starts."""

DEFAULT_PINNED_GIB = 64
"""The cap in GiB where the variable is not set. XLA reads the variable in GiB, in spite of its
name."""

PINNED_ROOM = 4
"""GiB of pinned memory beside what is kept there: results, what is in flight."""

HOST_ROOM = 2
"""GiB of host memory that are left to the process itself."""

MEMORY_SHARES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Environment variables, the newer first, for the share of a GPU's memory that jax takes, which is
75% if neither is set. jax reads them when its backend starts, and refuses both at once."""

RUNTIME_BYTES = 1 << 30
"""Bytes of GPU memory left to the CUDA context, programs and graphs; on a large GPU, RUNTIME_SHARE
of its memory if that is more."""

RUNTIME_SHARE = 0.02
"""Share of a large GPU's memory left to the CUDA context, programs and graphs."""

CHECKS_BYTES = 6 << 30
"""Bytes of GPU memory that are left to checks of kernels while any wait. The largest has an arena
above 4 GiB."""

OLDEST_CAPABILITY = 8.0
"""Compute capability of Ampere: bfloat16 matrix products, asynchronous copies."""

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
"""A file that exists where the kernel has NVIDIA's driver."""


ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
"""Environment variable for jax's allocator of GPU memory."""

WSL_ALLOCATOR = "cuda_async"
"""The allocator in WSL, where the default of jax 0.11 cannot allocate 4 GiB or more in one piece
(openxla/xla#48979)."""

KERNEL_RELEASE = Path("/proc/sys/kernel/osrelease")

THREADS = "PJRT_NPROC"
"""Environment variable for the size of XLA's pool of CPU threads. XLA reads it once, when jax
starts."""


def select_device(
    device: str | jax.Device | None = None,
    threads: int | None = None,
    *,
    kernels: bool = False,
    arrays: Sequence[int] = (),
    kept: int = 0,
) -> jax.Device:
    """Chooses the device to run on, and starts jax's backend if it has not started.

    Before the start, the cap on pinned host memory is set (pinned_gib), and the share
    of a GPU's memory to what is free, unless the environment sets them.

    - `device`: a device, or a platform ("cpu", "gpu") for its first device; None: jax's first.
    - `threads`: threads of XLA's CPU pool, and of native ops; None: as the environment says,
      else one for each CPU that the process may use.
    - `kernels`: whether kernels may run, whose checks need memory beside this process until all of
      them were made.
    - `arrays`, `kept`: as in pinned_gib.

    Raises UserError for a platform that jax cannot use, a jax without CUDA on a machine with an
    NVIDIA GPU (unless `device` or JAX_PLATFORMS asks for the CPU), a GPU older than compute
    capability 8.0, and another number of threads than jax has started with.
    """
    # jax has no public function that tells this without starting the backend.
    started = xla_bridge.backends_are_initialized()
    if threads is not None:
        _use_threads(threads, started)
    if not started:
        if PINNED_LIMIT not in os.environ:
            cap = pinned_gib(host_bytes(), host_available_bytes(), arrays, kept)
            os.environ[PINNED_LIMIT] = str(cap)
        if device != "cpu" and not _cpu_was_asked_for():
            if is_wsl():
                os.environ.setdefault(ALLOCATOR, WSL_ALLOCATOR)
            take_free_memory(kernels=kernels)
    if isinstance(device, str):
        try:
            chosen = jax.devices(device)[0]
        except RuntimeError as error:
            hint = "; a GPU needs pip install '.[cuda13]'" if device == "gpu" else ""
            raise UserError(f"jax can use no {device} here{hint} ({error})") from None
    elif device is None:
        chosen = jax.devices()[0]
        if chosen.platform == "cpu" and NVIDIA_DRIVER.exists() and not _cpu_was_asked_for():
            raise UserError(
                "this machine has an NVIDIA GPU but jax was installed without CUDA: "
                "pip install '.[cuda13]', or ask for the CPU (--device cpu, device=\"cpu\" or "
                "JAX_PLATFORMS=cpu)"
            )
    else:
        chosen = device
    capability = getattr(chosen, "compute_capability", None)
    if chosen.platform == "gpu" and capability and float(capability) < OLDEST_CAPABILITY:
        raise UserError(
            f"{chosen.device_kind} has compute capability {capability}; moejax needs "
            f"{OLDEST_CAPABILITY} (Ampere) or newer; --device cpu runs without it"
        )
    return chosen


def is_wsl() -> bool:
    """Whether this Linux runs inside Windows (WSL)."""
    try:
        return "microsoft" in KERNEL_RELEASE.read_text().lower()
    except OSError:
        return False


def _use_threads(threads: int, started: bool) -> None:
    have = os.environ.get(THREADS) or str(len(os.sched_getaffinity(0)))
    if started and have != str(threads):
        raise UserError(
            f"threads is {threads}, but jax has started with {have} in this process; say it where "
            f"jax is first used, or {THREADS}={threads} in the environment"
        )
    os.environ[THREADS] = str(threads)


def take_free_memory(*, kernels: bool = False) -> None:
    """Sets the share of a GPU's memory that jax takes to what is free now, less RUNTIME_BYTES or
    RUNTIME_SHARE. Call it before jax's backend starts. Changes nothing if the environment has a
    share already, or nvidia-smi finds no GPU.

    - `kernels`: leaves memory for checks of kernels if any wait.
    """
    if any(os.environ.get(name) for name in MEMORY_SHARES):
        return
    shares = []
    for kind, *sizes in nvidia_smi("name", "memory.total", "memory.free"):
        if "".join(sizes).isdecimal():
            total, free = (int(mib) << 20 for mib in sizes)
            wait = kernels and left_over(kind, checked_folder()) != 0
            left = min(CHECKS_BYTES, total // 2) if wait else 0
            shares.append(memory_share(total, free - left))
    if shares:  # any of the GPUs may be jax's first device
        os.environ[MEMORY_SHARES[0]] = f"{min(shares):.4f}"


def memory_share(total: int, free: int) -> float:
    """The share of a GPU's memory that jax may take beside other programs. It is at least 5%, with
    which jax starts, so that a message can say how much memory is missing.

    - `total`, `free`: bytes of the GPU's memory, and those that are free.
    """
    return max((free - max(RUNTIME_BYTES, RUNTIME_SHARE * total)) / total, 0.05)


def nvidia_smi(*fields: str, hidden: bool = False) -> list[list[str]]:
    """Asks nvidia-smi for fields of each GPU.

    - `fields`: names from `nvidia-smi --help-query-gpu`.
    - `hidden`: also the GPUs that CUDA_VISIBLE_DEVICES hides.

    Returns the fields' values for each GPU, or [] without nvidia-smi or where it fails.
    """
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible and not hidden:
        command.append(f"--id={visible}")
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line.split(", ") for line in answer.stdout.splitlines() if line.strip()]
    return lines if all(len(line) == len(fields) for line in lines) else []


def host_bytes() -> int:
    """Bytes of the machine's memory, without swap space."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def pinned_gib(
    memory: int, available: int | None = None, arrays: Sequence[int] = (), kept: int = 0
) -> int:
    """The cap on jax's pool of pinned host memory, in GiB, for a machine with `memory` bytes.

    jax's pool asks the driver for the power of two above an array, or for what the cap leaves. So
    the cap is what a start keeps there and PINNED_ROOM, less where HOST_ROOM would not be left.
    Experts smaller than PINNED_ROOM waste less than that, and leave the cap to later models.

    - `available`: bytes of host memory that are free; None: all.
    - `arrays`: bytes of the arrays of experts, in the order of their allocation; empty: not known.
    - `kept`: bytes of KV that may be there too.
    """
    if sum(arrays) <= PINNED_ROOM << 30:
        return max(memory >> 30, DEFAULT_PINNED_GIB)
    *before, last = arrays
    # An array behind another one may not fit into what that leaves of its power of two.
    regions = sum(1 << (nbytes - 1).bit_length() for nbytes in before) + last
    free = ((memory if available is None else available) >> 30) - HOST_ROOM
    cap = min(-(-(regions + kept) >> 30) + PINNED_ROOM, free)
    return max(cap, -(-(sum(arrays) + STAGING_BYTES) >> 30))


def require_pinned_memory(device: jax.Device, nbytes: int) -> None:
    """Raises NotPinned, with the line of code to add, where a store of `nbytes` is larger than the
    cap on pinned host memory. Only a GPU has a cap."""
    limit = int(os.environ.get(PINNED_LIMIT, DEFAULT_PINNED_GIB))
    if device.platform == "gpu" and nbytes > limit << 30:
        needed = (nbytes >> 30) + 4
        raise NotPinned(
            f"the experts need {nbytes / 2**30:.0f} GiB of pinned host memory, jax was started "
            f"with a limit of {limit} GiB; before the first use of jax add: "
            f'os.environ["{PINNED_LIMIT}"] = "{needed}"'
        )


def _cpu_was_asked_for() -> bool:
    platforms = jax.config.values["jax_platforms"] or os.environ.get("JAX_PLATFORMS", "")
    return platforms.split(",")[0] == "cpu"

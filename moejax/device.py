"""Which device runs, and what has to be true of it before anything is loaded."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import jax
from jax._src import xla_bridge

from moejax.errors import UserError

PINNED_LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""Environment variable that caps jax's pool of pinned host memory; read when the backend starts."""

DEFAULT_PINNED_GIB = 64
"""The cap where the variable is not set. XLA reads the variable in GiB, whatever its name says."""

MEMORY_SHARES = ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION")
"""Environment variables, the newer first, of the share of a GPU's memory that jax takes, 75% where
neither is set; read when the backend starts. Both at once are an error of jax's."""

RUNTIME_BYTES = 1 << 30
"""GPU memory that is left to the CUDA context, programs and graphs."""

RUNTIME_SHARE = 0.02
"""The same of a large GPU, of whose memory that is less."""

OLDEST_CAPABILITY = 8.0
"""Compute capability of Ampere: bfloat16 matrix products, asynchronous copies."""

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
"""Exists where the kernel has NVIDIA's driver."""


THREADS = "PJRT_NPROC"
"""The environment variable by which XLA sizes its pool of CPU threads, once, when jax starts."""


def select_device(device: str | jax.Device | None = None, threads: int | None = None) -> jax.Device:
    """The device to run on: the one given, the first of a platform ("cpu", "gpu"), or jax's first.
    threads: of XLA's pool on the CPU, which native ops share; None: as the environment says, else
    one for each CPU that the process may use.

    Starts jax's backend if it has not been used, after raising the cap on pinned host memory to the
    machine's memory and the share of a GPU's memory to what is free of it, unless the environment
    says either. Raises UserError for a platform that jax cannot use, a jax without CUDA on a
    machine with an NVIDIA GPU (unless the CPU was asked for, here or by JAX_PLATFORMS), a GPU
    older than compute capability 8.0, and another number of threads than jax has started with.
    """
    # jax has no public way to ask without starting it.
    started = xla_bridge.backends_are_initialized()
    if threads is not None:
        _use_threads(threads, started)
    if not started:
        if PINNED_LIMIT not in os.environ:
            os.environ[PINNED_LIMIT] = str(pinned_gib(host_bytes()))
        if device != "cpu" and not _cpu_was_asked_for():
            take_free_memory()
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


def _use_threads(threads: int, started: bool) -> None:
    have = os.environ.get(THREADS) or str(len(os.sched_getaffinity(0)))
    if started and have != str(threads):
        raise UserError(
            f"threads is {threads}, but jax has started with {have} in this process; say it where "
            f"jax is first used, or {THREADS}={threads} in the environment"
        )
    os.environ[THREADS] = str(threads)


def take_free_memory() -> None:
    """Lets jax take of a GPU what is free now, but for RUNTIME_BYTES or RUNTIME_SHARE: call it
    before the backend starts. Leaves everything as it is where the environment has a share already,
    or no NVIDIA GPU answers."""
    if any(os.environ.get(name) for name in MEMORY_SHARES):
        return
    found = nvidia_smi("memory.total", "memory.free")
    known = [(int(total), int(free)) for total, free in found if (total + free).isdecimal()]
    if known:
        # jax's first device may be any of them.
        share = min(memory_share(total << 20, free << 20) for total, free in known)
        os.environ[MEMORY_SHARES[0]] = f"{share:.4f}"


def memory_share(total: int, free: int) -> float:
    """The share of a GPU's memory that jax may take of so many bytes, as others leave it. At least
    5%, with which a start says what is missing."""
    return max((free - max(RUNTIME_BYTES, RUNTIME_SHARE * total)) / total, 0.05)


def nvidia_smi(*fields: str, hidden: bool = False) -> list[list[str]]:
    """The fields of each GPU, as `nvidia-smi --help-query-gpu` names them; empty where there is no
    nvidia-smi or it does not answer so. hidden: also GPUs that CUDA_VISIBLE_DEVICES hides."""
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
    """The machine's memory, without what it swaps to."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def pinned_gib(memory: int) -> int:
    """The cap on jax's pool of pinned host memory, in GiB, in a machine of so many bytes."""
    return max(memory >> 30, DEFAULT_PINNED_GIB)


def require_pinned_memory(device: jax.Device, nbytes: int) -> None:
    """Raises UserError, with the line to add, when the store would not fit under the cap on pinned
    host memory. Only a GPU's pool has one."""
    limit = int(os.environ.get(PINNED_LIMIT, DEFAULT_PINNED_GIB))
    if device.platform == "gpu" and nbytes > limit << 30:
        needed = (nbytes >> 30) + 4
        raise UserError(
            f"the experts need {nbytes / 2**30:.0f} GiB of pinned host memory, jax was started "
            f"with a limit of {limit} GiB; before the first use of jax add: "
            f'os.environ["{PINNED_LIMIT}"] = "{needed}"'
        )


def _cpu_was_asked_for() -> bool:
    platforms = jax.config.values["jax_platforms"] or os.environ.get("JAX_PLATFORMS", "")
    return platforms.split(",")[0] == "cpu"

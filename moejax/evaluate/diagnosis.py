"""Finds out what a machine has for moejax, what will run on it, and what is wrong (`moejax
doctor`).

`look` asks the machine, `judge` says what follows. `judge` depends on the result of `look` alone.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib.util
import json
import logging
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from host_offload.memory.budget import format_bytes
from host_offload.memory.device_memory import host_available_bytes, page_note
from moejax.device import (
    ALLOCATOR,
    DEFAULT_PINNED_GIB,
    MEMORY_SHARES,
    NVIDIA_DRIVER,
    OLDEST_CAPABILITY,
    PINNED_LIMIT,
    WSL_ALLOCATOR,
    host_bytes,
    is_wsl,
    memory_share,
    nvidia_smi,
    pinned_gib,
)
from pallas_kernels import resolve_ops
from pallas_kernels.cpu.library import instruction_set, why_not_cpu

OLDEST_DRIVER = {13: 580, 12: 525}
"""The oldest NVIDIA driver that runs each CUDA that jax is built for, by CUDA's release notes."""


def _plugin(cuda: int) -> tuple[str, str]:
    return f"jax-cuda{cuda}-plugin", f"jax-cuda{cuda}-pjrt"


PACKAGES = ("jax", "jaxlib", *(name for cuda in OLDEST_DRIVER for name in _plugin(cuda)))
"""Packages whose versions must agree."""

COMPILER = ("nvidia-cuda-nvcc", "nvidia-cuda-crt", "nvidia-nvvm", "nvidia-nvjitlink")
"""The parts of NVIDIA's compiler: the assembler, headers, the device library, and the linker with
which jax 0.12 assembles instead. They must be of one release."""

COMPILER_RELEASE = "13.0.88"
"""The release of COMPILER that `cuda13` of pyproject.toml installs, which compiled our kernels. It
is the oldest CUDA 13, since drivers of newer ones run what it writes, but not the other way round.
"""

_TINY = """\
.version {version}
.target sm_80
.address_size 64
.visible .entry nothing() {{ ret; }}
"""
_PTX = {13: "9.0", 12: "8.0"}
"""The PTX version of each CUDA's first release."""

ENVIRONMENT = (
    *("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH", "XLA_FLAGS"),
    *("XLA_PYTHON_CLIENT_PREALLOCATE", ALLOCATOR),
    *(*MEMORY_SHARES, PINNED_LIMIT),
)
"""Variables that change what jax does with a GPU."""

_SMI = (
    *("name", "driver_version", "compute_cap", "memory.total", "memory.free"),
    *("pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max"),
)
PROBED_BYTES, REPEATS = 256 << 20, 5
"""Bytes of each timed transfer, and number of transfers."""

PINNED_PIECE, PINNING_SECONDS = 1 << 30, 5.0
"""Bytes that are pinned at once to find out how many can be, and the time after which the rest is
not tried."""


@dataclasses.dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi describes it. Memory in bytes."""

    name: str
    driver: str
    capability: str
    memory: int
    free: int
    link: str = ""
    """PCIe generation, lanes in use and lanes; empty if unknown."""
    lanes_missing: bool = False


@dataclasses.dataclass(frozen=True)
class Assembler:
    """The `ptxas` that XLA finds."""

    path: str
    release: str
    error: str = ""
    """Its message about a tiny program for the first GPU; empty: it assembles the program."""


@dataclasses.dataclass(frozen=True)
class Machine:
    """What was found on a machine, before any judgement."""

    gpus: tuple[Gpu, ...]
    """GPUs that nvidia-smi lists; empty if nvidia-smi is missing or fails."""
    smi: str | None
    """The output of nvidia-smi if it is no list of GPUs; None: there is no nvidia-smi."""
    pci: bool
    """Whether the PCI bus has a display device of NVIDIA's."""
    driver_loaded: bool
    """Whether the kernel has NVIDIA's module."""
    versions: Mapping[str, str]
    """Installed versions of PACKAGES and COMPILER."""
    backend: Mapping[str, Any]
    """The result of probe."""
    environment: Mapping[str, str]
    host_bytes: int
    host_available: int
    memlock: int | None
    """Bytes that a process may lock (ulimit -l); None: no limit."""
    native: str
    """The instruction set of the native CPU ops, or why there are none."""
    pages: str
    """The kind of pages that host memory asks for."""
    wsl: bool = False
    """Whether it is a Linux inside Windows."""
    assembler: Assembler | None = None
    """The assembler; None: there is no ptxas, or jax has no CUDA."""

    @property
    def device(self) -> Mapping[str, Any]:
        """jax's first device; empty if jax has none."""
        return next(iter(self.backend["devices"]), {})

    @property
    def pinned(self) -> tuple[int, bool]:
        """The result of pin_pieces."""
        nbytes, refused = self.backend.get("pinned", (0, False))
        return nbytes, refused


@dataclasses.dataclass(frozen=True)
class Problem:
    """A problem, and the command that mends it."""

    what: str
    mend: str


def look() -> Machine:
    """Describes the machine that this process is on. Starts no backend in the process."""
    gpus, smi = _gpus()
    versions = _versions()
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Machine(
        gpus=gpus,
        smi=smi,
        pci=_has_nvidia(Path("/sys/bus/pci/devices")),
        driver_loaded=NVIDIA_DRIVER.exists(),
        versions=versions,
        backend=_backend(),
        environment={name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
        host_bytes=host_bytes(),
        host_available=host_available_bytes(),
        memlock=None if memlock == resource.RLIM_INFINITY else memlock,
        native=why_not_cpu() or f"{instruction_set()} instructions",
        pages=page_note(),
        wsl=is_wsl(),
        assembler=_assembler(versions, gpus[0].capability if gpus else "8.0"),
    )


def judge(machine: Machine) -> list[Problem]:
    """Returns the problems, with those to mend first at the top; empty if moejax will use what the
    machine has."""
    if machine.device.get("platform") == "gpu":
        return [*_of_packages(machine), *_of_a_gpu(machine)]
    if not (machine.gpus or machine.pci or machine.driver_loaded):
        return []
    return list(_without_the_gpu(machine))


def what_runs(machine: Machine) -> dict[str, str]:
    """Returns the implementation that a 16-bit model gets for each op."""
    device = machine.device.get("platform", "cpu")
    return resolve_ops("auto", platform=device, dtype="bfloat16").chosen()


def describe(machine: Machine) -> dict[str, str]:
    """Returns what was found, a line for people under each name."""
    lines: dict[str, str] = {}
    for number, gpu in enumerate(machine.gpus):
        text = f"{gpu.name}, compute capability {gpu.capability}, {format_bytes(gpu.memory)}, "
        text += f"{format_bytes(gpu.free)} free"
        lines[f"GPU {number}"] = text
    if not machine.gpus:
        lines["GPU"] = "none that nvidia-smi lists" if machine.pci else "none"
    lines["driver"] = machine.gpus[0].driver if machine.gpus else machine.smi or "no nvidia-smi"
    lines["python"] = platform.python_version()
    installed = [f"{name} {version}" for name, version in machine.versions.items()]
    lines["packages"] = ", ".join(installed)
    if machine.assembler:
        lines["assembler"] = f"ptxas {machine.assembler.release}, {machine.assembler.path}"
    device = machine.device
    if device:
        lines["jax uses"] = f"{device['kind']} ({device['platform']})"
        if device["bytes_limit"]:
            lines["jax takes"] = format_bytes(gpu_share(machine))
    lines["host memory"] = (
        f"{format_bytes(machine.host_bytes)}, {format_bytes(machine.host_available)} available"
    )
    lock = "unlimited" if machine.memlock is None else format_bytes(machine.memlock)
    more = "; then the driver refused" if machine.pinned[1] else ""
    # CUDA pins through its driver, which that limit does not hold.
    lines["pinned memory"] = (
        f"{format_bytes(pinnable(machine))} can be pinned now, of at most {pinned_limit(machine)} "
        f"GiB ({PINNED_LIMIT}){more}; what is more stays in pageable memory; ulimit -l: {lock}"
    )
    if machine.wsl:
        lines["Windows"] = (
            f"this is WSL, where jax gets {ALLOCATOR}={WSL_ALLOCATOR}, and Windows limits what can "
            "be pinned"
        )
    links = [gpu.link for gpu in machine.gpus[:1] if gpu.link]
    if measured := machine.backend.get("link"):
        links = [f"{measured / 1e9:.1f} GB/s measured, pinned host memory to device", *links]
    if links:
        lines["link"] = ", ".join(links)
    lines["native CPU ops"] = machine.native
    lines["weights' pages"] = machine.pages
    runs = what_runs(machine)
    for name in sorted({*runs.values()}):
        ops = [op for op, chosen in runs.items() if chosen == name]
        lines[f"runs as {name}"] = ", ".join(ops)
    if machine.environment:
        lines["environment"] = ", ".join(f"{k}={v}" for k, v in machine.environment.items())
    return lines


def next_step(machine: Machine, problems: list[Problem]) -> str:
    """Returns what to do after that, in a line."""
    if problems:
        return "then: moejax doctor"
    if machine.device.get("platform") == "gpu":
        return "next: moejax check-gpu --kernels --shapes qwen3-30b-a3b --minutes 5"
    return (
        'no GPU: everything runs on the CPU, moejax generate "The old house"; where there is one: '
        "pip install '.[cuda13]' && moejax doctor"
    )


def gpu_share(machine: Machine) -> int:
    """Returns the bytes of the GPU that jax will take for moejax."""
    limit = machine.device["bytes_limit"]
    if machine.gpus and not any(machine.environment.get(name) for name in MEMORY_SHARES):
        gpu = machine.gpus[0]
        return int(gpu.memory * memory_share(gpu.memory, gpu.free))
    return limit


def pinnable(machine: Machine) -> int:
    """Returns the bytes of experts that pinned host memory holds now."""
    nbytes, refused = machine.pinned
    most = min(pinned_limit(machine) << 30, machine.host_available)
    return min(most, nbytes) if refused else most


def pinned_limit(machine: Machine) -> int:
    """Returns the cap on jax's pool of pinned host memory in GiB, as select_device sets it."""
    if PINNED_LIMIT in machine.environment:
        return int(machine.environment[PINNED_LIMIT])
    return pinned_gib(machine.host_bytes)


# ---- what is wrong


def _without_the_gpu(machine: Machine) -> Iterator[Problem]:
    """Problems of a machine whose GPU jax does not use."""
    if not machine.gpus:
        yield _no_driver(machine)
        return
    asked = machine.environment.get("JAX_PLATFORMS", "")
    if asked.split(",")[0] == "cpu":
        yield Problem(f"JAX_PLATFORMS={asked} keeps jax from the GPU", "unset JAX_PLATFORMS")
    visible = machine.environment.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "-1", "NoDevFiles"):
        text = f"CUDA_VISIBLE_DEVICES={visible!r} hides the GPU"
        yield Problem(text, "unset CUDA_VISIBLE_DEVICES")
    hidden = asked.split(",")[0] == "cpu" or visible in ("", "-1", "NoDevFiles")
    packages = list(_of_packages(machine))
    yield from packages
    if packages or hidden:
        return
    said = _first_line(machine.backend["said"])
    version = machine.versions.get("jax", "")
    if "LD_LIBRARY_PATH" in machine.environment:
        path = machine.environment["LD_LIBRARY_PATH"]
        text = f"jax cannot start CUDA, and LD_LIBRARY_PATH={path} may give it another CUDA: {said}"
        yield Problem(text, "unset LD_LIBRARY_PATH")
        return
    cuda = next(cuda for cuda in OLDEST_DRIVER if _plugin(cuda)[0] in machine.versions)
    mend = f'pip install --force-reinstall "jax[cuda{cuda}]=={version}"'
    yield Problem(f"jax cannot start CUDA: {said}", mend)


def _no_driver(machine: Machine) -> Problem:
    if machine.driver_loaded:
        if machine.smi is None:
            text = "the kernel has NVIDIA's driver, but there is no nvidia-smi: a container without"
            return Problem(f"{text} its GPU", "docker run --gpus all …")
        return Problem(f"nvidia-smi fails: {machine.smi}", "sudo reboot")
    if machine.smi is not None:
        text = f"the driver is installed, but not loaded: {machine.smi}"
        return Problem(text, "sudo modprobe nvidia || sudo reboot")
    oldest = OLDEST_DRIVER[13]
    text = "there is an NVIDIA GPU without a driver"
    return Problem(text, f"sudo apt install nvidia-driver-{oldest}-open && sudo reboot")


def _of_packages(machine: Machine) -> Iterator[Problem]:
    """Problems between jax, its CUDA plugin and the driver."""
    versions = machine.versions
    release = versions.get("jax", "")
    installed = [cuda for cuda in OLDEST_DRIVER if _plugin(cuda)[0] in versions]
    driver = _major(machine.gpus[0].driver) if machine.gpus else 0
    fitting = next((n for n, oldest in OLDEST_DRIVER.items() if driver >= oldest), None)
    if driver and fitting is None:
        text = f"driver {machine.gpus[0].driver} is older than any CUDA that jax is built for"
        oldest = OLDEST_DRIVER[13]
        yield Problem(text, f"sudo apt install nvidia-driver-{oldest}-open && sudo reboot")
        return
    install = f'pip install "jax[cuda{fitting or 13}]=={release}"'
    if not installed:
        yield Problem("jax was installed without CUDA", install)
        return
    if len(installed) > 1:
        wrong = next(n for n in installed if n != fitting)
        text = "jax has plugins of two CUDAs, of which one is loaded"
        yield Problem(text, f"pip uninstall -y {' '.join(_plugin(wrong))}")
        return
    (cuda,) = installed
    if driver and driver < OLDEST_DRIVER[cuda]:
        text = f"jax is built for CUDA {cuda}, which needs driver {OLDEST_DRIVER[cuda]}; this is "
        text += machine.gpus[0].driver
        yield Problem(text, f"pip uninstall -y {' '.join(_plugin(cuda))} && {install}")
        return
    parts = {name: versions.get(name) for name in ("jaxlib", *_plugin(cuda))}
    wrong = [
        f"{name} {version or 'missing'}" for name, version in parts.items() if version != release
    ]
    if wrong:
        mend = f'pip install "jax[cuda{cuda}]=={release}"'
        yield Problem(f"jax is {release}, but {', '.join(wrong)}", mend)
        return
    if cuda == 13:
        yield from _of_the_compiler(machine)


def _of_the_compiler(machine: Machine) -> Iterator[Problem]:
    """Problems of NVIDIA's compiler for CUDA 13, which must be of one release and must assemble."""
    mend = f"pip install {' '.join(f'{name}=={COMPILER_RELEASE}' for name in COMPILER)}"
    parts = {name: machine.versions[name] for name in COMPILER if name in machine.versions}
    assembler = machine.assembler
    if assembler and COMPILER[0] not in parts:
        parts = {"ptxas": assembler.release, **parts}
    releases = {tuple(version.split(".")[:2]) for version in parts.values()}
    if len(releases) > 1:
        found = ", ".join(f"{name} {version}" for name, version in parts.items())
        text = "the CUDA compiler is of several releases, and the older one refuses what the newer "
        yield Problem(f"{text}one writes: {found}", mend)
    elif assembler and assembler.error:
        text = f"{assembler.path} does not assemble for this GPU: {assembler.error}"
        yield Problem(text, mend)


def _of_a_gpu(machine: Machine) -> Iterator[Problem]:
    """Problems of a machine whose GPU jax uses."""
    capability = machine.device.get("capability")
    if capability and float(capability) < OLDEST_CAPABILITY:
        text = f"{machine.device['kind']} has compute capability {capability}; moejax needs "
        yield Problem(f"{text}{OLDEST_CAPABILITY} (Ampere)", "moejax generate … --device cpu")
    if all(machine.environment.get(name) for name in MEMORY_SHARES):
        text = f"{' and '.join(MEMORY_SHARES)} are both set, which jax refuses"
        yield Problem(text, f"unset {MEMORY_SHARES[1]}")
    allocator = machine.environment.get(ALLOCATOR)
    if machine.wsl and allocator not in (None, WSL_ALLOCATOR):
        text = f"{ALLOCATOR}={allocator} keeps jax in WSL from memory of 4 GiB in one piece"
        yield Problem(text, f"unset {ALLOCATOR}")
    for gpu in machine.gpus[:1]:
        if gpu.free < gpu.memory / 2:
            text = f"other processes have {format_bytes(gpu.memory - gpu.free)} of {gpu.name}"
            yield Problem(text, "nvidia-smi  # its last table names them: end them")
        if gpu.lanes_missing:
            text = f"the link is narrower than the GPU's: {gpu.link}"
            yield Problem(text, "sudo poweroff  # and seat it in a slot with all lanes")
    if PINNED_LIMIT in machine.environment:
        limit = pinned_limit(machine)
        if limit < DEFAULT_PINNED_GIB and limit < machine.host_bytes >> 30:
            text = f"{PINNED_LIMIT}={limit} leaves little pinned memory for experts"
            yield Problem(text, f"unset {PINNED_LIMIT}")


# ---- looking


def _gpus() -> tuple[tuple[Gpu, ...], str | None]:
    """Returns the GPUs that nvidia-smi lists, and its output if it lists none (None: no
    nvidia-smi)."""
    gpus = []
    for name, driver, capability, total, free, *link in nvidia_smi(*_SMI, hidden=True):
        memory, left = (int(text) << 20 if text.isdecimal() else 0 for text in (total, free))
        gpus.append(Gpu(name, driver, capability, memory, left, **_link(link)))
    if gpus:
        return tuple(gpus), None
    if shutil.which("nvidia-smi") is None:
        return (), None
    return (), _first_line([_answer(["nvidia-smi"])[1]])


def _link(fields: list[str]) -> dict[str, Any]:
    """Returns keywords of Gpu from its link's fields, which not every card and driver knows."""
    if not all(text.isdecimal() for text in fields):
        return {}
    generation, lanes, most = map(int, fields)
    text = f"PCIe {generation}, {lanes} of {most} lanes"
    return {"link": text, "lanes_missing": lanes < most}


def _backend(timeout: float = 180.0) -> dict[str, Any]:
    """Runs `probe` in a process of its own."""
    # Only what a transfer needs: another process may use the GPU.
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    # Without -P it would import modules from the working directory.
    command = [sys.executable, "-P", "-m", "moejax.evaluate.diagnosis"]
    try:
        run = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=timeout
        )
    except subprocess.TimeoutExpired:
        return {"devices": [], "said": [f"no answer within {timeout:.0f} s"]}
    try:
        return json.loads(run.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        last = (run.stderr.strip().splitlines() or [f"exit status {run.returncode}"])[-1]
        return {"devices": [], "said": [last]}


def _versions() -> dict[str, str]:
    found = {}
    for name in (*PACKAGES, *COMPILER):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _assembler(versions: Mapping[str, str], capability: str) -> Assembler | None:
    """Returns the assembler that XLA would call, with its message about a tiny program for a GPU of
    this compute capability."""
    cuda = next((cuda for cuda in OLDEST_DRIVER if _plugin(cuda)[0] in versions), None)
    path = _ptxas()
    if cuda is None or path is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder, "tiny.ptx")
        program.write_text(_TINY.format(version=_PTX[cuda]))
        target = f"-arch=sm_{capability.replace('.', '')}"
        release = re.search(r"\bV(\d[\d.]*)", _answer([path, "--version"])[1])
        failed, said = _answer([path, target, str(program), "-o", str(Path(folder, "tiny.cubin"))])
    said = _first_line([said]).replace(f"{program}, ", "")
    return Assembler(path, release[1] if release else "unknown", said if failed else "")


def _answer(command: list[str]) -> tuple[int, str]:
    """Runs a command; returns (exit status, output)."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.SubprocessError) as error:
        return 1, str(error)
    return run.returncode, run.stderr + run.stdout


def _ptxas() -> str | None:
    """Returns the ptxas of the nvidia-cuda-nvcc wheel, else of a toolkit on PATH."""
    package = importlib.util.find_spec("nvidia")
    for root in (package and package.submodule_search_locations) or ():
        if (path := Path(root, "cu13", "bin", "ptxas")).exists():
            return str(path)
    return shutil.which("ptxas")


def _has_nvidia(devices: Path) -> bool:
    """Whether a device of this /sys folder is NVIDIA's (vendor 10de) and of the display class."""
    for device in devices.glob("*"):
        try:
            vendor, kind = ((device / name).read_text() for name in ("vendor", "class"))
        except OSError:
            continue
        if vendor.strip() == "0x10de" and kind.startswith("0x03"):
            return True
    return False


def _first_line(texts: list[str]) -> str:
    """Returns the first line with content, without jax's own repetitions."""
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    return lines[0][:300] if lines else "it does not say why"


def _major(version: str) -> int:
    found = re.match(r"\d+", version)
    return int(found[0]) if found else 0


# ---- jax, in a process of its own


def probe() -> dict[str, Any]:
    """Returns what jax finds on this machine, without an exception: devices, or jax's errors. Run
    it in a process of its own: a driver that hangs or ends that process does not end the caller."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(
        ": ".join(map(str, [record.getMessage(), *(record.exc_info or [])[1:2]]))
    )
    logging.getLogger("jax._src.xla_bridge").addHandler(handler)
    found: dict[str, Any] = {"devices": [], "said": said}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            found["devices"] = [_describe_device(device) for device in jax.devices()]
            device = jax.devices()[0]
            if device.platform == "gpu":
                found["link"] = link_rate(device)
                found["pinned"] = pin_pieces(host_available_bytes() * 3 // 4)
        except Exception as error:  # what jax cannot do here is the answer
            said.append(str(error) or type(error).__name__)
    said += [str(warning.message) for warning in warned if "jax" in str(warning.filename)]
    return found


def link_rate(device: jax.Device) -> float:
    """Measures bytes a second from pinned host memory to the device, the best of REPEATS."""
    pinned = SingleDeviceSharding(device, memory_kind="pinned_host")
    source = jax.device_put(np.zeros(PROBED_BYTES, np.uint8), pinned)
    times = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(jax.device_put(source, SingleDeviceSharding(device)))
        times.append(time.perf_counter() - began)
    return PROBED_BYTES / min(times)


def pin_pieces(most: int) -> tuple[int, bool]:
    """Pins host memory through the driver, not jax's pool, and frees it again.

    - `most`: bytes after which no more are tried.

    Returns the bytes that were pinned, and whether the driver refused more.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0, False
    device, context = ctypes.c_int(), ctypes.c_void_p()
    pieces: list[ctypes.c_void_p] = []
    failed = (
        cuda.cuInit(0)
        or cuda.cuDeviceGet(ctypes.byref(device), 0)
        or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
        or cuda.cuCtxSetCurrent(context)
    )
    refused, until = False, time.perf_counter() + PINNING_SECONDS
    while not (failed or refused) and time.perf_counter() < until:
        if (len(pieces) + 1) * PINNED_PIECE > most:
            break
        piece = ctypes.c_void_p()
        size = ctypes.c_size_t(PINNED_PIECE)
        refused = cuda.cuMemHostAlloc(ctypes.byref(piece), size, 0) != 0
        if not refused:
            pieces.append(piece)
    for piece in pieces:
        cuda.cuMemFreeHost(piece)
    return len(pieces) * PINNED_PIECE, refused


def _describe_device(device: jax.Device) -> dict[str, Any]:
    statistics = device.memory_stats() or {}
    return {
        "platform": device.platform,
        "kind": device.device_kind,
        "capability": getattr(device, "compute_capability", None),
        "bytes_limit": statistics.get("bytes_limit"),
        "runtime": device.client.platform_version,
    }


def _cause(record: logging.LogRecord) -> str:
    error = record.exc_info[1] if record.exc_info else None
    return f": {error}" if error else ""


if __name__ == "__main__":
    print(json.dumps(probe()))

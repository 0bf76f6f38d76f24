"""Which device runs, on machines that are not this one."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import pytest

from moejax import UserError, device
from moejax.cache import checked_folder
from moejax.device import (
    MEMORY_SHARES,
    PINNED_LIMIT,
    THREADS,
    nvidia_smi,
    pinned_gib,
    require_pinned_memory,
    select_device,
    take_free_memory,
)
from pallas_kernels.verification.table import file_name


@dataclasses.dataclass
class FakeGpu:
    compute_capability: str
    platform: str = "gpu"
    device_kind: str = "NVIDIA T4"


def test_the_first_device_is_the_default():
    assert select_device() == select_device("cpu") == jax.devices()[0]
    assert select_device(jax.devices()[0]) == jax.devices()[0]


def test_a_platform_that_is_not_there():
    with pytest.raises(UserError, match=r"no gpu here; a GPU needs pip install '.\[cuda13\]'"):
        select_device("gpu")


def test_cpu_only_jax_beside_a_gpu(monkeypatch, tmp_path):
    monkeypatch.setattr(device, "NVIDIA_DRIVER", tmp_path)
    # The tests run with JAX_PLATFORMS=cpu, which is asking for the CPU.
    assert select_device().platform == "cpu"
    monkeypatch.setattr(device, "_cpu_was_asked_for", lambda: False)
    assert select_device("cpu").platform == "cpu"
    with pytest.raises(UserError, match=r"pip install '.\[cuda13\]'.*JAX_PLATFORMS=cpu"):
        select_device()


def test_an_old_gpu_is_refused_by_name():
    assert select_device(FakeGpu("9.0", device_kind="NVIDIA H200")).platform == "gpu"
    with pytest.raises(UserError, match=r"NVIDIA T4 has compute capability 7\.5"):
        select_device(FakeGpu("7.5"))


def test_pinned_memory_beyond_the_limit_says_which_line_to_add(monkeypatch):
    monkeypatch.setenv(PINNED_LIMIT, "64")
    require_pinned_memory(FakeGpu("9.0"), 64 << 30)  # XLA reads the limit in GiB
    require_pinned_memory(jax.devices()[0], 600 << 30)  # a CPU's pool has no limit
    with pytest.raises(UserError, match=rf'64 GiB; .* os.environ\["{PINNED_LIMIT}"\] = "104"'):
        require_pinned_memory(FakeGpu("9.0"), 100 << 30)


def test_the_cap_on_pinned_memory_is_the_machine_s_in_gib():
    assert pinned_gib(96 << 30) == 96
    assert pinned_gib((96 << 30) - 1) == 95
    assert pinned_gib(16 << 30) == 64  # jax's own, which a smaller machine keeps


def test_the_cap_is_the_experts_and_4_gib():
    arrays = [54 << 30]
    assert pinned_gib(96 << 30, 90 << 30, arrays) == pinned_gib(96 << 30, None, arrays) == 58
    assert pinned_gib(96 << 30, 90 << 30, arrays, 4 << 30) == 62  # KV that leaves the device
    assert pinned_gib(96 << 30, 59 << 30, arrays, 4 << 30) == 57  # 2 GiB are left
    assert pinned_gib(96 << 30, 50 << 30, arrays) == 55
    assert pinned_gib(96 << 30, 90 << 30, [54 << 30, 14 << 30]) == 64 + 14 + 4
    assert pinned_gib(96 << 30, 90 << 30, [1 << 30]) == 96  # later models may be larger


def test_wsl_gets_the_asynchronous_allocator(monkeypatch, tmp_path):
    release = tmp_path / "osrelease"
    monkeypatch.setattr(device, "KERNEL_RELEASE", release)
    monkeypatch.setattr(device, "_cpu_was_asked_for", lambda: False)
    monkeypatch.setattr(device, "take_free_memory", lambda **_: None)
    monkeypatch.setattr(device.xla_bridge, "backends_are_initialized", lambda: False)
    monkeypatch.setenv(PINNED_LIMIT, "64")
    for name, allocator in (("6.8.0-generic", None), ("6.6.87.2-microsoft-WSL2", "cuda_async")):
        monkeypatch.setenv(device.ALLOCATOR, "")
        del os.environ[device.ALLOCATOR]
        release.write_text(name)
        select_device(jax.devices()[0])
        assert os.environ.get(device.ALLOCATOR) == allocator


def fake_smi(folder, text, status=0):
    """A nvidia-smi that prints this."""
    script = folder / "nvidia-smi"
    script.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {status}\n")
    script.chmod(0o755)


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """No share in the environment, no nvidia-smi but that of the folder."""
    for name in (*MEMORY_SHARES, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(MEMORY_SHARES[0], "")  # so that what is set is taken back
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    return tmp_path


@pytest.mark.parametrize(
    ("smi", "share"),
    [
        ("A, 16384, 16384", "0.9375"),  # 1 GiB is left
        ("A, 143771, 143771", "0.9800"),  # 2% of a large one
        ("A, 16384, 12288", "0.6875"),  # another process has 4 GiB
        ("A, 16384, 512", "0.0500"),
        ("A, 16384, 16384\nA, 16384, 8192", "0.4375"),  # the fuller of two
        ("A, [N/A], [N/A]", ""),
        ("No devices were found", ""),
    ],
)
def test_jax_takes_what_is_free(bare, smi, share):
    fake_smi(bare, smi)
    take_free_memory()
    assert os.environ[MEMORY_SHARES[0]] == share


def test_checks_that_wait_have_memory_beside(bare, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(bare))
    fake_smi(bare, "RTX A, 24576, 24576")
    take_free_memory(kernels=True)  # there is no table of this GPU
    assert os.environ[MEMORY_SHARES[0]] == "0.7083"  # 6 GiB, and the GiB
    table = checked_folder() / file_name("RTX A")
    table.parent.mkdir(parents=True)
    for left, share in ((3, "0.7083"), (0, "0.9583")):
        table.write_text(json.dumps({"left": left, "checks": {}}))
        monkeypatch.setenv(MEMORY_SHARES[0], "")
        take_free_memory(kernels=True)
        assert os.environ[MEMORY_SHARES[0]] == share


@pytest.mark.parametrize("name", MEMORY_SHARES)
def test_a_share_that_was_set_stays(bare, monkeypatch, name):
    fake_smi(bare, "A, 16384, 16384")
    monkeypatch.setenv(name, "0.5")
    take_free_memory()
    assert os.environ[name] == "0.5"
    assert os.environ[MEMORY_SHARES[0]] == ("0.5" if name == MEMORY_SHARES[0] else "")


def test_no_nvidia_smi_or_one_that_fails_changes_nothing(bare):
    take_free_memory()
    assert os.environ[MEMORY_SHARES[0]] == ""
    fake_smi(bare, "A, 16384, 16384", status=9)
    take_free_memory()
    assert os.environ[MEMORY_SHARES[0]] == ""


def test_only_visible_gpus_are_asked_for(bare, monkeypatch):
    script = bare / "nvidia-smi"
    script.write_text('#!/bin/sh\ncase "$*" in *--id=1*) echo 100, 7;; *) echo 100, 9;; esac\n')
    script.chmod(0o755)
    assert nvidia_smi("memory.total", "memory.free") == [["100", "9"]]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert nvidia_smi("memory.total", "memory.free") == [["100", "7"]]
    assert nvidia_smi("memory.total", "memory.free", hidden=True) == [["100", "9"]]


@pytest.mark.slow
def test_the_share_is_set_before_the_backend_starts(tmp_path):
    """In a process that would use a GPU; one that asks for the CPU has none set."""
    fake_smi(tmp_path, "A, 16384, 16384")
    code = (
        "import os\n"
        "from moejax import device\n"
        "device._cpu_was_asked_for = lambda: {asked}\n"
        "device.select_device()\n"
        "print(os.environ.get(device.MEMORY_SHARES[0]))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in MEMORY_SHARES}
    environment |= {"JAX_PLATFORMS": "cpu", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for asked, share in ((False, "0.9375"), (True, "None")):
        run = subprocess.run(
            [sys.executable, "-c", code.format(asked=asked)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert run.stdout.strip() == share


def test_threads_are_fixed_when_jax_starts():
    """How many XLA has is what its threads are called in /proc."""
    code = (
        "import os, jax, jax.numpy as jnp\n"
        "from moejax.device import select_device\n"
        "select_device('cpu', 3)\n"
        "jax.jit(lambda x: x @ x)(jnp.ones((512, 512))).block_until_ready()\n"
        "tasks = '/proc/self/task'\n"
        "names = [open(f'{tasks}/{t}/comm').read() for t in os.listdir(tasks)]\n"
        "print(sum('XLAEigen' in name for name in names))\n"
        "select_device('cpu', 3)\n"
        "select_device('cpu', 4)\n"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.pop(THREADS, None)
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert run.stdout.strip() == "3"
    said = "threads is 4, but jax has started with 3 in this process"
    assert run.returncode and said in run.stderr

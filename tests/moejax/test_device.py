"""Which device runs, on machines that are not this one."""

import dataclasses
import os
import subprocess
import sys

import jax
import pytest

from moejax import UserError, device
from moejax.device import PINNED_LIMIT, require_pinned_memory, select_device


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
    monkeypatch.setattr(device, "_NVIDIA_DRIVER", tmp_path)
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
    require_pinned_memory(FakeGpu("9.0"), 60 * 10**9)
    require_pinned_memory(jax.devices()[0], 600 * 10**9)  # a CPU's pool has no limit
    with pytest.raises(UserError, match=rf'os.environ\["{PINNED_LIMIT}"\] = "104"'):
        require_pinned_memory(FakeGpu("9.0"), 100 * 10**9)


@pytest.mark.slow
def test_the_limit_is_raised_only_before_the_backend_starts():
    code = (
        "import os, jax\n"
        "from moejax.device import PINNED_LIMIT, select_device\n"
        "select_device()\n"
        "print(os.environ[PINNED_LIMIT])\n"
        "del os.environ[PINNED_LIMIT]\n"
        "select_device()\n"
        "print(PINNED_LIMIT in os.environ)\n"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.pop(PINNED_LIMIT, None)
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    limit, again = run.stdout.split()
    assert int(limit) >= 64 and again == "False"

"""What the doctor says of machines that are not this one."""

import dataclasses
import json
import os
import re
import sys
import tomllib

import pytest

from moejax.commands import main as cli
from moejax.evaluate import diagnosis as doctor
from moejax.evaluate.diagnosis import (
    COMPILER,
    COMPILER_RELEASE,
    Assembler,
    Gpu,
    Machine,
    describe,
    judge,
    next_step,
    what_runs,
)
from pallas_kernels import resolve_ops

H200 = Gpu("NVIDIA H200", "580.159.04", "9.0", 143771 << 20, 143000 << 20, "PCIe 5, 16 of 16 lanes")
RTX = Gpu("NVIDIA GeForce RTX 4090", "580.1", "8.9", 24564 << 20, 24000 << 20)

CUDA13 = dict.fromkeys(("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda13-pjrt"), "0.10.2")
CPU_ONLY = dict.fromkeys(("jax", "jaxlib"), "0.10.2")
NVCC = dict.fromkeys(COMPILER, "13.0.88")
INSTALL_NVCC = f"pip install {' '.join(f'{name}==13.0.88' for name in COMPILER)}"
CUDA12 = {**CPU_ONLY, "jax-cuda12-plugin": "0.10.2", "jax-cuda12-pjrt": "0.10.2"}


def device(platform="gpu", capability="9.0"):
    return {
        "platform": platform,
        "kind": "NVIDIA H200" if platform == "gpu" else "cpu",
        "capability": capability if platform == "gpu" else None,
        "bytes_limit": 107 << 30 if platform == "gpu" else None,
        "runtime": "13.0",
    }


GOOD = Machine(
    gpus=(H200,),
    smi=None,
    pci=True,
    driver_loaded=True,
    versions={**CUDA13, **NVCC},
    backend={"devices": [device()], "said": [], "link": 52e9},
    environment={},
    host_bytes=128 << 30,
    host_available=100 << 30,
    memlock=8 << 20,
    native="avx2 instructions",
    pages="huge pages, 1 NUMA node",
    assembler=Assembler("/venv/nvidia/cu13/bin/ptxas", "13.0.88"),
)
ON_CPU = {"devices": [device("cpu")], "said": ["Unable to initialize backend 'cuda': no such file"]}
NO_GPU = dataclasses.replace(
    GOOD,
    gpus=(),
    pci=False,
    driver_loaded=False,
    versions=CPU_ONLY,
    backend=ON_CPU,
    assembler=None,
)


def unused(**changes):
    """A GPU that jax does not use."""
    return dataclasses.replace(GOOD, **{"backend": ON_CPU, **changes})


def test_nothing_is_wrong_with_a_good_machine():
    assert judge(GOOD) == []
    lines = describe(GOOD)
    assert lines["GPU 0"].startswith("NVIDIA H200, compute capability 9.0, 140.4 GiB")
    assert lines["driver"] == "580.159.04"
    assert "jax-cuda13-plugin 0.10.2" in lines["packages"]
    assert lines["jax takes"] == "136.8 GiB"  # not 75%
    assert lines["link"].startswith("52.0 GB/s measured") and "16 of 16" in lines["link"]
    assert lines["assembler"] == "ptxas 13.0.88, /venv/nvidia/cu13/bin/ptxas"
    assert "100 GiB can be pinned now, of at most 128 GiB" in lines["pinned memory"]
    assert "ulimit -l: 8" in lines["pinned memory"]
    assert "expert_ffn" in lines["runs as pallas"]
    assert lines["native CPU ops"] == "avx2 instructions"
    assert "check-gpu --kernels" in next_step(GOOD, [])


def test_a_machine_without_a_gpu_is_told_that_it_needs_none():
    assert judge(NO_GPU) == []
    assert describe(NO_GPU)["GPU"] == "none"
    assert what_runs(NO_GPU) == resolve_ops(dtype="bfloat16").chosen()
    said = next_step(NO_GPU, [])
    assert "runs on the CPU" in said and "pip install '.[cuda13]'" in said


@pytest.mark.parametrize(
    ("machine", "what", "mend"),
    [
        (unused(versions=CPU_ONLY), "without CUDA", 'pip install "jax[cuda13]==0.10.2"'),
        (
            unused(versions=CPU_ONLY, gpus=(dataclasses.replace(H200, driver="550.54"),)),
            "without CUDA",
            'pip install "jax[cuda12]==0.10.2"',  # which is what this driver runs
        ),
        (
            unused(gpus=(dataclasses.replace(H200, driver="550.54"),)),
            "built for CUDA 13, which needs driver 580; this is 550.54",
            "pip uninstall -y jax-cuda13-plugin jax-cuda13-pjrt && "
            'pip install "jax[cuda12]==0.10.2"',
        ),
        (
            unused(gpus=(dataclasses.replace(H200, driver="470.1"),)),
            "driver 470.1 is older than any CUDA",
            "sudo apt install nvidia-driver-580-open && sudo reboot",
        ),
        (
            unused(versions={**CUDA13, **CUDA12}),
            "plugins of two CUDAs",
            "pip uninstall -y jax-cuda12-plugin jax-cuda12-pjrt",
        ),
        (
            unused(),
            "cannot start CUDA: Unable to initialize backend 'cuda': no such file",
            'pip install --force-reinstall "jax[cuda13]==0.10.2"',
        ),
        (
            unused(versions={k: v for k, v in CUDA13.items() if "pjrt" not in k}),
            "jax is 0.10.2, but jax-cuda13-pjrt missing",
            'pip install "jax[cuda13]==0.10.2"',
        ),
        (
            unused(environment={"LD_LIBRARY_PATH": "/usr/local/cuda-11/lib64"}),
            "LD_LIBRARY_PATH=/usr/local/cuda-11/lib64 may give it another CUDA",
            "unset LD_LIBRARY_PATH",
        ),
        (unused(environment={"JAX_PLATFORMS": "cpu"}), "JAX_PLATFORMS=cpu", "unset JAX_PLATFORMS"),
        (
            unused(environment={"CUDA_VISIBLE_DEVICES": "-1"}),
            "CUDA_VISIBLE_DEVICES='-1' hides",
            "unset CUDA_VISIBLE_DEVICES",
        ),
        (
            unused(gpus=(), smi="Driver/library version mismatch"),
            "nvidia-smi fails: Driver/library version mismatch",
            "sudo reboot",
        ),
        (
            unused(gpus=(), driver_loaded=False),
            "an NVIDIA GPU without a driver",
            "sudo apt install nvidia-driver-580-open && sudo reboot",
        ),
        (
            unused(gpus=(), driver_loaded=False, smi="NVIDIA-SMI has failed"),
            "installed, but not loaded: NVIDIA-SMI has failed",
            "sudo modprobe nvidia || sudo reboot",
        ),
        (unused(gpus=(), smi=None), "a container without its GPU", "docker run --gpus all …"),
        (
            dataclasses.replace(GOOD, backend={"devices": [device(capability="7.5")], "said": []}),
            "compute capability 7.5; moejax needs 8.0",
            "moejax generate … --device cpu",
        ),
        (
            dataclasses.replace(GOOD, gpus=(dataclasses.replace(H200, free=20 << 30),)),
            "other processes have 120.4 GiB of NVIDIA H200",
            "nvidia-smi  # its last table names them: end them",
        ),
        (
            dataclasses.replace(
                GOOD,
                gpus=(dataclasses.replace(H200, link="PCIe 5, 4 of 16", lanes_missing=True),),
            ),
            "narrower than the GPU's: PCIe 5, 4 of 16",
            "sudo poweroff  # and seat it in a slot with all lanes",
        ),
        (
            dataclasses.replace(GOOD, environment=dict.fromkeys(doctor.MEMORY_SHARES, "0.9")),
            "both set, which jax refuses",
            f"unset {doctor.MEMORY_SHARES[1]}",
        ),
        (
            dataclasses.replace(GOOD, environment={doctor.PINNED_LIMIT: "8"}),
            f"{doctor.PINNED_LIMIT}=8 leaves little",
            f"unset {doctor.PINNED_LIMIT}",
        ),
        (
            dataclasses.replace(GOOD, versions={**CUDA13, **NVCC, "nvidia-nvvm": "13.5.37"}),
            "of several releases, and the older one refuses what the newer one writes: "
            "nvidia-cuda-nvcc 13.0.88, nvidia-cuda-crt 13.0.88, nvidia-nvvm 13.5.37",
            INSTALL_NVCC,
        ),
        (
            unused(
                versions={**CUDA13, "nvidia-nvvm": "13.0.88"},
                assembler=Assembler("/usr/bin/ptxas", "13.0.48", "Unsupported .version 9.4"),
            ),
            "/usr/bin/ptxas does not assemble for this GPU: Unsupported .version 9.4",
            INSTALL_NVCC,
        ),
    ],
)
def test_what_is_wrong_is_said_with_what_mends_it(machine, what, mend):
    first, *rest = judge(machine)
    assert what in first.what and first.mend == mend
    assert not rest
    assert next_step(machine, [first]) == "then: moejax doctor"
    assert describe(machine)


def test_lines_of_a_smaller_card():
    machine = dataclasses.replace(
        GOOD,
        gpus=(RTX,),
        memlock=None,
        backend={"devices": [device()], "said": []},
        environment={"XLA_CLIENT_MEM_FRACTION": "0.5"},
    )
    lines = describe(machine)
    assert lines["jax takes"] == "107 GiB"  # as it says itself
    assert "ulimit -l: unlimited" in lines["pinned memory"] and "link" not in lines
    assert lines["environment"] == "XLA_CLIENT_MEM_FRACTION=0.5"
    assert doctor._link(["4", "8", "16"]) == {
        "link": "PCIe 4, 8 of 16 lanes",
        "lanes_missing": True,
    }
    assert doctor._link(["[N/A]", "16", "16"]) == {}


def test_wsl_is_named_with_the_allocator_that_works_there():
    machine = dataclasses.replace(GOOD, gpus=(RTX,), wsl=True)
    assert judge(machine) == []
    assert "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async" in describe(machine)["Windows"]
    assert "Windows" not in describe(GOOD)
    other = dataclasses.replace(machine, environment={"XLA_PYTHON_CLIENT_ALLOCATOR": "bfc"})
    (problem,) = judge(other)
    assert "4 GiB in one piece" in problem.what
    assert problem.mend == "unset XLA_PYTHON_CLIENT_ALLOCATOR"


def test_an_rtx_5090_where_16_gib_can_be_pinned():
    card = Gpu("NVIDIA GeForce RTX 5090", "580.95", "12.0", 32607 << 20, 32000 << 20)
    machine = dataclasses.replace(
        GOOD, gpus=(card,), backend={"devices": [device(capability="12.0")], "said": []}
    )
    assert judge(machine) == []
    little = dataclasses.replace(machine, host_available=16 << 30)
    limited = dataclasses.replace(machine, environment={doctor.PINNED_LIMIT: "16"})
    refused = machine.backend | {"pinned": [16 << 30, True]}
    refuses = dataclasses.replace(machine, backend=refused)
    for each, limit in ((little, 128), (limited, 16), (refuses, 128)):
        said = describe(each)["pinned memory"]
        assert said.startswith(f"16 GiB can be pinned now, of at most {limit} GiB")
        assert "what is more stays in pageable memory" in said
        assert ("then the driver refused" in said) == (each is refuses)
    assert "leaves little" in judge(limited)[0].what


class Driver:
    """libcuda, which pins so many pieces."""

    cuInit = cuDeviceGet = cuDevicePrimaryCtxRetain = cuCtxSetCurrent = lambda self, *_: 0

    def __init__(self, pieces):
        self.pieces = self.free = pieces

    def cuMemHostAlloc(self, piece, size, flags):
        assert size.value == doctor.PINNED_PIECE and flags == 0
        self.free -= 1
        return 2 * (self.free < 0)

    def cuMemFreeHost(self, piece):
        self.pieces -= 1


@pytest.mark.parametrize(("most", "found"), [(40, (16, True)), (10, (10, False)), (0, (0, False))])
def test_memory_is_pinned_until_the_driver_refuses(monkeypatch, most, found):
    driver = Driver(16)
    monkeypatch.setattr(doctor.ctypes, "CDLL", lambda name: driver)
    nbytes, refused = doctor.pin_pieces((most << 30) + 5)
    assert (nbytes >> 30, refused) == found and driver.pieces == 16 - found[0]  # given back
    monkeypatch.setattr(doctor, "PINNING_SECONDS", -1)
    assert doctor.pin_pieces(1 << 40) == (0, False)


OLD_PTXAS = """\
#!/bin/sh
case "$1" in --version) echo "Cuda compilation tools, release 12.4, V12.4.131"; exit;; esac
echo "ptxas $2, line 1; fatal   : Unsupported .version 9.0; current version is '8.4'"
exit 255
"""


def test_the_assembler_is_given_a_program(tmp_path, monkeypatch):
    ptxas = tmp_path / "ptxas"
    ptxas.write_text(OLD_PTXAS)
    ptxas.chmod(0o755)
    monkeypatch.setattr(doctor, "_ptxas", lambda: str(ptxas))
    found = doctor._assembler(CUDA13, "9.0")
    assert (found.path, found.release) == (str(ptxas), "12.4.131")
    assert "Unsupported .version 9.0; current version is '8.4'" in found.error
    ptxas.write_text(OLD_PTXAS.replace("exit 255", "exit 0"))
    assert doctor._assembler(CUDA13, "9.0").error == ""
    assert doctor._assembler(CPU_ONLY, "9.0") is None
    ptxas.unlink()
    assert "No such file" in doctor._assembler(CUDA13, "9.0").error
    monkeypatch.setattr(doctor, "_ptxas", lambda: None)
    assert doctor._assembler(CUDA13, "9.0") is None


@pytest.mark.aot
@pytest.mark.parametrize("capability", ["8.0", "8.9", "9.0", "12.0"])
def test_the_assembler_that_is_installed_assembles(capability):
    found = doctor._assembler(CUDA13, capability)
    assert found.error == "" and found.release.startswith("13.")
    assert "is not defined for option" in doctor._assembler(CUDA13, "3.5").error


def test_every_install_of_the_compiler_is_of_one_release(repository):
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    pinned = project["optional-dependencies"]["cuda13"][1:]
    assert pinned == [f"{name}=={COMPILER_RELEASE}" for name in COMPILER]
    for name in (".ci/run", "tests/aot/README.md", "tests/aot/aot_h200.py", "tests/aot/ptxas.py"):
        found = re.findall(r"nvidia-(?:cuda-nvcc|nvvm)==([\d.*]+)", (repository / name).read_text())
        assert set(found) == {COMPILER_RELEASE}, name


def test_the_bus_is_searched_for_a_card(tmp_path):
    for name, vendor, kind in (("a", "0x8086", "0x030000"), ("b", "0x10de", "0x040300")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(vendor + "\n")
        (tmp_path / name / "class").write_text(kind + "\n")
    assert not doctor._has_nvidia(tmp_path)  # Intel's, and a card's sound
    (tmp_path / "b" / "class").write_text("0x030200\n")
    assert doctor._has_nvidia(tmp_path)


@pytest.mark.parametrize(
    ("code", "timeout", "said"),
    [
        ("import time; time.sleep(60)", 1, "no answer within 1 s"),
        ("import os; os.abort()", 60, "exit status -6"),
        ("import sys; sys.exit('CUDA_ERROR_NO_DEVICE')", 60, "CUDA_ERROR_NO_DEVICE"),
    ],
)
def test_a_backend_that_ends_the_process_or_hangs_is_a_finding(
    tmp_path, monkeypatch, code, timeout, said
):
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\nexec {sys.executable} -c {json.dumps(code)}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(doctor.sys, "executable", str(fake))
    assert doctor._backend(timeout) == {"devices": [], "said": [said]}


def test_the_backend_of_this_machine():
    found = doctor.probe()
    assert found["devices"][0]["platform"] == "cpu" and "link" not in found


SMI = """\
#!/bin/sh
case "$*" in
  *memory.total*) echo "NVIDIA H200, 580.159.04, 9.0, 143771, 143000, 5, 16, 16";;
  *) echo "a table";;
esac
"""


@pytest.mark.slow
def test_the_command_on_a_machine_with_a_gpu_that_jax_cannot_use(tmp_path, monkeypatch, capsys):
    """With a nvidia-smi of ours: JAX_PLATFORMS keeps jax from the GPU. One that fails is quoted."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "NVIDIA H200, compute capability 9.0" in out
    assert "wrong: JAX_PLATFORMS=cpu keeps jax from the GPU\nmend:  unset JAX_PLATFORMS" in out
    assert re.search(r"link +PCIe 5, 16 of 16 lanes", out)
    smi.write_text("#!/bin/sh\necho NVIDIA-SMI has failed\nexit 9\n")
    assert cli.main(["doctor"]) == 0
    assert re.search("driver +NVIDIA-SMI has failed", capsys.readouterr().out)


@pytest.mark.parametrize(("machine", "status"), [(GOOD, 0), (NO_GPU, 0), (unused(), 1)])
def test_json_and_exit_status(monkeypatch, capsys, machine, status):
    monkeypatch.setattr(doctor, "look", lambda: machine)
    assert cli.main(["doctor", "--json"]) == status
    found = json.loads(capsys.readouterr().out)
    assert found["machine"]["versions"]["jax"] == "0.10.2" and len(found["problems"]) == status
    assert found["runs"]["linear"] in ("pallas", "cpu", "xla") and found["next"]
    assert cli.main(["doctor"]) == status
    assert ("mend:" in capsys.readouterr().out) == bool(status)

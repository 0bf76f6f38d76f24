"""The wheel has the three packages, the embedded model and the texts of grids, nothing else."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from pallas_kernels.cpu.build import LIBRARY, sources

PACKAGES = ("moejax", "host_offload", "pallas_kernels")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(repository, tmp_path_factory) -> Path:
    """A copy, since setuptools puts whatever an older build left in build/ into the wheel."""
    source = tmp_path_factory.mktemp("source")
    for package in (*PACKAGES, "tests", "scripts"):
        ignore = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(repository / package, source / package, ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(repository / name, source)
    return source


def build(source: Path, *options: str) -> tuple[int, str]:
    """Without a compiler. Returns the exit status and what was said."""
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", "dist", *options, "."]
    environment = os.environ | {"CXX": "no-such-compiler"}
    result = subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True)
    return result.returncode, result.stdout + result.stderr


@pytest.fixture(scope="module")
def wheel(source) -> zipfile.ZipFile:
    """.ci/run's own wheel has the library."""
    status, said = build(source)
    assert status == 0, said
    assert "the CPU ops are left out, XLA runs instead" in said
    (wheel,) = (source / "dist").glob("moejax-*-py3-none-any.whl")  # for every platform
    return zipfile.ZipFile(wheel)


def test_a_wheel_of_a_named_platform_is_refused_without_the_library(source):
    status, said = build(source, "-C--build-option=--plat-name=manylinux_2_28_aarch64")
    assert status == 1 and "a wheel with the CPU ops, which were not compiled" in said


def test_the_wheel_has_what_it_needs_and_nothing_else(repository, wheel):
    names = set(wheel.namelist())
    files = [path for package in PACKAGES for path in (repository / package).rglob("*.py")]
    files += [path for path in (repository / "moejax" / "demo").iterdir() if path.is_file()]
    files += [*(repository / "moejax" / "evaluate" / "experiments" / "texts").iterdir()]
    files += [repository / package / "py.typed" for package in PACKAGES]
    files += [*(repository / "moejax" / "checkpoints" / "foreign" / "name_maps").glob("*.yaml")]
    needed = {path.relative_to(repository).as_posix() for path in (*files, *sources())}
    headers = {f"pallas_kernels/cpu/xla/ffi/api/{name}.h" for name in ("api", "c_api", "ffi")}
    assert "moejax/demo/model.safetensors" in needed and needed | headers <= names
    top = {name.split("/")[0] for name in names}
    (metadata,) = (name for name in top if name.endswith(".dist-info"))
    assert top == {*PACKAGES, metadata}
    assert {f"{metadata}/licenses/LICENSE", f"{metadata}/entry_points.txt"} <= names
    assert f"pallas_kernels/cpu/{LIBRARY}" not in names

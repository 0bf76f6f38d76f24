"""The wheel carries the three packages, the embedded model and, where a C++ compiler built it, the
library of native CPU ops; nothing else."""

import os
import shutil
import subprocess
import sys
import zipfile

import pytest

from pallas_kernels.cpu.build import LIBRARY, sources

PACKAGES = ("moejax", "host_offload", "pallas_kernels")

pytestmark = pytest.mark.slow


@pytest.fixture(
    scope="module",
    # .ci/run's own wheel has the library.
    params=[pytest.param("c++", marks=pytest.mark.nightly), "no-such-compiler"],
)
def wheel(repository, tmp_path_factory, request) -> zipfile.ZipFile:
    # A copy, since setuptools puts whatever an older build left in build/ into the wheel.
    source = tmp_path_factory.mktemp("source")
    for package in (*PACKAGES, "tests", "scripts"):
        ignore = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(repository / package, source / package, ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(repository / name, source)
    result = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", "dist", "."],
        cwd=source,
        env=os.environ | {"CXX": request.param},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    built = request.param == "c++"
    assert ("the CPU ops are left out, XLA runs instead" in result.stdout + result.stderr) != built
    (wheel,) = (source / "dist").glob(f"moejax-*-py3-none-{'*' if built else 'any'}.whl")
    # With the library it is for one platform.
    assert (wheel.name.split("-")[-1] != "any.whl") == built
    return zipfile.ZipFile(wheel)


@pytest.fixture(scope="module")
def wheel_names(wheel) -> set[str]:
    return set(wheel.namelist())


def test_the_library_is_in_the_wheel_where_it_was_built(wheel, wheel_names):
    library = f"pallas_kernels/cpu/{LIBRARY}"
    assert (library in wheel_names) == ("any" not in wheel.filename.split("-")[-1])
    if library in wheel_names:
        assert wheel.read(library).startswith(b"\x7fELF")


def test_the_sources_of_the_library_are_in_the_wheel(repository, wheel_names):
    names = {path.relative_to(repository).as_posix() for path in sources()}
    headers = {f"pallas_kernels/cpu/xla/ffi/api/{name}.h" for name in ("api", "c_api", "ffi")}
    assert names | headers <= wheel_names


def test_every_source_file_of_the_packages_is_in_the_wheel(repository, wheel_names):
    sources = {
        path.relative_to(repository).as_posix()
        for package in PACKAGES
        for path in (repository / package).rglob("*.py")
    }
    assert sources
    assert sources <= wheel_names


def test_each_package_says_that_it_has_types(wheel_names):
    assert {f"{package}/py.typed" for package in PACKAGES} <= wheel_names


def test_the_embedded_model_is_in_the_wheel(repository, demo_dir, wheel_names):
    files = {
        path.relative_to(repository).as_posix() for path in demo_dir.iterdir() if path.is_file()
    }
    assert "moejax/demo/model.safetensors" in files
    assert files <= wheel_names


def test_the_texts_of_grids_are_in_the_wheel(repository, wheel_names):
    texts = repository / "moejax" / "evaluate" / "experiments" / "texts"
    files = {path.relative_to(repository).as_posix() for path in texts.iterdir()}
    assert len(files) == 4  # three texts, and whose they are
    assert files <= wheel_names


def test_nothing_else_is_in_the_wheel(wheel_names):
    top = {name.split("/")[0] for name in wheel_names}
    (metadata,) = (name for name in top if name.endswith(".dist-info"))
    assert top == {*PACKAGES, metadata}
    assert f"{metadata}/licenses/LICENSE" in wheel_names
    assert f"{metadata}/entry_points.txt" in wheel_names

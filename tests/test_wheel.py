"""The wheel carries the three packages and the embedded model, and nothing else."""

import shutil
import subprocess
import sys
import zipfile

import pytest

PACKAGES = ("moejax", "host_offload", "pallas_kernels")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel_names(repository, tmp_path_factory) -> set[str]:
    # A copy, since setuptools puts whatever an older build left in build/ into the wheel.
    source = tmp_path_factory.mktemp("source")
    for package in (*PACKAGES, "tests", "scripts"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(repository / package, source / package, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repository / name, source)
    result = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", "dist", "."],
        cwd=source,
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    (wheel,) = (source / "dist").glob("moejax-*-py3-none-any.whl")
    return set(zipfile.ZipFile(wheel).namelist())


def test_every_source_file_of_the_packages_is_in_the_wheel(repository, wheel_names):
    sources = {
        path.relative_to(repository).as_posix()
        for package in PACKAGES
        for path in (repository / package).rglob("*.py")
    }
    assert sources
    assert sources <= wheel_names


def test_the_embedded_model_is_in_the_wheel(repository, demo_dir, wheel_names):
    files = {
        path.relative_to(repository).as_posix() for path in demo_dir.iterdir() if path.is_file()
    }
    assert "moejax/demo/model.safetensors" in files
    assert files <= wheel_names


def test_nothing_else_is_in_the_wheel(wheel_names):
    top = {name.split("/")[0] for name in wheel_names}
    (metadata,) = (name for name in top if name.endswith(".dist-info"))
    assert top == {*PACKAGES, metadata}
    assert f"{metadata}/licenses/LICENSE" in wheel_names
    assert f"{metadata}/entry_points.txt" in wheel_names

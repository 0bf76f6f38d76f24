"""docs/add_an_op.md: its diff applies to this tree, and what it adds keeps the op's contract."""

import os
import re
import shutil
import subprocess
import sys

import pytest

NO_CODE = shutil.ignore_patterns("__pycache__")


@pytest.fixture
def changed(repository, tmp_path):
    """A copy of the ops and their tests with the diff applied."""
    text = (repository / "docs" / "add_an_op.md").read_text()
    (diff,) = re.findall(r"^```diff\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    for folder in ("pallas_kernels", "tests/pallas_kernels", "tests/aot"):
        shutil.copytree(repository / folder, tmp_path / folder, ignore=NO_CODE)
    for file in ("pyproject.toml", "tests/__init__.py", "tests/conftest.py"):
        shutil.copy(repository / file, tmp_path / file)
    run(["git", "apply", "-"], tmp_path, input=diff)
    return tmp_path


def run(command, directory, **options):
    # Not inside of another repository, and nothing of this one but what was copied.
    environment = os.environ | {
        "GIT_CEILING_DIRECTORIES": str(directory.parent),
        "PYTHONPATH": str(directory),
    }
    result = subprocess.run(
        command, cwd=directory, env=environment, capture_output=True, text=True, **options
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_one_file_and_one_line(repository, changed):
    new, edited = [], []
    for path in (changed / "pallas_kernels").rglob("*.py"):
        name = path.relative_to(changed)
        if not (repository / name).exists():
            new.append(str(name))
        elif path.read_text() != (repository / name).read_text():
            lines = zip(
                path.read_text().splitlines(),
                (repository / name).read_text().splitlines(),
                strict=True,
            )
            edited.append((str(name), sum(one != other for one, other in lines)))
    assert new == ["pallas_kernels/combine/loop.py"]
    assert edited == [("pallas_kernels/combine/api.py", 1)]


@pytest.mark.slow
def test_it_is_listed_and_keeps_the_contract(changed):
    code = "from pallas_kernels import OPS, parse_ops; print(OPS['combine'])\n"
    code += "print(parse_ops('combine=loop')['combine'])"
    listed = run([sys.executable, "-c", code], changed)
    assert listed.splitlines() == ["('xla', 'pallas', 'cpu', 'loop')", "loop"]
    contract = "tests/pallas_kernels/test_combine.py"
    pytest_ = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    passed = run([*pytest_, contract, "-k", "loop", "-m", "not nightly"], changed)
    assert re.search(r"^(\d+) passed, \d+ deselected", passed, re.MULTILINE)

"""Imports go one way, and the light ones stay light."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

FORBIDDEN = {
    "pallas_kernels": {"host_offload", "moejax", "tests", "scripts"},
    "host_offload": {"moejax", "tests", "scripts"},
    "moejax": {"tests", "scripts"},
}
"""Top-level packages that a package may not import: moejax → host_offload → pallas_kernels."""


def imported(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, top-level package) of each absolute import, at any depth of the source."""
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += [(node.lineno, alias.name) for alias in names]
            case ast.ImportFrom(module=str(module), level=0):
                found.append((node.lineno, module))
            case ast.Call(
                func=ast.Name(id=name) | ast.Attribute(attr=name),
                args=[ast.Constant(value=str(module)), *_],
            ) if name in {"import_module", "__import__"}:
                found.append((node.lineno, module))
    return [(line, module.split(".")[0]) for line, module in found]


@pytest.mark.parametrize("package", FORBIDDEN)
def test_imports_go_one_way(repository, package):
    files = sorted((repository / package).rglob("*.py"))
    assert files, f"no source in {package}"
    against = [
        f"{path.relative_to(repository)}:{line} imports {top}"
        for path in files
        for line, top in imported(ast.parse(path.read_text()))
        if top in FORBIDDEN[package]
    ]
    assert not against


@pytest.mark.parametrize(
    "source",
    [
        "import moejax.engine.loop",
        "def late():\n    from moejax import LLM",
        "importlib.import_module('moejax.engine.loop')",
        "__import__('moejax')",
    ],
)
def test_an_import_against_the_direction_is_found(source):
    assert [top for _, top in imported(ast.parse(source))] == ["moejax"]


def loaded_by(code: str, cwd: Path) -> set[str]:
    """Top-level modules that a new process has loaded after running `code`."""
    report = "import sys; print(*{m.split('.')[0] for m in sys.modules}, file=sys.stderr)"
    result = subprocess.run(
        [sys.executable, "-c", f"{code}\n{report}"], cwd=cwd, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return set(result.stderr.splitlines()[-1].split())


def test_importing_the_package_loads_no_torch_and_no_transformers(repository):
    loaded = loaded_by("from moejax import LLM, SamplingParams", repository)
    assert "moejax" in loaded
    assert loaded.isdisjoint({"torch", "transformers", "tokenizers", "orbax"})


def test_help_does_not_load_jax(repository):
    code = (
        "import contextlib; from moejax.commands.main import main\n"
        "with contextlib.suppress(SystemExit): main(['--help'])"
    )
    assert loaded_by(code, repository).isdisjoint(
        {"jax", "jaxlib", "flax", "torch", "transformers"}
    )

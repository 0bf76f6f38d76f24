"""What a reader of the whole tree relies on: names, sizes, no stubs, versions that agree."""

import ast
import importlib.metadata
import re
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

PACKAGES = ("pallas_kernels", "host_offload", "moejax")
GRAB_BAGS = {"utils", "util", "helpers", "common", "misc"}


def python_files(repository, *folders):
    return [path for folder in folders for path in sorted((repository / folder).rglob("*.py"))]


def test_no_file_has_a_grab_bag_name(repository):
    files = python_files(repository, *PACKAGES, "tests", "scripts")
    assert not [str(path) for path in files if path.stem in GRAB_BAGS]


def test_readme_is_short(repository):
    assert len((repository / "README.md").read_text().splitlines()) <= 120


def missing_places(page: str, root: Path) -> list[str]:
    """Files and modules of ours that a page names and that are not there; diffs add theirs."""
    page = re.sub(r"^```diff\n.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    tops = r"(?<![\w/.~-])(?:pallas_kernels|host_offload|moejax|scripts|tests|docs|examples)"
    missing = [
        path
        for path in re.findall(rf"{tops}/[\w/.-]*\.(?:py|md|yaml)\b", page)
        if not (root / path).exists()
    ]
    dotted = rf"{tops}(?:\.[A-Za-z_]\w*)+"
    for name in re.findall(dotted, page) + [
        f"{module}.{name}"
        for module, names in re.findall(rf"^ *from ({dotted}) import ([\w, ]+)", page, re.MULTILINE)
        for name in names.split(", ")
    ]:
        parts, attribute = name.split("."), ""
        while not (file := module_file(root, parts)) and len(parts) > 1:
            attribute = parts.pop()
        if attribute and (file is None or not re.search(rf"\b{attribute}\b", file.read_text())):
            missing.append(name)
    return missing


def module_file(root: Path, parts: list[str]) -> Path | None:
    folder = root.joinpath(*parts)
    places = (folder.with_suffix(".py"), folder / "__init__.py")
    return next((place for place in places if place.is_file()), None)


PAGES = ("README.md", "docs/*.md", "docs/results/*.md")


def test_what_docs_name_is_there(repository):
    no_module = {"scripts.GROUP", "moejax.json", "moejax.trace", "moejax.policy", "moejax.costs"}
    missing = {
        str(page.relative_to(repository)): found
        for pattern in PAGES
        for page in sorted(repository.glob(pattern))
        if (found := set(missing_places(page.read_text(), repository)) - no_module)
    }
    assert not missing


@pytest.mark.parametrize(
    "page",
    [
        "`moejax/gone.py`",
        "see moejax.gone.",
        "moejax.errors.Gone",
        "from moejax.errors import Gone",
    ],
)
def test_what_is_not_there_is_found(page, repository):
    assert missing_places(page, repository)
    assert not missing_places("`moejax/nn.py` moejax.nn, moejax.nn.PagedMoE", repository)


def test_no_stubs_and_no_swallowed_errors(repository):
    found = []
    for path in python_files(repository, *PACKAGES, "scripts"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Raise(exc=ast.expr() as error) if "NotImplementedError" in ast.dump(error):
                    found.append(f"{path}:{node.lineno}: NotImplementedError")
                case ast.ExceptHandler(
                    type=None | ast.Name(id="Exception" | "BaseException"), body=[ast.Pass()]
                ):
                    found.append(f"{path}:{node.lineno}: swallows every error")
    assert not found


def test_a_plain_pytest_finds_every_test(repository):
    config = tomllib.loads((repository / "pyproject.toml").read_text())
    places = config["tool"]["pytest"]["ini_options"]["testpaths"]
    searched = {found for place in places for found in repository.glob(place)}
    tests = set(repository.glob("tests/**/test_*.py"))
    assert tests
    assert not [test for test in tests if searched.isdisjoint({test, *test.parents})]


def test_changelog_names_the_version(repository):
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    changelog = (repository / "CHANGELOG.md").read_text()
    assert f"## {project['version']}" in changelog


def test_installed_jax_is_a_supported_one():
    version = tuple(int(part) for part in importlib.metadata.version("jax").split(".")[:3])
    assert (0, 10, 2) <= version < (0, 12, 0)


def test_demo_has_its_model_card_and_nothing_unexpected(demo_dir):
    assert {path.name for path in demo_dir.iterdir() if path.suffix != ".py"} - {"__pycache__"} == {
        "MODEL_CARD.md",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }

"""The packages: each imports only what comes before it, in no circle, and ships nothing unused."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import tomllib
from pathlib import PurePosixPath

import pytest

from tests.conftest import REPOSITORY

PACKAGES = ("pallas_kernels", "host_offload", "moejax")

Graph = dict[str, set[str]]
"""Module → modules that it imports, at any depth of its source, for types too."""

ENTRIES = {
    "moejax": "what users import",
    "pallas_kernels.cpu.build": "setup.py",
}
"""Module that needs no module of ours to import it → who does. So does every `__main__`."""


def module_of(path: str) -> str:
    return ".".join(PurePosixPath(path).with_suffix("").parts).removesuffix(".__init__")


def imported(path: str, tree: ast.AST, modules: set[str]) -> set[str]:
    """Modules of ours that a source imports, also by the "MODULE:NAME" of a table."""
    package = ".".join(PurePosixPath(path).parent.parts)
    found: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found += [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names, level=0):
                inner = [f"{module}.{alias.name}" for alias in names]
                found += [name if name in modules else module for name in inner]
            case ast.Constant(value=str(text)) if re.fullmatch(r"[a-z_][\w.]*:[A-Za-z]\w*", text):
                place = text.partition(":")[0]
                found += [place, f"{package}.{place}"]
    return {name for name in found if name in modules}


def import_graph(files: dict[str, str]) -> Graph:
    modules = {module_of(path) for path in files}
    return {
        module_of(path): imported(path, ast.parse(text), modules) - {module_of(path)}
        for path, text in files.items()
    }


@functools.cache
def graph() -> Graph:
    """Of the packages of this tree."""
    paths = [path for package in PACKAGES for path in (REPOSITORY / package).rglob("*.py")]
    return import_graph({str(path.relative_to(REPOSITORY)): path.read_text() for path in paths})


def drawn_order() -> dict[str, list[str]]:
    """Package → its folders and top-level files, in the order that
    docs/explanation/architecture.md draws."""
    page = (REPOSITORY / "docs/explanation/architecture.md").read_text()
    (block,) = re.findall(r"^```text\n(pallas_kernels/.*?)^```$", page, re.DOTALL | re.MULTILINE)
    tree: dict[str, list[str]] = {}
    for line in block.splitlines():
        if line[0] != " ":
            names = tree.setdefault(line.split("/")[0], [])
        elif said := re.match(r" +((?:\w+(?:/|\.py)(?:, )?)+)", line):
            names += [re.sub(r"/|\.py", "", name) for name in said[1].split(", ")]
    return tree


def against(graph: Graph, order: dict[str, list[str]]) -> set[tuple[str, str]]:
    """(module, module that it imports) where the second is drawn after the first."""

    def place(module: str) -> tuple[int, int]:
        package, _, rest = module.partition(".")
        name = rest.split(".")[0] or "__init__"
        here = order[package].index(name) if rest or name in order[package] else -1
        return list(order).index(package), here

    return {
        (module, target)
        for module, targets in graph.items()
        for target in targets
        if place(module)[1] >= 0 and place(target) > place(module)
    }


def circle(graph: Graph) -> list[str]:
    """Modules that import each other in a circle, empty if none do."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def unused(graph: Graph, entries: set[str]) -> set[str]:
    """Modules that no entry reaches. A module brings its package, and the folder of an op brings
    its implementations, which are imported by name."""
    reached: set[str] = set()
    ahead = entries & graph.keys()
    while ahead:
        module = ahead.pop()
        reached.add(module)
        package = module.rpartition(".")[0]
        ahead |= graph[module] | {package} & graph.keys()
        if package.startswith("pallas_kernels."):
            ahead |= {other for other in graph if other.rpartition(".")[0] == package}
        ahead -= reached
    return graph.keys() - reached


def entries() -> set[str]:
    """ENTRIES, those of pyproject.toml, and what the pages name for users."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    named = list(project["scripts"].values())
    named += [value for group in project["entry-points"].values() for value in group.values()]
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    text = "".join(page.read_text() for page in pages)
    words = {module_of(path) for path in re.findall(r"[\w/]+\.py", text)}
    words |= set(re.findall(r"[a-z_]+(?:\.\w+)+", text))
    words |= {word.rpartition(".")[0] for word in words}
    words |= {module for module in graph() if module.endswith(".__main__")}
    return ENTRIES.keys() | {name.partition(":")[0] for name in named} | words


# ---- the tree


def test_imports_follow_the_order_of_the_page():
    assert not against(graph(), drawn_order())


def test_no_modules_import_each_other():
    assert not circle(graph())


def test_nothing_is_shipped_that_only_scripts_or_tests_import():
    assert not unused(graph(), entries())


# ---- what breaks a rule is found


@pytest.mark.parametrize(
    "line",
    [
        "from moejax.late import x",
        "import moejax.late",
        "def f():\n    from moejax import late",
        "TABLE = {'late': 'late:x'}",
    ],
)
def test_a_planted_import_is_found(line):
    found = import_graph({"moejax/early.py": line, "moejax/late.py": ""})
    assert against(found, {"moejax": ["early", "late"]}) == {("moejax.early", "moejax.late")}
    assert not circle(found) and unused(found, {"moejax.early"}) == set()
    assert unused(found, {"moejax.late"}) == {"moejax.early"}
    assert circle(found | {"moejax.late": {"moejax.early"}})

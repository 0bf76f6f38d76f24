"""The structure of the tree: what may import what, how much a level and a function hold.

Each rule is a function of the parsed sources that lists what breaks it, and each is shown to find a
violation. An exception stands here by name with its reason; one that nothing needs fails too.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath

import pytest

from tests.conftest import REPOSITORY

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

PACKAGES = ("pallas_kernels", "host_offload", "moejax")

ORDER: dict[str, tuple[str, ...]] = {
    "pallas_kernels": (
        *("implementations", "cards", "triton", "cpu", "dispatch", "__init__", "tolerances"),
        *("records", "plan", "fill", "move", "stage", "rms_norm", "layer_norm", "linear"),
        *("head_linear", "kv_write", "latent_write", "paged_attention", "route", "combine"),
        *("expert_ffn", "fill_ffn", "truncate", "verification"),
    ),
    "host_offload": (
        *("__init__", "memory", "versions", "queue", "control", "traces", "sizing"),
        *("policies", "simulate"),
    ),
    "moejax": (
        *("errors", "sizes", "cache", "device", "interrupt", "progress", "output_lock"),
        *("models", "requests", "step", "checkpoints", "nn", "traces", "engine", "costs", "start"),
        *("serve", "evaluate", "ray", "__init__", "commands", "__main__"),
    ),
}
"""Folders and top-level files of each package, in the order of docs/architecture.md: each imports
only from those before it, and a package only from the packages before it."""

ORDER_EXCEPTIONS: dict[tuple[str, str], str] = {}
"""(module, module that it imports against the order) → why."""

MAX_ENTRIES = 12
"""Files (without __init__.py), and folders, on one level."""

MAX_LINES = 80
"""Lines of a function."""

LONG_FUNCTIONS: dict[str, str] = {}
"""Function above MAX_LINES that is no kernel → why."""

KERNELS = re.compile(r"pallas_triton\w*\.py|kernels\.py|reference\.py")
"""Files of kernels and of the references that specify them: one loop nest is one function."""

MAX_PARAMETERS = 12
"""Parameters of a hand-written __init__, without self."""

WIDE_CONSTRUCTORS: dict[str, str] = {
    "moejax.serve.llm.LLM.__init__": "the keyword-only front of Options, as vLLM's",
}
"""Constructor with more → why."""

BAGS: dict[str, str] = {
    "moejax.evaluate.harness.model.MoejaxLM.__init__": "lm_eval's model_args; Options checks them",
    "moejax.evaluate.harness.model.MoejaxLM.tok_encode": "the harness's signature",
    "moejax.evaluate.harness.model.MoejaxLM._loglikelihood_tokens": "the harness's signature",
    "moejax.ray.generate": "the keywords of LLM, which Options checks",
    "moejax.serve.async_llm.AsyncLLM.__init__": "the keywords of LLM, which Options checks",
    "moejax.serve.costs.cost_model_of": "the keywords of LLM, which Options checks",
    "host_offload.simulate.prediction.predict": "the keywords of simulate, which checks them",
}
"""Function of host_offload or moejax that takes **keywords → why."""

LATE_IMPORTS: tuple[tuple[str, str, str], ...] = (
    (r"moejax/commands/", r".*", "moejax --help and a mistake in the arguments answer at once"),
    (r"moejax/progress\.py", r"rich", "loaded where there is something to show"),
    (r".*", r"pyarrow|matplotlib|pandas|PIL|ray|sklearn|torch|transformers", "optional packages"),
    (r".*", r"orbax", "optional, and it takes seconds to import"),
)
"""(files, top-level packages, why) that a function may import."""

Sources = Mapping[str, ast.Module]
"""Path in the repository → its syntax tree."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@functools.cache
def sources(*packages: str) -> Sources:
    return {
        path.relative_to(REPOSITORY).as_posix(): ast.parse(path.read_text())
        for package in packages
        for path in sorted((REPOSITORY / package).rglob("*.py"))
    }


def parsed(**files: str) -> Sources:
    """Sources made up for a test: files are named with double underscores for slashes."""
    return {f"{name.replace('__', '/')}.py": ast.parse(text) for name, text in files.items()}


def module_of(path: str) -> str:
    return ".".join(PurePosixPath(path).with_suffix("").parts).removesuffix(".__init__")


def imports(path: str, tree: ast.AST, modules: set[str]) -> Iterator[tuple[int, str]]:
    """(line, module) of each import of one of our modules, at any depth of the source, for types
    only or by the "MODULE:NAME" of a table."""
    package = ".".join(PurePosixPath(path).parent.parts)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                found = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), names=names, level=0):
                inner = [f"{module}.{alias.name}" for alias in names]
                found = [name if name in modules else module for name in inner]
            case ast.Call(
                func=ast.Name(id=name) | ast.Attribute(attr=name),
                args=[ast.Constant(value=str(module)), *_],
            ) if name in {"import_module", "__import__"}:
                found = [module]
            case ast.Constant(value=str(text)) if re.fullmatch(r"[a-z_][\w.]*:[A-Za-z]\w*", text):
                place = text.partition(":")[0]
                found = [place, f"{package}.{place}"]
            case _:
                continue
        yield from ((node.lineno, name) for name in dict.fromkeys(found) if name in modules)


def place_of(module: str) -> tuple[int, int] | None:
    """Where a module stands in the order; None: nowhere."""
    package, _, rest = module.partition(".")
    name = rest.split(".")[0] or "__init__"
    if package not in ORDER or name not in ORDER[package]:
        return None
    return PACKAGES.index(package), ORDER[package].index(name)


def import_graph(files: Sources) -> dict[str, dict[str, str]]:
    """Module → modules that it imports → file and line of the first import of each."""
    modules = {module_of(path) for path in files}
    graph: dict[str, dict[str, str]] = {}
    for path, tree in files.items():
        edges = graph.setdefault(module_of(path), {})
        for line, target in imports(path, tree, modules):
            edges.setdefault(target, f"{path}:{line}")
    return graph


def against_the_order(files: Sources) -> dict[tuple[str, str], str]:
    """(module, module that it imports) → where, of imports against the order."""
    found = {}
    for module, edges in import_graph(files).items():
        for target, where in edges.items():
            here, there = place_of(module), place_of(target)
            if here is None or there is None or there > here:
                found[module, target] = where
    return found


def circle(files: Sources) -> list[str]:
    """Modules that import each other in a circle, empty if none do."""
    graph = {module: set(edges) - {module} for module, edges in import_graph(files).items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def crowded(paths: list[PurePosixPath]) -> dict[str, tuple[int, int]]:
    """Folder → (files, folders) where either are more than can be seen at once."""
    files: dict[PurePosixPath, set[str]] = {}
    folders: dict[PurePosixPath, set[str]] = {}
    for path in paths:
        if path.name not in ("__init__.py", "__main__.py"):
            files.setdefault(path.parent, set()).add(path.name)
        for folder in path.parents:
            folders.setdefault(folder.parent, set()).add(folder.name)
    counts = {
        folder.as_posix(): (len(files.get(folder, ())), len(folders.get(folder, ())))
        for folder in files.keys() | folders.keys()
    }
    return {folder: count for folder, count in counts.items() if max(count) > MAX_ENTRIES}


def functions(path: str, tree: ast.AST) -> Iterator[tuple[str, Function]]:
    """(full name, function) of all functions and methods, inner ones too."""
    open_nodes = [(module_of(path), node) for node in ast.iter_child_nodes(tree)]
    while open_nodes:
        name, node = open_nodes.pop()
        if isinstance(node, Function | ast.ClassDef):
            name = f"{name}.{node.name}"
        if isinstance(node, Function):
            yield name, node
        open_nodes += [(name, child) for child in ast.iter_child_nodes(node)]


def definitions(path: str, tree: ast.AST) -> set[str]:
    """Full names of functions, methods and classes at the top of a module."""
    found = {name for name, _ in functions(path, tree)}
    return found | {
        f"{module_of(path)}.{n.name}" for n in ast.walk(tree) if isinstance(n, ast.ClassDef)
    }


def long_functions(files: Sources) -> dict[str, int]:
    return {
        name: length
        for path, tree in files.items()
        if not KERNELS.fullmatch(PurePosixPath(path).name)
        for name, function in functions(path, tree)
        if (length := (function.end_lineno or 0) - function.lineno + 1) > MAX_LINES
    }


def wide_constructors(files: Sources) -> dict[str, int]:
    found = {}
    for path, tree in files.items():
        for name, function in functions(path, tree):
            arguments = function.args
            count = len(arguments.posonlyargs + arguments.args + arguments.kwonlyargs) - 1
            if function.name == "__init__" and count > MAX_PARAMETERS:
                found[name] = count
    return found


def bags(files: Sources) -> set[str]:
    """Functions that take **keywords."""
    return {
        name
        for path, tree in files.items()
        for name, function in functions(path, tree)
        if function.args.kwarg is not None
    }


def late_imports(files: Sources) -> list[str]:
    """Imports inside functions that LATE_IMPORTS does not allow."""
    found = set()
    for path, tree in files.items():
        for _, function in functions(path, tree):
            for node in ast.walk(function):
                if isinstance(node, ast.Import):
                    names = [alias.name for alias in node.names]
                elif isinstance(node, ast.ImportFrom):
                    names = [node.module or ""]
                else:
                    continue
                for name in {name.split(".")[0] for name in names}:
                    if not any(
                        re.match(where, path) and re.fullmatch(what, name)
                        for where, what, _ in LATE_IMPORTS
                    ):
                        found.add(f"{path}:{node.lineno} imports {name}")
    return sorted(found)


def of_docstrings(files: Sources) -> list[str]:
    """Docstrings, of attributes too, that are no sentence with a subject."""
    return [
        f"{path}:{node.lineno}"
        for path, tree in files.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        and node.value.value.lstrip().startswith("Of ")
    ]


def without_a_folder(tests: list[PurePosixPath], root: Path) -> set[str]:
    """Folders of tests that mirror no folder of the package whose name they begin with."""
    folders = {parent for path in tests for parent in path.parents if len(parent.parts) > 1}
    return {
        folder.as_posix()
        for folder in folders
        if folder.parts[1] in PACKAGES and not (root / Path(*folder.parts[1:])).is_dir()
    }


def drawn_tree(page: str) -> dict[str, list[str]]:
    """Package → folders and files at its top, as the page's tree draws them: a line
    `PACKAGE/`, below it indented lines of names with / or .py, two spaces and a remark."""
    (block,) = re.findall(r"^```text\n(pallas_kernels/.*?)^```$", page, re.DOTALL | re.MULTILINE)
    tree: dict[str, list[str]] = {}
    for line in block.splitlines():
        if line[0] != " ":
            names = tree.setdefault(line.split("/")[0], [])
        elif said := re.match(r" +((?:\w+(?:/|\.py)(?:, )?)+)", line):
            names += [re.sub(r"/|\.py", "", name) for name in said[1].split(", ")]
    return tree


def walks(page: str) -> dict[str, list[tuple[str, list[str]]]]:
    """Value → (folder, names) of each folder that it passes, as the page lists them."""
    section = page[page.index("## Four walks") : page.index("## Contracts")]
    found = {}
    for item in section.split("\n- **")[1:]:
        value, _, steps = item.partition("**: ")
        parts = re.split(r"\*(\w+)\*", steps.split(". ")[0])
        found[value] = [
            (folder, re.findall(r"`([\w.]+)`", names))
            for folder, names in zip(parts[1::2], parts[2::2], strict=True)
        ]
    return found


def lost(walk: list[tuple[str, list[str]]], files: Sources) -> list[str]:
    """What is wrong with a walk: folders that it enters twice, names that their folder lacks."""
    folders = [folder for folder, _ in walk]
    wrong = [f"{folder} twice" for folder in {f for f in folders if folders.count(f) > 1}]
    for folder, names in walk:
        defined = {
            name.removeprefix(f"{module_of(path)}.")
            for path, tree in files.items()
            if path.split("/")[1] == folder
            for name in definitions(path, tree)
        }
        wrong += [f"{folder} has no {name}" for name in names if name not in defined]
    return wrong


def paths_of(*packages: str) -> list[PurePosixPath]:
    """Files of packages, in the repository."""
    return [
        PurePosixPath(path.relative_to(REPOSITORY).as_posix())
        for package in packages
        for path in (REPOSITORY / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]


# ---- the tree


def test_imports_follow_the_order():
    found = against_the_order(sources(*PACKAGES))
    wrong = [f"{where} imports {key[1]}" for key, where in found.items()]
    assert found.keys() == ORDER_EXCEPTIONS.keys(), "\n".join(wrong)


def test_no_modules_import_each_other():
    assert not circle(sources(*PACKAGES))


@pytest.mark.parametrize("package", PACKAGES)
def test_everything_has_a_place(package):
    tops = {path.parts[1].removesuffix(".py") for path in paths_of(package)}
    no_code = {"demo", "py.typed"}
    assert tops - no_code == set(ORDER[package])


def test_the_page_draws_the_order():
    drawn = drawn_tree((REPOSITORY / "docs" / "architecture.md").read_text())
    hidden = {"host_offload": "__init__", "pallas_kernels": "__init__"}
    for package, names in ORDER.items():
        assert drawn[package] == [n for n in names if n != hidden.get(package)]


@pytest.mark.parametrize(
    "value", ["A prompt", "`expert_budget`", "A policy's decision", "A checkpoint tensor"]
)
def test_a_value_goes_one_way(value):
    walk = walks((REPOSITORY / "docs" / "architecture.md").read_text())[value]
    assert len(walk) >= 3
    assert not lost(walk, sources(*PACKAGES))


def test_a_level_is_seen_at_once():
    assert not crowded(paths_of("host_offload", "moejax", "scripts"))


def test_functions_fit_a_screen():
    found = long_functions(sources(*PACKAGES))
    assert found.keys() == LONG_FUNCTIONS.keys(), found


def test_constructors_take_few_parameters():
    found = wide_constructors(sources(*PACKAGES))
    assert found.keys() == WIDE_CONSTRUCTORS.keys(), found


def test_nothing_is_passed_in_a_bag():
    found = bags(sources("host_offload", "moejax"))
    assert found == BAGS.keys(), sorted(found ^ BAGS.keys())


def test_imports_stand_at_the_top():
    assert not late_imports(sources(*PACKAGES))


def test_docstrings_are_sentences():
    assert not of_docstrings(sources(*PACKAGES, "scripts"))


def test_tests_mirror_the_folders():
    assert not without_a_folder(paths_of("tests"), REPOSITORY)


# ---- each rule finds what breaks it


@pytest.mark.parametrize(
    "line",
    [
        "from host_offload.policies.late import x",
        "from host_offload.policies import late",
        "import host_offload.policies.late",
        "if TYPE_CHECKING:\n    from host_offload.policies.late import x",
        "def f():\n    from host_offload.policies import late",
        "importlib.import_module('host_offload.policies.late')",
        "TABLE = {'late': 'host_offload.policies.late:x'}",
    ],
)
def test_an_import_against_the_order_is_found(line):
    files = parsed(host_offload__memory__early=line, host_offload__policies__late="x = 1")
    key = ("host_offload.memory.early", "host_offload.policies.late")
    assert against_the_order(files).keys() == {key}
    files = parsed(host_offload__policies__late="", host_offload__simulate__later=line)
    assert not against_the_order(files)


def test_an_import_of_a_later_package_and_one_without_a_place_are_found():
    files = parsed(
        pallas_kernels__fill__api="from moejax.errors import UserError",
        moejax__errors="from moejax.nowhere import x",
        moejax__nowhere="",
    )
    assert against_the_order(files).keys() == {
        ("pallas_kernels.fill.api", "moejax.errors"),
        ("moejax.errors", "moejax.nowhere"),
    }


@pytest.mark.parametrize(
    "back",
    [
        "import moejax.step.a",
        "def f():\n    from moejax.step import a",
        "if TYPE_CHECKING:\n    from moejax.step.a import A",
        "TABLE = ['a:A']",
    ],
)
def test_a_circle_is_found(back):
    files = parsed(moejax__step__a="import moejax.step.b", moejax__step__b="import moejax.step.c")
    assert not circle(files)
    assert len(circle({**files, **parsed(moejax__step__c=back)})) == 4  # the first one twice


def test_a_crowded_level_is_found():
    level = [PurePosixPath(f"moejax/step/f{i}.py") for i in range(MAX_ENTRIES)]
    level.append(PurePosixPath("moejax/step/__init__.py"))
    assert not crowded(level)
    assert crowded([*level, PurePosixPath("moejax/step/table.json")]) == {"moejax/step": (13, 0)}
    folders = [PurePosixPath(f"moejax/f{i}/a.py") for i in range(MAX_ENTRIES + 1)]
    assert crowded(folders) == {"moejax": (0, 13)}


def test_a_long_function_is_found():
    body = "\n".join(["    x = 1"] * (MAX_LINES - 1))
    assert not long_functions(parsed(moejax__a=f"def f():\n{body}"))
    text = f"class C:\n  async def f(self):\n{body}\n    return x"
    assert long_functions(parsed(moejax__a=text)) == {"moejax.a.C.f": MAX_LINES + 1}
    assert not long_functions(parsed(pallas_kernels__fill__pallas_triton=text))


def test_a_wide_constructor_is_found():
    names = ", ".join(f"p{i}" for i in range(MAX_PARAMETERS))
    assert not wide_constructors(parsed(moejax__a=f"class C:\n def __init__(self, {names}): ..."))
    text = f"class C:\n def __init__(self, {names}, *, last): ..."
    assert wide_constructors(parsed(moejax__a=text)) == {"moejax.a.C.__init__": 13}


def test_a_bag_is_found():
    text = "class C:\n def f(self, **options): ...\ndef g():\n return f(**x)"
    assert bags(parsed(moejax__a=text)) == {"moejax.a.C.f"}


def test_a_late_import_is_found():
    allowed = "def f():\n import torch\n from orbax.checkpoint import v1"
    assert not late_imports(parsed(moejax__step__a=allowed, moejax__commands__b="import jax"))
    late = "class C:\n def f(self):\n  from moejax import LLM"
    assert not late_imports(parsed(moejax__commands__trace__a=late))
    assert late_imports(parsed(moejax__step__a=late)) == ["moejax/step/a.py:3 imports moejax"]
    assert late_imports(parsed(moejax__step__a="def f():\n import rich")) != []


@pytest.mark.parametrize("text", ['"""Of a."""', 'def f():\n """Of b."""', 'x = 1\n"""Of c."""'])
def test_a_docstring_without_a_subject_is_found(text):
    assert len(of_docstrings(parsed(moejax__a=text))) == 1
    assert not of_docstrings(parsed(moejax__a=text.replace("Of", "Seconds of")))


def test_tests_of_no_folder_are_found(tmp_path):
    (tmp_path / "moejax" / "step").mkdir(parents=True)
    tests = [PurePosixPath("tests/moejax/step/test_a.py"), PurePosixPath("tests/aot/test_b.py")]
    assert not without_a_folder(tests, tmp_path)
    tests.append(PurePosixPath("tests/moejax/gone/test_c.py"))
    assert without_a_folder(tests, tmp_path) == {"tests/moejax/gone"}


def test_a_walk_that_returns_or_is_lost_is_found():
    steps = "*step* `f` → `C.g` → *fill* `h` → *step* `f`. `x`"
    page = f"## Four walks\n\n- **A**: {steps}\n\n## Contracts"
    files = parsed(moejax__step__a="def f(): ...\nclass C:\n def g(self): ...", moejax__fill__b="")
    (walk,) = walks(page).values()
    assert walk == [("step", ["f", "C.g"]), ("fill", ["h"]), ("step", ["f"])]
    assert lost(walk, files) == ["step twice", "fill has no h"]
    assert not lost(walk[:1], files)


def test_the_tree_is_read_as_drawn():
    tree = "pallas_kernels/\n  a/    an op\nmoejax/\n  b.py, c.py   ground\n  d/  e/f\n"
    page = f"x\n```text\n{tree}```\n"
    assert drawn_tree(page) == {"pallas_kernels": ["a"], "moejax": ["b", "c", "d"]}

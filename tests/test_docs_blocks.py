"""Every block of code on tutorials and how-to pages runs, in order, as a reader would run it."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.conftest import REPOSITORY

FOLDERS = ("docs/tutorials", "docs/how-to")
PAGES = sorted(page for folder in FOLDERS for page in (REPOSITORY / folder).glob("*.md"))
BLOCK = re.compile(
    r"(?:^<!-- not run(?: here)?: ([^\n]+) -->\n)?^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL
)
RUNS = ("bash", "python")


class Block(NamedTuple):
    reason: str | None
    """Why it is not run; None: it is."""
    language: str
    code: str


def blocks(text: str) -> list[Block]:
    return [Block(reason or None, *rest) for reason, *rest in BLOCK.findall(text)]


def check(block: Block) -> None:
    """Raises an exception for code that cannot be parsed."""
    match block.language:
        case "bash":
            subprocess.run(["bash", "-n"], input=block.code, text=True, check=True)
        case "python":
            ast.parse(block.code)
        case "yaml":
            yaml.safe_load(block.code)
        case "json":
            json.loads(block.code)
        case language:
            assert language == "text", f"a block of {language or 'no language'}: {block.code}"


def run_blocks(text: str, folder: Path, cache: Path) -> int:
    """Runs a page's blocks in a new folder, each in a process; returns how many. Raises
    AssertionError for one that fails.

    - `cache`: the reader's, with what earlier pages measured and compiled.
    """
    programs, work = folder / "bin", folder / "work"
    programs.mkdir()
    work.mkdir()
    for name, command in {"moejax": "-m moejax", "python": ""}.items():
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {command} "$@"\n')
        program.chmod(0o755)
    path = os.pathsep.join([str(programs), os.environ.get("PATH", os.defpath)])
    places = {"PATH": path, "PYTHONPATH": str(REPOSITORY), "XDG_CACHE_HOME": str(cache)}
    # Programs run for seconds; LLVM's optimizations take a seventh of the processor time.
    places["XLA_FLAGS"] = (
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )
    ran = 0
    for block in blocks(text):
        if block.reason is None and block.language in RUNS:
            command = {"bash": ["bash", "-euo", "pipefail", "-c"], "python": [sys.executable, "-c"]}
            done = subprocess.run(
                [*command[block.language], block.code],
                cwd=work,
                env=os.environ | places,
                capture_output=True,
                text=True,
                timeout=900,  # nothing waits, but machines may be busy
            )
            assert done.returncode == 0, f"{block.code}\n{done.stdout}{done.stderr}"
            ran += 1
    return ran


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_parse_and_say_why_they_are_not_run(page):
    found = blocks(page.read_text())
    assert len(found) == page.read_text().count("\n```") // 2
    for block in found:
        check(block)
        assert block.reason is None or (block.language in RUNS and len(block.reason) > 10)


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    """One reader's cache for all pages: most of their time went into measuring the demo's costs."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_run(page, tmp_path, cache):
    wanted = [b for b in blocks(page.read_text()) if b.language in RUNS and b.reason is None]
    assert run_blocks(page.read_text(), tmp_path, cache) == len(wanted)


@pytest.mark.parametrize("code", ["```bash\nfalse\n```", "```python\nassert 1 == 2\n```"])
def test_a_block_that_fails_is_found(code, tmp_path):
    with pytest.raises(AssertionError):
        run_blocks(f"# A page\n\n{code}\n", tmp_path, tmp_path)


@pytest.mark.parametrize("code", ["```bash\nfor\n```", "```python\na b\n```", "```\na\n```"])
def test_a_block_that_cannot_be_parsed_is_found(code):
    (block,) = blocks(code)
    with pytest.raises((AssertionError, SyntaxError, subprocess.CalledProcessError)):
        check(block)


# mypy reports nothing of installed packages; from a checkout it would, and it would read all of
# jax, ray and torch, of which no type reaches a script.
MYPY = """[mypy]
strict = True
[mypy-moejax.*,host_offload.*,pallas_kernels.*]
follow_imports = silent
[mypy-jax.*,flax.*,optax.*,orbax.*,ray.*,torch.*,transformers.*]
follow_imports = skip
"""
STRICT = {"typeCheckingMode": "strict", "extraPaths": [str(REPOSITORY)]}
CHECKERS = {
    "pyright": ("pyrightconfig.json", json.dumps(STRICT), "--pythonpath"),
    "mypy": ("mypy.ini", MYPY, "--python-executable"),
}


@pytest.mark.slow
@pytest.mark.parametrize("checker", CHECKERS)
def test_scripts_of_the_pages_have_strict_types(checker, tmp_path):
    """Types that users of a type checker see, in its strictest mode."""
    pages = ("README.md", "docs/tutorials/first_text.md", "docs/tutorials/chat.md")
    pages += ("docs/how-to/async.md", "docs/how-to/server.md")
    scripts = [
        b.code
        for p in pages
        for b in blocks((REPOSITORY / p).read_text())
        if "moejax" in b.code and b.language == "python"
    ]
    assert len(scripts) >= 5
    for number, code in enumerate(scripts):
        (tmp_path / f"script{number}.py").write_text(code)
    (tmp_path / "wrong.py").write_text('import moejax\n\nmoejax.LLM("demo", expert_budget=[])\n')
    name, settings, option = CHECKERS[checker]
    (tmp_path / name).write_text(settings)
    done = subprocess.run(
        [sys.executable, "-m", checker, option, sys.executable, "."],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    errors = [line for line in done.stdout.splitlines() if "error:" in line]
    assert len(errors) == 1 and "wrong.py:3" in errors[0] and "expert_budget" in errors[0], done

"""Every script answers --help; every command that docs, examples and docstrings name exists."""

import ast
import contextlib
import io
import re
import shlex
from importlib import import_module

import pytest

from moejax.commands.main import main as moejax_main
from scripts.parts.commands import COMMANDS
from scripts.texts.__main__ import main as texts_main

ALL = [(group, name) for group, names in COMMANDS.items() for name in names]


def usage(main, *arguments: str, flag: str = "--help") -> str:
    """The usage that --help, or --help-all, shows after these arguments. Raises ValueError if it
    refuses them."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([*arguments, flag])
        except SystemExit as left:
            if left.code:
                raise ValueError(err.getvalue().splitlines()[-1]) from None
    shown = out.getvalue().partition("\n\n")[0]
    more = "--help-all" in shown and flag == "--help"
    return usage(main, *arguments, flag="--help-all") if more else shown


def script(group: str, name: str):
    return import_module(f"scripts.{group}.{name}").main


# ---- the scripts themselves


@pytest.mark.parametrize(("group", "name"), ALL)
def test_help(group, name):
    assert usage(script(group, name)).startswith(f"usage: python -m scripts.{group} {name} ")


def test_what_has_a_main_is_a_command(repository):
    found = [
        (path.parent.name, path.stem)
        for path in (repository / "scripts").glob("*/*.py")
        if path.name != "__main__.py"
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "main"
    ]
    assert sorted(found) == sorted(ALL)


# ---- what texts name

SCRIPT = re.compile(r"python -m scripts\.([a-z]\w*) (\w+)\b(?!:)(.*)")
MOEJAX = re.compile(r"(?:^|&& )(?:\$ )?moejax ([a-z][\w-]*)(.*)")
END = re.compile(r" [|><;&]|   |  #| \(|…|`")


def code(text: str) -> list[str]:
    """Each line of a Markdown text's blocks of code, and each `span`."""
    blocks = re.compile(r"^```\w*\n(.*?)^```$|^((?: {4}.*\n)+)", re.DOTALL | re.MULTILINE)
    lines = [
        line.strip()
        for block in blocks.finditer(text)
        for line in block[0].replace("\\\n", " ").splitlines()
    ]
    return lines + [
        span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", blocks.sub("", text))
    ]


def words(text: str) -> list[str]:
    """The arguments in it, as a shell splits them, up to their end. What a usage line has in
    brackets counts, and what a string in a source says that goes on in the next line."""
    text = re.sub(r"[\[\]]", " ", END.split(text)[0])
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return END.split(text)[0].partition('"')[0].split()


def complaint(main, arguments: list[str]) -> str:
    """What is wrong with a command's arguments, "" if nothing is; options may have any value."""
    arguments = [word for word in arguments if word != "--help"]
    options = [word.partition("=")[0].rstrip(",.;:)") for word in arguments if word[:2] == "--"]
    places = [number for number, word in enumerate(arguments) if word.startswith("-")]
    try:
        shown = usage(main, *arguments[: places[0] if places else None])
    except ValueError as error:
        return str(error)
    missing = [name for name in options if not re.search(rf"{re.escape(name)}(?![\w-])", shown)]
    return f"no {', '.join(missing)}" if missing else ""


def texts(repository, *patterns):
    for pattern in patterns:
        for path in sorted(repository.glob(pattern)):
            yield path.relative_to(repository), path.read_text()


DOCS = ("*.md", "docs/**/*.md")
SOURCES = tuple(
    f"{folder}/**/*.py"
    for folder in ("scripts", "tests", "examples", "host_offload", "moejax", "pallas_kernels")
)


def test_scripts_are_named_as_they_are_called(repository):
    lines = [(path, line) for path, text in texts(repository, *DOCS) for line in code(text)]
    lines += [
        (path, line)
        for path, text in texts(repository, *SOURCES)
        if path.name != "test_commands.py"
        for line in text.splitlines()
    ]
    wrong, count = [], 0
    for path, line in lines:
        for group, name, rest in SCRIPT.findall(line):
            count += 1
            if group == "texts":
                why = complaint(texts_main, [name, *words(rest)])
            elif name not in COMMANDS.get(group, ()):
                why = "there is no such command"
            else:
                why = complaint(script(group, name), words(rest))
            if why:
                wrong.append(f"{path}: scripts.{group} {name}{rest}: {why}")
    assert count > 10
    assert not wrong


@pytest.mark.slow
def test_commands_of_moejax_are_named_as_they_are_called(repository):
    wrong, count = [], 0
    for path, text in texts(repository, *DOCS):
        for line in code(text):
            for name, rest in MOEJAX.findall(line):
                count += 1
                if why := complaint(moejax_main, [name, *words(rest)]):
                    wrong.append(f"{path}: moejax {name}{rest}: {why}")
    assert count > 40
    assert not wrong


def test_tests_are_named_where_they_are(repository):
    wrong = [
        f"{path}: {place}"
        for path, text in texts(repository, *DOCS)
        for place in re.findall(r"\btests/[\w/.]*\w", text)
        if not (repository / place).exists() and "NAME" not in place
    ]
    assert not wrong

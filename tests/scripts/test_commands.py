"""Every script answers --help; every command that docs, examples and docstrings name exists."""

import argparse
import ast
import contextlib
import io
import re
import shlex
from importlib import import_module
from importlib.util import find_spec

import pytest

from moejax.commands.main import main as moejax_main
from scripts.parts.commands import COMMANDS

ALL = [(group, name) for group, names in COMMANDS.items() for name in names]


def usage(main, *arguments: str) -> str:
    """The usage that --help shows after these arguments. Raises ValueError if it refuses them."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main([*arguments, "--help"])
        except SystemExit as left:
            if left.code:
                raise ValueError(err.getvalue().splitlines()[-1]) from None
    return out.getvalue().partition("\n\n")[0]


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
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "main"
    ]
    assert sorted(found) == sorted(ALL)


def test_no_command_is_imported_by_another_module(repository):
    commands = {f"scripts.{group}.{name}" for group, name in ALL}
    found = []
    for path in (repository / "scripts").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
                found += [f"{path}: {name}" for name in names & commands]
    assert not found


@pytest.mark.parametrize("group", COMMANDS)
def test_a_group_lists_its_commands(group, capsys, monkeypatch):
    for arguments, status in (([], 2), (["--help"], 0), (["no_such"], 2)):
        monkeypatch.setattr("sys.argv", ["scripts", *arguments])
        with pytest.raises(SystemExit) as left:
            import_module("scripts.parts.commands").run(group)
        assert left.value.code == status
        shown = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
        assert shown == list(COMMANDS[group])


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
            if name not in COMMANDS.get(group, ()):
                wrong.append(f"{path}: no scripts.{group} {name}")
            elif why := complaint(script(group, name), words(rest)):
                wrong.append(f"{path}: scripts.{group} {name}{rest}: {why}")
    assert count > 60
    assert not wrong


def test_nothing_names_a_script_by_its_file(repository):
    found = {
        f"{path}: {name}"
        for path, text in texts(repository, *DOCS, *SOURCES, ".ci/run")
        for name in re.findall(r"(?<!tests/)scripts/\w+(?:/\w+)?\.py", text)
        if path.name not in ("test_commands.py", "CHANGELOG.md")
    }
    assert not found


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


# ---- what evidence is given by

RUN = re.compile(r"(?:[A-Z]\w*=\S* )*(?:python -m (\S+)|(moejax)) ?(.*)")
"""A command whole, with its arguments. `moejax eval` alone is a name."""


@contextlib.contextmanager
def parsing_only():
    """Commands stop where argparse is content: with Parsed, before anything runs."""
    whole, depth = argparse.ArgumentParser.parse_known_args, 0

    def parse(self, args=None, namespace=None):
        nonlocal depth
        depth += 1  # a command's parser is asked by that of all commands
        try:
            found, unknown = whole(self, args, namespace)
        finally:
            depth -= 1
        if depth:
            return found, unknown
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        raise Parsed

    argparse.ArgumentParser.parse_known_args = parse
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_known_args = whole


class Parsed(Exception):
    """The arguments are those of a command."""


def refusal_of(command: str) -> str:
    """Why this command line cannot be run today, "" if argparse takes it whole. Of modules that are
    no scripts only that they are there."""
    match = RUN.fullmatch(command)
    assert match, command
    module, moejax, rest = match.groups()
    arguments = shlex.split(END.split(rest)[0])
    main = moejax_main
    if not moejax:
        group = module.removeprefix("scripts.")
        if group == module:
            return "" if find_spec(module) else f"no module {module}"
        name = arguments.pop(0) if arguments else ""
        if name not in COMMANDS.get(group, ()):
            return f"no {module} {name}"
        main = script(group, name)
    err = io.StringIO()
    with parsing_only(), contextlib.redirect_stderr(err):
        try:
            main(arguments)
        except Parsed:
            return ""
        except SystemExit:
            pass
    # argparse says it in the last line; moejax says last where its options are.
    said = err.getvalue().strip().splitlines()
    return next((line for line in reversed(said) if "error: " in line), "it ran")


def commands_in(text: str) -> list[str]:
    """The commands of a page: those with arguments, and of the scripts every one."""
    return [
        line.removeprefix("$ ")
        for line in code(text)
        if re.match(r"(?:\$ )?(?:[A-Z]\w*=\S* )*(?:python -m \w+\.|moejax [a-z][\w-]* )", line)
    ]


def test_the_commands_of_results_are_taken_whole(repository):
    """Values and what is required too: who copies a row's command need only put in DIR and FILE."""
    wrong, count = [], 0
    for path, text in texts(repository, "docs/results/*.md"):
        for command in commands_in(text):
            count += 1
            if why := refusal_of(command.replace("\\|", "|")):
                wrong.append(f"{path}: {command}: {why}")
    assert count > 60
    assert not wrong


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("python -m scripts.bench load --repeats 3", "required: directory"),
        ("python -m scripts.bench load DIR --repeats many", "invalid int value"),
        ("python -m scripts.budgets table2 --layer", "expected one argument"),
        ("NPROC=1 python -m scripts.budgets steps --resizes", "expected one argument"),
        ("python -m scripts.bench loads DIR", "no scripts.bench loads"),
        ("python -m tests.nowhere x", "no module tests.nowhere"),
        ("moejax eval demo --data", "expected at least one argument"),
        ("moejax trace info DIR --no-such", "unrecognized arguments: --no-such"),
    ],
)
def test_what_would_be_refused_is_found(command, why):
    assert why in refusal_of(command)

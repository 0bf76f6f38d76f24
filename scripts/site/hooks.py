"""MkDocs hooks: a page's `<!-- generate: NAME -->` becomes a reference made from the code."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from host_offload.control import step_record
from host_offload.control.step_record import COLUMNS, USES, LinkUse, PageUse, StepRecord
from moejax.commands.main import COMMANDS
from moejax.models.families import FAMILIES
from moejax.start.fields import Option, options_of
from moejax.start.options import GROUPS

SHAPE = re.compile(r"^\w+\[[^]]*\]:? ?")
"""What a field's text begins with, which the table has in another column."""
MARK = re.compile(r"^<!-- generate: (\w+) -->$", re.MULTILINE)
PAGE = re.compile(r"\bdocs/([\w/-]+\.md)")
CODE = re.compile(r"(?<![\w`/])(--[a-z][\w-]*|[\w-]+=[A-Z]+(?:%|\b))(?![\w`])")


def on_page_markdown(markdown: str, *, page, **_) -> str:
    """MkDocs calls it with each page's text."""
    here = Path(page.file.src_uri).parent
    return MARK.sub(lambda mark: link_pages(GENERATED[mark[1]](), here), markdown)


def link_pages(text: str, here: Path) -> str:
    """Pages that help texts name, as links from the folder `here`."""
    up = "../" * len(here.parts)
    return PAGE.sub(lambda page: f"[{Path(page[1]).stem.replace('_', ' ')}]({up}{page[1]})", text)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    head = list(head)
    lines = [head, ["---"] * len(head), *rows]
    cells = ([cell.replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def prose(text: str) -> str:
    """A help text as Markdown: flags and KEY=VALUE as code."""
    parts = text.replace("<", "&lt;").split("`")
    parts[::2] = [CODE.sub(r"`\1`", part) for part in parts[::2]]
    return "`".join(parts)


# ---- the command line


def command_line() -> str:
    """Each command: what it does, its own options, examples."""
    parser = argparse.ArgumentParser(prog="moejax")
    commands = parser.add_subparsers()
    for command in COMMANDS:
        command.add_parser(commands)
    return "\n\n".join(part for each in flat(commands) for part in describe(each))


def flat(commands: argparse._SubParsersAction) -> Iterator[argparse.ArgumentParser]:
    """Parsers of the commands, and of their actions in place of a command that has some."""
    for parser in commands.choices.values():
        inner = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
        yield from flat(inner[0]) if inner else [parser]


def describe(parser: argparse.ArgumentParser) -> Iterator[str]:
    groups = parser._action_groups
    shared = {a for group in groups if group.title in GROUPS for a in group._group_actions}
    own = [a for a in parser._actions if a not in shared and a.dest not in ("help", "help_all")]
    names = " ".join(written(a) for a in own if not a.option_strings)
    yield f"## {parser.prog}"
    yield f"`{parser.prog}{' ' + names if names else ''}{' [OPTIONS]' if own else ''}`"
    yield prose((parser.description or "").strip())
    rows = [(f"`{written(a)}`", prose((a.help or "") % vars_of(a))) for a in own]
    if rows:
        yield table(("argument", "meaning"), rows)
    if shared:
        yield "It also takes the [model options](options.md)."
    if parser.epilog:
        yield f"```text\n{parser.epilog.strip()}\n```"


def vars_of(action: argparse.Action) -> dict[str, object]:
    return {"default": action.default, "prog": "moejax"}


def written(action: argparse.Action) -> str:
    """An argument as one writes it."""
    value = action.metavar or ("" if action.choices is None else f"{{{','.join(action.choices)}}}")
    if isinstance(value, tuple):
        value = " ".join(value)
    if not action.option_strings:
        name = value or action.dest.upper()
        return f"[{name}]" if action.nargs == "?" else name
    if not value and action.nargs != 0:
        value = action.dest.upper()
    return f"{action.option_strings[-1]} {value}".strip()


# ---- options


def options() -> str:
    """Each group of options as a table; settings of an option below it."""
    parts = []
    for name, kind in GROUPS.items():
        parts.append(f"## {name.capitalize()}\n\n{sentence(kind.__doc__)}")
        fields = {f.name: f for f in dataclasses.fields(kind)}
        for option, one in options_of(kind).items():
            parts.append(describe_option(option, one, fields[option].default))
    return "\n\n".join(parts)


def describe_option(name: str, one: Option, default: object) -> str:
    flag = f"`--{name.replace('_', '-')}`" if one.flag else "Python only"
    elsewhere = {"model": "`MODEL` or `--model`", "seed": "`--seed`", "progress": "`--quiet`"}
    flag = elsewhere.get(name, flag)
    known = "" if default in (dataclasses.MISSING, None, ()) else f" · default `{default}`"
    bits = "may change output bits" if one.changes_bits else "same output bits"
    lines = [f"### `{name}`", f"{flag}{known} · {bits}", f"{sentence(prose(one.help))}"]
    if one.settings:
        rows = re.split(r"; (?=\w+: )", one.settings)
        pairs = [row.partition(": ")[::2] for row in rows]
        if all(re.fullmatch(r"\w+", key) and text for key, text in pairs):
            rows = [(f"`{key}`", prose(text)) for key, text in pairs]
            lines.append(table(("setting", "meaning"), rows))
        else:
            lines.append(f"Settings: {prose(one.settings)}.")
    return "\n\n".join(lines)


def sentence(text: str | None) -> str:
    text = (text or "").strip()
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")


# ---- traces


def trace_arrays() -> str:
    """The arrays of a trace's chunk."""
    said = field_docs(StepRecord)
    rows = [
        (
            f"`{column.per}.{name}`",
            f"{dtype_name(column.dtype)}[{', '.join([column.per + 's', *column.row])}]",
            ("Optional. " if column.optional else "") + SHAPE.sub("", said[name]),
        )
        for name, column in COLUMNS.items()
    ]
    rows.append(("`step.tokens`", "int32[steps]", "Token rows of the step."))
    rows.append(("`step.drafts`", "int32[steps]", "Optional. Tokens of its rejected drafts."))
    return table(("array", "type", "meaning"), rows)


def trace_uses() -> str:
    """The columns of step.use."""
    said = field_docs(PageUse) | field_docs(LinkUse)
    return table(("column of `step.use`", "meaning"), [(f"`{n}`", said[n]) for n in USES])


def dtype_name(dtype: type) -> str:
    return dtype.__name__.rstrip("_")


def field_docs(kind: type) -> dict[str, str]:
    """Field → the string below it, "" where there is none."""
    tree = ast.parse(Path(step_record.__file__).read_text())
    (body,) = (n.body for n in tree.body if isinstance(n, ast.ClassDef) and n.name == kind.__name__)
    said: dict[str, str] = {}
    name = ""
    for node in body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)):
                said[name] = ""
            case ast.Expr(value=ast.Constant(value=str(text))) if name:
                said[name] = " ".join(text.split())
    return said


# ---- models


ARCHITECTURES = Path(__file__).with_name("architectures.tsv")
"""Architectures with experts that do not run: name, `next` or `out`, and why."""


def other_architectures() -> dict[str, tuple[str, str]]:
    lines = (line.split("\t") for line in ARCHITECTURES.read_text().splitlines())
    return {name: (state, why) for name, state, why in lines if name not in runs()}


def runs() -> dict[str, str]:
    """Architecture, or another name of it → what of it runs."""
    found = {}
    for name, family in FAMILIES.items():
        what = "the text model runs" if family.text_types else "runs"
        found |= dict.fromkeys((name, *family.aliases), what)
    return found


def models() -> str:
    """Every architecture with experts that transformers or vLLM has."""
    states = {"next": "not yet", "out": "out of scope"}
    rows = [(f"`{name}`", what, "") for name, what in runs().items()]
    others = other_architectures().items()
    rows += [(f"`{name}`", states[state], why) for name, (state, why) in others]
    return table(("architecture", "state", "what it needs"), sorted(rows))


GENERATED: dict[str, Callable[[], str]] = {
    "command_line": command_line,
    "options": options,
    "trace_arrays": trace_arrays,
    "trace_uses": trace_uses,
    "models": models,
}
"""What pages may ask for."""

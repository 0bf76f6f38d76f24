"""Runs of commands in this process."""

import json
from collections.abc import Callable


def json_lines(capsys, main: Callable, *args: str) -> list[dict]:
    """What a run that must succeed prints with --json."""
    status = main([*args, "--json"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return [json.loads(line) for line in captured.out.splitlines()]


def refusal(capsys, main: Callable, *args: str) -> str:
    """The one line that a run that must be refused prints."""
    assert main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err

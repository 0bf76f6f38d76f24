"""Runs of the benches' main, and the modules of scripts/, imported as `python scripts/…` does."""

import json
from collections.abc import Callable

from scripts.bench import decode as bench_decode
from scripts.bench import prefill as bench_prefill
from scripts.parts import bench_engine, decode_timing, kernel_profile, prefill_report

__all__ = [
    "bench_decode",
    "bench_engine",
    "bench_prefill",
    "decode_timing",
    "json_lines",
    "kernel_profile",
    "prefill_report",
    "refusal",
]


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

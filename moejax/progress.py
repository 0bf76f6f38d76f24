"""Progress bars on stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def _bars(columns: Callable[[Any], tuple[Any, ...]]) -> Iterator[Any]:
    """Yields a rich Progress.

    - `columns`: makes the columns; its argument is the module rich.progress.
    """
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    # In a file or a pipe, a bar would only write blank lines.
    hidden = not console.is_terminal
    with progress.Progress(
        *columns(progress), console=console, transient=True, disable=hidden
    ) as bars:
        yield bars


@contextmanager
def byte_progress(verb: str, shown: bool) -> Iterator[Callable[[str, int, int], None]]:
    """Shows a bar over bytes for each name. Yields report(name, bytes so far, total).

    - `verb`: stands before each name.
    - `shown`: False: no bars.
    """
    if not shown:
        yield lambda name, done, total: None
        return

    def columns(rich: Any) -> tuple[Any, ...]:
        words = rich.TextColumn("{task.description}")
        return words, rich.BarColumn(), rich.DownloadColumn(), rich.TransferSpeedColumn()

    with _bars(columns) as bars:
        tasks: dict[str, Any] = {}

        def report(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bars.add_task(f"{verb} {name}", total=None)
            bars.update(tasks[name], completed=done, total=total)

        yield report


@contextmanager
def count_progress(
    verb: str,
    total: int | None,
    done: int,
    shown: bool,
    tokens: Callable[[], int] | None = None,
) -> Iterator[Callable[..., None]]:
    """Shows a bar over results, with the remaining time; without a terminal a line every LINE_S.

    - `verb`: stands before the bar.
    - `total`: the number of results; None: unknown.
    - `done`: results from an earlier run.
    - `shown`: False: no bar.
    - `tokens`: returns the tokens computed so far, and makes the bar show tokens per second. It is
      called whenever the bar is drawn, since a result may take long.

    Yields report(results so far, total, text); the last two are optional and replace `total` and
    `verb`.
    """
    if not shown:
        yield lambda done, total=None, text="": None
        return
    from rich.console import Console

    if not Console(stderr=True).is_terminal:
        yield _tell_lines(verb, total, done)
        return
    begin = 0 if tokens is None else tokens()

    def columns(rich: Any) -> tuple[Any, ...]:
        class TokenRate(rich.ProgressColumn):
            def render(self, task):
                rate = 0 if tokens is None else (tokens() - begin) / (task.elapsed or 1e-9)
                return rich.Text("" if tokens is None else f"{rate:.0f} tokens/s")

        counts = rich.TextColumn("{task.description}"), rich.BarColumn(), rich.MofNCompleteColumn()
        # An engine may start between two results, so the last minute is a poor estimate.
        left = rich.TextColumn("left"), rich.TimeRemainingColumn(elapsed_when_finished=True)
        return *counts, TokenRate(), rich.TimeElapsedColumn(), *left

    with _bars(columns) as bars:
        task = bars.add_task(verb, total=total, completed=done)
        yield lambda done, total=total, text=verb: bars.update(
            task, completed=done, total=total, description=text
        )


LINE_S = 60.0
"""Seconds between two lines of progress in a file or a pipe."""


def _tell_lines(verb: str, total: int | None, done: int) -> Callable[..., None]:
    """Returns `report` of `count_progress` for a log: jobs on clusters have no terminal."""
    began = told = time.monotonic()
    first = done

    def report(done: int, total: int | None = total, text: str = verb) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told < LINE_S:
            return
        told = now
        left = ""
        if total and done > first:
            seconds = (now - began) / (done - first) * (total - done)
            left = f", about {seconds / 60:.0f} min left"
        print(f"{text}: {done} of {total or '?'}{left}", file=sys.stderr, flush=True)

    return report

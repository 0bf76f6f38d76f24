"""Progress bars on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def _bar(shown: bool, columns: Callable[[Any], tuple[Any, ...]]) -> Iterator[Any]:
    """rich's Progress with these columns, made of the module rich.progress; None when not
    shown."""
    if not shown:
        yield None
        return
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    # Into a file or a pipe a bar would only leave blank lines.
    hidden = not console.is_terminal
    with progress.Progress(
        *columns(progress), console=console, transient=True, disable=hidden
    ) as bar:
        yield bar


def _bytes(rich: Any) -> tuple[Any, ...]:
    words = rich.TextColumn("{task.description}")
    return words, rich.BarColumn(), rich.DownloadColumn(), rich.TransferSpeedColumn()


@contextmanager
def loading_progress(
    name: str, shown: bool, verb: str = "loading"
) -> Iterator[Callable[[int, int], None] | None]:
    """A bar over bytes; yields report(done_bytes, total_bytes), None when not shown."""
    with versions_progress(shown, verb) as report:
        yield report and (lambda done, total: report(name, done, total))


@contextmanager
def versions_progress(
    shown: bool, verb: str = "making"
) -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar over bytes for each of what is made; yields report(name, done_bytes, total_bytes), None
    when not shown."""
    with _bar(shown, _bytes) as progress:
        tasks: dict[str, Any] = {}

        def report(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(f"{verb} {name}", total=None)
            progress.update(tasks[name], completed=done, total=total)

        yield None if progress is None else report


@contextmanager
def token_progress(
    verb: str, total: int | None, done: int, tokens: Callable[[], int] | None, shown: bool
) -> Iterator[Callable[[int], None]]:
    """A bar over results with tokens a second; yields report(results so far).

    total: of results, None when unknown. done: results that were there before. tokens: computed so
    far, asked for whenever the bar is drawn, since a result may take long; None: they are the
    results.
    """
    begin = 0 if tokens is None else tokens()

    def columns(rich: Any) -> tuple[Any, ...]:
        class TokenRate(rich.ProgressColumn):
            def render(self, task):
                found = task.completed if tokens is None else tokens()
                rate = (found - begin) / (task.elapsed or 1e-9)
                return rich.Text(f"{rate:.0f} tokens/s")

        counts = rich.BarColumn(), rich.MofNCompleteColumn()
        return rich.TextColumn(verb), *counts, TokenRate(), rich.TimeRemainingColumn()

    with _bar(shown, columns) as progress:
        task = None if progress is None else progress.add_task("", total=total, completed=done)
        yield lambda done: None if progress is None else progress.update(task, completed=done)


@contextmanager
def grid_progress(total: int, done: int, shown: bool) -> Iterator[Callable[[], None]]:
    """A bar over the runs of a grid with the time that is left; yields advance(), to be called
    after each. done: runs that were there before."""

    def columns(rich: Any) -> tuple[Any, ...]:
        bar = rich.TextColumn("runs"), rich.BarColumn(), rich.MofNCompleteColumn()
        # Engines start between runs, so the last minute says little.
        left = rich.TextColumn("left"), rich.TimeRemainingColumn(elapsed_when_finished=True)
        return *bar, rich.TimeElapsedColumn(), *left

    with _bar(shown, columns) as progress:
        task = None if progress is None else progress.add_task("", total=total, completed=done)
        yield lambda: None if progress is None else progress.advance(task)


@contextmanager
def training_progress(shown: bool) -> Iterator[Callable[[int, int, str], None]]:
    """A bar over the layers that learn, with what is said of each; yields report(layer, layers,
    said), which does nothing when not shown."""

    def columns(rich: Any) -> tuple[Any, ...]:
        words = rich.TextColumn("{task.description}")
        return words, rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeElapsedColumn()

    with _bar(shown, columns) as progress:
        task = None if progress is None else progress.add_task("training", total=None)

        def report(layer: int, layers: int, said: str) -> None:
            if progress is not None:
                text = f"layer {layer}, {said}"
                progress.update(task, description=text, completed=layer, total=layers)

        yield report

"""Progress bars on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


def _progress(*columns):
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    # Into a file or a pipe a bar would only leave blank lines.
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _byte_progress():
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn

    columns = TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    return _progress(*columns)


@contextmanager
def loading_progress(
    name: str, shown: bool, verb: str = "loading"
) -> Iterator[Callable[[int, int], None] | None]:
    """A bar over bytes; yields report(done_bytes, total_bytes), None when not shown."""
    if not shown:
        yield None
        return
    with _byte_progress() as progress:
        task = progress.add_task(f"{verb} {name}", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def versions_progress(shown: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar over bytes for each version of the experts that is made; yields report(version,
    done_bytes, total_bytes), None when not shown."""
    if not shown:
        yield None
        return
    with _byte_progress() as progress:
        tasks = {}

        def report(version: str, done: int, total: int) -> None:
            if version not in tasks:
                tasks[version] = progress.add_task(f"making {version}", total=total)
            progress.update(tasks[version], completed=done, total=total)

        yield report


@contextmanager
def token_progress(
    verb: str, total: int | None, done: int, tokens: Callable[[], int] | None, shown: bool
) -> Iterator[Callable[[int], None]]:
    """A bar over results with tokens a second; yields report(results so far).

    total: of results, None when unknown. done: results that were there before. tokens: computed so
    far, asked for whenever the bar is drawn, since a result may take long; None: they are the
    results.
    """
    if not shown:
        yield lambda done: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        ProgressColumn,
        Task,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.text import Text

    begin = 0 if tokens is None else tokens()

    class TokenRate(ProgressColumn):
        def render(self, task: Task) -> Text:
            found = task.completed if tokens is None else tokens()
            return Text(f"{(found - begin) / (task.elapsed or 1e-9):.0f} tokens/s")

    columns = (
        TextColumn(verb),
        BarColumn(),
        MofNCompleteColumn(),
        TokenRate(),
        TimeRemainingColumn(),
    )
    with _progress(*columns) as progress:
        task = progress.add_task("", total=total, completed=done)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def grid_progress(total: int, done: int, shown: bool) -> Iterator[Callable[[], None]]:
    """A bar over the runs of a grid with the time that is left; yields advance(), to be called
    after each. done: runs that were there before."""
    if not shown:
        yield lambda: None
        return
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (
        TextColumn("runs"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        # Engines start between runs, so the last minute says little.
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with _progress(*columns) as progress:
        task = progress.add_task("", total=total, completed=done)
        yield lambda: progress.advance(task)


@contextmanager
def training_progress(shown: bool) -> Iterator[Callable[[int, int, str], None]]:
    """A bar over the layers that learn, with what is said of each; yields report(layer, layers,
    said), which does nothing when not shown."""
    if not shown:
        yield lambda layer, layers, said: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with _progress(*columns) as progress:
        task = progress.add_task("training", total=None)

        def report(layer: int, layers: int, said: str) -> None:
            text = f"layer {layer}, {said}"
            progress.update(task, description=text, completed=layer, total=layers)

        yield report

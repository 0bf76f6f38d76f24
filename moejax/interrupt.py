"""Delays Ctrl-C until a safe moment, and ends a process that does not react to it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def deferred_interrupt() -> Iterator[list]:
    """Holds SIGINT back until the block has ended. Only the main thread gets signals, so in another
    thread this does nothing.

    Yields a list that is empty until a SIGINT comes, so that the block can end early.
    """
    held: list[tuple] = []
    if threading.current_thread() is not threading.main_thread():
        yield held
        return

    def hold(*received: Any) -> None:
        global _answered
        _answered = time.monotonic()
        held.append(received)

    before = signal.signal(signal.SIGINT, hold)
    try:
        yield held
    finally:
        # None stands for a handler that Python did not install and cannot restore.
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
        if held and callable(before):
            before(*held[0])
        elif held and before is not signal.SIG_IGN:
            raise KeyboardInterrupt


def end_where_stuck(seconds: float, status: int) -> None:
    """Makes Ctrl-C end the process even if the main thread stays in native code, where Python's
    handlers do not run: in a compilation, or a read from a disk that does not answer. Call it once,
    in the main thread.

    - `seconds`: how long after Ctrl-C the main thread may stay in native code.
    - `status`: the exit status.
    """
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    signal.signal(signal.SIGINT, _interrupt)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # works in native code too

    def watch() -> None:
        while True:
            if signal.SIGINT not in os.read(reader, 64):
                continue
            came = time.monotonic()
            time.sleep(seconds)
            handler = signal.getsignal(signal.SIGINT)
            ours = getattr(handler, "__module__", None) == __name__
            # The handler may have run a moment before this thread reads the signal.
            if ours and _answered < came - 0.2:
                os.write(2, b"moejax: interrupted while it waited for a disk or a compilation\n")
                os._exit(status)

    threading.Thread(target=watch, name="moejax-interrupt", daemon=True).start()


_answered = 0.0
"""time.monotonic() when a Python handler last ran for SIGINT."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _answered
    _answered = time.monotonic()
    signal.default_int_handler(number, frame)

"""Ctrl-C at a moment of our choosing, and at last."""

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
    """Holds SIGINT back until the block has ended; yields a list that is empty until one came, for
    blocks that end early then. Only the main thread gets signals; elsewhere this does nothing."""
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
        # None: a handler that Python did not install and cannot put back.
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
        if held and callable(before):
            before(*held[0])
        elif held and before is not signal.SIG_IGN:
            raise KeyboardInterrupt


def end_where_stuck(seconds: float, status: int) -> None:
    """From now on Ctrl-C ends the process, with that status, where the main thread stays in native
    code for so many seconds after it: in a compilation, or a read of a disk that does not answer.
    Python's handlers do not run there. Call it once, in the main thread."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return
    signal.signal(signal.SIGINT, _interrupt)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # written to wherever the thread is

    def watch() -> None:
        while True:
            if signal.SIGINT not in os.read(reader, 64):
                continue
            came = time.monotonic()
            time.sleep(seconds)
            handler = signal.getsignal(signal.SIGINT)
            ours = getattr(handler, "__module__", None) == __name__
            # The handler may have run before this thread has seen the signal.
            if ours and _answered < came - 0.2:
                os.write(2, b"moejax: interrupted while it waited for a disk or a compilation\n")
                os._exit(status)

    threading.Thread(target=watch, name="moejax-interrupt", daemon=True).start()


_answered = 0.0
"""When Python last heard of a SIGINT."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _answered
    _answered = time.monotonic()
    signal.default_int_handler(number, frame)

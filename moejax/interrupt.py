"""Ctrl-C at a moment of our choosing."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deferred_interrupt() -> Iterator[list]:
    """Holds SIGINT back until the block has ended; yields a list that is empty until one came, for
    blocks that end early then. Only the main thread gets signals; elsewhere this does nothing."""
    held: list[tuple] = []
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    before = signal.signal(signal.SIGINT, lambda *received: held.append(received))
    try:
        yield held
    finally:
        # None: a handler that Python did not install and cannot put back.
        signal.signal(signal.SIGINT, signal.default_int_handler if before is None else before)
        if held and callable(before):
            before(*held[0])
        elif held and before is not signal.SIG_IGN:
            raise KeyboardInterrupt

"""Ctrl-C at a moment of our choosing."""

from __future__ import annotations

import os
import signal
import socket
import sys
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


@contextmanager
def ending_after_interrupt(seconds: float, status: int) -> Iterator[None]:
    """Ends the process with this exit status so many seconds after a first Ctrl-C within the block,
    whatever it waits for then: neither a step on the device nor a compilation hears of a signal.
    For commands whose work leaves nothing behind; main thread only."""
    heard, told = socket.socketpair()
    told.setblocking(False)

    def end() -> None:
        while number := heard.recv(1):
            if number[0] == signal.SIGINT and not over.wait(seconds):
                print("moejax: interrupted", file=sys.stderr, flush=True)
                os._exit(status)

    over = threading.Event()
    # Python's own handler writes there at once, before the main thread gets to run any other.
    before = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=end, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(before)
        told.close()
        thread.join()
        heard.close()

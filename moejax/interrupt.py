"""Delays Ctrl-C until a safe moment, and ends what hangs where no error can be raised."""

from __future__ import annotations

import dataclasses
import os
import select
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from moejax.errors import fallbacks

STEP_S = 1800.0
"""Seconds that a step of an engine may take until it is said to hang."""
LOOK_S = 1.0
"""Seconds between two looks at the running steps."""
AGAIN_S = 0.05
"""Seconds after which Ctrl-C is tried again where no error can be raised."""
AGAIN = 0
"""The byte that asks for this; signals write their numbers."""


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


@dataclasses.dataclass(eq=False)
class RunningStep:
    """The step that an engine runs now, as other threads see it.

    - `tell`: gets the message if the step hangs. Nothing can be raised in a thread that waits for a
      device, so by default the message ends a command, and is logged in other programs.
    """

    tell: Callable[[str], Any] | None = None
    began: float | None = None
    """time.monotonic() when the step began; None: none runs."""
    _told: float | None = None

    @contextmanager
    def running(self) -> Iterator[None]:
        _watch_steps()
        self.began = time.monotonic()
        _running.add(self)
        try:
            yield
        finally:
            _running.discard(self)
            self.began = None

    def hangs(self, seconds: float) -> str | None:
        """What is wrong, if the running step has run for longer than `seconds`."""
        began = self.began
        if began is None or (took := time.monotonic() - began) <= seconds:
            return None
        return (
            f"a step of the engine has not ended for {took:.0f} s; its device or a disk does not "
            "answer, so end the process"
        )

    def look(self) -> None:
        """Tells of a step that hangs, once."""
        began = self.began
        if began != self._told and (message := self.hangs(STEP_S)) is not None:
            self._told = began
            (self.tell or end_command)(message)


_running: set[RunningStep] = set()
_watcher: tuple[int, threading.Thread] | None = None
"""The thread that looks at steps, and its process: a fork has none."""


def _watch_steps() -> None:
    global _watcher
    if _watcher is None or _watcher[0] != os.getpid():
        thread = threading.Thread(target=_look_at_steps, name="moejax-steps", daemon=True)
        _watcher = os.getpid(), thread
        thread.start()


def _look_at_steps() -> None:
    while True:
        time.sleep(LOOK_S)
        for step in tuple(_running):
            step.look()


def end_command(message: str) -> None:
    """Ends a command with an error, whatever hangs; in other programs the error is logged."""
    if _error_status is None:
        fallbacks.error(message)
    else:
        os.write(2, f"moejax: error: {message}\n".encode())
        os._exit(_error_status)


def end_where_stuck(seconds: float, status: int, error_status: int) -> None:
    """Makes Ctrl-C end the process even if the main thread stays in native code, where Python's
    handlers do not run: in a compilation, or a read from a disk that does not answer; or if a step
    of an engine does not end. Call it once, in the main thread.

    - `seconds`: how long after Ctrl-C the main thread may stay in native code, or a step may run.
    - `status`: the exit status.
    - `error_status`: the exit status if a step runs for longer than STEP_S, without Ctrl-C.
    """
    global _error_status, _wake
    _error_status = error_status
    if signal.getsignal(signal.SIGINT) not in (signal.default_int_handler, _leave):
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # works in native code too
    _wake = writer

    def judge(came: float) -> None:
        handler = signal.getsignal(signal.SIGINT)
        ours = getattr(handler, "__module__", None) == __name__
        # The handler may have run a moment before this thread reads the signal.
        if ours and _answered < came - 0.2:
            _end(b"a disk or a compilation", status)
        if any(step.hangs(time.monotonic() - came) for step in tuple(_running)):
            _end(b"a step of the engine", status)

    def watch() -> None:
        main = threading.main_thread().ident
        assert main is not None
        came: list[float] = []
        while True:
            if not came or select.select([reader], [], [], AGAIN_S)[0]:
                read = os.read(reader, 64)
                if signal.SIGINT in read:
                    came.append(time.monotonic())
                if AGAIN in read:
                    time.sleep(AGAIN_S)
                    signal.pthread_kill(main, signal.SIGINT)
            while came and time.monotonic() - came[0] >= seconds:
                judge(came.pop(0))

    threading.Thread(target=watch, name="moejax-interrupt", daemon=True).start()
    signal.signal(signal.SIGINT, _interrupt)  # last: until now the process just ends


def _end(waited: bytes, status: int) -> None:
    os.write(2, b"moejax: interrupted while it waited for " + waited + b"\n")
    os._exit(status)


_error_status: int | None = None
"""The exit status of a command whose step hangs; None: this process is no command."""
_wake = -1
"""Where a byte wakes the thread that watches signals."""
_answered = 0.0
"""time.monotonic() when a Python handler last ran for SIGINT."""


_LOSE_ERRORS = ("__del__", "_xla_gc_callback", "discover_pjrt_plugins")
"""Functions of Python and jax whose callers drop errors."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    global _answered
    _answered = time.monotonic()
    if _loses_errors(frame):
        with suppress(BlockingIOError):  # full of signals: one of them comes again anyway
            os.write(_wake, bytes([AGAIN]))
    else:
        signal.default_int_handler(number, frame)


def _loses_errors(frame: FrameType | None) -> bool:
    """Whether an error that is raised here goes nowhere, as in callbacks of the garbage collector,
    or becomes another one, as in an import of an extension."""
    while frame is not None:
        code = frame.f_code
        if code.co_name in _LOSE_ERRORS:
            return True
        if code.co_filename.startswith("<frozen importlib") or code.co_filename == weakref.__file__:
            return True
        frame = frame.f_back
    return False


def leave_quietly() -> None:
    """Makes Ctrl-C end the process at once, until end_where_stuck: while modules are imported, and
    at the end of the interpreter, there is nothing to put in order. Does nothing where SIGINT is
    ignored."""
    if callable(signal.getsignal(signal.SIGINT)):
        signal.signal(signal.SIGINT, _leave)


def _leave(*_: Any) -> None:
    os.write(2, b"moejax: interrupted\n")
    os._exit(130)

"""The errors that moejax raises for mistakes that the user can correct."""

import contextlib
import logging
from collections.abc import Iterator

MOST_LINE, MOST_LINES = 800, 40
"""Most characters of a line of a message, and most lines. Longer ones lose their middle."""


fallbacks = logging.getLogger("moejax.fallbacks")
"""Says what a start does instead of what did not work, in two lines each. A level of its own, since
people must see it where notes are silenced."""
fallbacks.setLevel(logging.WARNING)


class UserError(ValueError):
    """A mistake that the user can correct. The message says what is wrong and what to do.

    A message may quote an untrusted file, so it is cut to MOST_LINE and MOST_LINES. The command
    line prints it without a traceback and exits with status 2.
    """

    def __init__(self, message: str = ""):
        lines = [
            line if len(line) <= MOST_LINE else f"{line[: MOST_LINE - 303]} … {line[-300:]}"
            for line in message.split("\n")
        ]
        if len(lines) > MOST_LINES:
            lines[MOST_LINES // 2 : -MOST_LINES // 2] = ["…"]
        super().__init__("\n".join(lines))


class OutOfKV(UserError):
    """Requests wait for KV pages, and no running request will free any. The engine still works, but
    the waiting requests cannot continue."""


class NotPinned(UserError):
    """Pinned host memory does not hold the experts."""


@contextlib.contextmanager
def user_errors(kind: type[Exception] = ValueError, where: str = "") -> Iterator[None]:
    """Turns errors of a kind, raised inside the `with`, into UserError.

    - `kind`: the exception to catch.
    - `where`: begins the message. Without it, a UserError passes unchanged.
    """
    try:
        yield
    except kind as error:
        if isinstance(error, UserError) and not where:
            raise
        raise UserError(f"{where}{error}") from error


@contextlib.contextmanager
def as_user_error(what: str) -> Iterator[None]:
    """Turns every error inside the `with` into UserError, so that one request's error ends nothing
    else. That includes errors that are no Exception, such as pyo3's PanicException from compiled
    libraries.

    - `what`: begins the message; the error's own text is cut to 300 characters.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise UserError(f"{what} ({type(error).__name__}: {str(error)[:300]})") from error


def shown(value: object, most: int = 80) -> str:
    """A value as text for a message, on one line and cut to `most` characters. The value may come
    from an untrusted file."""
    try:
        text = ascii(value)
    except ValueError:  # an integer of more digits than Python prints
        text = "an enormous number"
    except RecursionError:
        text = "a value that is nested too deeply"
    return text if len(text) <= most else f"{text[: most - 3]}..."

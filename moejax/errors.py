"""What moejax raises when the user, not the program, has to change something."""

import contextlib
from collections.abc import Iterator

MOST_LINE, MOST_LINES = 800, 40
"""Characters of a message's line, and its lines; what is beyond is left out, in the middle."""


class UserError(ValueError):
    """A mistake the user can mend: the message says what is wrong and what to do.

    A message may quote what a stranger's file holds, so each is cut to MOST_LINE and MOST_LINES.
    The command line prints it without a traceback and exits with status 2.
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
    """Requests wait for KV pages, and nothing that runs will free any. The engine is whole; the
    waiting requests cannot go on."""


@contextlib.contextmanager
def user_errors(kind: type[Exception] = ValueError, where: str = "") -> Iterator[None]:
    """What is refused below with an error of this kind, as UserError; one that is a UserError
    passes where nothing is to be said before its message. where: that."""
    try:
        yield
    except kind as error:
        if isinstance(error, UserError) and not where:
            raise
        raise UserError(f"{where}{error}") from error


@contextlib.contextmanager
def as_user_error(what: str) -> Iterator[None]:
    """Raises UserError for everything that goes wrong inside: what it does belongs to one request,
    and must end nothing else. what: begins the message, of which a long one is cut.

    Compiled libraries panic with exceptions that are no Exception (pyo3's PanicException).
    """
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise UserError(f"{what} ({type(error).__name__}: {str(error)[:300]})") from error


def shown(value: object, most: int = 80) -> str:
    """A value for a message: on one line and short, whatever a stranger's file holds."""
    try:
        text = ascii(value)
    except ValueError:  # an integer of more digits than Python prints
        text = "an enormous number"
    except RecursionError:
        text = "a value that is nested too deeply"
    return text if len(text) <= most else f"{text[: most - 3]}..."

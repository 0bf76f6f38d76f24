"""What moejax raises when the user, not the program, has to change something."""

import contextlib
from collections.abc import Iterator


class UserError(ValueError):
    """A mistake the user can mend: the message says what is wrong and what to do.

    The command line prints it without a traceback and exits with status 2.
    """


class OutOfKV(UserError):
    """Requests wait for KV pages that nobody can give. The engine is whole; those in it cannot go
    on as things are."""


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

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
def user_errors(kind: type[ValueError] = ValueError, where: str = "") -> Iterator[None]:
    """What is refused below with a ValueError, as UserError. where: before its message."""
    try:
        yield
    except kind as error:
        raise UserError(f"{where}{error}") from error

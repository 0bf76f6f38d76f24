"""What moejax raises when the user, not the program, has to change something."""

from __future__ import annotations

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
def as_user_error(*kinds: type[Exception]) -> Iterator[None]:
    """What is raised of these kinds is raised as a UserError of the same message; one that is a
    UserError already passes."""
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        raise UserError(str(error)) from error

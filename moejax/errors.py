"""What moejax raises when the user, not the program, has to change something."""


class UserError(ValueError):
    """A mistake the user can mend: the message says what is wrong and what to do.

    The command line prints it without a traceback and exits with status 2.
    """


class OutOfKV(UserError):
    """Requests wait for KV pages that nobody can give. The engine is whole; those in it cannot go
    on as things are."""

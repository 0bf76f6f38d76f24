"""The commands of ``moejax``, a module each, and the exit statuses that they share."""

EXIT_USER_ERROR = 2
EXIT_BAD_LINES = 3
"""A job did all it could, but some results are errors. (1 is a crash of Python.)"""
EXIT_INTERRUPTED = 130
"""128 + SIGINT, as shells report it."""
EXIT_BROKEN_PIPE = 141
"""128 + SIGPIPE: the reader of stdout went away, as with ``| head``."""

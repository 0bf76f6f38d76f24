"""What ends native objects, in the process that made them."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any


def finalize_here(owner: object, function: Callable[..., Any], *args: Any) -> weakref.finalize:
    """As weakref.finalize, but a forked child does not call the function: the threads that it would
    wait for are its parent's."""
    return weakref.finalize(owner, _call_here, os.getpid(), function, args)


def _call_here(process: int, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    if os.getpid() == process:
        function(*args)

"""Lets forked children of a process with a model end."""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import os
import sys


@functools.cache
def let_children_end() -> None:
    """Makes forked children of this process keep their native objects as they end.

    jax's clients, compiled steps and thread pools wait, when they are freed, for threads that only
    the parent has: a child that ended with sys.exit hung or crashed. It still cannot use jax. Call
    it once jax runs; children of multiprocessing end by os._exit and do not need it.
    """
    os.register_at_fork(after_in_child=lambda: atexit.register(_keep_objects))


def _keep_objects() -> None:
    """Holds a reference to every object that Python would free, and skips C++'s own destructors."""
    from jax._src import api

    # It frees jax's clients, and ends the process with status 255 if one is still referred to.
    if (clean_up := getattr(api, "clean_up", None)) is not None:
        atexit.unregister(clean_up)
    hold = ctypes.pythonapi.Py_IncRef
    hold.argtypes, hold.restype = (ctypes.py_object,), None
    gc.disable()
    for module in tuple(sys.modules.values()):
        for value in tuple(getattr(module, "__dict__", {}).values()):
            hold(value)
    for value in gc.get_objects():
        hold(value)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # glibc's; others tell no function the exit status
        libc.on_exit(libc._exit, None)

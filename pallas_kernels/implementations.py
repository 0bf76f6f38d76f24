"""The implementations of an op: modules of its folder, named in the op's `api`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

MODULES = {"xla": "reference", "pallas": "pallas_triton", "mosaic": "pallas_mosaic"}
"""Name → module. Any other implementation is in the module of its name."""

LATE = {"mosaic"}
"""Implementations whose modules are imported when they first run, since they take long."""


def implementations(op: str, names: Sequence[str], function: str = "") -> dict[str, Callable]:
    """Name → function, for the named implementations.

    - `function`: its name in the modules, if it differs from the op's.
    """

    def find(name: str) -> Callable:
        return getattr(
            import_module(f"pallas_kernels.{op}.{MODULES.get(name, name)}"), function or op
        )

    def find_late(name: str) -> Callable:
        return lambda *args, **options: find(name)(*args, **options)

    return {name: find_late(name) if name in LATE else find(name) for name in names}


def pick(
    op: str,
    implementations: Mapping[str, Callable],
    name: str,
    shared_kib: int | None = None,
) -> Callable:
    """The function of one implementation.

    - `shared_kib`: the class of GPU (`cards`), passed to the kernel only, if its tables need it.

    Raises ValueError for an unknown implementation, with those that exist.
    """
    if name not in implementations:
        raise ValueError(
            f"op {op!r} has no implementation {name!r}; it has {', '.join(implementations)}"
        )
    function = implementations[name]
    if shared_kib is None or name != "pallas":
        return function
    return functools.partial(function, shared_kib=shared_kib)


def no_integers(op: str, implementation: str) -> str:
    """The message for an implementation that has the exact arithmetic only."""
    return (
        f"op {op!r}: {implementation} has no integer products; use arithmetic exact, or a CPU with "
        "ops cpu or xla"
    )

"""Policies by name. A new policy is one file and a line in the table of its kind.

A policy that learns has `fit(trace, …)`, a function of its module or a class method, which makes
the policy from a trace. If it learns arrays, it has a field `fitted`, its module has NAME, which
its files contain, and the settings saved with the arrays are its other fields. A module with
another way to make a policy from a path has `read(path)`.
"""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from host_offload.control.interface import Policy
from host_offload.policies.prefetch.fitted import read_fitted
from pallas_kernels.option_text import Reader, number, parse_option, whole, yes


class Registry(Mapping[str, Any]):
    """Name → class of a policy.

    - `option`: its name in messages, such as "prefetch policy".
    - `package`: the package of the modules.
    - `places`: name → MODULE:CLASS in the package.
    """

    def __init__(self, option: str, package: str | None, places: Mapping[str, str]):
        self.option = option
        self._classes: dict[str, Any] = {
            name: pkgutil.resolve_name(f"{package}.{place}") for name, place in places.items()
        }

    def __getitem__(self, name: str) -> Any:
        return self._classes[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._classes)

    def __len__(self) -> int:
        return len(self._classes)

    @property
    def plain(self) -> dict[str, Callable[..., Any]]:
        """The policies that need no file."""
        return {name: made for name, made in self.items() if not _needs_more(made)}

    @property
    def fits(self) -> dict[str, Callable[..., Any]]:
        """Name → function that fits the policy to a Trace, with optional settings;
        `policy.fitted.write(FILE)` writes it."""
        every = {
            name: getattr(made, "fit", None) or getattr(self._module(name), "fit", None)
            for name, made in self.items()
        }
        return {name: fit for name, fit in every.items() if fit is not None}

    @property
    def from_path(self) -> frozenset[str]:
        """The policies that are made from a path: a file of learned arrays, or what their module
        reads."""
        return frozenset(
            name
            for name, made in self.items()
            if hasattr(self._module(name), "read") or "fitted" in made.__dataclass_fields__
        )

    def parse(self, text: str) -> Policy:
        """The policy called NAME or NAME=PATH. Raises ValueError for an unknown name, with the
        known ones, and for a path that is missing, unreadable or not taken."""
        names: dict[str, dict[str, Reader]] = {name: {} for name in self}
        name, path, _ = parse_option(self.option, text, names, paths=self.from_path)
        if path is not None:
            return self._read(name, path)
        if name not in self.plain:
            what = "the trace of the very run" if name == "oracle" else "a file that its fit wrote"
            raise ValueError(
                f"{self.option.split()[0]} {name!r} needs {what}: {name}=PATH "
                "(docs/explanation/policies.md)"
            )
        return self[name]()

    def _read(self, name: str, path: str) -> Policy:
        module = self._module(name)
        if hasattr(module, "read"):
            return module.read(path)
        found = read_fitted(path, module.NAME)
        fields = self[name].__dataclass_fields__
        settings = {key: value for key, value in found.all_settings.items() if key in fields}
        return self[name](fitted=found, **settings)

    def _module(self, name: str) -> Any:
        return sys.modules[self[name].__module__]


def _weights(text: str) -> tuple[int, ...]:
    """Reads victim weights such as 1+0+0."""
    found = tuple(int(part) for part in text.split("+") if part.isdecimal())
    if len(found) != 3:
        raise ValueError("three whole numbers such as 1+0+0")
    return found


_READERS: Mapping[str, Reader] = {
    "int": whole(),
    "int | None": whole(),
    "float": number,
    "bool": yes,
    "str": str,
    "tuple[int, int, int]": _weights,
}
"""Type of a setting → reader of its text."""


def setting_readers(made: Callable[..., Any]) -> dict[str, Reader]:
    """The keywords of a policy's class, or of its fit, that can be written KEY=VALUE."""
    parameters = inspect.signature(made).parameters.values()
    kinds = {p.name: getattr(p.annotation, "__name__", p.annotation) for p in parameters}
    return {name: _READERS[kind] for name, kind in kinds.items() if kind in _READERS}


def _needs_more(made: Any) -> bool:
    missing = dataclasses.MISSING
    fields = dataclasses.fields(made)
    return any(field.default is missing and field.default_factory is missing for field in fields)

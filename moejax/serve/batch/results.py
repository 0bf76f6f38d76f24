"""Results of a file job that are there, and the place for more."""

from __future__ import annotations

import abc
import json
from collections.abc import Iterator
from typing import Any

from moejax.errors import UserError
from moejax.serve.batch.result_lines import read_result


class Results(abc.ABC):
    """An output. regular: it can be read again; else it has no results, and no lock."""

    def __init__(self, name: str, regular: bool):
        self.name, self.regular = name, regular
        self.keys: set[bytes] = set()
        """Of `read_result`, of what was there when it was opened."""
        self.errors = 0
        """Errors among those."""
        self.count = 0
        """Whole results in it now."""
        self.size = 0
        """Their bytes, as lines."""

    @abc.abstractmethod
    def stored(self) -> Iterator[tuple[str, bytes]]:
        """(place, line) of each whole result that is there."""

    @abc.abstractmethod
    def begin(self, *, overwrite: bool) -> None:
        """Removes what is there, if asked to; until now the output is as it was found."""

    @abc.abstractmethod
    def append(self, line: bytes) -> None:
        """Takes a result. Raises UserError where it cannot be written; what is there stays
        whole."""

    def forget(self) -> None:
        """What was there has been removed."""
        self.keys, self.errors, self.count, self.size = set(), 0, 0, 0

    def scan(self) -> None:
        """Reads what is there. Raises UserError for what is no result, or is there twice."""
        for place, raw in self.stored():
            try:
                _, key, error = read_result(raw)
            except (ValueError, RecursionError):
                raise not_a_result(place) from None
            if key in self.keys:
                raise UserError(
                    f"{place}: this result is there twice; take one out, or start anew with "
                    "--overwrite"
                )
            self.keys.add(key)
            self.errors += error
            self.count += 1
            self.size += len(raw)

    def first_not_in(self, keys: set[bytes]) -> tuple[str, str | int]:
        """(place, id) of the first result that is not among the keys."""
        for place, raw in self.stored():
            id, key, _ = read_result(raw)
            if key not in keys:
                return place, id
        raise LookupError(f"every result of {self.name} is among the keys")

    def options(self) -> dict[str, Any] | None:
        """Those of the run that wrote the results, as the first one of it says."""
        for _, raw in self.stored():
            metrics = json.loads(raw).get("metrics")
            job = metrics.get("job") if isinstance(metrics, dict) else None
            if isinstance(job, dict):
                return job
        return None


def not_a_result(place: str) -> UserError:
    return UserError(
        f"{place}, is no result of moejax; choose another --output, or start anew with --overwrite"
    )

"""The workload that a model's memory is split by where no number says how: a trace that the user
named once (`moejax plan --trace T --remember`), kept by the model's configuration."""

from __future__ import annotations

import json
from pathlib import Path

from host_offload.traces.reader import Trace
from moejax.cache import cache_root, write_whole
from moejax.errors import UserError


def remember(trace: Trace) -> Path:
    """Keeps a trace's directory as the workload of its model; returns the file that says so, which
    may be deleted. Raises UserError where it cannot be written."""
    path = workload_file(trace.header.config_digest)
    try:
        write_whole(path, json.dumps({"trace": str(trace.directory.absolute())}) + "\n")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror})") from error
    return path


def remembered(model: str) -> str | None:
    """The trace's directory; None: none was named. model: config_digest. Raises UserError for a
    file that is damaged."""
    path = workload_file(model)
    try:
        return str(json.loads(path.read_text())["trace"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error}); delete it") from error


def workload_file(model: str) -> Path:
    """Where it is kept which trace is the workload. model: config_digest."""
    return cache_root() / "workloads" / f"{model[:32]}.json"

"""The table of checked configurations: in the package for known devices, otherwise made at
start."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import functools
import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.verification.apart import PATIENCE, Job, outcomes_apart
from pallas_kernels.verification.outcomes import AnyCheck, Outcome, Unverified

log = logging.getLogger("moejax")

SHIPPED = Path(__file__).parent / "tables"
"""Tables that came from `moejax check-gpu` on real devices."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A check that ran."""

    error: float | None
    """Its error; None: it failed."""
    source: str
    """Digest of the checked sources; other sources must be checked again."""
    runtime: str
    """The backend's version (CUDA, driver) at the time."""
    why: str = ""
    """Why it failed."""


@functools.cache
def digest() -> str:
    """sha256 over the sources of all kernels and checks: kernels share code, and a changed check
    must run again."""
    root = Path(__file__).parent.parent
    files = sorted(root.rglob("*.py"))
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:16]


def file_name(device_kind: str) -> str:
    """A table's file: one per device kind and jax version."""
    kind = "".join(c if c.isalnum() else "-" for c in device_kind.lower())
    return f"{kind}_jax-{jax.__version__}.json"


def load_table(path: Path) -> dict[str, Entry]:
    """Check key → entry; empty if there is no file. Raises ValueError for a damaged file."""
    if not path.exists():
        return {}
    try:
        entries = json.loads(path.read_text())["checks"]
        return {
            key: Entry(
                None if e["error"] is None else float(e["error"]),
                str(e["source"]),
                str(e["runtime"]),
                str(e.get("why", "")),
            )
            for key, e in entries.items()
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a table of checked kernels ({error}); delete it"
        ) from error


def left_over(device_kind: str, cache: Path) -> int | None:
    """How many checks wait in the cache's table of this kind of device, None without a table."""
    try:
        return int(json.loads((cache / file_name(device_kind)).read_text())["left"])
    except (OSError, KeyError, TypeError, ValueError):
        return None


def write_table(path: Path, device: jax.Device, entries: Mapping[str, Entry], left: int) -> None:
    """Writes the table with device, versions and date, atomically. Raises OSError if that fails.

    - `left`: checks that still wait.
    """
    table: dict[str, Any] = {
        "device": device.device_kind,
        "runtime": device.client.platform_version,
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "left": left,
        "checks": {key: dataclasses.asdict(entries[key]) for key in sorted(entries)},
    }
    partial = path.with_suffix(f".{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(table, indent=1) + "\n")
        partial.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def current(device: jax.Device, *folders: Path) -> dict[str, Entry]:
    """Check key → entry, of this device kind, jax version, source and runtime. Later folders count
    more. Raises ValueError for a damaged table."""
    now = digest(), device.client.platform_version
    tables = [load_table(folder / file_name(device.device_kind)) for folder in folders]
    every = {key: found for table in tables for key, found in table.items()}
    return {key: found for key, found in every.items() if (found.source, found.runtime) == now}


def unverified(wanted: Iterable[AnyCheck], known: Mapping[str, Entry]) -> list[str]:
    """The keys of checks that did not pass, each once: first those that did not run, then those
    that failed."""
    open_ = dict.fromkeys(c.key for c in wanted if c.key not in known or known[c.key].why)
    return sorted(open_, key=lambda key: key in known)


def why_no_kernels(wanted: Iterable[AnyCheck], known: Mapping[str, Entry]) -> dict[str, str]:
    """Op → why its kernel must not run: a check of it that failed, else one that did not run."""
    found: dict[str, str] = {}
    for check in wanted:
        entry = known.get(check.key)
        if entry is None:
            found.setdefault(check.op, NOT_CHECKED)
        elif entry.why and found.get(check.op, NOT_CHECKED) == NOT_CHECKED:
            found[check.op] = entry.why
    return found


NOT_CHECKED = "its kernel was not compared with its reference on this GPU yet"


def run_checks(
    job: Job,
    keys: Sequence[str],
    device: jax.Device,
    folder: Path,
    threads: int | None = None,
    patience: float = PATIENCE,
    later: int = 0,
) -> Generator[Outcome, None, None]:
    """Runs these checks of the job in processes of their own, and keeps each outcome in the
    folder's table before it is yielded. So a killed process loses only the running check. Close the
    generator to leave the rest.

    - `later`: checks that wait beside these.

    Raises CannotCheck.
    """
    path, left, writable = folder / file_name(device.device_kind), later + len(keys), True
    with contextlib.closing(outcomes_apart(job, keys, device, threads, patience)) as found:
        for outcome in found:
            if outcome.failed or outcome.error is not None:
                left -= 1
                entry = Entry(outcome.error, digest(), device.client.platform_version, outcome.why)
                if writable:
                    writable = _keep(path, device, outcome.key, entry, left)
            yield outcome


def require_verified(
    job: Job,
    wanted: Sequence[AnyCheck],
    device: jax.Device,
    cache: Path,
    report: Callable[[Outcome], None] = lambda _: None,
) -> int:
    """Makes sure that every wanted check of the job passes on the device. Returns how many had to
    run. Those that neither the shipped table nor the one in the folder `cache` has run now.

    - `report`: called after each check that ran and passed.

    Raises Unverified, which names the op and what to use instead, for a configuration that is wrong
    or does not run.
    """
    known = current(device, SHIPPED, cache)
    missing = unverified(wanted, known)
    ops = {check.key: check.op for check in wanted}
    for outcome in run_checks(job, missing, device, cache):
        if outcome.error is None:
            use = f"use ops={ops[outcome.key]}=xla and report it"
            raise Unverified(f"{outcome.why}; {use}")
        report(outcome)
    if missing:
        log.info("checked kernel configurations of %s are in %s", device.device_kind, cache)
    return len(missing)


def _keep(path: Path, device: jax.Device, key: str, entry: Entry, left: int) -> bool:
    """Adds an entry to the table, to which other processes may add at the same time. Returns
    whether that was possible."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
            write_table(path, device, {**load_table(path), key: entry}, left)
        finally:
            os.close(folder)
    except OSError as error:
        log.warning("%s cannot be written (%s): no check is remembered", path, error)
        return False
    return True

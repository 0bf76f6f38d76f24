"""The table of checked configurations: in the package for known devices, otherwise made at
start."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.verification.check import Check
from pallas_kernels.verification.outcomes import Unverified, outcomes

log = logging.getLogger("moejax")

SHIPPED = Path(__file__).parent / "tables"
"""Tables that came from `moejax check-gpu` on real devices."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A check that passed."""

    error: float
    source: str
    """Digest of the checked sources; other sources must be checked again."""
    runtime: str
    """The backend's version (CUDA, driver) at the time."""


@functools.cache
def digest() -> str:
    """sha256 over the sources of all kernels and checks: kernels share code, and a changed check
    must run again."""
    root = Path(__file__).parent.parent
    files = sorted(root.rglob("*.py"))
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:16]


def file_name(device: jax.Device) -> str:
    """A table's file: one per device kind and jax version."""
    kind = "".join(c if c.isalnum() else "-" for c in device.device_kind.lower())
    return f"{kind}_jax-{jax.__version__}.json"


def load_table(path: Path) -> dict[str, Entry]:
    """Check key → entry; empty if there is no file. Raises ValueError for a damaged file."""
    if not path.exists():
        return {}
    try:
        entries = json.loads(path.read_text())["checks"]
        return {
            key: Entry(float(e["error"]), str(e["source"]), str(e["runtime"]))
            for key, e in entries.items()
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is not a table of checked kernels ({error}); delete it"
        ) from error


def write_table(path: Path, device: jax.Device, entries: dict[str, Entry]) -> None:
    """Writes the table with device, versions and date, atomically. Raises OSError if that fails."""
    table: dict[str, Any] = {
        "device": device.device_kind,
        "runtime": device.client.platform_version,
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
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


def unknown(
    wanted: Iterable[Check], device: jax.Device, entries: Mapping[str, Entry]
) -> list[Check]:
    """The checks without an entry for this source and runtime, in order, each once."""
    now, runtime = digest(), device.client.platform_version

    def shown(check: Check) -> bool:
        then = entries.get(check.key)
        return then is not None and (then.source, then.runtime) == (now, runtime)

    return list({check.key: check for check in wanted if not shown(check)}.values())


def unverified(wanted: Iterable[Check], device: jax.Device, cache: Path) -> list[Check]:
    """The checks that neither the shipped table nor the one in the folder `cache` has for this
    device kind, jax version and source. Raises ValueError for a damaged table."""
    name = file_name(device)
    return unknown(wanted, device, {**load_table(SHIPPED / name), **load_table(cache / name)})


def require_verified(
    wanted: Iterable[Check],
    device: jax.Device,
    cache: Path,
    report: Callable[[Check, float], None] | None = None,
    threads: int | None = None,
) -> int:
    """Makes sure that every wanted check passes on the device. Returns how many had to run.

    Checks that are not `unverified` count as done. The others run now, and each is written to the
    cache when it has passed, so a killed process loses only the running check.

    - `threads`: that compile at once; None: see `outcomes`.
    - `report`: called after each check that ran and was kept.

    Raises Unverified, which names the op and what to use instead, for a configuration that is wrong
    or does not run.
    """
    path = cache / file_name(device)
    missing = unverified(wanted, device, cache)
    own, writable = load_table(path) if missing else {}, True
    with contextlib.closing(outcomes(missing, device, threads)) as found:
        for check, result in found:
            if isinstance(result, Unverified):
                raise result
            own[check.key] = entry(check, result, device)
            writable = writable and _keep(path, device, own)
            if report is not None:
                report(check, result)
    if missing and writable:
        log.info("checked kernel configurations of %s are in %s", device.device_kind, path)
    return len(missing)


def entry(check: Check, error: float, device: jax.Device) -> Entry:
    """The entry of a check that had this error on the device now."""
    return Entry(error, digest(), device.client.platform_version)


def _keep(path: Path, device: jax.Device, entries: dict[str, Entry]) -> bool:
    """Writes the table. Returns whether that was possible."""
    try:
        write_table(path, device, entries)
    except OSError as error:
        log.warning(
            "%s cannot be written (%s): the kernels are checked at every start", path, error
        )
        return False
    return True

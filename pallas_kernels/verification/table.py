"""The table of checked configurations: in the package for known devices, else made at start-up."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import hashlib
import json
import logging
import platform
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.verification.check import Check

log = logging.getLogger("moejax")

SHIPPED = Path(__file__).parent / "tables"
"""Tables that came from `moejax check-gpu` on real devices."""


class Unverified(ValueError):
    """A kernel configuration that gives wrong numbers on this device."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A check that passed."""

    error: float
    source: str
    """Digest of the sources at the time; others have to be checked again."""
    runtime: str
    """The backend's version (CUDA, driver) at the time."""


@functools.cache
def digest() -> str:
    """sha256 over the sources of all kernels and of these checks: kernels share code, and a check
    that was mended has to be made again."""
    root = Path(__file__).parent.parent
    files = sorted(root.rglob("*.py"))
    return hashlib.sha256(b"".join(f.read_bytes() for f in files)).hexdigest()[:16]


def file_name(device: jax.Device) -> str:
    """A table's file: one per device kind and jax version."""
    kind = "".join(c if c.isalnum() else "-" for c in device.device_kind.lower())
    return f"{kind}_jax-{jax.__version__}.json"


def load_table(path: Path) -> dict[str, Entry]:
    """Check key → entry; empty where there is no file. Raises ValueError for a damaged one."""
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
    """Writes the table with device, versions and date."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table: dict[str, Any] = {
        "device": device.device_kind,
        "runtime": device.client.platform_version,
        "jax": jax.__version__,
        "jaxlib": metadata.version("jaxlib"),
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "checks": {key: dataclasses.asdict(entries[key]) for key in sorted(entries)},
    }
    path.write_text(json.dumps(table, indent=1) + "\n")


def require_verified(
    wanted: Iterable[Check],
    device: jax.Device,
    cache: Path,
    report: Callable[[Check, float], None] | None = None,
) -> int:
    """Makes sure that every wanted check holds on the device; returns how many had to be run.

    A check counts as done if the shipped table or the one in the folder `cache` has it for this
    device kind, jax version and source. The others run now (seconds) and go to the cache. report:
    called after each that ran.

    Raises Unverified, naming the op and what to use instead, for a configuration that is wrong or
    does not run.
    """
    name = file_name(device)
    own = load_table(cache / name)
    known = {**load_table(SHIPPED / name), **own}
    ran = 0
    try:
        for check in wanted:
            now = entry(check, 0.0, device)
            then = known.get(check.key)
            if then is not None and (then.source, then.runtime) == (now.source, now.runtime):
                continue
            error = measured(check, device)
            ran += 1
            if report is not None:
                report(check, error)
            own[check.key] = entry(check, error, device)
    finally:
        if ran:
            _keep(cache / name, device, own)
    return ran


def entry(check: Check, error: float, device: jax.Device) -> Entry:
    """The entry of a check that gave this error on the device now."""
    return Entry(error, digest(), device.client.platform_version)


def measured(check: Check, device: jax.Device) -> float:
    """The check's error. Raises Unverified where it is too large or the check does not run."""
    where = f"{device.device_kind} with jax {jax.__version__}"
    try:
        error = check.error(device)
    except Exception as problem:  # whatever the compiler or the device says, the kernel cannot run
        first_line = (str(problem) or type(problem).__name__).splitlines()[0]
        raise Unverified(
            f"the kernel for {check.key} does not run on {where} ({first_line}); "
            f"use ops={check.op}=xla and report it"
        ) from problem
    if not error <= check.tolerance:
        raise Unverified(
            f"the kernel for {check.key} is wrong on {where}: it deviates by {error:.1e}, "
            f"{check.tolerance:.1e} is allowed; use ops={check.op}=xla and report it"
        )
    return error


def _keep(path: Path, device: jax.Device, entries: dict[str, Entry]) -> None:
    try:
        write_table(path, device, entries)
        log.info("checked kernel configurations of %s are in %s", device.device_kind, path)
    except OSError as error:
        log.warning(
            "%s cannot be written (%s): the kernels are checked at every start", path, error
        )

"""The table of checked configurations: in the package for known devices, else made at start-up."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import logging
import platform
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from pallas_kernels.verification.checks import Check

log = logging.getLogger("moejax")

SHIPPED = Path(__file__).parent / "tables"
"""Tables that came from scripts/check_gpu.py on real devices."""


class Unverified(ValueError):
    """A kernel configuration that gives wrong numbers on this device."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """A check that passed."""

    error: float
    source: str
    """Digest of the op's source at the time; another source has to be checked again."""


def digest(op: str) -> str:
    """sha256 over the sources of an op and of what every kernel is called through."""
    root = Path(__file__).parent.parent
    files = [*sorted((root / op).glob("*.py")), root / "triton.py"]
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
        return {key: Entry(float(e["error"]), str(e["source"])) for key, e in entries.items()}
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

    Raises Unverified, naming the op and what to use instead, for a configuration that is wrong.
    """
    name = file_name(device)
    own = load_table(cache / name)
    known = {**load_table(SHIPPED / name), **own}
    ran = 0
    for check in wanted:
        source = digest(check.op)
        if check.key in known and known[check.key].source == source:
            continue
        error = check.error()
        ran += 1
        if report is not None:
            report(check, error)
        if not error <= check.tolerance:
            raise Unverified(
                f"the kernel for {check.key} is wrong on {device.device_kind} with jax "
                f"{jax.__version__}: it deviates by {error:.1e}, {check.tolerance:.1e} is allowed; "
                f"use ops={check.op}=xla and report it"
            )
        own[check.key] = Entry(error, source)
    if ran:
        write_table(cache / name, device, own)
        log.info("checked %d kernel configurations on %s", ran, device.device_kind)
    return ran

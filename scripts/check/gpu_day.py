"""Everything that waits for a GPU, in order of value: one command for a loan.

python -m scripts.check gpu_day --out DIR [--minutes 40] [--copy DIR] [--rehearse]

Each step is an existing command in a process of its own, ended after its minutes (below ten).
Run it again with the same --out for what is left: steps that are done or failed are not run again,
but those named by --again. A step that does not fit into the minutes is left, a shorter one after
it may run. DIR/results.json has commands, times, statuses and figures, DIR/page.md is to be read,
DIR/work what steps wrote with their logs, DIR/scratch what is too large to take home. --copy puts
page, results and an archive of work into another folder after every step, for a machine that hands
back a few files of a command and may end it; an --out with these three goes on from them.

--rehearse runs the same commands at small sizes on the CPU: it shows no figure of a GPU.
Exit status 0 where every step is done, else 1; 2 for a mistake.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import shlex
import shutil
import signal
import subprocess
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moejax import UserError
from moejax.cache import write_whole
from scripts.check.day_page import GOOD, TAIL, page
from scripts.check.day_steps import STEPS, Step
from scripts.parts.commands import new_parser, refuse
from scripts.parts.places import REPOSITORY

ARCHIVE = "work.tar.gz"
LARGEST = 4 << 20
"""Bytes of a file that the archive takes."""

QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""A rehearsal's programs run for milliseconds: compiling them is what takes time."""

ENDED = ("done", "failed", "timed out")
"""Statuses of steps that are not run again by themselves. The others: cut (by --minutes), skipped
(no GPU), left (not begun)."""


def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    try:
        return _day(args)
    except (UserError, OSError) as error:
        return refuse(__name__, error)


def _parser() -> argparse.ArgumentParser:
    parser = new_parser(__name__, __doc__)
    add, names = parser.add_argument, ", ".join(step.name for step in STEPS)
    add("--out", type=Path, required=True, metavar="DIR", help="of results; of those that go on")
    add("--minutes", type=float, default=40, help="of this call (default: %(default)g)")
    add("--copy", type=Path, metavar="DIR", help="puts page, results and an archive there too")
    add("--only", metavar="NAME,…", help=f"of {names}")
    add("--again", metavar="NAME,…", help="runs these anew")
    add("--rehearse", action="store_true", help="small sizes on the CPU")
    return parser


def _day(args: argparse.Namespace) -> int:
    only, again = _named(args.only), _named(args.again)
    out = args.out.resolve()
    results = _begun(out, args.rehearse)
    until = time.monotonic() + 60 * args.minutes
    for step in STEPS:
        if only and step.name not in only:
            continue
        before = results["steps"].get(step.name, {}).get("status")
        if before in ENDED and step.name not in again:
            continue
        room = until - time.monotonic()
        if room < 60 * step.expected:
            continue
        if step.name != "doctor" and (why := _no_gpu(results)):
            found: dict[str, Any] = {"status": "skipped", "why": why}
        else:
            print(f"{step.name}: {step.answers}", flush=True)
            found = _run(step, args.rehearse, out, room)
        results["steps"][step.name] = found
        print(f"  {found['status']}, {found.get('seconds', 0):.0f} s", flush=True)
        _write(out, results, args.copy)
    _write(out, results, args.copy)
    wanted = only or {step.name for step in STEPS}
    statuses = {name: results["steps"].get(name, {}).get("status", "left") for name in wanted}
    print(f"{out / 'page.md'}: {sum(s in GOOD for s in statuses.values())} of {len(wanted)} done")
    return 0 if all(status in GOOD for status in statuses.values()) else 1


def _named(text: str | None) -> set[str]:
    """Steps by name. Raises UserError for one that does not exist."""
    names = set(text.split(",")) if text else set()
    if unknown := names - {step.name for step in STEPS}:
        known = ", ".join(step.name for step in STEPS)
        raise UserError(f"there is no step {min(unknown)!r}; there are {known}")
    return names


def _begun(out: Path, rehearse: bool) -> dict[str, Any]:
    """The results in the folder so far. Raises UserError for those of another kind."""
    for folder in ("work/logs", "scratch"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    file = out / "results.json"
    if not file.exists():
        return {"began": _now(), "rehearsed": rehearse, "steps": {}}
    try:
        results = json.loads(file.read_text())
        rehearsed = bool(results["rehearsed"]) and isinstance(results["steps"], dict)
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{file} is not of this command ({error}); name another --out") from error
    if rehearsed != rehearse:
        kind = "a rehearsal" if rehearsed else "a day with a GPU"
        raise UserError(f"{file} is of {kind}; name another --out")
    if (out / ARCHIVE).exists() and not any((out / "work/logs").iterdir()):
        with tarfile.open(out / ARCHIVE) as archive:
            archive.extractall(out, filter="data")
    return results


def _no_gpu(results: dict[str, Any]) -> str:
    """Why the other steps cannot run; "" where they can."""
    if results["rehearsed"]:
        return ""
    found = results["steps"].get("doctor", {}).get("found")
    devices = found[0]["machine"]["backend"]["devices"] if found else []
    if any(device["platform"] == "gpu" for device in devices):
        return ""
    return "jax has no GPU here: see doctor; when that is mended, run with --again doctor"


def _run(step: Step, rehearse: bool, out: Path, room: float) -> dict[str, Any]:
    """The step's results. room: seconds that are left."""
    command = step.arguments(rehearse, out / "work", out / "scratch")
    limit = min(60 * step.minutes, room)
    files = [out / "work/logs" / f"{step.name}.{end}" for end in ("out", "err")]
    began, worked = time.monotonic(), _worked()
    with open(files[0], "w") as stdout, open(files[1], "w") as stderr:
        process = subprocess.Popen(
            command,
            cwd=REPOSITORY,
            env=_environment(step, rehearse, out),
            stdout=stdout,
            stderr=stderr,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
        except BaseException as reason:
            # With what it started itself: the next step needs the GPU's memory.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(reason, subprocess.TimeoutExpired):
                raise
            status = None
    text = [file.read_text(errors="replace") for file in files]
    tail = [line[:300] for part in text for line in part.rstrip().splitlines()[-TAIL:]]
    found: dict[str, Any] = {
        "status": _status(status, limit < 60 * step.minutes),
        "exit": status,
        "seconds": time.monotonic() - began,
        "processor_seconds": _worked() - worked,
        "began": _now(),
        "command": shlex.join(["python", *command[1:]]),
        "found": _objects(text[0]),
        "tail": tail,
    }
    if status is None:
        found["why"] = f"Ended after {limit:.0f} s."
    elif status:
        found["why"] = f"Exit status {status}."
    return found


def _worked() -> float:
    """Seconds of processors that the steps so far have used."""
    return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])


def _status(status: int | None, cut: bool) -> str:
    if status is None:
        return "cut" if cut else "timed out"
    return "failed" if status else "done"


def _environment(step: Step, rehearse: bool, out: Path) -> dict[str, str]:
    platforms = "cpu" if rehearse else step.platforms
    given = {"JAX_PLATFORMS": platforms} if platforms else {}
    # Tables and costs go home; executables need not.
    given["XDG_CACHE_HOME"] = str(out / "work/cache")
    given["PYTHONUNBUFFERED"] = "1"
    if rehearse:
        given["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK}".strip()
    return {"JAX_COMPILATION_CACHE_DIR": str(out / "scratch/xla"), **os.environ, **given}


def _objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects in a command's output: one of many lines, or one a line."""
    try:
        whole = json.loads(text)
        return [whole] if isinstance(whole, dict) else []
    except ValueError:
        pass
    found = []
    for line in text.splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found


def _write(out: Path, results: dict[str, Any], copy: Path | None) -> None:
    """Page and results, whole; with an archive of work where they are copied."""
    write_whole(out / "results.json", json.dumps(results, indent=1) + "\n")
    write_whole(out / "page.md", page(results))
    if copy is None:
        return
    copy.mkdir(parents=True, exist_ok=True)

    def small(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return entry if entry.size <= LARGEST else None

    partial = out / f"{ARCHIVE}.partial"
    with tarfile.open(partial, "w:gz") as archive:
        archive.add(out / "work", "work", filter=small)
    partial.replace(out / ARCHIVE)
    for name in ("results.json", "page.md", ARCHIVE):
        shutil.copyfile(out / name, copy / name)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")

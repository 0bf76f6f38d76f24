"""Everything that waits for a GPU, in order of value: one command for a loan.

python -m scripts.check gpu_day --out DIR [--minutes 40] [--copy DIR] [--rehearse]

Each step is an existing command in a process of its own, ended after its minutes (below ten).
Run it again with the same --out for what is left: steps that are done or failed are not run again,
but those named by --again. A step that does not fit into the minutes is left, a shorter one after
it may run. DIR/results.json has commands, times, statuses and figures, DIR/page.md is to be read,
DIR/work what steps wrote with their logs, DIR/scratch what is too large to take home. --copy puts
page, results and an archive of work into another folder after every step, for a machine that hands
back a few files of a command and may end it; an --out with these three goes on from them.

--rehearse runs the same commands at small sizes on the CPU, two at a time (one with --copy, whose
archive wants files that nobody writes): it shows no figure of a GPU.
Exit status 0 where every step is done, else 1; 2 for a mistake.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib.metadata
import json
import os
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
from scripts.parts.commands import new_parser, refusing
from scripts.parts.places import REPOSITORY

ARCHIVE = "work.tar.gz"
LARGEST = 4 << 20
"""Bytes of a file that the archive takes."""

QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""A rehearsal's programs run for milliseconds: compiling them is what takes time."""

UNFUSED = "--xla_cpu_use_fusion_emitters=false"
"""Compiles a step's programs in a third of the time. jaxlib 0.11 has it no more, and ends where it
is named."""

REHEARSED_AT_ONCE = 2
"""Steps; a CPU's times show nothing. On a GPU each is alone."""

POLL_S = 0.05

ENDED = ("done", "failed", "timed out")
"""Statuses of steps that are not run again by themselves. The others: cut (by --minutes), skipped
(no GPU), left (not begun)."""


@refusing(OSError)
def main(arguments: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    return _day(args)


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

    def wanted(step: Step) -> bool:
        before = results["steps"].get(step.name, {}).get("status")
        return not (only and step.name not in only) and (before not in ENDED or step.name in again)

    def keep(step: Step, found: dict[str, Any]) -> None:
        results["steps"][step.name] = found
        print(f"{step.name}: {found['status']}, {found.get('seconds', 0):.0f} s", flush=True)
        _write(out, results, args.copy)

    at_once = REHEARSED_AT_ONCE if args.rehearse and args.copy is None else 1
    waiting, running = list(filter(wanted, STEPS)), list[_Running]()
    try:
        while waiting or running:
            while len(running) < at_once and (step := _next(waiting, running)):
                waiting.remove(step)
                room = until - time.monotonic()
                if room < 60 * step.expected:
                    continue
                if step.name != "doctor" and (why := _no_gpu(results)):
                    keep(step, {"status": "skipped", "why": why})
                    continue
                print(f"{step.name}: {step.answers}", flush=True)
                running.append(_start(step, args.rehearse, out, room))
            time.sleep(POLL_S)
            for each in running[:]:
                if each.ended():
                    running.remove(each)
                    keep(each.step, each.found())
    finally:
        for each in running:
            each.end()
    _write(out, results, args.copy)
    asked = only or {step.name for step in STEPS}
    statuses = {name: results["steps"].get(name, {}).get("status", "left") for name in asked}
    print(f"{out / 'page.md'}: {sum(s in GOOD for s in statuses.values())} of {len(asked)} done")
    return 0 if all(status in GOOD for status in statuses.values()) else 1


def _next(waiting: Sequence[Step], running: Sequence[_Running]) -> Step | None:
    """The first that waits for no other's files."""
    busy = {step.name for step in waiting} | {each.step.name for each in running}
    return next((step for step in waiting if step.after not in busy), None)


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


@dataclasses.dataclass
class _Running:
    """A step's process, with all that it starts."""

    step: Step
    command: list[str]
    files: tuple[Path, Path]
    """Where its stdout and stderr go."""
    process: subprocess.Popen[bytes]
    limit: float
    """Seconds."""
    began: float
    timed_out: bool = False
    seconds: float = 0.0
    worked: float = 0.0
    """Seconds of processors, of the process and the children that it has waited for."""

    def ended(self) -> bool:
        """Whether it has; ends it where its time is over."""
        if time.monotonic() - self.began > self.limit:
            self.end()
            self.timed_out = True
            return True
        return self._waited(os.WNOHANG)

    def end(self) -> None:
        if self.process.returncode is None:
            # With what it started itself: the next step needs the GPU's memory.
            os.killpg(self.process.pid, signal.SIGKILL)
            self._waited(0)

    def _waited(self, how: int) -> bool:
        # Not Popen.wait, which does not say what this one child used.
        pid, status, usage = os.wait4(self.process.pid, how)
        if not pid:
            return False
        self.process.returncode = os.waitstatus_to_exitcode(status)
        self.seconds = time.monotonic() - self.began
        self.worked = usage.ru_utime + usage.ru_stime
        return True

    def found(self) -> dict[str, Any]:
        """Its results, once it has ended."""
        status = None if self.timed_out else self.process.returncode
        text = [file.read_text(errors="replace") for file in self.files]
        found: dict[str, Any] = {
            "status": _status(status, self.limit < 60 * self.step.minutes),
            "exit": status,
            "seconds": self.seconds,
            "processor_seconds": self.worked,
            "ended": _now(),
            "command": shlex.join(["python", *self.command[1:]]),
            "found": _objects(text[0]),
            "tail": _tail(text[0]),
            "errors": _tail(text[1]),
        }
        if status is None:
            found["why"] = f"Ended after {self.limit:.0f} s."
        elif status:
            found["why"] = f"Exit status {status}."
        return found


def _start(step: Step, rehearse: bool, out: Path, room: float) -> _Running:
    """room: seconds that are left."""
    command = step.arguments(rehearse, out / "work", out / "scratch")
    files = out / f"work/logs/{step.name}.out", out / f"work/logs/{step.name}.err"
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
    limit = min(60 * step.minutes, room)
    return _Running(step, command, files, process, limit, time.monotonic())


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
        version = importlib.metadata.version("jaxlib").split(".")
        quick = [QUICK, UNFUSED] if tuple(map(int, version[:2])) < (0, 11) else [QUICK]
        # Its programs compile in less than the second from which jax keeps them.
        given["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        given["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *quick]).strip()
    return {"JAX_COMPILATION_CACHE_DIR": str(out / "scratch/xla"), **os.environ, **given}


def _tail(text: str) -> list[str]:
    return [line.rstrip()[:300] for line in text.strip("\n").splitlines()[-TAIL:]]


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

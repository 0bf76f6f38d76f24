"""Plants mistakes in the papers' mechanisms, one at a time, and runs the test that must find each.

python -m scripts.check mutants [--only WORD] [--list] [--limit SECONDS]

scripts/check/mutants.yaml has the mistakes with their tests. They are planted in a copy of this
checkout, whose tests must pass without any first. Exit status 1 where a mistake is not found, also
where its test did not end in time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from moejax import UserError
from scripts.parts.commands import new_parser, positive, refusing
from scripts.parts.text_table import aligned

HERE = Path(__file__).resolve().parents[2]
COPIED = ("host_offload", "moejax", "pallas_kernels", "scripts", "tests")
COLUMNS = (("found", "{found}"), ("s", "{seconds:.0f}"), ("mistake", "{of}"), ("test", "{test}"))


class Mutant(NamedTuple):
    """A mistake."""

    of: str
    """The paper and what the mistake breaks."""
    file: str
    old: str
    new: str
    test: str
    """The test that finds it, as pytest takes it."""

    def text(self, root: Path) -> str:
        """Returns the file with the mistake. Raises UserError unless `old` is there once."""
        text = (root / self.file).read_text()
        if (count := text.count(self.old)) != 1:
            raise UserError(f"{self.file} has {self.old!r} {count} times, for {self.of!r}")
        return text.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    return [
        Mutant(**each) for each in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    ]


def fails(root: Path, limit: float, *tests: str) -> bool | None:
    """Runs tests in a checkout, slow ones too, for at most `limit` seconds each. Returns whether
    one fails; None if they did not end. Raises UserError if pytest cannot run them."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "", "-p", "no:cacheprovider"]
    given: dict[str, Any] = {"cwd": root, "env": {**os.environ, "PYTHONPATH": str(root)}}
    given |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    # A group of its own, so that what the tests started ends with them.
    with subprocess.Popen([*command, *tests], start_new_session=True, **given) as process:
        try:
            said, _ = process.communicate(timeout=limit * len(tests))
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return None
    if process.returncode > 1:
        raise UserError(f"pytest {' '.join(tests)}: {said[-2000:]}")
    return process.returncode == 1


def set_time(path: Path, ahead: int) -> None:
    """Byte code is known by the second and the size of its source, which may both be as before."""
    then = time.time() + ahead
    os.utime(path, (then, then))


def try_out(chosen: Sequence[Mutant], root: Path, limit: float) -> list[dict[str, object]]:
    """Plants each in the checkout `root` and takes it out again. Returns a row of each.

    - `limit`: seconds of a test.
    """
    rows = []
    for number, each in enumerate(chosen, 1):
        path = root / each.file
        before, began = path.read_text(), time.perf_counter()
        path.write_text(each.text(root))
        set_time(path, 10 * number)
        try:
            found = fails(root, limit, each.test)
        finally:
            path.write_text(before)
            set_time(path, 10 * number + 5)
        took = time.perf_counter() - began
        said = "LATE" if found is None else "yes" if found else "NO"
        rows.append({**each._asdict(), "found": said, "seconds": took})
        print(f"{said:4} {took:4.0f} s  {each.of}", file=sys.stderr, flush=True)
    return rows


@refusing()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = new_parser(__name__, __doc__ or "")
    parser.add_argument("--only", default="", metavar="WORD", help="those whose line has the word")
    parser.add_argument("--list", action="store_true", help="print them, run nothing")
    parser.add_argument(
        "--limit", type=int, default=300, help="most seconds of a test (default: %(default)s)"
    )
    args: argparse.Namespace = parser.parse_args(arguments)
    positive(args, "limit")
    chosen = [each for each in mutants() if args.only.lower() in " ".join(each).lower()]
    if not chosen:
        raise UserError(f"no mistake has {args.only!r}")
    if args.list:
        print(*aligned(COLUMNS[2:], [each._asdict() for each in chosen]), sep="\n")
        return 0
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for path in HERE.iterdir():
            if path.name in COPIED:
                shutil.copytree(path, root / path.name)
            elif path.name != ".git":
                (root / path.name).symlink_to(path)
        tests = dict.fromkeys(each.test for each in chosen)
        if (found := fails(root, args.limit, *tests)) is not False:
            said = "do not end within --limit" if found is None else "fail"
            raise UserError(f"these tests {said} without a mistake: {' '.join(tests)}")
        rows = try_out(chosen, root, args.limit)
    print(*aligned(COLUMNS, rows), sep="\n")
    return int(any(row["found"] != "yes" for row in rows))

"""Minutes of `.ci/run` by the issue that added the tests: the table of docs/testing.md over a log.

    PYTEST_ADDOPTS=--durations=0 .ci/run | tee ci.log
    python -m tests.minutes ci.log

Two processes share a suite, so a test takes its share of the suite's minutes, not its own seconds.
A log of pytest alone does too. The first suite is printed by file as well.
"""

import collections
import re
import sys
from fnmatch import fnmatch
from pathlib import Path

TABLE = Path(__file__).resolve().parent.parent / "docs" / "testing.md"
BEFORE = "up to 17"


def issues(page: str) -> dict[str, list[str]]:
    """An issue's patterns of test ids, from rows "| 18 | `pattern` ... |", in their order."""
    rows = re.findall(r"^\| (\d+) \| (`.*)\|$", page, re.MULTILINE)
    return {issue: re.findall(r"`([^`]+)`", patterns) for issue, patterns in rows}


def issue_of(test: str, table: dict[str, list[str]]) -> str:
    """The first issue one of whose patterns the test's id has."""
    found = (issue for issue, patterns in table.items() if any(fnmatch(test, p) for p in patterns))
    return next(found, BEFORE)


def suites(log: str) -> list[tuple[float, dict[str, float]]]:
    """The minutes of each of a log's suites, and those of its tests."""
    ended = r"\d+ (?:passed|failed).* in ([\d.]+)s"
    found, end = [], 0
    for last in re.finditer(ended, log):
        seconds: collections.Counter[str] = collections.Counter()
        timed = r"^ *([\d.]+)s (?:call|setup|teardown) +(\S.*?) *$"
        for took, test in re.findall(timed, log[end : last.start()], re.MULTILINE):
            seconds[test] += float(took)
        if not seconds:
            raise SystemExit("the log has no durations: PYTEST_ADDOPTS=--durations=0")
        minutes, end = float(last[1]) / 60, last.end()
        share = minutes / seconds.total()
        found.append((minutes, {test: took * share for test, took in seconds.items()}))
    return found


def main(path: str) -> None:
    log, table = Path(path).read_text(), issues(TABLE.read_text())
    total: collections.Counter[str] = collections.Counter()
    files: collections.Counter[str] = collections.Counter()
    for number, (minutes, tests) in enumerate(suites(log)):
        added: collections.Counter[str] = collections.Counter()
        for test, took in tests.items():
            added[issue_of(test, table)] += took
            if not number:
                files[test.split("::")[0]] += took
        total += added
        shares = ", ".join(f"{issue}: {added[issue]:.2f}" for issue in (BEFORE, *table))
        print(f"suite {number + 1}: {minutes:.2f} minutes; {shares}")
    later = sum(total[issue] for issue in table)
    print(f"suites: {total[BEFORE]:.2f} minutes {BEFORE}, {later:.2f} added by later issues")
    for begun, what in re.findall(r"^== (\d+) s: (.*)$", log, re.MULTILINE):
        print(f"{int(begun) / 60:6.2f} begins {what}")
    for file, minutes in files.most_common():
        print(f"{60 * minutes:6.1f} s {file}")


if __name__ == "__main__":
    main(sys.argv[1])

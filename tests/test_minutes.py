"""The account of a test log by issue."""

from pathlib import Path

import pytest

from tests.minutes import BEFORE, TABLE, issue_of, issues, suites

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

LOG = """\
== 60 s: tests
============ slowest durations ============
3.00s call     tests/a/test_old.py::test_one[x y]
1.00s setup    tests/a/test_old.py::test_one[x y]
2.00s call     tests/a/test_new.py::test_two
1 failed, 2 passed in 180.00s (0:03:00)
1.00s call     tests/a/test_old.py::test_one[x y]
2 passed, 4 skipped in 60.00s
"""


def test_a_test_has_its_share_of_its_suite():
    first, second = suites(LOG)
    assert first == (
        3,
        {"tests/a/test_old.py::test_one[x y]": 2, "tests/a/test_new.py::test_two": 1},
    )
    assert second == (1, {"tests/a/test_old.py::test_one[x y]": 1})


def test_a_log_without_durations_is_refused():
    with pytest.raises(SystemExit, match="--durations=0"):
        suites("2 passed in 60.00s")


def test_a_test_belongs_to_the_first_issue_that_names_it():
    table = issues("| 18 | `*/test_new.py::*` |\n| 20 | `tests/a/*` `*[[]cpu*` |\n| x | `*` |\n")
    assert table == {"18": ["*/test_new.py::*"], "20": ["tests/a/*", "*[[]cpu*"]}
    assert issue_of("tests/a/test_new.py::test_two", table) == "18"
    assert issue_of("tests/a/test_old.py::test_one", table) == "20"
    assert issue_of("tests/b/test_old.py::test_one[cpu-1]", table) == "20"
    assert issue_of("tests/b/test_old.py::test_cpu", table) == BEFORE


def test_every_file_of_the_table_is_there(repository):
    files = [str(path.relative_to(repository)) for path in (repository / "tests").rglob("*.py")]
    patterns = [p for of_issue in issues(TABLE.read_text()).values() for p in of_issue]
    assert len(patterns) > 50
    named = [p.split("::")[0] for p in patterns if ".py::" in p]
    assert not [p for p in named if not any(Path("/", file).match(p) for file in files)]

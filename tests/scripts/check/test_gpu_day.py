"""A day with a GPU: its steps are commands that exist, and none can stop the others."""

import json
import os
import time

import pytest

from scripts.check import gpu_day
from scripts.check.gpu_day import STEPS, Step
from tests.scripts.runs import refusal
from tests.scripts.test_commands import complaint, moejax_main, script

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax


def step(name, code, minutes=1.0, expected=0.001):
    return Step(name, f"what {name} says", ("-c", code), (), minutes, expected)


@pytest.fixture
def day(monkeypatch, tmp_path):
    """day(steps, *arguments) → (exit status, results by step, page)."""

    def run(steps, *arguments):
        monkeypatch.setattr(gpu_day, "STEPS", tuple(steps))
        monkeypatch.setattr(gpu_day, "_has_gpu", lambda: True)
        status = gpu_day.main(["--out", str(tmp_path / "day"), *arguments])
        results = json.loads((tmp_path / "day" / "results.json").read_text())
        return status, results["steps"], (tmp_path / "day" / "page.md").read_text()

    return run


def test_the_page_has_what_steps_print(day):
    progress = "import sys; print('round 1 of 2', file=sys.stderr)"
    steps = [
        step("good", f"{progress}; print('figures')"),
        step("bad", f"{progress}; print('figures'); sys.exit(1)"),
        step("slow", "import time; print('begun', flush=True); time.sleep(60)", minutes=0.03),
        step("last", "import os; print(os.environ['JAX_PLATFORMS'])"),
    ]
    status, results, page = day(steps)
    assert status == 1
    assert [results[s.name]["status"] for s in steps] == ["done", "failed", "timed out", "done"]
    assert "| good | what good says | done | " in page
    shown = [part.partition("```text\n")[2] for part in page.split("\n## ")[1:]]
    assert shown == [
        *("figures\n```\n", "figures\nround 1 of 2\n```\n", "begun\n```\n", "cuda,cpu\n```\n"),
    ]


def test_a_day_goes_on_where_it_was(day, tmp_path):
    """Steps that ended are not run again, unless they are named; one that was cut is."""
    count = f"open({str(tmp_path / 'ran')!r}, 'a').write('x')"
    steps = [step("one", count), step("two", f"{count}; raise SystemExit(3)")]
    assert day(steps, "--only", "one")[0] == 0
    assert day(steps)[0] == 1
    assert day(steps)[0] == 1
    assert (tmp_path / "ran").read_text() == "xx"
    day(steps, "--again", "two")
    assert (tmp_path / "ran").read_text() == "xxx"


def test_a_step_that_does_not_fit_is_left_for_the_next_call(day):
    steps = [
        step("never", "print('fine')", expected=0.5),
        step("long", "import time; time.sleep(60)"),
    ]
    status, results, page = day(steps, "--minutes", "0.05")
    assert status == 1 and results["long"]["status"] == "cut" and "never" not in results
    assert "| never | what never says | left | 0 |" in page
    steps[1] = step("long", "print('fine')")
    status, results, _ = day(steps)
    assert status == 0 and results["long"]["status"] == results["never"]["status"] == "done"


def test_what_a_step_started_ends_with_it(day, tmp_path):
    wait = "import os, subprocess, sys, time; "
    wait += f"child = subprocess.Popen([sys.executable, '-c', {'import time; time.sleep(60)'!r}]); "
    wait += f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid)); time.sleep(60)"
    day([step("parent", wait, minutes=0.02)])
    child, until = int((tmp_path / "child").read_text()), time.monotonic() + 10
    while time.monotonic() < until:
        try:
            os.kill(child, 0)
        except ProcessLookupError:
            return
        time.sleep(0.01)
    pytest.fail("the child runs on")


def test_one_real_step_is_rehearsed(tmp_path):
    assert gpu_day.main(["--out", str(tmp_path), "--rehearse", "--only", "load"]) == 0
    page = (tmp_path / "page.md").read_text()
    assert page.startswith("# A day with a GPU: rehearsed on a CPU\n")
    assert "load as float32" in page


@pytest.mark.nightly
def test_the_day_is_rehearsed(tmp_path):
    assert gpu_day.main(["--out", str(tmp_path), "--rehearse"]) == 0


@pytest.mark.parametrize("each", STEPS, ids=lambda each: each.name)
def test_every_command_has_its_options(each, repository):
    """On a GPU too, where no rehearsal looks; and it ends before a loan's command does."""
    assert 0 < each.expected < each.minutes < 9
    for words in (each.command, (*each.command, *(each.small or ()))):
        if words[1] == "pytest":
            assert any((repository / word).is_dir() for word in words if word.startswith("tests"))
        elif words[1] == "moejax":
            assert not complaint(moejax_main, list(words[2:]))
        else:
            assert not complaint(script(words[1].removeprefix("scripts."), words[2]), words[3:])


def test_mistakes_are_refused(capsys, tmp_path, monkeypatch):
    arguments = ("--out", str(tmp_path))
    assert "there is no step 'x'" in refusal(capsys, gpu_day.main, *arguments, "--only=x")
    (tmp_path / "results.json").write_text('{"rehearsed": false, "steps": {}}')
    said = refusal(capsys, gpu_day.main, *arguments, "--rehearse")
    assert "is of a day with a GPU" in said
    monkeypatch.setattr(gpu_day, "_has_gpu", lambda: False)
    assert "jax has no GPU here" in refusal(capsys, gpu_day.main, *arguments)

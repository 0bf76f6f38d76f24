"""A day with a GPU on a machine without one: rehearsed whole, and with steps of ours."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jaxlib
import pytest

from scripts.check import day_page, gpu_day
from scripts.check.day_steps import STEPS, Step
from scripts.parts.places import REPOSITORY
from tests.scripts.runs import refusal
from tests.scripts.test_commands import complaint, moejax_main, script

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

OF_THE_SUITE = ("bits", "precision", "kernels")
"""Steps whose rehearsal is some tests of the suite, their collection, or what --help says."""


@pytest.mark.slow  # most of a minute: each step is a process that compiles
@pytest.mark.parametrize(
    "left_out",
    [pytest.param((), id="whole", marks=pytest.mark.nightly), pytest.param(OF_THE_SUITE, id="own")],
)
def test_the_day_is_rehearsed(left_out, tmp_path, capsys):
    """Every command that a loan would run, at small sizes; the page has their figures."""
    steps = [step for step in STEPS if step.name not in left_out]
    only = ",".join(step.name for step in steps)
    status = gpu_day.main(["--out", str(tmp_path), "--rehearse", "--only", only])
    results = json.loads((tmp_path / "results.json").read_text())
    found = {name: step["status"] for name, step in results["steps"].items()}
    assert found == {step.name: "done" for step in steps}
    assert status == 0
    text = (tmp_path / "page.md").read_text()
    assert text.startswith("# A day with a GPU: rehearsed on a CPU\n")
    rest = f", {len(left_out)} left" if left_out else ""
    assert f"\n{len(steps)} done{rest}.\n" in text
    for step in steps:
        assert f"\n## {step.name}: done\n" in text
        if step.columns:
            assert f"| {' | '.join(step.columns)} |" in text
            assert len(results["steps"][step.name]["found"]) > 1
    assert re.search(r"^- runs as (cpu|xla): .*\blinear\b", text, re.M)
    assert "bits equal" in text and "DIFFERENT" not in text
    # Two minutes of two cores: each step's own, however busy the machine is. 182 s of them on a
    # machine without AVX-512.
    assert sum(step["processor_seconds"] for step in results["steps"].values()) < 2 * 120
    # What was checked is where a start looks for it.
    (table,) = tmp_path.glob("work/cache/moejax/verified/*.json")
    assert json.loads(table.read_text())["checks"]


DOCTOR = {
    "machine": {
        "backend": {"devices": [{"platform": "gpu", "kind": "NVIDIA H200"}], "link": 52e9},
        "gpus": [{"name": "NVIDIA H200", "driver": "580.1"}],
        "versions": {"jax": "0.11.2"},
    },
    "problems": [{"what": "a slow link", "mend": "seat it"}],
    "runs": {"linear": "pallas", "latent_write": "xla"},
}


def step(name, code, minutes=1.0, columns=(), expected=0.001, **others):
    command = ("-c", code)
    return Step(name, f"what {name} says", command, command, minutes, expected, columns, **others)


def doctor(found):
    return step("doctor", f"print({json.dumps(json.dumps(found))})")


@pytest.fixture
def day(monkeypatch, tmp_path):
    """day(steps, *arguments) → (exit status, results, page)."""

    def run(steps, *arguments):
        for module in (gpu_day, day_page):
            monkeypatch.setattr(module, "STEPS", tuple(steps))
        status = gpu_day.main(["--out", str(tmp_path / "day"), *arguments])
        results = json.loads((tmp_path / "day" / "results.json").read_text())
        return status, results["steps"], (tmp_path / "day" / "page.md").read_text()

    return run


LINES = "print('a table'); print('{\"ms\": 1.25, \"batch\": 8}')"


def test_a_day_with_a_gpu_reads_well(day):
    steps = [doctor(DOCTOR), step("decode", LINES, columns=("batch", "ms", "floor"))]
    status, results, page = day(steps)
    assert status == 0
    assert results["decode"]["found"] == [{"ms": 1.25, "batch": 8}]
    assert results["decode"]["command"].startswith("python -c ")
    assert "NVIDIA H200 (driver 580.1); jax uses NVIDIA H200; jax 0.11.2; link 52.0 GB/s." in page
    assert "- wrong: a slow link; `seat it`" in page and "- runs as pallas: linear" in page
    assert "| batch | ms | floor |\n|---|---|---|\n| 8 | 1.25 | – |" in page
    assert "| decode | what decode says | done |" in page
    assert "seat it`\n\n- runs as" in page  # a list of its own


def test_a_good_step_shows_no_progress(day):
    """What it says on stderr, unless it says nothing else."""
    code = "import sys; print('round 1 of 2', file=sys.stderr)"
    steps = [doctor(DOCTOR), step("both", f"{code}; print('figures')"), step("quiet", code)]
    steps.append(step("bad", f"{code}; print('figures'); sys.exit(1)"))
    _, results, page = day(steps)
    assert results["both"]["errors"] == ["round 1 of 2"]
    shown = [part.partition("```text\n")[2] for part in page.split("\n## ")[2:]]
    assert shown == [
        *("figures\n```\n", "round 1 of 2\n```\n"),
        "figures\nround 1 of 2\n```\n",
    ]


def test_a_rehearsal_compiles_with_this_jaxlib_s_flags(day, monkeypatch):
    """jax ends a process whose XLA_FLAGS it does not know."""
    show = "import jax, os; jax.devices(); print(os.environ['XLA_FLAGS'])"
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=true")
    status, results, _ = day([step("jax", show)], "--rehearse")
    (flags,) = results["jax"]["tail"]
    assert status == 0
    assert flags.startswith(f"--xla_cpu_multi_thread_eigen=true {gpu_day.QUICK}")
    assert (gpu_day.UNFUSED in flags) == jaxlib.__version__.startswith("0.10.")


def test_what_fails_or_takes_too_long_is_shown_and_stops_nothing(day):
    steps = [
        doctor(DOCTOR),
        step("broken", "import sys; print('figures'); sys.exit('no memory left')"),
        step("slow", "import time; print('begun', flush=True); time.sleep(60)", minutes=0.03),
        step("good", "print('fine')"),
    ]
    status, results, page = day(steps)
    assert status == 1
    assert [results[s.name]["status"] for s in steps] == ["done", "failed", "timed out", "done"]
    assert "## broken: failed\n\nExit status 1.\n" in page
    assert "```text\nfigures\nno memory left\n```" in page
    assert "## slow: timed out\n\nEnded after 2 s.\n" in page and "begun\n```" in page
    assert "2 done, 1 failed, 1 timed out." in page


def test_a_day_goes_on_where_it_was(day, tmp_path):
    """Done and failed steps are not run again, unless they are named."""
    count = f"open({str(tmp_path / 'ran')!r}, 'a').write('x')"
    steps = [doctor(DOCTOR), step("one", count), step("two", f"{count}; raise SystemExit(3)")]
    assert day(steps, "--only", "doctor,one")[0] == 0
    status, results, _ = day(steps)
    assert status == 1 and results["two"]["exit"] == 3
    assert day(steps)[0] == 1
    assert (tmp_path / "ran").read_text() == "xx"
    day(steps, "--again", "two")
    assert (tmp_path / "ran").read_text() == "xxx"


def test_a_step_that_does_not_fit_is_left_for_the_next_call(day):
    steps = [
        doctor(DOCTOR),
        step("never", "print('fine')", expected=0.5),
        step("long", "import time; time.sleep(60)"),
    ]
    began = time.monotonic()
    status, results, page = day(steps, "--minutes", "0.1")
    assert time.monotonic() - began < 30
    assert status == 1 and results["long"]["status"] == "cut" and "never" not in results
    assert "| never | what never says | left | – | – |" in page and "1 done, 1 left, 1 cut." in page
    steps[2] = step("long", "print('fine')")
    status, results, _ = day(steps)
    assert status == 0 and results["long"]["status"] == results["never"]["status"] == "done"


def test_without_a_gpu_the_rest_is_skipped(day):
    nothing = {**DOCTOR, "machine": {**DOCTOR["machine"], "backend": {"devices": []}, "gpus": []}}
    steps = [doctor(nothing), step("decode", "print('figures of a CPU')")]
    status, results, page = day(steps)
    assert status == 1 and results["decode"]["status"] == "skipped"
    assert "jax has no GPU here: see doctor" in page and "figures of a CPU" not in page
    # Skipped steps run once the doctor finds one.
    status, results, _ = day([doctor(DOCTOR), steps[1]], "--again", "doctor")
    assert status == 0 and results["decode"]["status"] == "done"


def test_three_files_go_home_and_back(day, tmp_path):
    """An archive without what is large; another machine goes on from it."""
    big = gpu_day.LARGEST + 1
    write = f"from pathlib import Path; Path('{{out}}/big').write_bytes(bytes({big}))"
    write += "; Path('{out}/small').write_text('kept')"
    steps = [doctor(DOCTOR), step("one", write)]
    home = tmp_path / "home"
    assert day(steps, "--copy", str(home))[0] == 0
    assert sorted(p.name for p in home.iterdir()) == ["page.md", "results.json", "work.tar.gz"]
    steps.append(step("two", "print(open('{out}/small').read())"))
    for module in (gpu_day, day_page):
        assert len(module.STEPS) == 2
        module.STEPS = tuple(steps)
    assert gpu_day.main(["--out", str(home)]) == 0
    results = json.loads((home / "results.json").read_text())["steps"]
    assert results["two"]["tail"] == ["kept"] and not (home / "work" / "big").exists()
    assert (home / "work" / "logs" / "one.out").exists()


def test_what_a_step_started_ends_with_it(day, tmp_path):
    child = f"import time; time.sleep(3); open({str(tmp_path / 'late')!r}, 'w')"
    code = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {child!r}]); "
        "time.sleep(60)"
    )
    day([doctor(DOCTOR), step("parent", code, minutes=0.02)])
    time.sleep(3)
    assert not (tmp_path / "late").exists()


def test_a_rehearsal_has_two_at_a_time_and_mixes_nothing(day, tmp_path):
    """Each of two waits for the other; a third for the files of the first. The page has them in
    order, each with its own output."""
    wait = "import time, pathlib as p; w = p.Path('{{scratch}}'); (w / '{0}').touch(); print('{0}')"
    wait += "\nwhile not (w / '{1}').exists(): time.sleep(0.01)"
    wait += "\nprint('{0}')"
    steps = [
        step("one", wait.format("one", "two")),
        step("reads", "print(open('{scratch}/two').read() + 'read')", after="two"),
        step("two", wait.format("two", "one")),
        step("busy", "import time\nwhile time.process_time() < 0.5: pass"),
    ]
    status, results, page = day(steps, "--rehearse")
    assert status == 0
    assert [results[s.name]["tail"] for s in steps[:3]] == [["one"] * 2, ["read"], ["two"] * 2]
    headings = [page.index(f"\n## {s.name}: done\n") for s in steps]
    assert headings == sorted(headings)
    # Its own processor seconds, not those of its neighbour.
    assert results["busy"]["processor_seconds"] > 0.5 > results["reads"]["processor_seconds"]


@pytest.mark.parametrize("arguments", [(), ("--rehearse", "--copy", "{home}")])
def test_a_gpu_and_an_archive_have_one_step_at_a_time(day, tmp_path, arguments):
    alone = (
        "import os, time, pathlib as p; mark = p.Path('{scratch}/mark'); assert not mark.exists()"
    )
    alone += "; mark.touch(); time.sleep(0.2); mark.unlink()"
    steps = [doctor(DOCTOR), *(step(name, alone) for name in ("one", "two"))]
    assert day(steps, *(a.replace("{home}", str(tmp_path / "home")) for a in arguments))[0] == 0


KILLED = """
import sys
from scripts.check import day_page, gpu_day
from tests.scripts.check.test_gpu_day import long_steps
gpu_day.STEPS = day_page.STEPS = long_steps()
gpu_day.main(sys.argv[1:])
"""


def long_steps():
    """One that ends, and two of which neither does before another file is there."""
    wait = "import os, time, pathlib as p; w = p.Path('{scratch}'); (w / '%s').write_text("
    wait += "str(os.getpid()))\nwhile not (w / 'go').exists(): time.sleep(0.01)"
    count = "open('{out}/ran', 'a').write('x')"
    return step("first", count), step("one", wait % "one"), step("two", wait % "two")


def is_running(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_ctrl_c_ends_both_steps_and_the_day_goes_on(day, tmp_path):
    out = tmp_path / "day"
    arguments = [sys.executable, "-c", KILLED, "--out", str(out), "--rehearse"]
    begun = subprocess.Popen(arguments, cwd=REPOSITORY, stderr=subprocess.DEVNULL)
    files, until = [out / "scratch" / name for name in ("one", "two")], time.monotonic() + 120
    while not all(file.exists() and file.read_text() for file in files):
        assert begun.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    begun.send_signal(signal.SIGINT)
    assert begun.wait(60) in (-signal.SIGINT, 128 + signal.SIGINT)
    assert not any(is_running(int(file.read_text())) for file in files)
    assert "1 done, 2 left." in (out / "page.md").read_text()
    (out / "scratch" / "go").touch()
    status, results, _ = day(long_steps(), "--rehearse")
    assert status == 0 and [found["status"] for found in results.values()] == ["done"] * 3
    assert (out / "work" / "ran").read_text() == "x"


@pytest.mark.parametrize("each", STEPS, ids=lambda each: each.name)
def test_every_command_has_its_options(each):
    """On a GPU too, where no rehearsal looks."""
    for command in (each.command, each.rehearsed):
        if "pytest" in command:
            assert any(Path(argument).is_file() or Path(argument).is_dir() for argument in command)
            continue
        if command[0] == "-c" or command[1] == "moejax":
            main, arguments = moejax_main, list(command[2:])
        else:
            main = script(command[1].removeprefix("scripts."), command[2])
            arguments = list(command[3:])
        assert not complaint(main, arguments)


def test_mistakes_are_refused(capsys, tmp_path):
    assert "there is no step 'x'" in refusal(
        capsys, gpu_day.main, "--out", str(tmp_path), "--only=x"
    )
    for text in ("{", '{"steps": 1}'):
        (tmp_path / "results.json").write_text(text)
        assert "is not of this command" in refusal(capsys, gpu_day.main, "--out", str(tmp_path))
    (tmp_path / "results.json").write_text('{"rehearsed": true, "steps": {}}')
    assert "is of a rehearsal" in refusal(capsys, gpu_day.main, "--out", str(tmp_path))


def test_steps_are_short_and_few_files_hold_them():
    """A loan's command has ten minutes; what a step writes is in the folders that it is given."""
    assert all(0 < s.expected < s.minutes < 9 for s in STEPS)
    assert len({s.name for s in STEPS}) == len(STEPS)
    out, scratch = Path("/o"), Path("/s")
    for each in STEPS:
        for rehearse in (False, True):
            command = each.arguments(rehearse, out, scratch)
            assert command[0] == sys.executable and not any(
                "{out}" in a or "{scratch}" in a for a in command
            )
    for number, each in enumerate(STEPS):  # none waits for a later one, or none would begin
        assert not each.after or each.after in {s.name for s in STEPS[:number]}
    assert sum(s.minutes for s in STEPS) > 40  # so the order matters

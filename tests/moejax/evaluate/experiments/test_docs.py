"""The five commands of docs/ablation.md, as written; `.ci/run` runs them from the wheel."""

import os
import re
import subprocess
import sys

import pytest

from moejax.evaluate.experiments.definition import _DEFAULTS
from moejax.evaluate.experiments.records import read_results


@pytest.fixture(scope="module")
def page(repository):
    return (repository / "docs" / "ablation.md").read_text()


@pytest.fixture(scope="module")
def commands(page):
    (block,) = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    found = block.splitlines()
    assert len(found) == 5
    return found


def check_results(place):
    records = read_results(place / "mine" / "grid")
    assert not records.failures
    measured = {row["policy"] for row in records.of_mode("measured")}
    assert "my_policy.py:MyPolicy" in measured
    assert records.agreement() == (20, 20)
    text = (place / "mine" / "grid" / "report.html").read_text()
    assert "my_policy.py:MyPolicy" in text


@pytest.mark.slow
@pytest.mark.nightly
def test_commands_without_the_installation(commands, repository, tmp_path):
    """A line of shell is the command `moejax`."""
    assert commands[1] == "pip install ."
    (tmp_path / "bin").mkdir()
    command = tmp_path / "bin" / "moejax"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m moejax "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    env = os.environ | {"PATH": path, "PYTHONPATH": str(repository)}
    script = "\n".join(["set -e", *commands[2:]])
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    check_results(tmp_path)


def test_the_page_has_every_key(page):
    section = page[page.index("## What a grid says") : page.index("## How it runs")]
    first = "".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`(\w+)`", first)) == set(_DEFAULTS)

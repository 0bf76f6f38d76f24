"""The server's campaign, small, and what it must find."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from scripts.check.server import malformed
from tests.conftest import REPOSITORY

LIE = """
import sys
from scripts.check import server
texts_of = server.texts_of
server.texts_of = lambda *args: [text + "x" for text in texts_of(*args)]
sys.exit(server.main(sys.argv[1:]))
"""


def campaign(*command: str) -> subprocess.CompletedProcess:
    done = [sys.executable, *command]
    return subprocess.run(done, cwd=REPOSITORY, capture_output=True, text=True, timeout=280)


@pytest.mark.slow
def test_a_small_campaign():
    sizes = ["--streams", "8", "--malformed", "80", "--schemas", "6"]
    done = campaign("-m", "scripts.check", "server", *sizes)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert [line.split()[0] for line in lines] == ["streams", "malformed", "schemas"]
    assert "'good': 1" in lines[1] and "'valid'" in lines[2]


@pytest.mark.slow
def test_another_text_is_a_fault():
    done = campaign(
        "-c", LIE, "--streams", "2", "--malformed", "0", "--schemas", "0", "--seed", "3"
    )
    assert done.returncode == 2 and "another text than generate" in done.stderr


def test_malformed_requests_have_every_kind():
    chance = random.Random(0)
    made = [malformed(chance)[0] for _ in range(300)]
    assert any(raw.count(b"[") > 9 for raw in made) and len({*made}) > 250

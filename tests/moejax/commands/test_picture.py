"""moejax generate --picture."""

from __future__ import annotations

import pytest

from moejax.commands.main import main
from tests.moejax.engine.scenes import LIMITS


@pytest.mark.parametrize("name", ["out.svg", pytest.param("out.png", marks=pytest.mark.slow)])
def test_a_picture_of_memory_and_experts(tmp_path, capsys, name):
    path = tmp_path / name
    command = ["generate", "The old house", "--expert-budget", "25%", "--max-tokens", "4"]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in LIMITS.items()]
    assert main([*command, "--picture", str(path), "--quiet"]) == 0
    head = path.read_bytes()[:200]
    assert head.startswith(b"\x89PNG" if name.endswith("png") else b"<?xml")
    assert path.stat().st_size > 5000


def test_a_picture_that_cannot_be_drawn_is_refused_before_the_text(capsys):
    assert main(["generate", "The old house", "--picture", "out.txt"]) == 2
    captured = capsys.readouterr()
    assert "must end in .svg or .png" in captured.err and captured.out == ""

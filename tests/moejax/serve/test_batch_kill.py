"""File jobs ended with SIGKILL and resumed; `python -m scripts.check batch` is the larger check.

MOEJAX_KILLS sets how often (default: 2); with `--kills 20` that one is the full size.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from moejax import LLM
from moejax.serve.batch.job import Job, open_job
from scripts.check import batch as check_batch
from scripts.parts import file_jobs


@pytest.fixture(scope="module")
def llm():
    limits = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256}
    with LLM("demo", progress=False, **limits) as llm:
        yield llm


def check_killed(llm, tmp_path, lines: int, kills: int, seed: int) -> list[int]:
    """Kills a job of the command line, ends it here, and compares with an undisturbed one."""
    source, whole, output = (tmp_path / name for name in ("in", "whole", "out"))
    file_jobs.write_input(source, lines, seed)

    def run(to: Path) -> None:
        # What the command line makes of no options.
        job = Job(str(source), str(to), sampling={"max_tokens": 128}, on_error="skip")
        with open_job(job) as opened:
            opened.run(llm)

    run(whole)
    undisturbed = file_jobs.results(whole)
    assert len(undisturbed) == lines
    sizes = check_batch.kill_often(source, output, whole.stat().st_size, kills, seed)
    run(output)
    assert file_jobs.results(output) == undisturbed
    return sizes


@pytest.mark.nightly
@pytest.mark.slow
def test_killed_and_resumed(llm, tmp_path):
    kills = int(os.environ.get("MOEJAX_KILLS", "2"))
    sizes = check_killed(llm, tmp_path, lines=60 * kills, kills=kills, seed=6)
    assert len(sizes) == kills and 0 < sizes[0] < sizes[-1]


@pytest.mark.nightly
@pytest.mark.slow
def test_ctrl_c_leaves_whole_results(tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file_jobs.write_input(source, 300, 8)
    arguments = file_jobs.command(source, output)
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True)
    while not output.exists() or not output.stat().st_size:
        assert process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    found = len(file_jobs.results(output))
    assert process.returncode == 130 and "Traceback" not in err
    message = f"interrupted; {found} of 300 results are in {output}, and the same command goes on"
    assert message in err and 0 < found < 300
    check_batch.run(file_jobs.command(source, output))
    assert len(file_jobs.results(output)) == 300

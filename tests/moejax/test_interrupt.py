import signal
import subprocess
import sys
import time

import pytest

_HELD = """
import sys, time
from moejax.interrupt import deferred_interrupt, ending_after_interrupt
with ending_after_interrupt(float(sys.argv[1]), 130), deferred_interrupt():
    print("ready", flush=True)
    time.sleep(float(sys.argv[2]))  # hears of no signal, as a step on the device
"""


def _interrupted(*arguments: str) -> tuple[int, str, float]:
    """Exit status, stderr, and how long it went on after Ctrl-C."""
    command = [sys.executable, "-c", _HELD, *arguments]
    pipe = subprocess.PIPE
    # Where the tests run in the background, programs begin with SIGINT ignored.
    given = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)
    finally:
        signal.signal(signal.SIGINT, given)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    began = time.perf_counter()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    return process.returncode, said, time.perf_counter() - began


def test_a_process_that_hears_nothing_ends_after_ctrl_c():
    status, said, seconds = _interrupted("0.1", "60")
    assert (status, said) == (130, "moejax: interrupted\n")
    assert seconds < 30  # not when the sleep ends


def test_one_that_ends_in_time_ends_as_it_would():
    status, said, _ = _interrupted("60", "0.5")
    assert status in (1, -signal.SIGINT)
    assert said.endswith("KeyboardInterrupt\n")


@pytest.mark.nightly
@pytest.mark.parametrize("moment", ["begin", "load", "compile", "score"])
def test_eval_ends_after_ctrl_c(tmp_path, repository, moment):
    text = tmp_path / "text"
    text.write_text((repository / "README.md").read_text() * 160)
    given = signal.signal(signal.SIGINT, signal.default_int_handler)
    command = ["eval", "demo", "--task", "perplexity", "--data", str(text)]
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "moejax", *command], stderr=subprocess.PIPE, text=True
        )
    finally:
        signal.signal(signal.SIGINT, given)
    time.sleep({"begin": 1.0, "load": 2.0, "compile": 4.0, "score": 12.0}[moment])
    began = time.perf_counter()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    seconds = time.perf_counter() - began
    print(f"{moment}: ended {seconds:.2f} s after Ctrl-C")
    assert process.returncode == 130, said
    assert said.endswith("moejax: interrupted\n")
    assert seconds < 10

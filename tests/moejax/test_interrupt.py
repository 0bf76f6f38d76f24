import signal
import subprocess
import sys
import time

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

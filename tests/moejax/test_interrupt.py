"""Ctrl-C ends a command wherever its main thread is, and is answered where it can be."""

import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import REPOSITORY

BEGIN = """
import ctypes, signal, sys, threading, time
from moejax import interrupt
from moejax.interrupt import deferred_interrupt, end_where_stuck
end_where_stuck(0.5, 130, 2)
print("ready", flush=True)
"""
STUCK = """
lock = ctypes.create_string_buffer(128)
libc = ctypes.CDLL(None)
libc.pthread_mutex_lock(lock)
libc.pthread_mutex_lock(lock)  # waits for itself, whatever signal comes
"""
ANSWERED = """
for _ in range(2):
    try:
        time.sleep(30)
    except KeyboardInterrupt:
        print("answered", flush=True)
"""
LOST = """
class Slow:
    def __del__(self):  # what is raised here goes nowhere
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            time.sleep(0.01)

try:
    Slow()
    time.sleep(30)
except KeyboardInterrupt:
    print("answered", flush=True)
"""
DEFERRED = """
try:
    with deferred_interrupt():
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            time.sleep(0.01)
        print("whole", flush=True)
except KeyboardInterrupt:
    print("answered", flush=True)
"""
HUNG_STEP = """
interrupt.LOOK_S = 0.1
with interrupt.RunningStep().running():
    signal.signal(signal.SIGINT, lambda *_: None)  # as servers have
    until = time.monotonic() + 30
    while time.monotonic() < until:
        time.sleep(0.01)
"""
DISK, STEP = "interrupted while it waited for a disk", "interrupted while it waited for a step"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("waits", "signals", "status", "said", "error"),
    [
        (STUCK, 1, 130, "", DISK),
        (ANSWERED, 2, 0, "answered" * 2, ""),
        (DEFERRED, 1, 0, "wholeanswered", ""),
        (LOST, 1, 0, "answered", ""),
        (HUNG_STEP, 1, 130, "", STEP),
        ("interrupt.STEP_S = 0.3" + HUNG_STEP, 0, 2, "", "error: a step of the engine has not end"),
    ],
)
def test_ctrl_c_ends_what_is_stuck_and_nothing_else(waits, signals, status, said, error):
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN + waits],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    for _ in range(signals):
        time.sleep(0.9)
        process.send_signal(signal.SIGINT)
    began = time.monotonic()
    out, err = process.communicate(timeout=10)
    assert time.monotonic() - began < 2.5
    assert (process.returncode, out.replace("\n", "")) == (status, said)
    assert error in err and bool(error) == bool(err)

"""A forked child of a process with a model ends, and leaves the model to its parent."""

import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

SCRIPT = """
import os, signal, sys, warnings
from moejax import LLM, SamplingParams

warnings.simplefilter("ignore")  # of os.fork, that jax has threads
llm = LLM("demo", max_model_len=64, max_num_seqs=2, progress=False, OPTIONS)

def text():
    params = SamplingParams(max_tokens=4, temperature=0)
    return llm.generate("The old house", params)[0].outputs[0].text

before = text()
child = os.fork()
if child == 0:
    signal.alarm(60)  # a child that hangs is ended by it
    sys.exit(3)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(status, text() == before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", ["store='shared'", "transfers='queue'", "driver='host'"])
def test_a_forked_child_ends_with_its_status(options):
    """It hung in a thread pool of jax's, or crashed in the garbage collector."""
    script = SCRIPT.replace("OPTIONS", options)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "3 True\n", done.stderr[-2000:]

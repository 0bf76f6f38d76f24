"""Checks without kernels, some with faults, for processes that tests start."""

import dataclasses
import os
import signal
import time

import jax
import jax.numpy as jnp
import numpy as np

from moejax.start.kernels import step_key
from pallas_kernels.verification import Job
from pallas_kernels.verification.check import make_check

broken = False
"""Whether this process has a broken context."""


def at_run(fault, x):
    global broken
    if broken:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")
    if fault == "poisons":
        broken = True
    if fault == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    return np.asarray(x * 2)


def at_compilation(fault):
    if fault == "raises":
        raise RuntimeError("no such instruction")
    if fault == "lacks memory":
        raise RuntimeError("RESOURCE_EXHAUSTED: out of memory")
    if fault == "aborts":
        os.abort()
    if fault == "hangs":
        time.sleep(1000)


def make_checks(count, faults, op="fill"):
    """- `faults`: number of a check → its kernel's fault."""

    def check(number):
        fault = faults.get(number, "")

        def run(name, x):
            if name == "xla":
                return x * 2
            at_compilation(fault)
            y = jax.pure_callback(lambda x: at_run(fault, x), x, x)
            return y + jnp.uint16(fault == "wrong")

        return make_check(op, f"toy {number}", "uint16", lambda: (jnp.uint16(number),), run)

    return [check(number) for number in range(count)]


def toy_job(count, **faults):
    """- `faults`: fault → number of its check."""
    return Job(make_checks, (count, {number: fault for fault, number in faults.items()}))


def start_job(steps, _arena_bytes):
    """Stands for moejax.start.kernels.start_checks. The kernel of rms_norm has the fault that the
    environment names."""
    faults = {3: os.environ["FAULT"]}
    found = [*make_checks(6, faults, "rms_norm"), *make_checks(1, {}, "combine")]
    return [check for check in found if steps.ops.are_kernels(check.op)]


def step_job(*model):
    """Stands for moejax.start.whole_step.step_checks, with a fault that the environment names."""
    (check,) = make_checks(1, {0: os.environ.get("STEP_FAULT", "")})
    return [dataclasses.replace(check, key=step_key(*model))]

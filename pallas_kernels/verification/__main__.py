"""The process in which checks run (`apart`): it takes them from standard input, and writes outcomes
to a pipe."""

import contextlib
import dataclasses
import json
import os
import pickle
import sys
import threading
import traceback
from typing import Any, BinaryIO

import jax

from pallas_kernels.triton import interpreted
from pallas_kernels.verification.outcomes import outcomes


def main() -> None:
    """Runs checks until one fails. The arguments are the pipe's file descriptor."""
    pipe = open(int(sys.argv[1]), "w")  # noqa: SIM115
    (platform, number, interpret), job, keys, threads = pickle.load(sys.stdin.buffer)
    threading.Thread(target=end_with_parent, args=(sys.stdin.buffer,), daemon=True).start()
    lock = threading.Lock()

    def say(**word: Any) -> None:
        with lock:
            print(json.dumps(word), file=pipe, flush=True)

    device = next(one for one in jax.devices(platform) if one.id == number)
    with interpreted() if interpret else contextlib.nullcontext():
        known = {check.key: check for check in job.checks()}
        say(began=True)
        wanted = [known[key] for key in keys]
        for found in outcomes(wanted, device, threads, lambda what, of: say(**{what: of.key})):
            say(outcome=dataclasses.asdict(found))
            if found.failed:
                break


def end_with_parent(stdin: BinaryIO) -> None:
    """Ends this process when its parent ends, which closes the pipe."""
    stdin.read()
    os._exit(1)


if __name__ == "__main__":
    status = 1
    try:
        main()
        status = 0
    except Exception:
        traceback.print_exc()
    # Not by returning: destroying a broken context may hang.
    sys.stderr.flush()
    os._exit(status)

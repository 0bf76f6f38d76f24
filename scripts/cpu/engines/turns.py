"""The native ops of one checkout, a call whenever it is told to: what `ops --against` alternates.

Run by its path with that checkout in PYTHONPATH, so nothing of another one may be imported but what
both have: `scripts.cpu.cases`. Says a JSON list [name, bytes, SHA-1 of the first result] for each
case and "ready"; then answers each line "case call" by the call's seconds.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import sys
from collections.abc import Callable

import jax
import numpy as np

from scripts.cpu.cases import CASES, timed


def digest(result: object) -> str:
    whole = b"".join(np.asarray(array).tobytes() for array in jax.tree.leaves(result))
    return hashlib.sha1(whole).hexdigest()


def main() -> None:
    args = argparse.Namespace(**json.loads(sys.argv[1]))
    calls = []
    for case in (case for name in args.only.split(",") for case in CASES[name](args)):
        calls.append(case.call("cpu"))
        print(json.dumps([case.name, case.nbytes, digest(calls[-1](0))]), flush=True)
    print("ready", flush=True)
    for line in sys.stdin:
        number, at = map(int, line.split())
        print(timed(functools.partial(_ended, calls[number], at)), flush=True)


def _ended(call: Callable[[int], object], at: int) -> None:
    jax.block_until_ready(call(at))


if __name__ == "__main__":
    main()

"""Measures what a start needs before it can decide: the memory that steps take, and their costs."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable

from host_offload.control.interface import Costs
from moejax.cache import cache_root, write_whole
from moejax.costs.measure import calibrate
from moejax.costs.store import find_quiet_costs, identity
from moejax.errors import UserError
from moejax.step.executor import Executor
from moejax.step.step_parts import StepSpec


def activation_bytes(runner: Executor) -> int:
    """Returns the bytes of the largest executable's temporaries, of the results of two steps (one
    is read while the other runs) and of records in staging. Waits until everything is compiled.
    Raises UserError if XLA does not report them."""
    temporaries = results = 0
    runner.wait_compiled(everything=True)
    for executable in runner.compiler.compiled:
        memory = executable.memory_analysis()
        if memory is None:
            raise UserError(
                "XLA does not say what memory a step needs on this device; give memory (--memory)"
            )
        temporaries = max(temporaries, memory.temp_size_in_bytes)
        results = max(results, memory.output_size_in_bytes - memory.alias_size_in_bytes)
    return temporaries + 2 * results + runner.staging_bytes


def step_costs(steps: StepSpec, make_runner: Callable[[], Executor]) -> Costs:
    """Returns the costs of these steps that policies see, kept or measured on a runner made for it.
    Raises UserError like moejax.costs.measure.calibrate."""
    if (kept := find_quiet_costs(identity(steps))) is not None:
        return kept.costs()
    runner = make_runner()
    try:
        return calibrate(runner).costs()
    finally:
        runner.delete(given=False)


def find_activation_bytes(steps: StepSpec, make_runner: Callable[[], Executor]) -> int:
    """Returns activation_bytes of these steps, kept or measured on a runner made for it. Measuring
    compiles every step once more than a start needs.

    - `make_runner`: makes a runner with the smallest arena that has begun to compile what this
      start's policies need.
    """
    runner = make_runner()
    try:
        about = {**identity(steps), "programs": sorted(map(str, runner.executables()))}
        text = json.dumps(about, sort_keys=True, default=str)
        name = hashlib.sha256(text.encode()).hexdigest()[:32]
        path = cache_root() / "activations" / f"{name}.json"
        try:
            return int(json.loads(path.read_text())["bytes"])
        except (OSError, ValueError, KeyError, TypeError):  # not there, or not whole
            found = activation_bytes(runner)
        # A cache that cannot be written costs the next start time.
        with contextlib.suppress(UserError):
            write_whole(path, json.dumps({"bytes": found, "of": about}))
        return found
    finally:
        runner.delete(given=False)

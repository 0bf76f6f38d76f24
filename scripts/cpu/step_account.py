"""Where a decode step's time goes on a CPU: each native op's, its bytes and its rate."""

from __future__ import annotations

import collections
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import jax
import numpy as np

from moejax.engine.loop import Engine
from moejax.step.programs import ProgramKey
from scripts.parts.decode_timing import Samples, Sequences, decode, step_bytes

STEPS = 8

READS = {
    "linear": "attention and other weights",
    "expert_ffn": "experts",
    "decode_attention": "KV",
    "linear, once": "head",
}
"""Op → what of step_bytes it reads. Shared experts and dense layers are `linear`'s too."""

CALL = re.compile(r'%?(\S+) = .*custom_call_target="moejax_cpu_(\w+)"')
CONTAINERS = re.compile(r"while|call|conditional|ThunkExecutor|end: |Pjit|Common|np\.|\$|Parse")


def account(engine: Engine, sequences: Sequences, batch: int, context: int) -> Iterator[str]:
    """Lines of Markdown: STEPS steps under jax's profiler, which slows down small ops."""
    runner, samples = engine.runner, Samples()
    key = ProgramKey("decode", runner._bucket(max(sequences.rows) + 1))
    program = dict(zip(runner.executables(), runner.compiled(), strict=True))[key]
    found = events(lambda: decode(runner, sequences, [None] * STEPS, samples))
    ops = by_op(found, op_names(program.as_text() or ""), STEPS)
    active = float(np.mean(np.sum(samples.active, axis=1)))
    read = step_bytes(runner, active, batch=batch, context=context)
    step_ms = 1e3 * float(np.median(samples.step_s))
    yield "| op | calls a step | ms | of the step | MB | GB/s |"
    yield "|---|---|---|---|---|---|"
    for name, (calls, ms) in sorted(ops.items(), key=lambda item: -item[1][1]):
        mb = read.get(READS.get(name, ""), 0.0) / 1e6
        rate = f"{mb:.0f} | {mb / ms:.1f}" if mb else " | "
        yield f"| {name} | {calls:.0f} | {ms:.2f} | {ms / step_ms:.0%} | {rate} |"
    rest = step_ms - sum(ms for _, ms in ops.values())
    yield f"| between ops, Python, sampler | | {rest:.2f} | {rest / step_ms:.0%} | | |"


def events(work: Callable[[], object]) -> list[tuple[str, float]]:
    """Name and milliseconds of everything that XLA's threads say they did."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory(prefix="moejax-profile-") as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            work()
        (path,) = Path(directory).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
        return [
            (event.name, event.duration_ns / 1e6)
            for plane in data.planes
            for line in plane.lines
            for event in line.events
        ]


def op_names(text: str) -> dict[str, str]:
    """Instruction → native op, with ", once" where it is outside of the loop over layers."""
    names = {}
    for line in text.splitlines():
        if match := CALL.match(line.strip().removeprefix("ROOT ")):
            names[match[1]] = match[2] + ("" if "/while/" in line else ", once")
    return names


def by_op(
    found: list[tuple[str, float]], names: Mapping[str, str], steps: int
) -> dict[str, tuple[float, float]]:
    """Op → calls and milliseconds a step; XLA's own computations are one."""
    sums: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
    for name, ms in found:
        if CONTAINERS.match(name) and name not in names:
            continue
        total = sums[names.get(name, "XLA's own")]
        total[0] += 1 / steps
        total[1] += ms / steps
    return {name: (calls, ms) for name, (calls, ms) in sums.items()}

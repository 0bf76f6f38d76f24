"""Where a step's time goes on a GPU: kernels, and the gaps between them, from jax's profiler."""

from __future__ import annotations

import collections
import dataclasses
import gzip
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moejax.errors import UserError
from scripts.parts.text_table import aligned

SHOWN = 24
"""Kernels that the table lists, the costliest first; JSON has all."""


@dataclasses.dataclass(frozen=True)
class Kernel:
    """All executions of the device events of one name."""

    name: str
    calls: float
    """Per step, as the time."""
    us: float
    share: float
    """The share of all events' time, 0 to 1."""


@dataclasses.dataclass(frozen=True)
class Profile:
    """A number of equal steps on one device. Times in µs per step."""

    steps: int
    kernels: tuple[Kernel, ...]
    """The costliest first."""
    span_us: float
    """From the first event's start to the last one's end."""
    busy_us: float
    """At least one event runs: the union over all streams."""
    gaps: float
    """Gaps within a program, a step."""
    gap_us: float
    """Their time."""
    gap_median_us: float
    """The median of a gap."""
    between_us: float | None
    """Idle between two programs, so between steps and between a step and its sampler; None when
    the trace does not say which program an event belongs to."""

    @property
    def idle_percent(self) -> float:
        return 100 * (1 - self.busy_us / self.span_us)

    @property
    def idle_between_percent(self) -> float | None:
        """Idle between programs, of the whole time."""
        return None if self.between_us is None else 100 * self.between_us / self.span_us

    def as_json(self) -> dict[str, Any]:
        properties = {
            "idle_percent": self.idle_percent,
            "idle_between_percent": self.idle_between_percent,
        }
        return dataclasses.asdict(self) | properties


def parse_trace(trace: Mapping[str, Any], steps: int) -> Profile:
    """The profile in a trace of `steps` steps.

    trace: the trace viewer's JSON (times in µs): the events of threads named "Stream …" of the
    process "/device:GPU:0" are what ran on the device; `args.hlo_module` names their program.

    Raises ValueError when there are none, as in the trace of a CPU.
    """
    events = trace["traceEvents"]
    named = {"process_name": {}, "thread_name": {}}
    for event in events:
        if event.get("ph") == "M" and event["name"] in named:
            key = (event["pid"], event.get("tid") if event["name"] == "thread_name" else None)
            named[event["name"]][key] = event["args"]["name"]

    def on_device(event: Mapping[str, Any]) -> bool:
        process = named["process_name"].get((event["pid"], None), "")
        thread = named["thread_name"].get((event["pid"], event.get("tid")), "")
        return "/device:GPU:0" in process and thread.startswith("Stream")

    ran = sorted(
        (e for e in events if e.get("ph") == "X" and on_device(e)), key=lambda event: event["ts"]
    )
    if not ran:
        raise ValueError("the trace has no events of a GPU's streams.")

    durations = collections.defaultdict(list)
    for event in ran:
        durations[event["name"]].append(float(event["dur"]))
    total = sum(map(sum, durations.values()))
    kernels = [
        Kernel(name, len(all_us) / steps, sum(all_us) / steps, sum(all_us) / total)
        for name, all_us in durations.items()
    ]
    within, between = _gaps(ran)
    span = max(event["ts"] + event["dur"] for event in ran) - ran[0]["ts"]
    return Profile(
        steps=steps,
        kernels=tuple(sorted(kernels, key=lambda kernel: -kernel.us)),
        span_us=span / steps,
        busy_us=(span - sum(within) - sum(between or ())) / steps,
        gaps=len(within) / steps,
        gap_us=sum(within) / steps,
        gap_median_us=float(np.median(within)) if within else 0.0,
        between_us=None if between is None else sum(between) / steps,
    )


def _gaps(ran: list[Mapping[str, Any]]) -> tuple[list[float], list[float] | None]:
    """µs of each time in which nothing ran, (within a program, between two), the second None when
    programs are unknown. ran: by start."""
    programs = [event.get("args", {}).get("hlo_module") for event in ran]
    known = [program for program in programs if program is not None]
    # A copy from or to the host belongs to no program: it ends none and begins none.
    before, after = list(programs), list(programs)
    if known:
        before[0], after[-1] = before[0] or known[0], after[-1] or known[-1]
        for i in range(1, len(ran)):
            before[i] = before[i] or before[i - 1]
            after[-1 - i] = after[-1 - i] or after[-i]
    within, between = [], []
    end = ran[0]["ts"] + ran[0]["dur"]
    for i, event in enumerate(ran[1:], 1):
        if event["ts"] > end:
            same = before[i - 1] == after[i]
            (within if same else between).append(event["ts"] - end)
        end = max(end, event["ts"] + event["dur"])
    return within, between if known else None


GRAPHS = "--xla_enable_command_buffers_during_profiling=true"
"""XLA runs steps without CUDA graphs while it is profiled, unless this is in XLA_FLAGS before the
backend starts: then what is profiled is what runs."""


def profile_graphs() -> None:
    """Has steps run as graphs while they are profiled, as they do otherwise; before jax's backend
    starts. What XLA_FLAGS says already stays."""
    flags = os.environ.get("XLA_FLAGS", "")
    if GRAPHS.partition("=")[0] not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {GRAPHS}".strip()


def record(work: Callable[[], object], steps: int) -> Profile:
    """Runs work(), which is to run `steps` steps and wait for them, under jax's profiler.

    Raises ValueError as parse_trace does.
    """
    options = jax.profiler.ProfileOptions()
    # Only the device's track is read; the host's would slow down what it watches.
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    with tempfile.TemporaryDirectory(prefix="moejax-profile-") as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            work()
        (path,) = Path(directory).rglob("*.trace.json.gz")
        with gzip.open(path) as file:
            return parse_trace(json.load(file), steps)


def require_track(device: jax.Device) -> None:
    """Raises UserError when record would find nothing of the device: before a long run, not after.

    On a GPU it needs CUPTI, and leave to use it.
    """
    if device.platform != "gpu":
        raise UserError(
            f"--profile reads the GPU's track of the trace, and this is a {device.platform}; "
            "leave it out or run on a GPU"
        )

    def work() -> None:
        x = jax.device_put(np.ones((64, 64), np.float32), device)
        jax.block_until_ready(jax.jit(jnp.matmul)(x, x))

    try:
        record(work, 1)
    except ValueError as error:
        raise UserError(
            f"--profile: {error} On a GPU jax's profiler needs CUPTI (pip: nvidia-cuda-cupti) and "
            "a driver that lets this user profile"
        ) from error


COLUMNS = (
    ("calls/step", "{calls:.1f}"),
    ("µs/step", "{us:.1f}"),
    ("share", "{share:.1%}"),
    ("kernel", "{name}"),
)


def table(profile: Profile) -> Iterator[str]:
    """Lines of text for people."""
    yield (
        f"{profile.span_us / 1e3:.3f} ms a step, {profile.busy_us / 1e3:.3f} busy; idle "
        f"{profile.idle_percent:.1f}%; {profile.gaps:.0f} gaps within programs, "
        f"{profile.gap_us:.1f} µs, median {profile.gap_median_us:.2f}"
    )
    share = profile.idle_between_percent
    if share is None:
        yield "idle between programs: unknown, the trace names no programs"
    else:
        yield f"idle between programs: {profile.between_us:.1f} µs a step, {share:.1f}%"
    shown = [dataclasses.asdict(kernel) for kernel in profile.kernels[:SHOWN]]
    rest = profile.kernels[SHOWN:]
    if rest:
        sums = {key: sum(getattr(k, key) for k in rest) for key in ("calls", "us", "share")}
        shown.append({"name": f"{len(rest)} more", **sums})
    for line in shown:
        line["name"] = line["name"][:60]
    yield from aligned(COLUMNS, shown)

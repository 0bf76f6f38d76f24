"""Bounds the bytes of transitions of a step: what crosses the link in 5% of a decode step.

A transition rides in a step, behind the experts of its layer, and adds the time of its copy to the
step. The bound is taken from the shortest decode step, of one row, so it holds for all others. It
comes from what the device's maker states, not from measurements: otherwise equal runs would have
different histories of versions and different bits. On a CPU nothing is bounded, since copies and
products share the same cores.
"""

from __future__ import annotations

import dataclasses

from host_offload.memory.layout import SlotLayout
from host_offload.memory.placement import ResidentSpec
from host_offload.policies.precision.precision_names import Precision
from moejax.costs.hardware import hardware_of
from moejax.costs.rates import Rates
from moejax.step.step_parts import StepSpec

STEP_SHARE = 0.05
"""Share of a decode step's time for transitions."""

ASSUMED = Rates(16e9, 8.0e12)
"""Rates for a device that moejax.costs.hardware does not have: a slow link and a fast memory, so
that the bound is too small rather than too large."""

LINK_REACHED = 0.75
"""Share of a stated link's rate that fills inside a step reach: 48 of 64 GB/s on an H200."""

SOURCES = {
    "given": "as given",
    "stated": f"{STEP_SHARE:.0%} of a decode step at the device's stated bandwidth",
    "assumed": f"{STEP_SHARE:.0%} of a decode step of a device that is not known",
}
"""The text for people on where a bound is from. `list` stands for no bound: on a CPU, and with
transitions that block."""


def step_bound(
    precision: Precision, platform: str, device_kind: str, step_read_bytes: int
) -> tuple[int | None, str]:
    """Returns (most bytes of a step's transitions, where the bound is from). None bytes mean as
    many transitions as fit on the step's list.

    - `platform`, `device_kind`: of the jax device.
    - `step_read_bytes`: least bytes that a decode step of one row reads, from which its time
      follows.
    """
    if precision.step_bytes is not None:
        return precision.step_bytes, "given"
    if platform == "cpu":
        return None, "list"
    known = hardware_of(device_kind)
    rates = Rates(known.link, known.memory_rate) if known else ASSUMED
    step_s = step_read_bytes / rates.memory
    nbytes = int(STEP_SHARE * step_s * rates.link * LINK_REACHED)
    return max(nbytes, 1), "stated" if known else "assumed"


def with_step_bound(
    resident: ResidentSpec, precision: Precision, steps: StepSpec, platform: str, read_bytes: int
) -> ResidentSpec:
    """Returns the resident mode with the bound of this run's steps.

    - `platform`: of the device.
    - `read_bytes`: bytes of all parameters that a decode step of one row reads, without experts.
    """
    if not resident.spares:
        return resident
    config = steps.config
    smallest = min(record.nbytes for record in steps.layout.records)
    experts = sum(config.moe_layers) * config.num_experts_per_tok * smallest
    nbytes, source = step_bound(precision, platform, steps.device_kind, read_bytes + experts)
    nbytes = resident.step_bytes if nbytes is None else nbytes
    return dataclasses.replace(resident, step_bytes=nbytes, step_bytes_from=source)


def describe_step_bound(resident: ResidentSpec, layout: SlotLayout) -> str:
    """Describes the bound as a part of a line for people, or returns "" if versions never
    change."""
    if not resident.spares or resident.step_bytes_from == "list":
        return ""
    where = SOURCES[resident.step_bytes_from]
    largest = max(record.nbytes for record in layout.records)
    alone = "; one transition in any case, which is more" if largest > resident.step_bytes else ""
    return f"; transitions of at most {resident.step_bytes} bytes a step ({where}{alone})"

"""`placement=` and `driver=host,threads=…`: whether a second processor computes missed experts, and
how fast it is said to be."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from host_offload.control.interface import Policy
from host_offload.control.rules import gives_away
from host_offload.policies.placement.placement_names import placement_policy
from host_offload.policies.placement.recorded import PREFIX
from moejax.errors import UserError, user_errors
from moejax.start.option_values import Driver
from moejax.start.options import Config
from moejax.step.step_parts import SecondProcessor, StatedTimes, StepSpec
from pallas_kernels import Ops
from pallas_kernels.cpu.library import DTYPES, why_not_cpu

if TYPE_CHECKING:
    from host_offload.policies.precision.precision_names import Precision


def _stated(driver: Driver) -> SecondProcessor:
    """The processor that a driver states; both run on what threads there are, as fast as they go,
    where it says nothing."""
    times = StatedTimes(**driver.times) if driver.times else None
    return SecondProcessor(driver.threads or (0, 0), times)


def placement_of(options: Config) -> str | None:
    """The placement with the times that the driver states as costs, where it states none itself.
    Raises UserError for a name that there is not."""
    placement = options.policy.placement
    if placement is None or placement.startswith(PREFIX):
        return placement
    with user_errors():
        policy = placement_policy(placement)
    given = dict(policy.stated)
    more = [
        f"{name}={value!r}"
        for name, value in options.transfer.driver.times.items()
        if value and name not in given
    ]
    if options.transfer.transfers.rate and "load" not in given and not policy.load_of_link:
        more.append("load=link")
    return ",".join([placement, *more])


def check_places(options: Config, policies: Sequence[Policy], precision: Precision) -> None:
    """Raises UserError for a test of nothing, and for experts in several versions."""
    if not gives_away(policies):
        if options.transfer.driver.tests_placement:
            raise UserError(
                "threads and times of driver='host' are of a placement; name one, "
                "placement='prescope'"
            )
    elif len(precision.versions) > 1 or precision.in_transit:
        raise UserError(
            f"placement knows one version of the experts, the store's; precision {precision.name} "
            "has others; leave one out"
        )


def second_of(
    options: Config, policies: Sequence[Policy], ops: Ops, dtype: str, platform: str
) -> SecondProcessor | None:
    """The second processor that the policies give experts to; None: there is none. Where the steps'
    own expert op is none of a CPU's, it is the native one, or XLA's where that is not built."""
    if not gives_away(policies):
        return None
    second, own = _stated(options.transfer.driver), ops.expert_ffn
    instead = "cpu" if why_not_cpu() is None and dtype in DTYPES else "xla"
    name = own if own == "cpu" or (own, platform) == ("xla", "cpu") else instead
    same = (name, "cpu") == (own, platform)
    return dataclasses.replace(second, implementation=name, same_bits=same)


def check_second(options: Config, steps: StepSpec, platform: str) -> None:
    """Raises UserError where a second processor cannot run."""
    if steps.second is None:
        return
    if not steps.separate:
        if platform != "cpu" or not steps.second.same_bits:
            raise UserError(
                "placement beside a device with memory of its own computes experts from pinned "
                "arrays: add transfers='queue' (--transfers queue), or leave out placement"
            )
        return
    if options.memory.store.name == "file":
        raise UserError(
            "placement computes experts of pinned arrays, not of a cache of files in them; take "
            "store='memory', or native ops on a CPU, or leave out placement"
        )
    if options.transfer.driver.tests_placement:
        raise UserError(
            "driver='host' states times of two groups of a CPU's cores, which transfers='queue' "
            f"on {platform} with these ops does not have; leave them out"
        )
    if options.transfer.transfers.chunk_bytes is not None:
        raise UserError(
            "placement computes a record where it lies, in one piece, and chunk_bytes cuts it; "
            "leave chunk_bytes out"
        )


def second_notes(second: SecondProcessor | None) -> list[str]:
    """What results must say of a second processor."""
    if second is None or second.same_bits:
        return []
    return [
        "missed experts that a placement gives to the CPU are computed by another implementation "
        f"({second.implementation}) with other bits: outputs are a function of the placement, "
        "which a trace records"
    ]

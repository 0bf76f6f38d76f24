"""`placement=` and `placement_test=`: whether a second processor computes missed experts, and how
fast it is said to be."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from host_offload.control.interface import Policy
from host_offload.control.rules import gives_away
from host_offload.policies.placement.names import placement_policy
from host_offload.policies.placement.recorded import PREFIX
from moejax.errors import UserError, user_errors
from moejax.start.options import Options
from moejax.step.parts import SecondProcessor, StatedTimes, StepSpec
from pallas_kernels import Ops
from pallas_kernels.cpu.library import DTYPES, why_not_cpu
from pallas_kernels.option_text import Reader, parse_pairs, seconds

if TYPE_CHECKING:
    from host_offload.policies.precision.names import Precision

RATES = tuple(field.name for field in dataclasses.fields(StatedTimes))
"""Times of placement_test, as fields of StatedTimes and costs of a placement."""


def _two_groups(text: str) -> tuple[int, int]:
    parts = text.split("+")
    if len(parts) != 2 or not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(
            "A+B, threads of the accelerator's and the second processor's experts, such as 1+1"
        )
    return int(parts[0]), int(parts[1])


_TEST_SETTINGS: dict[str, Reader] = {"threads": _two_groups, **dict.fromkeys(RATES, seconds)}


def parse_placement_test(text: str | None) -> SecondProcessor:
    """What `threads=A+B,accelerator=TIME,startup=TIME,per_token=TIME` says; None: nothing, so both
    processors run on what threads there are, as fast as they go. Raises UserError."""
    with user_errors():
        found = parse_pairs("placement_test", text or "", _TEST_SETTINGS)
    threads = found.pop("threads", (0, 0))
    return SecondProcessor(threads, StatedTimes(**found) if found else None)


def placement_of(options: Options) -> str | None:
    """The placement with the rates of its test as costs, where those are not stated. Raises
    UserError for a name or a test that there is not."""
    test = parse_placement_test(options.placement_test)
    if options.placement is None or options.placement.startswith(PREFIX):
        return options.placement
    with user_errors():
        policy = placement_policy(options.placement)
    given = dict(policy.stated)
    more = [
        f"{name}={value!r}"
        for name in RATES
        if name not in given and (value := getattr(test.stated, name, 0.0))
    ]
    if options.link_rate and "load" not in given and not policy.load_of_link:
        more.append("load=link")
    return ",".join([options.placement, *more])


def check_places(options: Options, policies: Sequence[Policy], precision: Precision) -> None:
    """Raises UserError for a test of nothing, and for experts in several versions."""
    if not gives_away(policies):
        if options.placement_test is not None:
            raise UserError("placement_test is of a placement; name one, placement='prescope'")
    elif len(precision.versions) > 1 or precision.in_transit:
        raise UserError(
            f"placement knows one version of the experts, the store's; precision {precision.name} "
            "has others; leave one out"
        )


def second_of(
    options: Options, policies: Sequence[Policy], ops: Ops, dtype: str, platform: str
) -> SecondProcessor | None:
    """The second processor that the policies give experts to; None: there is none. Where the steps'
    own expert op is none of a CPU's, it is the native one, or XLA's where that is not built."""
    if not gives_away(policies):
        return None
    second, own = parse_placement_test(options.placement_test), ops.expert_ffn
    instead = "cpu" if why_not_cpu() is None and dtype in DTYPES else "xla"
    name = own if own == "cpu" or (own, platform) == ("xla", "cpu") else instead
    same = (name, "cpu") == (own, platform)
    return dataclasses.replace(second, implementation=name, same_bits=same)


def check_second(options: Options, steps: StepSpec, platform: str) -> None:
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
    if options.store == "file":
        raise UserError(
            "placement computes experts of pinned arrays, not of a cache of files in them; take "
            "store='memory', or native ops on a CPU, or leave out placement"
        )
    if options.placement_test is not None:
        raise UserError(
            "placement_test states times of two groups of a CPU's cores, which transfers='queue' "
            f"on {platform} with these ops does not have; leave it out"
        )
    if options.chunk_bytes is not None:
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

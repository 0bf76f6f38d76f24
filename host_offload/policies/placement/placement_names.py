"""Placement by name: NAME[,KEY=VALUE…] as a policy, and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from host_offload.control.interface import Policy, Spec
from host_offload.policies.eviction.static import hot_beside_prefetches
from host_offload.policies.placement.placement_policy import COSTS, PlacementPolicy, costs_of
from host_offload.policies.placement.rivals import SCHEDULERS
from host_offload.policies.prefetch.llapor import Learned
from host_offload.policies.recorded import repeat_run
from host_offload.traces.reader import read_trace
from pallas_kernels.option_text import Reader, one_of, parse_option, seconds, share, whole

PREFIX = "recorded="
"""Prefix of a placement that repeats a run; a trace's directory follows."""

_SETTINGS: dict[str, Reader] = {
    **dict.fromkeys(COSTS, seconds),
    "load": lambda value: None if value == "link" else seconds(value),
    "predict": one_of("gates"),
    "hit": share,
    "buffers": whole(),
    "defer": whole(),
}
"""Readers of the keys of every placement. A load of None is the time of the stated link."""


def placement_policy(placement: str) -> PlacementPolicy:
    """The policy called NAME[,KEY=VALUE…].

    NAME is one of SCHEDULERS. Keys: costs as times (COSTS; load=link: the time of the stated link),
    predict=gates, hit=R_hit at the start, buffers=N (see with_placement), defer=N (see
    PlacementPolicy). Raises ValueError as parse_option.
    """
    names = dict.fromkeys(SCHEDULERS, _SETTINGS)
    option = parse_option("placement", placement, names, known=(f"{PREFIX}TRACE",))
    stated = {name: option.settings.pop(name) for name in COSTS if name in option.settings}
    return PlacementPolicy(
        option.name,
        tuple(sorted((name, value) for name, value in stated.items() if value is not None)),
        load_of_link=None in stated.values(),
        **option.settings,
    )


def with_placement(placement: str | None, policies: Sequence[Policy]) -> Sequence[Policy]:
    """Adds the placement of that name to the policies.

    If it looks ahead, it predicts by LLaPor's networks among the policies, also by such that learn
    on. With buffers a hot table is added too. recorded=TRACE repeats the decisions of that run.
    Raises ValueError as placement_policy and for two ways to predict, and TraceError.
    """
    if placement is None:
        return policies
    if placement.startswith(PREFIX):
        if any(isinstance(each, Learned) for each in policies):
            raise ValueError("a recorded placement has its prefetches; leave out prefetch")
        return (*policies, repeat_run(read_trace(placement.removeprefix(PREFIX)), PlacementPolicy))
    return add_placement(placement_policy(placement), policies)


def add_placement(policy: PlacementPolicy, policies: Sequence[Policy]) -> Sequence[Policy]:
    """with_placement of a placement that was parsed."""
    if policy.buffers is not None:
        policies = (*policies, hot_beside_prefetches(policy.buffers))
    learned = [each for each in policies if isinstance(each, Learned)]
    if not learned:
        return (*policies, policy)
    if policy.predict:
        raise ValueError("prefetch learned=FILE and predict=gates both predict; leave one out")
    policy = dataclasses.replace(policy, learned=learned[0])
    if not policy.looks_ahead:
        raise ValueError(
            f"placement {policy.scheduler} prefetches nothing; leave out prefetch learned=FILE"
        )
    return (*(each for each in policies if each is not learned[0]), policy)


def deferred(placement: str | None) -> int:
    """The `defer` of a placement, or of the run that it repeats. Raises as with_placement."""
    if placement is not None and placement.startswith(PREFIX):
        placement = read_trace(placement.removeprefix(PREFIX)).header.spec.get("placement")
        if placement is not None and placement.startswith(PREFIX):
            return deferred(placement)
    return 0 if placement is None else placement_policy(placement).defer


def said(policy: PlacementPolicy, spec: Spec) -> str:
    """NAME,KEY=VALUE… with every cost that the policy uses, so that a replay, which measures
    nothing, decides the same."""
    record = max(int(sizes.max()) for sizes in spec.link_bytes.values())
    costs = dataclasses.asdict(costs_of(policy, spec, record))
    parts = [policy.scheduler, *(f"{name}={value!r}" for name, value in costs.items())]
    parts += [f"predict={policy.predict}"] if policy.predict else []
    parts += [] if policy.buffers is None else [f"buffers={policy.buffers}"]
    parts += [f"defer={policy.defer}"] if policy.defer else []
    return ",".join([*parts, f"hit={policy.hit!r}"])

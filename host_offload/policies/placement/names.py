"""Placement by name: NAME[,KEY=VALUE…] as a policy, and back."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

from host_offload.control.interface import Policy, Spec
from host_offload.policies.eviction.hot_table import beside_prefetches
from host_offload.policies.placement.policy import COSTS, Placement, costs_of
from host_offload.policies.placement.recorded import PREFIX, recorded_placement
from host_offload.policies.placement.rivals import SCHEDULERS
from host_offload.policies.prefetch.llapor.policy import Learned
from host_offload.traces.reader import read_trace

ALIASES = {"cross_layer": "prescope"}

_UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "": 1.0}
_TIME = re.compile(r"([0-9.]+(?:e-?[0-9]+)?)(s|ms|us|ns|)")


def seconds(text: str) -> float:
    """The seconds that "20us", "1.5ms" or a plain number says. Raises ValueError."""
    found = _TIME.fullmatch(text.strip())
    try:
        assert found is not None
        return float(found[1]) * _UNITS[found[2]]
    except (AssertionError, ValueError):
        raise ValueError(f"{text!r} is no time; write 20us, 1.5ms or 0.002s") from None


def placement_policy(placement: str) -> Placement:
    """The policy called NAME[,KEY=VALUE…]: a name of SCHEDULERS or cross_layer; costs in seconds
    (COSTS; load=link: what the stated link takes), predict=gates, hit=R_hit at the start, buffers=N
    (with_placement). Raises ValueError naming what is known."""
    name, *given = placement.split(",")
    name = ALIASES.get(name, name)
    if name not in SCHEDULERS:
        known = ", ".join((*SCHEDULERS, *ALIASES, f"{PREFIX}TRACE"))
        raise ValueError(f"unknown placement {name!r}; known: {known}")
    known = ", ".join((*COSTS, "predict", "hit", "buffers"))
    settings: dict[str, Any] = {}
    stated: dict[str, float] = {}
    for pair in given:
        key, _, value = pair.partition("=")
        if key in COSTS and pair != "load=link":
            stated[key] = seconds(value)
        elif key in _SETTINGS:
            settings |= _SETTINGS[key](value)
        else:
            raise ValueError(f"placement {name!r} has no setting {key!r}; it has {known}")
    return Placement(name, tuple(sorted(stated.items())), **settings)


def _predict(value: str) -> dict[str, str]:
    if value != "gates":
        raise ValueError(
            f"placement predicts by gates, or by prefetch learned=FILE; not by {value!r}"
        )
    return {"predict": value}


def _hit(value: str) -> dict[str, float]:
    try:
        hit = float(value)
    except ValueError:
        hit = -1.0
    if not 0 <= hit <= 1:
        raise ValueError(f"hit is R_hit at the start, 0 to 1, not {value!r}")
    return {"hit": hit}


def _buffers(value: str) -> dict[str, int]:
    if not value.isdecimal():
        raise ValueError(f"buffers are cells of each layer, 0 or more, not {value!r}")
    return {"buffers": int(value)}


_SETTINGS: dict[str, Callable[[str], dict[str, Any]]] = {
    "predict": _predict,
    "hit": _hit,
    "buffers": _buffers,
    "load": lambda value: {"load_of_link": True},
}
"""Key → what it makes of a value; load is here where it is the link's."""


def with_placement(placement: str | None, policies: Sequence[Policy]) -> Sequence[Policy]:
    """The policies, with the placement of that name behind them. LLaPor's networks among them
    become what it predicts by, if it looks ahead; with buffers there is a hot table beside it.
    recorded=TRACE repeats that run's. Raises ValueError as placement_policy, and for two ways to
    predict; TraceError."""
    if placement is None:
        return policies
    if placement.startswith(PREFIX):
        if any(isinstance(each, Learned) for each in policies):
            raise ValueError("a recorded placement has its prefetches; leave out prefetch")
        return (*policies, recorded_placement(read_trace(placement.removeprefix(PREFIX))))
    policy = placement_policy(placement)
    if policy.buffers is not None:
        policies = (*policies, beside_prefetches(policy.buffers))
    learned = [each for each in policies if isinstance(each, Learned)]
    if not learned:
        return (*policies, policy)
    if policy.predict:
        raise ValueError("prefetch learned=FILE and predict=gates both predict; leave one out")
    if type(learned[0]) is not Learned:
        raise ValueError("a placement predicts by networks that stay as they are: learned=FILE")
    policy = dataclasses.replace(policy, fitted=learned[0].fitted)
    if not policy.looks_ahead:
        raise ValueError(
            f"placement {policy.scheduler} prefetches nothing; leave out prefetch learned=FILE"
        )
    return (*(each for each in policies if each is not learned[0]), policy)


def said(policy: Placement, spec: Spec) -> str:
    """NAME,KEY=VALUE… with every cost that the policy goes by, so that a replay, which measures
    nothing, decides the same."""
    record = max(int(sizes.max()) for sizes in spec.link_bytes.values())
    costs = dataclasses.asdict(costs_of(policy, spec, record))
    parts = [policy.scheduler, *(f"{name}={value!r}" for name, value in costs.items())]
    parts += [f"predict={policy.predict}"] if policy.predict else []
    parts += [] if policy.buffers is None else [f"buffers={policy.buffers}"]
    return ",".join([*parts, f"hit={policy.hit!r}"])

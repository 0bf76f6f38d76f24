"""Prefetch by name: policies that say which experts come ahead of need (docs/policies.md)."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from host_offload.control.interface import Policy
from pallas_kernels.option_text import parse_option


class _Made(NamedTuple):
    """MODULE:NAME of what makes a policy from nothing, from a trace, from a file; None: nothing."""

    plain: str | None = None
    fit: str | None = None
    read: str | None = None


_MADE: dict[str, _Made] = {
    "coactivation": _Made("coactivation:CoActivation", "coactivation:fit", "coactivation:read"),
    "deepspeed": _Made("deepspeed:DeepSpeedInference"),
    "expert_map": _Made(
        "expert_map.expert_map_policy:ExpertMap",
        "expert_map.expert_map_policy:fit",
        "expert_map.expert_map_policy:read",
    ),
    "expert_map_in_step": _Made(
        "expert_map.in_step:ExpertMapInStep", "expert_map.in_step:fit", "expert_map.in_step:read"
    ),
    "expertflow": _Made(read="expertflow.expertflow_policy:read"),
    "fate": _Made("fate:Fate"),
    "layer-streaming": _Made("deepspeed:LayerStreaming"),
    "learned": _Made(read="llapor.llapor_policy:read"),
    "learned_online": _Made(read="llapor.online:read"),
    "mixtral-offloading": _Made("mixtral_offloading:MixtralOffloading"),
    "moe-infinity": _Made("moe_infinity:MoEInfinity", "moe_infinity:fit", "moe_infinity:read"),
    "oracle": _Made(read="oracle:read"),
    "promoe": _Made(fit="promoe.promoe_policy:fit", read="promoe.promoe_policy:read"),
    "random": _Made("random_prefetch:RandomPrefetch"),
}
"""A new policy is a file of its own and a line here."""


def _resolved(places: dict[str, str | None]) -> dict[str, Any]:
    return {
        name: pkgutil.resolve_name(f"{__package__}.{place}")
        for name, place in places.items()
        if place
    }


PREFETCH: dict[str, Callable[[], Policy]] = _resolved({n: m.plain for n, m in _MADE.items()})
"""Name → policy that needs nothing learned: what LLM(prefetch=…) and --prefetch take."""

FIT: dict[str, Callable[..., Policy]] = _resolved({n: m.fit for n, m in _MADE.items()})
"""Name → function that fits the policy to a Trace, with settings if wanted;
`policy.fitted.write(FILE)` keeps it."""

FROM_PATH: dict[str, Callable[[str], Policy]] = _resolved({n: m.read for n, m in _MADE.items()})
"""Name → policy from NAME=PATH: a file of what it learned; for the oracle the trace of the run."""


def prefetch_policy(prefetch: str) -> Policy:
    """The policy called NAME or NAME=PATH. Raises ValueError naming the known ones, and for a path
    that is missing, of no use or unreadable."""
    names = {key: {} for key in sorted(PREFETCH.keys() | FROM_PATH.keys())}
    name, path, _ = parse_option("prefetch policy", prefetch, names, paths=FROM_PATH)
    if path is not None:
        return FROM_PATH[name](path)
    if name not in PREFETCH:
        what = "the trace of the very run" if name == "oracle" else "a file that its fit wrote"
        raise ValueError(f"prefetch {name!r} needs {what}: {name}=PATH (docs/policies.md)")
    return PREFETCH[name]()


def with_prefetch(prefetch: str | None, policies: Sequence[Policy]) -> Sequence[Policy]:
    """The policies, with the prefetch of that name behind them. Raises ValueError as
    prefetch_policy."""
    return policies if prefetch is None else (*policies, prefetch_policy(prefetch))

"""Prefetch by name: policies that say which experts come ahead of need (docs/policies.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from host_offload.control.interface import Policy
from host_offload.policies.prefetch import coactivation, moe_infinity, promoe
from host_offload.policies.prefetch.coactivation import CoActivation
from host_offload.policies.prefetch.fate import Fate
from host_offload.policies.prefetch.fitted import read_fitted
from host_offload.policies.prefetch.layer_streaming import LayerStreaming
from host_offload.policies.prefetch.mixtral_offloading import MixtralOffloading
from host_offload.policies.prefetch.moe_infinity import MoEInfinity
from host_offload.policies.prefetch.oracle import oracle_of
from host_offload.policies.prefetch.promoe import ProMoE
from host_offload.policies.prefetch.random_prefetch import RandomPrefetch
from host_offload.traces.reader import Trace, read_trace

PREFETCH: dict[str, Callable[[], Policy]] = {
    "coactivation": CoActivation,
    "fate": Fate,
    "layer-streaming": LayerStreaming,
    "mixtral-offloading": MixtralOffloading,
    "moe-infinity": MoEInfinity,
    "random": RandomPrefetch,
}
"""Name → policy that needs nothing learned: what LLM(prefetch=…) and --prefetch take."""

FIT: dict[str, Callable[[Trace], Policy]] = {
    "coactivation": coactivation.fit,
    "moe-infinity": moe_infinity.fit,
    "promoe": promoe.fit,
}
"""Name → function that fits the policy to a trace; `policy.fitted.write(FILE)` keeps it."""


def _coactivation(path: str) -> Policy:
    state = read_fitted(path, "coactivation")
    return CoActivation(fitted=state, reach=state.setting("reach"))


def _moe_infinity(path: str) -> Policy:
    state = read_fitted(path, "moe-infinity")
    return MoEInfinity(fitted=state, capacity=state.setting("capacity"))


FROM_PATH: dict[str, Callable[[str], Policy]] = {
    "coactivation": _coactivation,
    "moe-infinity": _moe_infinity,
    "oracle": lambda path: oracle_of(read_trace(path)),
    "promoe": lambda path: ProMoE(read_fitted(path, "promoe")),
}
"""Name → policy from NAME=PATH: a file of what it learned; for the oracle the trace of the run."""


def prefetch_policy(prefetch: str) -> Policy:
    """The policy called NAME or NAME=PATH. Raises ValueError naming the known ones, and for a path
    that is missing, of no use or unreadable."""
    name, given, path = prefetch.partition("=")
    known = sorted(PREFETCH.keys() | FROM_PATH.keys())
    if name not in known:
        raise ValueError(f"unknown prefetch policy {name!r}; known: {', '.join(known)}")
    if given:
        if name not in FROM_PATH:
            raise ValueError(f"prefetch {name!r} learns nothing; leave out ={path}")
        return FROM_PATH[name](path)
    if name not in PREFETCH:
        what = "the trace of the very run" if name == "oracle" else "a file that its fit wrote"
        raise ValueError(f"prefetch {name!r} needs {what}: {name}=PATH (docs/policies.md)")
    return PREFETCH[name]()


def with_prefetch(prefetch: str | None, policies: Sequence[Policy]) -> Sequence[Policy]:
    """The policies, with the prefetch of that name behind them. Raises ValueError as
    prefetch_policy."""
    return policies if prefetch is None else (*policies, prefetch_policy(prefetch))

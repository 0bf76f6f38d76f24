"""Which implementation of each op runs: chosen once, by name, never silently."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

OPS: dict[str, tuple[str, ...]] = {
    "linear": ("xla",),
    "rms_norm": ("xla",),
    "route": ("xla",),
    "plan": ("xla",),
    "fill": ("xla",),
    "expert_ffn": ("xla",),
    "combine": ("xla",),
    "kv_write": ("xla",),
    "paged_attention": ("xla",),
}
"""Every op and the implementations this release has."""


@dataclasses.dataclass(frozen=True)
class Ops:
    """The chosen implementation of each op."""

    linear: str
    rms_norm: str
    route: str
    plan: str
    fill: str
    expert_ffn: str
    combine: str
    kv_write: str
    paged_attention: str


def resolve_ops(ops: str | Mapping[str, str] = "auto") -> Ops:
    """Decides an implementation for each op.

    ops: "auto", the name of one implementation for every op, or a mapping from op to
    implementation (ops left out are "auto"). Auto is "xla", which runs on every device.

    Raises ValueError naming what exists, for an op or an implementation that does not.
    """
    chosen = dict(ops) if isinstance(ops, Mapping) else dict.fromkeys(OPS, ops)
    unknown = sorted(set(chosen) - set(OPS))
    if unknown:
        raise ValueError(f"unknown op {unknown[0]!r}; the ops are {', '.join(OPS)}")
    resolved = {}
    for op, implementations in OPS.items():
        name = chosen.get(op, "auto")
        if name == "auto":
            name = "xla"
        if name not in implementations:
            raise ValueError(
                f"op {op!r} has no implementation {name!r}; it has {', '.join(implementations)}"
            )
        resolved[op] = name
    return Ops(**resolved)


def pick(op: str, implementations: Mapping[str, Callable], name: str) -> Callable:
    """The function of one implementation. Raises ValueError naming what exists."""
    if name not in implementations:
        raise ValueError(
            f"op {op!r} has no implementation {name!r}; it has {', '.join(implementations)}"
        )
    return implementations[name]

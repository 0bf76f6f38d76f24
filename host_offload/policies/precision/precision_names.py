"""Parses the option precision: which version each expert has at the start and during a run."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from host_offload.control.interface import Policy
from host_offload.policies.precision.dynaexq import DynaExq
from host_offload.policies.precision.hobbit import Hobbit, Promotions
from host_offload.policies.precision.maps import (
    LO,
    check_map,
    check_shape,
    count_selections,
    mean_selections,
    random_map,
    read_array,
    top_map,
)
from host_offload.traces.reader import read_trace
from pallas_kernels.option_text import (
    Reader,
    number,
    one_of,
    parse_option,
    share,
    whole,
    yes,
)
from pallas_kernels.records.format import LOSSY, VERSIONS

CHECKPOINT = "checkpoint"
"""The precision, and in place of a version, in which experts are as in the checkpoint: dense, or in
the formats that it is quantized to, which may differ by layer."""


@dataclasses.dataclass(frozen=True)
class Precision:
    """The versions of a run, and which experts have which version."""

    name: str
    versions: tuple[str, ...] = ("dense",)
    """The one version of all experts, or the high and the low one, in the order of the tables; with
    `of_checkpoint` those of the files, each in its own layers. A high CHECKPOINT is filled in by
    `of_model`, unless the layers differ in format."""
    in_transit: bool = False
    """Whether records are decoded while they are copied: the store has the version, cells have
    dense."""
    policy: Policy | None = None
    """What changes versions while the model runs: DynaExq, or a policy of a grid's own."""
    promotions: Promotions | None = None
    """Brings the high version after the low one; None: it does not follow."""
    given: np.ndarray | None = dataclasses.field(default=None, repr=False, compare=False)
    """int8[L, E]: a map from a file."""
    hot: np.ndarray | None = dataclasses.field(default=None, repr=False, compare=False)
    """float[L, E]: the experts with the largest numbers are high, as many as have room, and never
    change."""
    seed: int | None = None
    """The seed of a random map."""
    quantizer: str = "rtn"
    """How to make the int versions that the checkpoint lacks."""
    hi_share: float | None = None
    """Share of the experts that are high; None: as many as the budget has room for."""
    spares: int = 0
    """Free cells of each version, which bound how many transitions a step can begin; 0: versions
    never change."""
    step_bytes: int | None = None
    """Most bytes of transitions in a step; None: as many as the device allows."""
    publish: str = "step"
    """When a new version is used: after the `step` that copies it, or at the `arrival` of its last
    byte over the queue, beside the steps. Then outputs depend on times."""
    of_checkpoint: bool = False
    """Whether experts are as in the checkpoint's files; `of_model` fills in the versions."""
    paged: bool = False
    """Whether layers have fewer cells than experts, so that experts can be missed; else every
    expert is always resident in one of the versions."""

    @property
    def lossy(self) -> bool:
        """Whether the bits of the output differ from those with the checkpoint's experts."""
        return not self.of_checkpoint and not {*LOSSY}.isdisjoint(self.versions)

    def of_model(self, *versions: str) -> Precision:
        """The precision for a checkpoint whose experts are in `versions`, or in CHECKPOINT while
        they are not known."""
        if not self.of_checkpoint:
            if CHECKPOINT not in self.versions or len(versions) != 1:
                return self
            return dataclasses.replace(self, versions=(versions[0], self.versions[LO]))
        if versions == ("dense",):
            return Precision("dense")
        return dataclasses.replace(self, name=CHECKPOINT, versions=versions)

    @property
    def mixed(self) -> bool:
        """Whether there is a high and a low version."""
        return len(self.versions) > 1 and not self.of_checkpoint

    @property
    def policies(self) -> tuple[Policy, ...]:
        """The policies that change versions while the model runs."""
        return tuple(each for each in (self.policy, self.promotions) if each is not None)

    def start(
        self,
        layers: int,
        experts: int,
        capacity: int,
        has_all_versions: Sequence[bool] | None = None,
    ) -> np.ndarray:
        """The map int8[L, E] at the start.

        - `layers`, `experts`: the model's MoE layers, and the experts of each.
        - `capacity`: how many high experts have room; a map from a file ignores it.
        - `has_all_versions`: the layers with two versions; the others have the low one. None: all.

        Raises ValueError for a map of another model.
        """
        if self.given is not None:
            check_shape(self.given, (layers, experts), "map")
            if has_all_versions is None:
                return self.given
            return np.where(np.array(has_all_versions)[:, None], self.given, np.int8(LO))
        if self.hot is not None:
            check_shape(self.hot, (layers, experts), "map")
            return top_map(self.hot, capacity, has_all_versions)
        if self.seed is not None:
            return random_map(layers, experts, capacity, self.seed, has_all_versions)
        if isinstance(self.policy, DynaExq):
            return self.policy.start(layers, experts, capacity, has_all_versions)
        return np.full((layers, experts), LO if self.mixed else 0, np.int8)

    def report(self) -> dict[str, Any]:
        """The precision as plain data, for statistics and results."""
        names: tuple[str, ...] = ()
        if isinstance(self.policy, DynaExq):
            names = ("alpha", "margin", "slack", "interval")
        elif isinstance(self.policy, Hobbit):
            names = ("threshold",)
        return {
            "name": self.name,
            "versions": list(self.versions),
            "in_transit": self.in_transit,
            "changes_bits": self.lossy,
            **({"spares": self.spares} if self.spares else {}),
            **({} if self.step_bytes is None else {"step_bytes": self.step_bytes}),
            **({} if self.publish == "step" else {"publish": self.publish}),
            **({"paged": self.paged} if self.mixed else {}),
            **({} if self.promotions is None else {"promote": self.promotions.most}),
            **{name: getattr(self.policy, name) for name in names},
        }


def precision_of(text: str | None, *, seed: int = 0) -> Precision:
    """Parses NAME[,KEY=VALUE…] or NAME=PATH[,…].

    dynaexq, hobbit, map and random mix two versions, hi and lo (default: dense and int4). A map, or
    the scores of dynaexq, is a .npy file or the directory of a trace; with a trace, the experts
    that it selected most are high.

    - `text`: the option; None: "checkpoint".
    - `seed`: of random, where the text has none.

    Raises ValueError as parse_option and read_trace do, for a setting out of range, and for a file
    without such an array.
    """
    name, path, keys = parse_option("precision", text or CHECKPOINT, _SETTINGS, paths=("map",))
    if name == CHECKPOINT:
        return Precision("dense", of_checkpoint=True)
    if name in VERSIONS:
        return Precision(name, (name,), **keys)
    paged, hi_share = keys.pop("paged", False), keys.pop("hi_share", None)
    moves = {key: keys.pop(key) for key in ("spares", "step_bytes", "publish") if key in keys}
    if paged and moves:
        raise ValueError(
            f"{next(iter(moves))} does not apply with paged=true; leave one of them out"
        )
    if "step_bytes" in moves and "spares" not in moves and name != "dynaexq":
        raise ValueError(
            "step_bytes bounds what versions that change move; add spares=1, or leave it out"
        )
    plan = Precision(
        name,
        _pair(keys.pop("hi", "dense"), keys.pop("lo", "int4")),
        hi_share=hi_share,
        paged=paged,
        quantizer=keys.pop("quantizer", "rtn"),
        **moves,
    )
    if name == "map":
        if path is None:
            raise ValueError(
                "precision 'map' needs a map or the trace of a run: map=FILE, map=TRACE "
                "(docs/how-to/precision.md)"
            )
        if os.path.isdir(path):
            return dataclasses.replace(plan, hot=count_selections(read_trace(path)))
        if hi_share is not None and not paged:
            raise ValueError(
                "precision 'map' takes no hi_share: the map names the experts in high precision"
            )
        return dataclasses.replace(plan, given=check_map(read_array(path, "map"), 2))
    if name == "hobbit":
        promotions = Promotions(keys.pop("promote")) if "promote" in keys else None
        return dataclasses.replace(plan, policy=Hobbit(**keys), promotions=promotions, paged=True)
    if name == "random":
        return dataclasses.replace(plan, seed=keys.get("seed", seed))
    if (path := keys.get("scores")) is not None:
        keys["scores"] = (
            mean_selections(read_trace(path), keys.get("interval", DynaExq.interval))
            if os.path.isdir(path)
            else read_array(path, "scores")
        )
    spares = plan.spares if paged else plan.spares or 1
    return dataclasses.replace(plan, policy=DynaExq(**keys, paged=paged), spares=spares)


MIXED_SETTINGS: dict[str, Reader] = {
    "hi": one_of(CHECKPOINT, *VERSIONS),
    "lo": one_of(*VERSIONS),
    "hi_share": share,
    "quantizer": str,
    "paged": yes,
    "spares": whole(1),
    "step_bytes": whole(1),
}
"""Settings of every way to mix two versions, with their readers."""

_SETTINGS: dict[str, dict[str, Reader]] = {
    CHECKPOINT: {},
    "dense": {},
    "lossless12": {"in_transit": yes},  # other versions do not decode to the dense bits
    **{version: {"quantizer": str} for version in LOSSY},
    "random": {**MIXED_SETTINGS, "seed": whole()},
    "map": MIXED_SETTINGS,
    "hobbit": {
        **{name: MIXED_SETTINGS[name] for name in ("hi", "lo", "hi_share", "quantizer")},
        "threshold": number,
        "promote": whole(1),
    },
    "dynaexq": {
        **MIXED_SETTINGS,
        "interval": str,
        "alpha": number,
        "margin": number,
        "slack": whole(),
        "scores": str,
        "publish": one_of("step", "arrival"),
    },
}
"""Name that LLM(precision=…) and --precision take, a version or a way to mix two, → its
settings."""


def _pair(hi: str, lo: str) -> tuple[str, str]:
    if hi == CHECKPOINT:
        if lo not in LOSSY:
            raise ValueError(f"lo={lo} cannot be with hi=checkpoint; choose {', '.join(LOSSY)}")
        return hi, lo  # which has more bytes is known with the model
    if (order := [*VERSIONS]).index(hi) >= order.index(lo):
        raise ValueError(
            f"hi={hi} must have more bytes than lo={lo}; from the most to the fewest: "
            f"{', '.join(VERSIONS)}"
        )
    return hi, lo

"""The arms of a grid: policies as a definition names them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from host_offload.control.interface import Policy, Spec
from host_offload.control.rules import (
    BETWEEN_LAYERS,
    check_policies,
    name_of,
    search_of,
    wants_pool,
)
from host_offload.policies.budget.mv_wsa import MvWsa
from host_offload.policies.budget.peak_headroom import PeakHeadroom
from host_offload.policies.budget.user_caps import UserCaps
from host_offload.policies.eviction.belady import belady_of
from host_offload.policies.eviction.eviction_names import POLICIES, with_eviction
from host_offload.policies.placement.placement_names import add_placement, placement_policy
from host_offload.policies.placement.placement_policy import PlacementPolicy
from host_offload.policies.prefetch import expertflow
from host_offload.policies.prefetch.fitted import learned_bytes
from host_offload.policies.prefetch.forest import check_trainer
from host_offload.policies.prefetch.oracle import clairvoyant_of, oracle_of
from host_offload.policies.prefetch.prefetch_names import PREFETCH
from host_offload.simulate import split_experts
from host_offload.simulate.split_experts import HalfExperts
from host_offload.sizing.split import SplitRule
from host_offload.traces.reader import Trace
from moejax.errors import UserError, user_errors
from moejax.evaluate.experiments.policy_file import (
    digests_of,
    file_digest,
    find_class,
    load_module,
    make_policy,
)
from moejax.step.buddies import COVER, MOST, SPREAD, read_buddies
from moejax.step.step_parts import RECORDED_ARRAYS
from pallas_kernels.option_text import parse_pairs

BUDGETS = frozenset({"kv_pages", "max_running", "transitions"})
"""Decisions that a policy of a grid may not make, since its engine's arena is that of the largest
budget."""

TRAIN, RUN = "train", "run"

BETWEEN_CONTROL = "clairvoyant"

CONTROLS: Mapping[str, Callable[..., Policy]] = {
    "oracle": oracle_of,
    "belady": belady_of,
    BETWEEN_CONTROL: clairvoyant_of,
}
"""Makers of the policy of NAME=run, by name, from the trace of the very run: the prefetch and the
eviction that know it, and both in one that looks between layers."""

BUDDIES = "buddies"


@dataclasses.dataclass(frozen=True)
class Substitution:
    """BuddyMoE as a grid names it: residents stand in for missing experts, which CHANGES OUTPUTS.
    Steps are compiled with it."""

    option: str
    """The engine's cache_aware_routing."""


def _substitution(
    trace: Trace, most: int = MOST, cover: float = COVER, spread: float = SPREAD
) -> Substitution:
    """Returns the substitution by the buddies of a trace. Raises ValueError as read_buddies."""
    option = f"{BUDDIES}={trace.directory},most={most},cover={cover},spread={spread}"
    read_buddies(option, trace.header.layers, trace.header.experts)
    return Substitution(option)


LEARNERS: Mapping[str, Callable[..., Policy | HalfExperts | Substitution]] = {
    **POLICIES.fits,
    **PREFETCH.fits,
    split_experts.NAME: split_experts.fit,
    BUDDIES: _substitution,
}
"""Makers of the policy of NAME=train, by name, from a trace of the texts' training part;
ExpertFlow's takes the model's routers too."""

_MAPS, _GATES = frozenset({"probs", "embedding"}), frozenset({"gate_input"})

_LEARNED_FROM = {
    "expert_map": _MAPS,
    "expert_map_in_step": _MAPS,
    "expertflow": _GATES,
    "learned": _GATES,
    "promoe": _GATES,
}
"""Arrays that such a trace must have beside the routing, by name."""


def _mv_wsa(
    decay: float = SplitRule.decay,
    expect_returns: bool = True,
    allocation: str = "uniform",
    trace: Any = None,
) -> Policy:
    rule = SplitRule(decay=decay)
    return MvWsa(trace=trace, expect_returns=expect_returns, allocation=allocation, rule=rule)


MOVERS: Mapping[str, Callable[..., Policy]] = {
    "mv_wsa": _mv_wsa,
    "mv_wsa=train": functools.partial(_mv_wsa, trace=TRAIN),
    "peak_headroom": PeakHeadroom,
    "right_size": UserCaps,
}
"""Policies by name that move the line between experts and KV, in grids of conversations. MvWsa gets
the prices and, with `train`, a trace when a run begins."""


@dataclasses.dataclass(frozen=True)
class Later:
    """A policy that a trace of the grid makes: NAME=train, or NAME=run, which knows the run."""

    name: str
    settings: Mapping[str, Any]
    fit: Callable[..., Policy | HalfExperts | Substitution]
    arrays: frozenset[str] = frozenset()
    """Arrays that the trace must have beside the routing."""

    def make(self, trace: Trace, router: np.ndarray | None) -> Policy | HalfExperts | Substitution:
        """Returns the policy. Forests take minutes to fit, so they are kept beside the trace and
        read again.

        - `router`: float32[L, D, E], which forests alone need.

        Raises what the policy's fit raises.
        """
        if self.name != expertflow.NAME:
            return self.fit(trace, **self.settings)
        assert router is not None  # definitions without a model are refused: no gate inputs
        trained = {name: value for name, value in self.settings.items() if name != "pool"}
        digest = hashlib.sha256(repr(sorted(trained.items())).encode()).hexdigest()[:16]
        kept = trace.directory.with_name(f"{trace.directory.name}-{digest}.safetensors")
        return expertflow.read_or_fit(kept, trace, router, **self.settings)


@dataclasses.dataclass(frozen=True)
class Arm:
    """A policy, or several together, that a grid compares with others."""

    name: str
    given: tuple[Policy | HalfExperts | Substitution | Later, ...] = ()
    """The policies of the name, in its order."""
    files: tuple[tuple[str, str], ...] = ()
    """Files that it was read from, with their SHA-256. Other content makes another experiment."""
    shared: bool = False
    """Whether it may move the line between experts and KV."""

    @functools.cached_property
    def policies(self) -> tuple[Policy, ...]:
        """Its policies, eviction first; without policies that have not learned yet."""
        return _together(self.given)

    @property
    def learns(self) -> tuple[str, ...]:
        """Names of its policies that have not learned yet."""
        return tuple(p.name for p in self.given if isinstance(p, Later) and p.name not in CONTROLS)

    @property
    def knows_run(self) -> bool:
        return any(isinstance(each, Later) and each.name in CONTROLS for each in self.given)

    @property
    def train_arrays(self) -> frozenset[str]:
        """Arrays that a trace must have to teach it, beside the routing."""
        return frozenset().union(*(p.arrays for p in self.given if isinstance(p, Later)))

    def teach(self, trace: Trace, router: np.ndarray | None = None) -> Arm:
        """Returns this arm with what `trace` teaches.

        - `router`: float32[L, D, E] of its model; None without a model.

        Raises UserError for a trace that cannot be used.
        """
        if not self.learns:
            return self
        with user_errors(where=f"policy {self.name!r}: "):
            given = tuple(
                each.make(trace, router)
                if isinstance(each, Later) and each.name not in CONTROLS
                else each
                for each in self.given
            )
        return dataclasses.replace(self, given=given).check()

    def check(self) -> Arm:
        """Raises UserError for policies that cannot run together, or not in a grid."""
        with user_errors(where=f"policy {self.name!r}: "):
            if self.halved and len(self.given) > 1:
                raise ValueError("halves of experts have an LRU cache of their own; name it alone")
            # With the driver that has all moments: which one runs it is another question.
            check_policies(self.policies, "host")
        for policy in () if self.shared else self.policies:
            if moves := sorted(policy.writes & BUDGETS):
                raise UserError(
                    f"policy {self.name!r}: {name_of(policy)} writes {moves[0]!r}, and in a grid "
                    "budgets are the grid's; leave it out"
                )
        return self

    def policies_in(self, trace: Trace | None) -> tuple[Policy, ...]:
        """The policies of a run whose routing is that of `trace`."""
        if not self.knows_run:
            return self.policies
        assert trace is not None
        return _together(
            [one.make(trace, None) if isinstance(one, Later) else one for one in self.given]
        )

    @property
    def halves(self) -> HalfExperts | None:
        """MoEpic, which is simulated alone; None: experts are whole."""
        return next((one for one in self.given if isinstance(one, HalfExperts)), None)

    @property
    def halved(self) -> bool:
        """Whether it is, or will be, `halves`."""
        return self.halves is not None or split_experts.NAME in self.learns

    @property
    def substitution(self) -> str | None:
        """The engine's option by which residents stand in for missing experts; None: none do, or
        their trace is not recorded yet."""
        return next((one.option for one in self.given if isinstance(one, Substitution)), None)

    @property
    def substitutes(self) -> bool:
        """Whether it has, or will have, a `substitution`."""
        return self.substitution is not None or BUDDIES in self.learns

    @property
    def placement(self) -> PlacementPolicy | None:
        """What gives experts to a second processor; None without one."""
        return next((one for one in self.given if isinstance(one, PlacementPolicy)), None)

    @property
    def moves_cells(self) -> bool:
        """Whether it decides how many cells layers have, which a grid's engines do not allow."""
        return any("cells" in policy.writes for policy in self.policies)

    @property
    def pooled(self) -> bool:
        """Whether cells move from layer to layer under it."""
        search = search_of(self.policies)
        return any(map(wants_pool, self.policies)) or (search is not None and search.pooled)

    def learned_bytes(self, spec: Spec) -> int:
        """Returns the bytes of what it learned or may learn, which experts do not get."""
        return learned_bytes(self.policies, spec)

    @property
    def needs_host(self) -> bool:
        """Whether it looks between layers."""
        later = any(isinstance(each, Later) and each.name == BETWEEN_CONTROL for each in self.given)
        return later or any(policy.moments & BETWEEN_LAYERS for policy in self.policies)

    @property
    def in_step(self) -> bool:
        """Whether compiled steps search maps for it."""
        return search_of(self.policies) is not None or "expert_map_in_step" in self.learns

    @property
    def arrays(self) -> frozenset[str]:
        """Arrays that it needs of steps."""
        return RECORDED_ARRAYS & {need for policy in self.policies for need in policy.needs}

    @property
    def simulated_arrays(self) -> frozenset[str]:
        """Arrays that a trace must have to simulate it, also for its steps' search of maps."""
        asked = self.arrays | (_MAPS if search_of(self.policies) is not None else frozenset())
        return asked | (_GATES if self.halved else frozenset())


def _together(given: Sequence[Policy | HalfExperts | Substitution | Later]) -> tuple[Policy, ...]:
    """Returns the policies, eviction first. A placement predicts by networks among them."""
    known = [one for one in given if not isinstance(one, (HalfExperts, Substitution, Later))]
    policies: Sequence[Policy] = known
    for placed in known:
        if isinstance(placed, PlacementPolicy):
            policies = add_placement(placed, [one for one in policies if one is not placed])
    return with_eviction(None, [*policies])[1]


def read_arm(text: str, home: Path, *, shared: bool = False) -> Arm:
    """Returns the arm that `text` names: an eviction, a prefetch (NAME or NAME=PATH),
    placement=NAME or FILE.py:CLASS, each with optional settings, `mixtral-offloading,count=1`;
    several with + between them. LRU evicts if none of them does. NAME=train learns from the texts'
    training part; oracle=run, clairvoyant=run and belady=run are controls that know
    the run.

    - `home`: where relative files are.
    - `shared`: whether experts and KV share a memory, whose line policies may move (MOVERS too).

    Raises UserError for an unknown text, for policies that cannot run together, and for whatever a
    file of policies raises.
    """
    where = f"policy {text!r}: "
    found = [_read_policy(part.strip(), where, home, shared) for part in text.split(" + ")]
    files = {path: digest for _, read in found for path, digest in read.items()}
    return Arm(text, tuple(policy for policy, _ in found), tuple(files.items()), shared).check()


def _read_policy(
    text: str, where: str, home: Path, shared: bool
) -> tuple[Policy | HalfExperts | Later, dict[str, str]]:
    """Returns (the policy, its files with their SHA-256)."""
    name, _, pairs = text.partition(",")
    base, _, path = name.partition("=")
    place, colon, class_name = base.rpartition(":")
    module, arrays = None, _LEARNED_FROM.get(base, frozenset())
    learns = path == TRAIN and (base in LEARNERS or bool(colon))
    with user_errors(where=where):
        if (placed := _placement_of(text)) is not None:
            return placed, {}
    if place.endswith(".py") and (learns or not path):
        module = load_module((home / place).resolve(), where)
        made: Callable[..., Any] = find_class(module, class_name, where)
        if learns:
            arrays = RECORDED_ARRAYS & getattr(made, "needs", frozenset())
            made = (
                getattr(made, "fit", None) or getattr(module, "fit", None) or _no_fit(where, made)
            )
    elif learns:
        made = LEARNERS[base]
        if base == expertflow.NAME:  # before a model is loaded and a trace recorded
            with user_errors(where=where):
                check_trainer()
    elif path == RUN and base in CONTROLS:
        made = CONTROLS[base]
    elif path and base in PREFETCH.from_path:
        at = (home / path).resolve()
        with user_errors(where=where):
            parse_pairs(f"{base}=PATH, which has its own settings,", pairs, {})
            return PREFETCH.parse(f"{base}={at}"), {str(at): file_digest(at)}
    else:
        made = _find_policy(name, {**POLICIES, **PREFETCH.plain, **(MOVERS if shared else {})})

    def build(settings: dict[str, Any]) -> Policy | Later:
        later = learns or path == RUN
        return Later(base, settings, made, arrays) if later else made(**settings)

    found, reads = make_policy(name, pairs, made, where, build)
    return found, {} if module is None else digests_of(module, reads)


def _placement_of(text: str) -> PlacementPolicy | None:
    """Returns the placement that a part of an arm's text names; None if it names none. Raises
    ValueError as placement_policy."""
    name, equals, placement = text.partition("=")
    return placement_policy(placement) if name == "placement" and equals else None


def changed_outputs(text: str) -> str:
    """Returns how the arm that `text` names changes outputs; "" if it does not. Raises as
    read_arm."""
    parts = [part.strip() for part in text.split(" + ")]
    if any(one.defer for part in parts if (one := _placement_of(part)) is not None):
        return "experts of a token are added a layer late"
    if any(part.partition(",")[0] == f"{BUDDIES}={TRAIN}" for part in parts):
        return "residents stand in for missing experts"
    return ""


def _no_fit(where: str, made: type) -> NoReturn:
    raise UserError(
        f"{where}{made.__name__} cannot learn: it needs fit(trace), a class method or a function "
        "of its file, which returns the policy"
    )


def _find_policy(name: str, known: Mapping[str, Any]) -> Any:
    if name in known:
        return known[name]
    with_files = ", ".join(f"{n}=PATH" for n in sorted(PREFETCH.from_path))
    runs = ", ".join(f"{n}={RUN}" for n in CONTROLS)
    raise UserError(
        f"unknown policy {name!r}; write one of {', '.join(known)}, {with_files}, "
        f"{', '.join(f'{n}={TRAIN}' for n in LEARNERS)}, {runs}, placement=NAME, or "
        "FILE.py:CLASS of your own (docs/extending/write_a_policy.md); several together as A + B"
    )

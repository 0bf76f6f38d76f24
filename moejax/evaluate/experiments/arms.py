"""What a grid compares: policies as a definition names them."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from host_offload.control.interface import Moment, Policy, Spec
from host_offload.control.rules import (
    BETWEEN_LAYERS,
    check_policies,
    name_of,
    search_of,
    wants_pool,
)
from host_offload.policies.budget.mv_wsa import MvWsa
from host_offload.policies.budget.peak_headroom import PeakHeadroom
from host_offload.policies.eviction import static
from host_offload.policies.eviction.eviction_names import POLICIES, with_eviction
from host_offload.policies.prefetch.expertflow import expertflow_training as forests
from host_offload.policies.prefetch.fitted import learned_bytes
from host_offload.policies.prefetch.llapor import llapor_training as training
from host_offload.policies.prefetch.oracle import oracle_of
from host_offload.policies.prefetch.prefetch_names import FIT, FROM_PATH, PREFETCH, prefetch_policy
from host_offload.sizing.split import SplitRule
from host_offload.traces.reader import Trace
from moejax.errors import UserError, as_user_error, user_errors
from moejax.evaluate.experiments.sources.named import named
from moejax.step.step_parts import TRACE_ARRAYS

BUDGETS = frozenset({"kv_pages", "max_running", "transitions"})
"""What a policy of a grid may not decide: its engine's arena is that of the largest budget."""

TRAIN, RUN = "train", "run"

LEARNERS: Mapping[str, Callable[..., Policy]] = {
    **FIT,
    "expertflow": forests.kept_policy,
    "learned": training.fit,
    "static": static.fit,
}
"""Name → what makes the policy of NAME=train from a trace of the texts' training part; ExpertFlow's
takes the model's routers too."""


def _mv_wsa(
    decay: float = SplitRule.decay,
    expect_returns: bool = True,
    allocation: str = "uniform",
    window: int = MvWsa.window,
    floor_share: float = MvWsa.floor_share,
    trace: str | None = None,
) -> Policy:
    """MvWsa, told what things cost by the grid's prices."""
    return MvWsa(
        rule=SplitRule(decay=decay),
        expect_returns=expect_returns,
        allocation=allocation,
        window=window,
        floor_share=floor_share,
        trace=trace,
    )


MOVERS: Mapping[str, Callable[..., Policy]] = {
    "mv_wsa": _mv_wsa,
    "mv_wsa=train": functools.partial(_mv_wsa, trace=TRAIN),
    "peak_headroom": PeakHeadroom,
}
"""Name → policies that move the line between experts and KV, in grids of conversations."""

_LEARNED_FROM = {
    "expert_map": {"probs", "embedding"},
    "expert_map_in_step": {"probs", "embedding"},
    "expertflow": {"gate_input"},
    "learned": {"gate_input"},
    "promoe": {"gate_input"},
}
"""Name → what such a trace must have beside the routing."""


@dataclasses.dataclass(frozen=True)
class Later:
    """A policy that a trace of the grid makes: NAME=train, or `oracle=run`, which knows the run."""

    name: str
    settings: Mapping[str, Any]

    @property
    def needs_router(self) -> bool:
        """It learns what the model's routers get wrong."""
        return self.name == forests.NAME

    def made(self, trace: Trace, router: np.ndarray | None) -> Policy:
        """The policy. router: float32[L, D, E], None where there is no model. Forests, which take
        minutes, are kept beside the trace, named by what they were learned from, and read again.
        Raises what its fit does."""
        if not self.needs_router:
            return LEARNERS[self.name](trace, **self.settings)
        assert router is not None  # definitions without a model are refused: no gate inputs
        trained = {name: value for name, value in self.settings.items() if name != "pool"}
        told = hashlib.sha256(repr(sorted(trained.items())).encode())
        for array in (trace.array("token.ids"), router):
            told.update(np.ascontiguousarray(array).tobytes())
        kept = f"{trace.directory.name}-{self.name}-{told.hexdigest()[:16]}.safetensors"
        return forests.kept_policy(trace.directory.with_name(kept), trace, router, **self.settings)


@dataclasses.dataclass(frozen=True)
class Arm:
    """One of the things that are compared: a name and its policies, eviction first."""

    name: str
    policies: tuple[Policy, ...]
    """Its policies; of one that learns only once it has (`taught`)."""
    files: tuple[tuple[str, str], ...]
    """Files that it was read from, with their SHA-256: another content is another experiment."""
    given: tuple[Policy | Later, ...] = ()
    """What the name says, in its order."""
    oracle: Mapping[str, Any] | None = None
    """Settings of an oracle of each run; None: there is none."""
    shared: bool = False
    """It may move the line between experts and KV."""

    @property
    def learns(self) -> tuple[str, ...]:
        """Names of policies that were not taught yet."""
        return tuple(each.name for each in self.given if isinstance(each, Later))

    @property
    def train_arrays(self) -> frozenset[str]:
        """What a trace must have to teach it, beside the routing."""
        return frozenset().union(*(_LEARNED_FROM.get(name, ()) for name in self.learns))

    @property
    def learns_by_router(self) -> bool:
        """What teaches it has to know the model's routers."""
        return any(isinstance(each, Later) and each.needs_router for each in self.given)

    def taught(self, trace: Trace, router: np.ndarray | None = None) -> Arm:
        """This arm with what `trace` teaches. router: float32[L, D, E] of its model, None where
        there is none. Raises UserError for a trace of no use."""
        if not self.learns:
            return self
        with user_errors(where=f"policy {self.name!r}: "):
            given = [
                each.made(trace, router) if isinstance(each, Later) else each for each in self.given
            ]
        return _ready(dataclasses.replace(self, given=tuple(given)))

    def policies_in(self, trace: Trace | None) -> tuple[Policy, ...]:
        """The policies of a run whose routing is that of `trace`."""
        if self.oracle is None:
            return self.policies
        assert trace is not None
        return *self.policies, oracle_of(trace, **self.oracle)

    @property
    def moments(self) -> frozenset[Moment]:
        """When its policies are asked; empty where tables say all that they decide."""
        return frozenset().union(*(policy.moments for policy in self.policies))

    @property
    def moves_cells(self) -> bool:
        """It decides how many cells the layers have, which no engine of a grid lets it."""
        return any("cells" in policy.writes for policy in self.policies)

    @property
    def pooled(self) -> bool:
        """Cells go from layer to layer under it."""
        return any(map(wants_pool, self.policies))

    def learned_bytes(self, spec: Spec) -> int:
        """Bytes of what it learned or may learn, which are memory that experts do not get."""
        return learned_bytes(self.policies, spec)

    @property
    def needs_host(self) -> bool:
        """It looks between layers."""
        return any(policy.moments & BETWEEN_LAYERS for policy in self.policies)

    @property
    def arrays(self) -> frozenset[str]:
        """What steps must give out for it."""
        return TRACE_ARRAYS & {need for policy in self.policies for need in policy.needs}

    @property
    def simulated_arrays(self) -> frozenset[str]:
        """What a trace must have to simulate it: also what its steps search maps by."""
        searched = {"probs", "embedding"} if search_of(self.policies) is not None else set()
        return self.arrays | searched


def arm_of(text: str, home: Path, *, shared: bool = False) -> Arm:
    """The arm that `text` names: an eviction, a prefetch (NAME or NAME=PATH) or FILE.py:CLASS, each
    with settings in parentheses if wanted, `mixtral-offloading(count=1)`; several with + between
    them. LRU evicts where none of them does. NAME=train learns from the texts' training part;
    oracle=run is a control that knows the run.

    home: where files that are not absolute are. shared: experts and KV share a memory, whose line
    policies may move (MOVERS too). Raises UserError for what is none of these, for policies that
    cannot run together, and for whatever a file of policies raises.
    """
    given: list[Policy | Later] = []
    files: dict[str, str] = {}
    oracle = None
    for part in (part.strip() for part in text.split("+")):
        made, read = _policy(part, text, home, shared)
        files.update(read)
        if isinstance(made, Later) and made.name == "oracle":
            oracle = made.settings
        else:
            given.append(made)
    return _ready(Arm(text, (), tuple(files.items()), tuple(given), oracle, shared))


def _ready(arm: Arm) -> Arm:
    """The arm with its policies, unless it has to learn first. Raises UserError for policies that
    cannot run together."""
    if arm.learns:
        return arm
    given = [each for each in arm.given if not isinstance(each, Later)]
    with user_errors(where=f"policy {arm.name!r}: "):
        _, every = with_eviction(None, given)
        # With the driver that has all moments: which one runs it is another question.
        check_policies(every, "host")
    for policy in () if arm.shared else every:
        if moves := sorted(policy.writes & BUDGETS):
            raise UserError(
                f"policy {arm.name!r}: {name_of(policy)} writes {moves[0]!r}, and in a grid "
                "budgets are the grid's; leave it out"
            )
    return dataclasses.replace(arm, policies=tuple(every))


def _policy(
    part: str, whole: str, home: Path, shared: bool
) -> tuple[Policy | Later, dict[str, str]]:
    name, settings = named(part, f"policy {whole!r}")
    if shared and name in MOVERS:
        with as_user_error(f"policy {whole!r}: {name} does not take {settings}"):
            return MOVERS[name](**settings), {}
    if name == f"oracle={RUN}" or name in (f"{each}={TRAIN}" for each in LEARNERS):
        later = Later(name.partition("=")[0], settings)
        if later.name in LEARNERS:
            with as_user_error(f"policy {whole!r}: {name} does not take {settings}"):
                inspect.signature(LEARNERS[later.name]).bind_partial(**settings)
        if later.needs_router:  # before a model is loaded and a trace recorded
            with user_errors(where=f"policy {whole!r}: "):
                forests.check_trainer()
        return later, {}
    place, colon, found = name.rpartition(":")
    if colon and place.endswith(".py"):
        path = (home / place).resolve()
        made = _in_file(path, found, whole)
        files = {str(path): file_digest(path)}
        with as_user_error(f"policy {whole!r}: {found}{settings or '()'} fails"):
            return made(**settings), files
    name, given, path = name.partition("=")
    if given and name in FROM_PATH:
        at = (home / path).resolve()
        if settings:
            raise UserError(
                f"policy {whole!r}: what {name} learned has its settings; leave out (…)"
            )
        with user_errors(where=f"policy {whole!r}: "):
            # An oracle's is a directory, whose steps nobody edits.
            files = {str(at): file_digest(at)} if at.is_file() else {str(at): ""}
            return prefetch_policy(f"{name}={at}"), files
    known = POLICIES | PREFETCH
    if given or name not in known:
        with_files = ", ".join(f"{n}=PATH" for n in FROM_PATH)
        raise UserError(
            f"unknown policy {name!r}; write one of {', '.join(known)}, {with_files}, "
            f"{', '.join(f'{n}={TRAIN}' for n in LEARNERS)}, oracle={RUN}, or "
            "FILE.py:CLASS of your own (docs/write_a_policy.md); several together as A + B"
        )
    with as_user_error(f"policy {whole!r}: {name} does not take {settings}"):
        return known[name](**settings), {}


def _in_file(path: Path, name: str, whole: str) -> Callable[..., Policy]:
    module = _module(path, whole)
    made = getattr(module, name, None)
    if not isinstance(made, type):
        has = sorted(
            n for n, v in vars(module).items() if isinstance(v, type) and hasattr(v, "decide")
        )
        raise UserError(
            f"policy {whole!r}: {path} has no class {name}; it has {', '.join(has) or 'no policy'}"
        )
    return made


def _module(path: Path, whole: str) -> ModuleType:
    if not path.is_file():
        raise UserError(f"policy {whole!r}: there is no file {path}")
    name = f"moejax_policy_{path.stem}_{file_digest(path)[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up there
    try:
        with as_user_error(f"policy {whole!r}: {path} cannot be read"):
            spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def file_digest(path: Path) -> str:
    """SHA-256 of a file, as hexadecimal digits. Raises UserError where it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None

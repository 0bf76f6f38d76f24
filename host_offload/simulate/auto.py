"""`policy="auto"`: chooses among arms by predicted times that measured ones correct.

An arm is an eviction, with `+split` also a split of memory by need (KV keeps its recent peak and a
tenth, experts have the rest), with `+layers` more cells for layers in which these save more; or a
prefetch or a placement, or both, with their eviction. If experts are paged in two versions an arm
also says what misses and prefetches bring: one of them, or what a precision decides. A window of
decode steps prices the arms: seconds of computing and of moves, both corrected by the window's
measured times, and of the host work of one pool, which only steps with a pool show.
`choose_arm` then decides, a pure function. It changes to an arm that would have saved more, in the
steps since the load began or the last change, than the change costs: so whatever comes, changes
cost no more than what they answer. The same steps with the same times give the same choices, so a
replay of a trace repeats them.

Watching costs host time, and no more can be gained than misses take. So between windows a rest
lasts until COST of its misses' time pays for what was watched, and begins when no change is about
to pay. A split that is fitted anew is priced by the steps that follow.

Evictions have shadows, residents that follow what steps route as if that arm ran. With a prefetch
or placement among the arms, which decide between layers, a window is simulated under each arm
instead, from its first residents on. That may take longer than a load does. So a rest comes first,
until THINKING of its time has paid for it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from host_offload.control.control import Control
from host_offload.control.interface import (
    Decision,
    Moment,
    Observation,
    Policy,
    Spec,
)
from host_offload.control.rules import wants_pool
from host_offload.control.step_record import Glance, StepRecord
from host_offload.memory.budget import cells_of_versions, cells_per_layer
from host_offload.memory.tables import Residency
from host_offload.policies.eviction.eviction_names import with_eviction
from host_offload.policies.placement.placement_names import with_placement
from host_offload.policies.placement.placement_policy import PlacementPolicy
from host_offload.policies.precision.dynaexq import DynaExq
from host_offload.policies.precision.hobbit import Hobbit, find_heavy
from host_offload.policies.precision.maps import HI, LO, top_map
from host_offload.policies.precision.precision_names import precision_of
from host_offload.policies.prefetch.prefetch_names import PREFETCH, with_prefetch
from host_offload.simulate.recent import PLACES, ROWS, predict_recent, record_of, tables_of
from host_offload.simulate.shadows import Shadows, cold_shadows
from host_offload.simulate.timeline import Link
from host_offload.sizing.cell_allocation import allocate, share_anew
from host_offload.sizing.cost_model import CostModel
from host_offload.sizing.split import Division, division_of, peak_headroom
from host_offload.traces.recency import tails
from host_offload.traces.schema import TraceError

NAME = "auto"
SPLIT, LAYERS = "+split", "+layers"
PLACED, PRECISION = "placement=", "precision="
"""Parts of arms' names, before a placement or precision as options name it, or a version."""
DECIDE = "dynaexq", "hobbit"
"""Precisions that decide in which version a miss comes."""
EVICTIONS = ("lru", "lfu", "lfru")
KEEP = 0.9
"""Share that earlier windows keep of their weight."""
FORGET = 0.1
"""Share of a pool's host work that is forgotten at each choice without one, since it may have been
measured on a busy machine."""
OUTLIER = 4.0
"""A step that took so many times as long as those of its window was disturbed and does not count.
"""
COUNTED, SIMULATED = 0.5, 2.0
"""Weight of the last ratios of measured to predicted times, in steps: where a window's moves were
counted, and where they were simulated."""
LEAST = 0.05
"""What a window leaves at least of such a ratio, as a share."""
TRIFLE = 1e-6
"""Square of a share of steps: moves of less, as of a copy that ends late, say nothing."""
WATCH_S, COST = 6e-4, 0.05
"""Seconds that a step of a window costs the host, as measured on two cores, and the share of the
misses' time that they may cost."""
SWITCH_S = 2e-3
"""Seconds that a change costs beside its moves."""
AT_ONCE, LONGEST = 64, 4096
"""Steps: a rest that would be no longer does not begin, since much is missed and little was
watched; and misses of the longest rest, of which each step counts as one at least."""
SIMULATE_S, THINKING = 3e-3, 0.05
"""Least seconds of simulating a layer of a step under an arm, as measured on two cores, and the
share of the time that simulating may take."""
UNPAID = 3
"""Of a rest before a simulated window, until it is paid. It then has a step that was dispatched
without a copy of the tables, and one with it, after which the window begins."""
KEPT = 8
"""Windows of a load whose steps count: what the last one does not show, all of them may."""
OTHER_LOAD = 4
"""Ratio of two steps' sequences by which they are of different loads."""
SAMPLED, SHARED, GATE = 2, 4, 0.05
"""Of cells by layer: watched steps of which one counts, choices of which one shares anew, and the
least saving of misses by which it does."""
FEWER_BITS = 0.1
"""How much faster an arm must be that changes outputs, as a share of its time."""
LESS_KV = 0.05
"""The same of an arm whose split gives experts memory that KV had at the start: requests that come
wait for it, a step of prompts or two."""
PEAKS, HEADROOM, DEAD = 32, 0.1, 2
"""Of splits: windows of which the peak counts, share beyond it, and the least gain in cells of
each layer."""


_NOTHING = Decision()


class Prices(NamedTuple):
    """What a choice is made from, by arm."""

    step_s: tuple[float, ...]
    """Seconds for as many tokens as a decode step of the present arm gives."""
    switch_s: tuple[float, ...]
    """Seconds of changing to it: SWITCH_S and those of the experts that it would hold and the
    present one does not; 0 for the present one."""
    current: int


def choose_arm(prices: Prices, *, horizon: int) -> int:
    """Returns the arm with which the next `horizon` steps are cheapest, the change included."""
    total = [step_s * horizon + s for step_s, s in zip(prices.step_s, prices.switch_s, strict=True)]
    return total.index(min(total))


def correct(
    seconds: np.ndarray,
    compute: np.ndarray,
    moves: np.ndarray,
    before: tuple[float, float],
    known: np.ndarray,
    prior: float = COUNTED,
) -> tuple[tuple[float, float], np.ndarray]:
    """Returns measured over predicted time of computing and of moves, by least squares over the
    steps of a window and those before it, and `known` with the window.

    - `seconds`, `compute`, `moves`: float64[n], measured times and predicted parts.
    - `before`: the last ratios, for what steps do not say: in some all miss alike.
    - `known`: float64[3, 3], products of computing, moves and seconds, summed over earlier windows,
      of which each KEEPs a share.
    - `prior`: weight of `before`, in steps.
    """
    parts = np.stack([compute, moves, seconds])
    if len(seconds) > 1:  # steps may be read two by two: the second one then takes no time
        parts = parts[:, 1:] + parts[:, :-1]
    ordered = np.sort(parts[2])
    parts = parts[:, parts[2] <= OUTLIER * ordered[len(ordered) // 2]]
    parts = parts / max(parts[2].mean(), 1e-12)  # a trace may have no times
    known = KEEP * known + parts @ parts.T
    weights = prior * parts[:2].mean(axis=1) ** 2 + TRIFLE
    (first, both), (_, second) = (known[:2, :2] + np.diag(weights)).tolist()
    of_compute, of_moves = (known[:2, 2] + weights * before).tolist()
    size, (least, least_moves) = first * second - both * both, (LEAST * each for each in before)
    if (ratio := (second * of_compute - both * of_moves) / size) < least:
        return (least, max((of_moves - both * least) / second, least_moves)), known
    if (moved := (first * of_moves - both * of_compute) / size) < least_moves:
        return ((of_compute - both * least_moves) / first, least_moves), known
    return (ratio, moved), known


class Sample(NamedTuple):
    """A decode step of a window."""

    seconds: float
    compute_s: float
    missed: int
    fills: np.ndarray
    """int64[S]: experts that each shadow missed since the decode step before."""
    record: StepRecord | None
    """With a prefetch or placement among the arms."""


class Priced(NamedTuple):
    """A window of n steps. Seconds as predicted."""

    compute_s: np.ndarray
    """float64[n]"""
    moves_s: np.ndarray
    """float64[n], under the present arm."""
    arms_s: np.ndarray
    """float64[A, n], of moves under each arm."""
    differ: np.ndarray
    """int64[A], experts that each arm holds at the end and the present one does not."""


class Widths(NamedTuple):
    """Steps of the arms beside those of the present arm, as ratios, float64[A]."""

    rows: np.ndarray
    moves: np.ndarray


class Places(NamedTuple):
    """The shadows of the arms: one each, or one for each version of an arm with two. S of them, in
    the order of the arms. If layers lack the high version, its arm also has two."""

    first: np.ndarray
    """int64[A], of each arm."""
    fill_s: np.ndarray
    """float64[A, S]: predicted seconds of a miss, the mean of the layers that it can be in; 0 of
    other arms' shadows."""
    dearer: np.ndarray
    """float64[A]: by what the time of an arm is multiplied where outputs change."""


class Watched(NamedTuple):
    """State of Auto."""

    spec: Spec
    arm: int
    inner: tuple[Any, ...]
    """States of the present arm's policies."""
    shadows: Shadows
    places: Places
    division: Division
    cap: int
    """Cells of each layer with a split by need."""
    fitted: bool = False
    """Whether such a split was fitted; before, it is that of the start."""
    peaks: tuple[int, ...] = (0,)
    """Most KV pages in use in each of the last windows, the present one last."""
    kv_pages: tuple[int, int] = (-1, -1)
    """Of the first and the last step; −1: unknown."""
    window: tuple[Sample, ...] = ()
    """The last steps of the present load."""
    fresh: int = 0
    """Steps of the window since the last choice."""
    carried: int | np.ndarray = 0
    """int64[S]: experts that shadows missed in prefill steps since the last decode step."""
    brings: np.ndarray | None = None
    """bool[S, L, E]: experts that a miss brings in a shadow's version; None: all."""
    reuse: np.ndarray | None = None
    """float64[L, E]: Shadows.distances of late, for cells by layer."""
    taught: Mapping[Policy, Any] = {}
    """What policies with `learn` learned of all steps, each once for all arms that have it."""
    tables: Residency | None = None
    """Before the window, with a prefetch or placement among the arms."""
    known: Mapping[Policy, Any] = {}
    """`taught` before the window."""
    ratios: tuple[float, float] = (1.0, 1.0)
    """Measured over predicted seconds of computing and of moves."""
    steps: np.ndarray = np.zeros((3, 3))
    """What `correct` knows of the present load."""
    pool_s: float = 0.0
    """Seconds of host work of a step with one pool; 0 until one ran."""
    seconds: float = 0.0
    """When the step before was read."""
    watched: int = 0
    """Decode steps watched since the last rest."""
    held: int = 0
    """Decode steps since the load began or the arm changed."""
    rest: int = 0
    """Misses until the next window begins; 0: there is one. If windows are simulated: decode steps
    once it is paid, UNPAID before."""
    owed_s: float = 0.0
    """Seconds of simulating that were not paid yet."""
    usual_s: float = 0.0
    """Seconds of a step of a simulated window, until the step after it shows what that took; then
    0."""
    load: int = 0
    """Sequences of the present load's first step."""
    switches: int = 0
    switched: int = 0
    """Experts that the switches moved, as predicted."""
    prices: tuple[float, ...] = ()
    priced: tuple[float, ...] = ()
    """Sums of the prices of all choices."""
    choices: int = 0
    said: str = ""


@dataclasses.dataclass(frozen=True)
class Auto:
    """Runs one of several arms, and another one when that pays."""

    cells: tuple[int, ...]
    """Of each layer."""
    costs: CostModel
    link: Link | None = None
    """Of a queue; None: steps move experts themselves."""
    arms: tuple[str, ...] = EVICTIONS
    """The first one runs at the start."""
    ratios: tuple[float, float] = (1.0, 1.0)
    """Corrections that an earlier run learned."""
    pool_s: float = 0.0
    """Host work of a step with one pool, likewise."""
    source: str = "stated"
    """Where the predicted times are from."""
    window: int = 8
    """Decode steps between choices."""
    forced: int | None = None
    """Seed of choices at random, for tests; None: by prices."""
    bare: bool = False
    """Whether steps say what they route and nothing else, as in generated traces."""
    same_bits: bool = True
    """Whether the second processor has the device's bits."""

    policy_name: str = NAME

    @functools.cached_property
    def policies(self) -> tuple[tuple[Policy, ...], ...]:
        """Of each arm."""
        return tuple(policies_of(arm) for arm in self.arms)

    @functools.cached_property
    def predicted(self) -> tuple[tuple[Policy, ...], ...]:
        """Of each arm, to predict it: as if the device waited for experts that are deferred, which
        no prediction has."""
        waits = functools.partial(dataclasses.replace, defer=0)
        return tuple(
            tuple(waits(p) if isinstance(p, PlacementPolicy) else p for p in each)
            for each in self.policies
        )

    @functools.cached_property
    def ahead(self) -> bool:
        """Whether an arm decides between layers what moves."""
        return any(map(is_ahead, self.arms))

    @functools.cached_property
    def _active(self) -> tuple[frozenset[Moment], ...]:
        """Moments of each arm."""
        own = frozenset({Moment.STEP_END})
        return tuple(own.union(*(policy.moments for policy in each)) for each in self.policies)

    @functools.cached_property
    def _silent(self) -> tuple[bool, ...]:
        """Of each arm: whether none of its policies is asked."""
        return tuple(not any(policy.moments for policy in each) for each in self.policies)

    @functools.cached_property
    def pooled(self) -> np.ndarray:
        """bool[A]: whether an arm has one pool of cells."""
        return np.array([any(map(wants_pool, each)) for each in self.policies])

    @property
    def pool(self) -> bool:
        """Whether an arm has one pool of cells. The others have an even share in each layer."""
        return bool(self.pooled.any())

    @functools.cached_property
    def versioned(self) -> bool:
        """Whether arms say in which version misses come."""
        return any(PRECISION in arm for arm in self.arms)

    @functools.cached_property
    def splits(self) -> bool:
        """Whether an arm splits memory by need."""
        return any(SPLIT in arm for arm in self.arms)

    @functools.cached_property
    def layered(self) -> bool:
        """Whether an arm shares cells by layer."""
        return any(LAYERS in arm for arm in self.arms)

    @functools.cached_property
    def alone(self) -> bool:
        """Whether there is nothing to watch."""
        return len(self.arms) == 1 and not self.layered

    @functools.cached_property
    def simulate_s(self) -> float:
        """Least seconds of simulating a window under each arm; 0: none is simulated."""
        steps = self._window * len(self.arms) if self.ahead and not self.alone else 0
        return SIMULATE_S * len(self.cells) * steps

    @functools.cached_property
    def hobbit(self) -> Hobbit | None:
        """The arm's by which a miss that weighs little comes in fewer bits."""
        return next((p for each in self.policies for p in each if isinstance(p, Hobbit)), None)

    @functools.cached_property
    def interval(self) -> str | None:
        """Of the arm whose policy has one."""
        found = (getattr(p, "interval", None) for each in self.policies for p in each)
        return next((each for each in found if each is not None), None)

    @functools.cached_property
    def _members(self) -> tuple[frozenset[Moment], frozenset[str], frozenset[str]]:
        """Moments, needs and writes."""
        needs, writes = {"ids", "phase", "missed"}, {"victim_weights", "note"}
        if not self.bare:
            needs |= {"bucket", "compiled", "waiting", "waiting_tokens"}
            needs |= {"kv_used", "kv_swapped", "kv_pages", "running"}
        if self.ahead:
            needs |= ROWS | PLACES
        if self.splits or self.layered:
            writes |= {"cells"}
        if self.splits:
            writes |= {"kv_pages"}
        if self.versioned:
            writes |= {"fill_version"}
        every = [policy for each in self.policies for policy in each]
        return (
            frozenset({Moment.STEP_END}).union(*(policy.moments for policy in every)),
            frozenset(needs).union(*(policy.needs for policy in every)),
            frozenset(writes).union(*(policy.writes for policy in every)),
        )

    @property
    def moments(self) -> frozenset[Moment]:
        return self._members[0]

    @property
    def needs(self) -> frozenset[str]:
        return self._members[1]

    @property
    def writes(self) -> frozenset[str]:
        return self._members[2]

    @property
    def victim_weights(self) -> tuple[int, int, int]:
        return self._weights(0)

    def _weights(self, arm: int) -> tuple[int, int, int]:
        return next(w for p in self.policies[arm] if (w := getattr(p, "victim_weights", None)))

    @functools.cached_property
    def fill_s(self) -> float:
        """Predicted seconds of a miss."""
        return self._fill_s(self.costs.expert_bytes)

    def _fill_s(self, size: float) -> float:
        if self.link is not None:
            return self.link.latency + size / self.link.rate
        return float(self.costs.costs().fill @ [1, size])

    @functools.cached_property
    def step_s(self) -> dict[int, float]:
        """Rows of a decode executable → predicted seconds with every expert resident."""
        return dict(self.costs.costs().step_s)

    @property
    def said(self) -> dict[str, Any]:
        """The settings as JSON gives them back, for `auto_of`."""
        found = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        found["costs"] = self.costs.to_json()
        found["link"] = self.link and dataclasses.asdict(self.link)
        return json.loads(json.dumps(found))

    def init(self, spec: Spec) -> Watched:
        """Empty shadows, and the first arm. Raises SplitError if KV's floor does not fit."""
        names, layers, some = [*spec.version_bytes], spec.layers, spec.has_all_versions
        wanted = [versions_of(arm, names) for arm in self.arms]
        # Layers without the high version get the low one under its arm too.
        both = (HI, LO) if len(names) > 1 and not some.all() else (HI,)
        brought = [both if each == (HI,) else each for each in wanted]
        of, version = zip(*((i, v) for i, each in enumerate(brought) for v in each), strict=True)
        arms, first = np.array(of), np.searchsorted(of, range(len(self.arms)))
        filled = np.array([some if v == HI else ~some for v in version])
        filled |= [[LO in wanted[arm] and v == LO] for arm, v in zip(of, version, strict=True)]
        each, cells = [self.fill_s] * len(arms), np.tile(self.cells, (len(arms), 1))
        if len(names) > 1 and spec.capacity is not None:
            sizes = np.array([*spec.link_bytes.values()])[[*version]]
            each = [self._fill_s(n[f].mean()) for n, f in zip(sizes, filled, strict=True)]
            cells = _cells_of(spec)[[*version]]
        fill_s = np.zeros((len(self.arms), len(arms)))
        fill_s[arms, range(len(arms))] = each
        lossy = np.array([self._is_lossy(i, versions) for i, versions in enumerate(wanted)])
        weights = [self._weights(arm) for arm in of]
        shadows, brings = cold_shadows(weights, cells, spec.experts), None
        if len(arms) > len(self.arms):
            last = np.append(first[1:], len(arms)) - 1
            shadows = shadows._replace(other=(first + last)[arms] - range(len(arms)))
            brings = np.repeat(filled[:, :, None], spec.experts, axis=2)
            brings[self._mixed(first)] = False  # the first version: a precision begins with low
        reuse = np.zeros((layers, spec.experts)) if self.layered else None
        said = f"{self.arms[0]}: the start, {self.source} costs"
        return Watched(
            spec,
            arm=0,
            inner=tuple(policy.init(spec) for policy in self.policies[0]),
            shadows=shadows,
            places=Places(first, fill_s, np.where(lossy, 1 + FEWER_BITS, 1.0)),
            division=division_of(spec),
            cap=min(self.cells),
            brings=brings,
            reuse=reuse,
            ratios=self.ratios,
            pool_s=self.pool_s,
            rest=UNPAID if self.simulate_s else 0,
            owed_s=self.simulate_s,
            said=said,
            taught={
                policy: policy.init(spec)
                for each in self.policies
                for policy in each
                if hasattr(policy, "learn")
            },
        )

    def _is_lossy(self, arm: int, versions: Sequence[int]) -> bool:
        """Whether an arm whose misses come in these versions changes outputs."""
        placed = [p for p in self.policies[arm] if isinstance(p, PlacementPolicy)]
        return any(versions) or any(p.defer or not self.same_bits for p in placed)

    def rests(self, state: Watched, glance: Glance) -> Watched | None:
        """Passes the steps that end no window and change no split."""
        if self.ahead and (state.taught or not self._silent[state.arm]):
            return None
        if self.alone and not self.splits:
            return state
        needed = not state.rest and (self.ahead or self.hobbit is not None)
        if needed or self._ends_window(state, glance, state.fresh + 1):
            return None
        state, decision = self._end_step(state, glance)
        return None if _parts(decision) else state

    def skips(self, state: Watched) -> tuple[int, int]:
        """Returns the steps and misses of a rest that change no more than counts: those before the
        next fit of the split. Meanwhile KV of as many requests grows by a page each at most."""
        if self.bare or self.ahead or not (state.rest and state.held):
            return 0, 0
        return self.window - 1 - state.fresh, state.rest

    def skipped(self, state: Watched, steps: int, misses: int) -> Watched:
        """Returns the state after such steps."""
        return state._replace(
            rest=state.rest - misses, fresh=state.fresh + steps, held=state.held + steps
        )

    def pools(self, state: Watched) -> bool:
        """Whether the present arm has one pool of cells."""
        return bool(self.pooled[state.arm])

    def active(self, state: Watched) -> frozenset[Moment]:
        """The moments of the present arm."""
        return self._active[state.arm]

    def looks_away(self, state: Watched) -> bool:
        """Whether no tables are looked at: by a rest that is not paid yet, and the present arm."""
        return self.ahead and state.rest == UNPAID and self._silent[state.arm]

    def decide(self, state: Watched, seen: Observation) -> tuple[Watched, Decision]:
        state, asked = self._ask(state, seen)
        if seen.moment != Moment.STEP_END:
            return state, asked
        learners: Mapping[Any, Any] = state.taught  # a policy need not have `learn`
        taught = {policy: policy.learn(known, seen) for policy, known in learners.items()}
        state = state._replace(taught=taught)
        state, own = self._end_step(state, self._glance(seen), seen)
        if not (said := _parts(own)):
            return state, asked
        # The policies of an arm that ends have nothing more to say.
        return state, own if own.note else dataclasses.replace(asked, **said)

    def _ask(self, state: Watched, seen: Observation) -> tuple[Watched, Decision]:
        """Asks the present arm's policies."""
        states, said = list(state.inner), dict[str, Any]()
        for i, policy in enumerate(self.policies[state.arm]):
            if seen.moment in policy.moments:
                states[i], decision = policy.decide(states[i], seen)
                said |= {name: value for name, value in vars(decision).items() if value is not None}
        return state._replace(inner=tuple(states)), Decision(**said)

    def _glance(self, seen: Observation) -> Glance:
        """Returns what `rests` is shown of a step."""
        use = (
            (0, 0, 0, 0, 0, 0)
            if self.bare
            else (
                *(seen.kv_used, seen.kv_pages, seen.kv_swapped),
                *(seen.running, seen.waiting, seen.waiting_tokens),
            )
        )
        return Glance(
            bool(seen.phase.all()) and len(seen.phase) > 0,
            len(seen.ids) if self.bare else seen.bucket,
            int(seen.missed.sum()),
            seen.seconds,
            bool(seen.compiled),  # None in a bare step
            lambda: seen.ids,
            *use,
        )

    def _end_step(
        self, state: Watched, seen: Glance, whole: Observation | None = None
    ) -> tuple[Watched, Decision]:
        """Returns the state after a step and what is decided.

        - `whole`: what else is known of the step, which the end of a window and arms with a
          prefetch need.
        """
        if not self.bare:
            state = self._watch_kv(state, seen)
        short = SPLIT in self.arms[state.arm] and _is_short(state, seen)
        if seen.decode:
            state = self._see_load(state, seen.rows if self.bare else max(seen.running, 1))
            if state.owed_s or state.usual_s:
                state = self._pay(state, seen.seconds - state.seconds)
        if self.alone or state.rest:
            state = self._pass(state, seen)
        elif self.ahead and state.tables is None:  # the window begins with the next step
            assert whole is not None
            cells = _cells_of(state.spec).T if self.versioned else None
            if self.pool:  # arms are compared from even shares on
                shares = cells_per_layer(int(whole.cells.sum()), *whole.version.shape)
                cells = np.array(shares)[:, None]
            begun = {"tables": tables_of(whole, cells), "known": state.taught}
            return state._replace(seconds=seen.seconds, **begun), _NOTHING
        else:
            state = self._watch(state, seen, whole)
        fits = seen.decode and (state.fresh == 0 or state.held == 1)
        if self.splits and (short or fits):
            fit = functools.partial(self._fit_kv, short=True) if short else self._fit_window
            state, decision = fit(state, seen)
            if decision.cells is not None:
                return state, decision
        ends = self._ends_window(state, seen, state.fresh)
        return self._close(state, seen) if ends else (state, _NOTHING)

    def _ends_window(self, state: Watched, seen: Glance, steps: int) -> bool:
        """Whether the window ends with so many steps: half as many where requests wait for KV,
        since there is much to gain."""
        if state.rest or self.alone:
            return False
        starved = self.splits and SPLIT not in self.arms[state.arm]
        starved = starved and _wanted(state.spec, seen) > seen.running
        return steps >= (self._window // 2 if starved else self._window)

    @property
    def _window(self) -> int:
        """Decode steps between choices. Of a simulated window the first half does not count."""
        return self.window * (2 if self.ahead else 1)

    def _see_load(self, state: Watched, load: int) -> Watched:
        """Returns the state before a decode step of so many sequences. Another load begins anew:
        shadows that are behind hold what an earlier load used, as every arm would."""
        other = max(load, state.load) >= OTHER_LOAD * min(load, state.load)
        if other:
            state = state._replace(load=load, held=0, steps=np.zeros((3, 3)))
        if self.ahead:  # its window's records follow one another
            return state._replace(load=load)
        return state._replace(window=(), fresh=0, rest=0) if other else state

    def _watch(self, state: Watched, seen: Glance, whole: Observation | None) -> Watched:
        """Returns the state after a step of a window."""
        shadows, fills = state.shadows, np.zeros(1, np.int64)
        if not self.ahead:
            ids = seen.ids()
            if state.reuse is not None and shadows.clock % SAMPLED == 0:
                state = state._replace(reuse=state.reuse + shadows.distances(ids))
            shadows, fills = shadows.follow(ids, self._brings(state, whole))
        fills = fills + state.carried
        if not seen.decode or seen.compiled:
            return state._replace(seconds=seen.seconds, shadows=shadows, carried=fills)
        window = state.window
        if state.fresh >= 0:  # or the shadows are behind
            took = seen.seconds - state.seconds
            record = record_of(whole) if self.ahead and whole is not None else None
            sample = Sample(took, self._compute_s(seen.rows), seen.missed, fills, record)
            window = (*window[-(KEPT * self.window - 1) :], sample)
        return state._replace(
            seconds=seen.seconds,
            shadows=shadows,
            carried=0,
            window=window,
            fresh=state.fresh + 1,
            watched=state.watched + 1,
            held=state.held + 1,
        )

    def _brings(self, state: Watched, whole: Observation | None) -> np.ndarray | None:
        """Returns bool[S, L, E], what a miss of this step brings in each shadow's version."""
        if state.brings is None or self.hobbit is None or whole is None:
            return state.brings
        shape, brings = (whole.ids, whole.weights, state.spec.experts), state.brings.copy()
        heavy = find_heavy(*shape, self.hobbit.threshold)
        heavy &= state.spec.has_all_versions[:, None]
        for first in self._mixed(state.places.first):
            brings[first], brings[first + 1] = heavy, ~heavy
        return brings

    def _mixed(self, first: np.ndarray) -> list[int]:
        """Returns those of the arms' first shadows whose arm has a precision."""
        return [f for f, arm in zip(first, self.arms, strict=True) if is_decided(arm)]

    def _pass(self, state: Watched, seen: Glance) -> Watched:
        """Returns the state after a step of a rest, or of one arm alone. Its `fresh` says when the
        split is fitted, as often as in windows."""
        if not seen.decode:
            return state._replace(seconds=seen.seconds)
        rest = state.rest - (1 if self.ahead else max(seen.missed, 1))
        if state.owed_s:
            rest = UNPAID
        fresh, held = (state.fresh + 1) % self.window, state.held + 1
        if state.rest and rest <= 0:  # the shadows are behind
            fresh = 0 if self.ahead else -self.window
        return state._replace(seconds=seen.seconds, rest=max(rest, 0), fresh=fresh, held=held)

    def _pay(self, state: Watched, took: float) -> Watched:
        """Returns the state after a decode step of so many seconds, which pay for simulating. The
        first step after a window also shows what that took."""
        owed, usual = state.owed_s, state.usual_s
        if usual:
            owed += max(min(took - usual, LONGEST * THINKING * usual), self.simulate_s)
        return state._replace(owed_s=max(owed - THINKING * took, 0.0), usual_s=0.0)

    # ---- what a step says

    def _compute_s(self, rows: int) -> float:
        """Returns the predicted seconds of computing a step."""
        larger = [bucket for bucket in self.step_s if bucket >= rows]
        return self.step_s[min(larger, default=max(self.step_s))]

    def _watch_kv(self, state: Watched, seen: Glance) -> Watched:
        """Returns the state with what a step says of KV. Where others move the split, all shadows
        get or lose their slots, shared evenly by the layers."""
        first, before = state.kv_pages
        held, pages = seen.kv_used + seen.kv_swapped, seen.kv_pages
        if pages == before and held <= state.peaks[-1]:
            return state
        peaks = (*state.peaks[:-1], max(state.peaks[-1], held))
        state = state._replace(peaks=peaks, kv_pages=(pages if first < 0 else first, pages))
        if before in (-1, pages) or self.splits or self.versioned:
            return state
        layers, experts = len(self.cells), state.spec.experts
        slots = int(state.shadows.cells[0].sum())
        slots = min(max(slots + (before - pages) // state.division.unit_pages, 0), layers * experts)
        cells = np.array(cells_per_layer(slots, layers, experts))
        return state._replace(shadows=state.shadows.regrant(cells))

    # ---- the split

    def _fit_window(self, state: Watched, seen: Glance) -> tuple[Watched, Decision]:
        """Fits the split at the end of a window, to sequences as long as at the next one's."""
        each = _pages_each(seen) + self._window / state.division.page_tokens
        needed = math.ceil(_wanted(state.spec, seen) * each)
        state = state._replace(peaks=(*state.peaks[:-1], max(state.peaks[-1], needed)))
        state, decision = self._fit_kv(state, seen, short=False)
        return state._replace(peaks=(*state.peaks, 0)[-PEAKS:]), decision

    def _fit_kv(self, state: Watched, seen: Glance, short: bool) -> tuple[Watched, Decision]:
        """Fits the split by need to the peaks. The decision carries it out, if it is the present
        arm's."""
        division, peak = state.division, max(state.peaks)
        if short:
            more = DEAD * division.cap_bytes / division.page_bytes
            peak = max(peak, math.ceil((seen.kv_pages + more) / (1 + HEADROOM)))
            # Each prompt that waits one step longer costs a step of prompts.
            rows = _wanted(state.spec, seen) - seen.running
            peak = max(peak, seen.kv_used + seen.kv_swapped + rows * _prompt_pages(state, seen))
        cap = peak_headroom(division, peak_pages=peak, headroom=HEADROOM, cap=state.cap, dead=1)
        if cap is None or 0 < cap - state.cap < DEAD:  # KV gets what it needs at once
            return state, _NOTHING
        before, state = state.cap, state._replace(cap=cap, fitted=True)
        cells = state.shadows.cells.copy()
        for i, arm in enumerate(self.arms):
            if LAYERS in arm and SPLIT in arm:
                slots, least = cap * len(cells[i]), state.spec.min_cells
                cells[i] = allocate("marginal", _curves(state), slots, least=least).cells
            elif SPLIT in arm:
                cells[i] = cap
        # What shadows missed so far, they missed with other cells.
        begun = {"window": (), "fresh": min(state.fresh, 0), "tables": None}
        state = state._replace(shadows=state.shadows.regrant(cells), **begun)
        if SPLIT not in (arm := self.arms[state.arm]):
            return state, _NOTHING
        plain = arm.replace(SPLIT, "")
        if cap > min(self.cells) >= before and plain in self.arms:
            said = f"{plain}: KV keeps its memory until a split saves {LESS_KV:.0%}"
            now = {"arm": self.arms.index(plain), "switches": state.switches + 1, "said": said}
            state = state._replace(**now)
            return state, dataclasses.replace(self._split(state), note=said)
        return state, self._split(state)

    def _is_split(self, state: Watched, arm: str) -> bool:
        """Whether an arm's split is not that of the start."""
        return SPLIT in arm and state.fitted

    def _split(self, state: Watched) -> Decision:
        """Returns the decision with the split and the cells of the present arm."""
        if "cells" not in self.writes:
            return _NOTHING
        cells, pages = state.shadows.cells[state.arm].astype(np.int32), state.kv_pages[0]
        if self._is_split(state, self.arms[state.arm]):
            pages = state.division.pages_at(state.cap)
        return Decision(cells=cells, kv_pages=pages if self.splits else None)

    def _share_layers(self, state: Watched) -> tuple[Watched, Decision]:
        """Shares the cells of each arm by layer again, where that saves enough misses."""
        assert state.reuse is not None
        cells, curves = state.shadows.cells.copy(), _curves(state)
        for i, arm in enumerate(self.arms):
            if LAYERS in arm:
                limits = {"gate": GATE, "least": state.spec.min_cells}
                found = share_anew("marginal", curves, int(cells[i].sum()), cells[i], **limits)
                cells[i] = cells[i] if found is None else found
        changed = (cells != state.shadows.cells).any(axis=1)
        state = state._replace(reuse=state.reuse / 2)
        if not changed.any():
            return state, _NOTHING
        state = state._replace(shadows=state.shadows.regrant(cells))
        return state, self._split(state) if changed[state.arm] else _NOTHING

    # ---- the choice

    def _close(self, state: Watched, seen: Glance) -> tuple[Watched, Decision]:
        """Fits the split and the cells, prices the arms and chooses."""
        decision = _NOTHING
        if self.splits:
            state, decision = self._fit_window(state, seen)
            if not state.window:
                return state, decision
        if self.layered and state.choices % SHARED == SHARED - 1:
            state, shared = self._share_layers(state)
            decision = shared if shared.cells is not None else decision
        if state.brings is not None and self.hobbit is None and not self.ahead:
            state = state._replace(brings=self._hottest(state))
        priced = self._predict(state) if self.ahead else self._price_shadows(state)
        late = min(state.fresh, len(priced.compute_s))
        seconds = np.array([sample.seconds for sample in state.window[-late:]])
        state = self._learn(state, seconds, priced)
        steps = self._corrected(state, seen, priced)
        switch_s = SWITCH_S + state.ratios[1] * state.places.fill_s.max(axis=1) * priced.differ
        switch_s[state.arm] = 0.0
        mean = steps.mean(axis=1)
        lately, prices = (
            Prices(tuple((of * self._dearer(state)).tolist()), tuple(switch_s.tolist()), state.arm)
            for of in (steps[:, -state.fresh :].mean(axis=1), mean)
        )

        def choose(horizon: int) -> int:
            """Returns the arm that pays over so many steps, the present one if that did better in
            the last ones."""
            found = choose_arm(prices, horizon=horizon)
            return state.arm if lately.step_s[found] > lately.step_s[state.arm] else found

        arm = choose_arm(lately, horizon=state.fresh)
        if arm == state.arm:
            arm = choose(state.held)
        rest, passed = self._rest(state)
        if arm == state.arm and choose(state.held + passed) != arm:
            rest = 0  # if all stays so, a change pays before the rest ends
        if self.forced is not None:
            arm = int(np.random.default_rng((self.forced, state.choices)).integers(len(self.arms)))
        state = state._replace(
            window=() if self.ahead else state.window,
            fresh=0,
            tables=None,
            usual_s=float(np.median(seconds)) if self.ahead else 0.0,
            prices=tuple(mean.tolist()),
            priced=tuple((mean + (state.priced or 0.0)).tolist()),
            choices=state.choices + 1,
            rest=rest,
            watched=0 if rest else state.watched,
        )
        if arm == state.arm:
            return state, decision
        prices = prices if prices.step_s[arm] < prices.step_s[state.arm] else lately
        return self._switch(state, arm, prices, priced, decision)

    def _dearer(self, state: Watched) -> np.ndarray:
        """Returns float64[A], by what the times of arms are multiplied that cost other things."""
        less = state.cap > min(self.cells) and [SPLIT in arm for arm in self.arms]
        return state.places.dearer * np.where(less, 1 + LESS_KV, 1.0)

    def _learn(self, state: Watched, seconds: np.ndarray, priced: Priced) -> Watched:
        """Returns the state with what the measured times of a window's last steps say."""
        late = len(seconds)
        parts = priced.compute_s[-late:], priced.moves_s[-late:]
        if self.pools(state):
            rest = seconds - state.ratios @ np.stack(parts)
            return state._replace(pool_s=max(float(np.median(rest)), 0.0))
        prior = SIMULATED if self.ahead else COUNTED
        ratios, known = correct(seconds, *parts, state.ratios, state.steps, prior)
        return state._replace(ratios=ratios, steps=known, pool_s=(1 - FORGET) * state.pool_s)

    def _rest(self, state: Watched) -> tuple[int, int]:
        """Returns the misses of the rest that pays for the steps watched since the last one, and
        its steps; 0 if they come soon."""
        if self.ahead:
            return UNPAID, 0
        fill_s = float(state.places.fill_s[state.arm].max())
        paid = max(COST * state.ratios[1] * fill_s, 1e-12)  # a trace may have no times
        rest = min(int(state.watched * WATCH_S / paid), LONGEST)
        missed = sum(sample.missed for sample in state.window[-state.fresh :]) / state.fresh
        steps = int(rest / max(missed, 1))
        return (rest, steps) if steps > AT_ONCE else (0, 0)

    def _corrected(self, state: Watched, seen: Glance, priced: Priced) -> np.ndarray:
        """Returns float64[A, n], the corrected seconds of the window's steps under each arm, for as
        many tokens as a step of the present arm gives."""
        more = self._widths(state, seen)
        moves = state.ratios[1] * priced.arms_s * more.moves[:, None]
        host = state.pool_s * self.pooled[:, None]
        return (state.ratios[0] * priced.compute_s + host + moves) / more.rows[:, None]

    def _widths(self, state: Watched, seen: Glance) -> Widths:
        """Returns how the arms' steps differ from the present arm's by the sequences that their KV
        holds."""
        ones = np.ones(len(self.arms))
        if not self.splits:
            return Widths(ones, ones)
        rows = np.array([self._fitting(state, seen, arm) for arm in self.arms])
        rows = np.minimum(rows, _wanted(state.spec, seen))
        # Experts that so many rows use, if they choose independently.
        unused = 1 - state.spec.top_k / state.spec.experts
        used = 1 - unused**rows
        return Widths(rows / rows[state.arm], used / used[state.arm])

    def _fitting(self, state: Watched, seen: Glance, arm: str) -> float:
        """Returns how many sequences KV holds under an arm, if they are as long as the present
        ones."""
        pages = state.kv_pages[0]
        if self._is_split(state, arm):
            pages = state.division.pages_at(state.cap)
        return max(pages / _pages_each(seen), 1.0)

    def _price_shadows(self, state: Watched) -> Priced:
        _, compute, missed, fills, _ = map(np.array, zip(*state.window, strict=True))
        fills = fills.T
        first, fill_s = state.places.first, state.places.fill_s
        arms_s, mine = fill_s @ fills, fill_s[state.arm]
        each = mine.max()  # of two versions, what most of the misses bring
        if np.count_nonzero(mine) > 1 and (total := fills[mine > 0].sum()):
            each = arms_s[state.arm].sum() / total
        differ = np.add.reduceat(state.shadows.differ(first[state.arm]), first)
        return Priced(compute, each * missed, arms_s, differ)

    def _hottest(self, state: Watched) -> np.ndarray:
        """Returns bool[S, L, E]: where a precision fills the hottest experts in the high version,
        as many as have cells."""
        assert state.brings is not None
        brings, some = state.brings.copy(), state.spec.has_all_versions.tolist()
        for first in self._mixed(state.places.first):
            high = int(state.shadows.cells[first].sum())
            brings[first] = top_map(state.shadows.frequency, high, some) == HI
            brings[first + 1] = ~brings[first]
        return brings

    def _predict(self, state: Watched) -> Priced:
        """Simulates the window under each arm. The first half, in which residents change, does not
        count."""
        steps = [sample.record for sample in state.window if sample.record is not None]
        costs = self._costs_of(state.spec)
        found = [
            predict_recent(steps, policies, state.spec, self._tables(state, arm), costs, self.link)
            for arm, policies in zip(self.arms, self._begun(state), strict=True)
        ]
        late = slice(len(steps) // 2, None)
        held = np.stack([run.tables.address >= 0 for run in found])
        present = found[state.arm]
        return Priced(
            present.compute_s[late],
            present.moves_s[late],
            np.stack([run.moves_s[late] for run in found]),
            np.count_nonzero(held & ~held[state.arm], axis=(1, 2)),
        )

    def _begun(self, state: Watched) -> list[list[Policy]]:
        """Returns `predicted`, of which policies that learn begin with what the window found, and
        as if the hottest experts stayed the same."""

        def begin(policy: Any) -> Policy:
            learns = hasattr(policy, "learn")
            return dataclasses.replace(policy, begun=state.known[policy]) if learns else policy

        return [
            [begin(policy) for policy in each if not isinstance(policy, DynaExq)]
            for each in self.predicted
        ]

    def _tables(self, state: Watched, arm: str) -> Residency:
        """Returns those before the window, with what misses bring under an arm."""
        spec, tables = state.spec, state.tables
        assert tables is not None
        if not self.versioned or spec.capacity is None:
            return tables
        some, (version, *others) = spec.has_all_versions, versions_of(arm, [*spec.version_bytes])
        brought = np.full(tables.version.shape, version)
        if others:
            brought = top_map(tables.frequency, spec.capacity[HI], some.tolist())
        brought = np.where(some[:, None], brought, LO).astype(np.int32)
        return tables._replace(fill_version=brought)

    def _costs_of(self, spec: Spec) -> CostModel | dict[str, CostModel]:
        """Returns the costs of each version, if there are two: moves by bytes, the rest alike."""
        if len(spec.version_bytes) == 1:
            return self.costs
        return {
            name: self.costs.of_size(int(sizes.mean())) for name, sizes in spec.link_bytes.items()
        }

    def _switch(
        self, state: Watched, arm: int, prices: Prices, priced: Priced, fitted: Decision
    ) -> tuple[Watched, Decision]:
        moved = int(priced.differ[arm])
        cells = state.shadows.cells
        if "cells" in self.writes and (cells[state.arm] != cells[arm]).any():
            fitted = self._split(state._replace(arm=arm))
        said = self._describe(state, prices, arm, moved)
        known = self.pooled[arm] <= self.pooled[state.arm]
        state = state._replace(
            arm=arm,
            held=0,
            rest=state.rest if known else 0,  # its host work is measured at once
            inner=tuple(
                state.taught[policy] if hasattr(policy, "learn") else policy.init(state.spec)
                for policy in self.policies[arm]
            ),
            switches=state.switches + 1,
            switched=state.switched + moved,
            said=said,
        )
        begin: dict[str, Any] = {"victim_weights": np.array(self._weights(arm), np.int32)}
        if "prior" in self.writes:
            begin["prior"] = np.zeros((state.spec.layers, state.spec.experts), np.int32)
        for queue in self.writes & {"stages", "transitions"}:
            begin[queue] = ()
        if "fill_version" in self.writes:
            begin["fill_version"] = self._fill_version(state)
        return state, dataclasses.replace(fitted, note=said, **begin)

    def _fill_version(self, state: Watched) -> np.ndarray:
        """Returns int8[L, E], what misses bring when the present arm begins."""
        spec, arm = state.spec, self.arms[state.arm]
        versions = versions_of(arm, [*spec.version_bytes])
        found = np.full((spec.layers, spec.experts), versions[-1], np.int8)
        for inner in state.inner:
            if (high := getattr(inner, "high", None)) is not None:
                found[high] = HI
        return found

    def _describe(self, state: Watched, prices: Prices, arm: int, moved: int) -> str:
        dearer = self._dearer(state)
        old, new = (1e3 * prices.step_s[i] / dearer[i] for i in (prices.current, arm))
        names = self.arms[prices.current], self.arms[arm]
        return (
            f"{names[1]}: {new:.3g} ms a step's tokens, {names[0]} {old:.3g} ms; the switch moves "
            f"{moved} experts"
        )

    def stats(self, state: Watched) -> dict[str, Any]:
        """Returns the choice, why, and what switches cost."""
        return {
            "arm": self.arms[state.arm],
            "why": state.said,
            "step_s": dict(zip(self.arms, state.prices, strict=False)),
            "mean_step_s": {
                arm: total / state.choices
                for arm, total in zip(self.arms, state.priced, strict=False)
            },
            "ratios": state.ratios,
            "pool_s": state.pool_s,
            "switches": state.switches,
            "switched_experts": state.switched,
        }


class Parts(NamedTuple):
    """Of an arm's name; empty: it has none."""

    first: str
    """An eviction with what moves, or a prefetch."""
    precision: str = ""
    """A version or a precision."""
    placement: str = ""

    @property
    def arm(self) -> str:
        more = (PRECISION, self.precision), (PLACED, self.placement)
        parts = [self.first, *(f"{name}{part}" for name, part in more if part)]
        return "+".join(part for part in parts if part)


def parts_of(arm: str) -> Parts:
    before, _, placement = arm.partition(PLACED)
    first, _, precision = before.partition(PRECISION)
    return Parts(first.removesuffix("+"), precision.removesuffix("+"), placement)


def is_ahead(arm: str) -> bool:
    """Whether an arm has a prefetch or a placement."""
    parts = parts_of(arm)
    return bool(parts.placement) or parts.first.partition("=")[0] in PREFETCH


def is_decided(arm: str) -> bool:
    """Whether a precision of an arm decides in which version each miss comes."""
    return parts_of(arm).precision.partition(",")[0] in DECIDE


def versions_of(arm: str, names: Sequence[str]) -> tuple[int, ...]:
    """Returns the versions, by number, in which misses come under an arm."""
    if is_decided(arm):
        return HI, LO
    return (names.index(version) if (version := parts_of(arm).precision) else 0,)


def policies_of(arm: str) -> tuple[Policy, ...]:
    """Returns the policies of an arm, but for the split and the cells."""
    first, precision, placement = parts_of(arm)
    more = precision_of(precision).policies if is_decided(arm) else ()
    if not is_ahead(arm):
        return with_eviction(first.partition("+")[0], more)[1]
    return with_eviction(
        None, with_placement(placement or None, with_prefetch(first or None, more))
    )[1]


def _cells_of(spec: Spec) -> np.ndarray:
    """Returns int64[V, L], the cells of two versions."""
    assert spec.capacity is not None
    high, low = spec.capacity
    shares = cells_of_versions(high, low, spec.has_all_versions.tolist(), spec.experts)
    return np.array(shares, np.int64)


def _curves(state: Watched) -> np.ndarray:
    """Returns float64[L, C + 1], late misses of LRU by cells."""
    assert state.reuse is not None
    most = min(state.spec.experts, state.spec.cell_bound)
    return tails(state.reuse)[:, : most + 1]


def _wanted(spec: Spec, seen: Glance) -> int:
    """Returns how many sequences could run if KV had room for all."""
    wanted = max(seen.running + seen.waiting, 1)
    return min(wanted, spec.max_num_seqs or wanted)


def _pages_each(seen: Glance) -> float:
    """Returns the KV pages of a running sequence."""
    return max(seen.kv_used / max(seen.running, 1), 1.0)


def _prompt_pages(state: Watched, seen: Glance) -> int:
    """Returns the pages of a waiting prompt."""
    return -(-seen.waiting_tokens // (max(seen.waiting, 1) * state.division.page_tokens))


def _is_short(state: Watched, seen: Glance) -> bool:
    """Whether pages had to leave, or a prompt waits for them and for no row."""
    prompt = _prompt_pages(state, seen)
    needed = seen.kv_used + (prompt if _wanted(state.spec, seen) > seen.running else 0)
    return max(needed, seen.kv_used + seen.kv_swapped) > seen.kv_pages


def describe_choice(control: Control | None) -> str | None:
    """Returns what Auto runs and why, in one line; None without it."""
    said = {} if control is None else control.controller.stats().get("said", {})
    return f"policy auto runs {said[NAME]['why']}" if NAME in said else None


def _parts(decision: Decision) -> dict[str, Any]:
    """Returns what a decision decides."""
    return {name: value for name, value in vars(decision).items() if value is not None}


def auto_of(said: Mapping[str, Any]) -> Auto:
    """Returns the policy of these settings, as `Auto.said` gives them. Raises TraceError for those
    of another version of moejax."""
    if said.keys() != {field.name for field in dataclasses.fields(Auto)}:
        raise TraceError(
            "policy auto of another moejax chose in this run, which cannot be repeated; simulate it"
        )
    fields = {name: tuple(x) if isinstance(x, list) else x for name, x in said.items()}
    link = None if said["link"] is None else Link(**said["link"])
    return Auto(**{**fields, "costs": CostModel.from_json(said["costs"]), "link": link})

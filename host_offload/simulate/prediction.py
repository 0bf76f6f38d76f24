"""Predicts the time of a trace's steps under any policy and budget, on a machine whose costs were
measured.

`simulate` says what each step moves, the cost model how long computing and moving take, and a
timeline (step_timeline) when they happen. docs/explanation/simulator.md explains the result.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from host_offload.control.interface import Moment, Policy, Spec
from host_offload.control.rules import BETWEEN_LAYERS
from host_offload.control.step_record import StepRecord
from host_offload.policies.placement.placement_policy import PlacementPolicy, costs_of
from host_offload.policies.placement.presched import PlacementCosts
from host_offload.simulate.simulated_engine import SimulatedStep
from host_offload.simulate.simulator import Simulation, name_policies, simulate, spec_of
from host_offload.simulate.step_timeline import StepLoad, StepTimeline
from host_offload.simulate.timeline import Link, TimelineEvent
from host_offload.sizing.cost_model import CostError, CostModel, RunCosts, Work, run_costs
from host_offload.traces.reader import Trace, TraceHeader
from host_offload.traces.schema import KINDS
from host_offload.traces.step_sets import step_counts
from pallas_kernels.paged_attention import SPAN


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The predicted time of a trace's T steps."""

    simulation: Simulation
    """The transfers of the steps."""
    seconds: np.ndarray
    """float64[T]: each step, from the end of the one before it."""
    compute_s: np.ndarray
    """float64[T]: the same with every expert resident, so that nothing moves."""
    tokens: np.ndarray
    """int64[T]: token rows of each step."""
    bytes: int
    """Bytes of all steps over the link."""
    link_per_byte: float
    events: tuple[TimelineEvent, ...] = ()
    """Events of the timeline, if they were to be drawn."""

    @property
    def stall_s(self) -> np.ndarray:
        """float64[T]: what moving experts adds to each step."""
        return self.seconds - self.compute_s

    @property
    def stall_share(self) -> float:
        """The part of all steps' time beyond computing."""
        return float(self.stall_s.sum() / self.seconds.sum())

    @property
    def stall_bound_share(self) -> float:
        """The part of `stall_share` that no overlap of the link with computing could hide: the time
        of the same bytes at the link's rate, less the time in which steps compute, over the time
        that both take."""
        compute = float(self.compute_s.sum())
        least = max(self.bytes * self.link_per_byte - compute, 0.0)
        return least / (compute + least)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens (decode rows) over the time of all steps, prefill steps included."""
        return float(self.tokens[self.of_kind("decode")].sum() / self.seconds.sum())

    def of_kind(self, kind: str) -> np.ndarray:
        """bool[T]: the steps of that kind, `prefill` or `decode`. Steps of unknown kind count as
        decode steps."""
        found = self.simulation.kind == KINDS.index(kind)
        return found | (self.simulation.kind < 0) if kind == "decode" else found

    def mean_s(self, kind: str = "decode") -> float:
        """Mean seconds of the steps of that kind; nan without any."""
        chosen = self.seconds[self.of_kind(kind)]
        return float(chosen.mean()) if chosen.size else float("nan")


def predict(
    trace: Trace,
    model: CostModel | Mapping[str, CostModel],
    *,
    link: Link | None = None,
    draw: bool = False,
    **options: Any,
) -> Prediction:
    """Predicts the time of the trace's steps on the cost model's machine under these policies and
    budgets, from a cold start.

    - `model`: the costs of the run's version, or version → costs for a run that mixes versions, or
      to choose a version. The trace's routing may be of a run in another version.
    - `link`: link of an engine with a queue, whose transfers run beside computing; None: experts
      move within steps.
    - `draw`: whether to keep the events.
    - `options`: those of simulator.simulate (eviction, prefetch, placement, policies, cells,
      driver, spec, …).

    Steps are dispatched and read in the trace's order, however long they take. The time that
    policies see (`seconds`, and with it intervals) is the model's; their `costs` are those of
    version 0. Policies add CostModel.control to each step and, if they look between layers,
    CostModel.look to each layer. What policies compute costs nothing, nor do searches that a step
    makes itself. With a placement a second processor computes beside the device, β·m + C seconds
    for each of its experts. Waiting for requests is not part of any step. The same arguments give
    the same result.

    A trace without rows, kinds or positions (converted, generated) counts as decode steps of as
    many rows as tokens, each with one span of context.

    Raises CostError for a trace of another shape than the model's or of more rows than were
    measured; for versions without costs of their own; for experts of a second processor without
    costs (placement=recorded=...), or deferred ones; and for transitions that block, which move
    experts outside of any step. Raises QueueError for a link that leaves no time to compute, and
    otherwise like simulate.
    """
    header, spec = trace.header, options.get("spec")
    sizes = header.spec.get("version_bytes", {}) if spec is None else spec.version_bytes
    costs = run_costs(model, sizes)
    first = costs.models[0]
    of_trace = header.layers, header.experts, header.top_k
    of_model = first.layers, first.experts, first.top_k
    if of_trace != of_model:
        raise CostError(
            "the trace is of {} MoE layers, {} experts and top-{}, ".format(*of_trace)
            + "the costs are of {}, {} and top-{}; calibrate the trace's model".format(*of_model)
        )
    names = (options.get(name) for name in ("eviction", "prefetch", "placement"))
    policies = name_policies(options.get("policies", ()), *names)
    if link is not None:
        beside = max(each.beside_per_byte for each in costs.models)
        link = dataclasses.replace(link, beside=beside)
    second = _placement_costs(policies, spec, header, first)
    timeline = StepTimeline(costs, link, second=second, record=draw)
    moments = frozenset().union(*(policy.moments for policy in policies))
    clock = _Clock(trace, costs, timeline, moments)
    timed = {"costs": first.costs(), "watcher": clock.add_step, "clock": clock.ends.__getitem__}
    simulation = simulate(trace, **timed, **options)
    # Of one version it is the costs' experts that move, whichever the trace was recorded with.
    moved = int(simulation.transfers.sum()) * first.expert_bytes
    alike = [np.unique(size).tolist() for size in sizes.values()] == [[first.expert_bytes]]
    if simulation.bytes is not None and (alike or len(costs.models) > 1):
        moved = int(simulation.bytes.sum())  # fewer than cells take, where decoded in transit
    slowest = min(each.link_per_byte for each in costs.models)
    return Prediction(
        simulation=simulation,
        seconds=np.array(clock.seconds),
        compute_s=np.array(clock.compute_s),
        tokens=np.array(clock.tokens, np.int64),
        bytes=moved,
        link_per_byte=slowest if link is None else 1 / link.rate,
        events=tuple(timeline.timeline.events),
    )


class _Clock:
    """Times of simulated steps, one after the other.

    - `moments`: moments at which policies are asked.
    """

    def __init__(
        self, trace: Trace, costs: RunCosts, timeline: StepTimeline, moments: frozenset[Moment]
    ):
        self._costs, self._timeline = costs, timeline
        self._experts = trace.header.experts
        self._control_s = costs.control if moments else 0.0
        self._look_s = costs.look if moments & BETWEEN_LAYERS else 0.0
        self._steps: Iterator[StepRecord] = trace.step_traces()
        self.seconds: list[float] = []
        self.compute_s: list[float] = []
        self.tokens: list[int] = []
        self.ends: dict[int, float] = {}
        """The time at which each step is read."""
        self._now = 0.0

    def add_step(self, simulated: SimulatedStep) -> None:
        """Adds a dispatched step with its moves."""
        step, costs = next(self._steps), self._costs
        work, rows = step_work(step, costs.models[0].chunk)
        routed = step_counts(step, self._experts)
        used = simulated.version[simulated.active]
        compute = costs.fixed_cost(work, rows, used).seconds(work) + self._control_s
        compute += float(costs.products(routed, simulated.version, rows).sum())
        load = StepLoad(work, rows, routed, self._control_s, self._look_s)
        seconds = self._timeline.play(load, simulated)
        self._now += seconds
        self.ends[step.number] = self._now
        self.seconds.append(seconds)
        self.compute_s.append(compute + self._look_s * len(routed))
        self.tokens.append(len(step.ids))


def _placement_costs(
    policies: Sequence[Policy], spec: Spec | None, header: TraceHeader, model: CostModel
) -> PlacementCosts | None:
    """Returns the costs that the placement among the policies, or the arms of policy auto, uses;
    None without a placement.

    - `spec`: None: the trace's.
    """
    arms = (arm for policy in policies for arm in getattr(policy, "predicted", ()))
    for policy in itertools.chain(policies, *arms):
        if isinstance(policy, PlacementPolicy):
            if policy.defer:
                raise CostError(
                    "a placement that defers experts is measured, not predicted; leave out defer"
                )
            spec = spec or spec_of(header)
            record = max(int(sizes.max()) for sizes in spec.link_bytes.values())
            return costs_of(policy, dataclasses.replace(spec, costs=model.costs()), record)
    return None


def step_work(step: StepRecord, chunk: int) -> tuple[Work, int | None]:
    """Returns (what a step computes beside its experts, rows of its decode executable). Rows are
    None for a prefill step.

    - `chunk`: of a CostModel.
    """
    if step.kind == KINDS[0]:
        return Work(*_chunks(step, chunk)), None
    tokens = len(step.ids)
    spans = tokens if step.position is None else float(np.sum(step.position + 1)) / SPAN
    return Work(tokens, spans), tokens if step.rows is None else step.rows


def _chunks(step: StepRecord, chunk: int) -> tuple[int, int]:
    """Returns (chunks of a prefill step, spans that they attend to)."""
    if step.position is None or step.request is None:
        count = -(-len(step.ids) // chunk)
        return count, count
    number = step.position // chunk
    places = np.unique(np.stack([step.request, number]), axis=1)
    return places.shape[1], int(np.sum((places[1] * chunk) // SPAN + 1))

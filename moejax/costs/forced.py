"""Runs decode steps with chosen routing and residency, and prefill steps, through an engine of its
own, to measure what a step costs."""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from typing import Any, NamedTuple

import jax
import numpy as np

from host_offload.control.controller import Controller
from host_offload.control.interface import Decision, Moment, Observation, Spec, routed_counts
from host_offload.control.step_record import USES, PageUse
from host_offload.memory.arena import SlotArena
from host_offload.memory.kv_cache import KVCache
from host_offload.memory.pager import Pager
from host_offload.memory.tables import Residency
from host_offload.simulate.prediction import step_work
from host_offload.sizing.cost_model import Work
from moejax.engine.control import control_of, layer_hooks, spec_of_engine
from moejax.engine.loop import Engine
from moejax.engine.scheduler import Scheduler
from moejax.engine.statistics import Statistics
from moejax.engine.step_work import Step, step_record
from moejax.errors import UserError
from moejax.requests.sampling_params import SamplingParams
from moejax.step.executor import Executor
from moejax.step.step_parts import DECODE_TILE, Routing, StepOutput
from moejax.step.walk import Hooks

WARM = 1
"""Steps of a case before the timed ones."""

SLACK = 8
"""Tokens that a sequence has room for beyond the planned steps."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Decode steps that are alike.

    - `active`, `missing`: experts of each layer; missing experts are read through or fill cells.
    - `own`: the model routes, with `active` cells of each layer.
    """

    rows: int
    active: int
    missing: int = 0
    read_through: bool = False
    own: bool = False
    watched: tuple[Moment, ...] = ()
    """Moments at which policies look; they decide nothing."""
    prompt: int = 1
    """Tokens before the first step."""


class StepSample(NamedTuple):
    """A timed step."""

    seconds: float
    """Of several decode steps that are alike: their mean."""
    work: Work


NEEDS = {
    Moment.STEP_END: frozenset({"state", "last_used", "request", "ids", "counts", "missed"}),
    Moment.ROUTED: frozenset({"ids", "state"}),
}
"""The fields that policies see at the moments at which they look."""


@dataclasses.dataclass(frozen=True)
class Onlooker:
    """A policy that sees what other policies see at a moment and decides nothing."""

    moments: frozenset[Moment]
    needs: frozenset[str]
    writes: frozenset[str] = frozenset()

    def init(self, spec: Spec) -> None: ...

    def decide(self, state: None, observation: Observation) -> tuple[None, Decision]:
        return None, Decision()


class ForcedRunner:
    """A runner whose decode steps take their routing from a queue; None: the model routes."""

    def __init__(self, runner: Executor):
        self._runner = runner
        self.queue: deque[Routing | None] = deque()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def decode(
        self, positions: np.ndarray, block_table: jax.Array, stages: None, hooks: Hooks | None
    ) -> StepOutput:
        routing = self.queue.popleft()
        return self._runner.decode(positions, block_table, forced=routing, hooks=hooks)


class ForcedSteps:
    """An engine over a runner that nothing else uses.

    - `pages`: KV pages in use at a time.

    Raises UserError for an arena without room for a token's experts and that KV.
    """

    def __init__(self, runner: Executor, pages: int, seed: int = 0):
        self.runner = runner
        self.layers, self.experts = runner.tables.address.shape
        self.top_k = runner.config.num_experts_per_tok
        self._forced = ForcedRunner(runner)
        self._random = np.random.default_rng(seed)
        layout, shapes = runner.layout, runner.shapes
        self.pages = pages
        kv_slots = -(-pages // layout.pages_per_slot)
        self.cells = min(self.experts, (runner.slots - kv_slots) // self.layers)
        """Most cells of each layer."""
        if self.cells < self.top_k:
            raise UserError(
                f"an arena of {runner.slots} slots has no room for the {self.top_k} experts of a "
                f"token in each of {self.layers} layers, and {kv_slots} slots of KV, which "
                "calibration takes; raise memory or expert_budget"
            )
        bound = runner.tables.cell_row.shape[1]
        self._arena = SlotArena(layout, runner.slots, self.layers, self.experts, cells=bound)
        self._arena.grant_kv_slots(kv_slots)
        scheduler = Scheduler(
            KVCache(
                self._arena, runner.read_pages, runner.write_pages, runner.move_pages, swap_bytes=0
            ),
            shapes,
            shapes.rows,
            shapes.blocks * layout.page.block_size,
            prefix_caching=False,
        )
        statistics = Statistics((layout.records[0].nbytes,))
        forced: Any = self._forced
        self._engine = Engine(forced, scheduler, statistics, eos_token_ids=())
        self._spec = spec_of_engine(runner, max_model_len=scheduler.max_model_len, seed=0)
        self._steps: list[Step] = []
        self._engine.listener = self._keep

    def _keep(self, step: Step) -> None:
        """Keeps a step without its logits: those of the steps to come would be new memory, which a
        run of requests never waits for."""
        logits: Any = jax.ShapeDtypeStruct(step.output.logits.shape, step.output.logits.dtype)
        output = step.output._replace(logits=logits)
        self._steps.append(dataclasses.replace(step, output=output, logprobs=None))

    def measure(self, case: Case, steps: int) -> list[StepSample]:
        """Prefills sequences, runs WARM decode steps of the case, then the timed steps, then one
        more, so that each timed step is dispatched before the previous step is read.

        - `steps`: number of timed steps.
        """
        engine, count = self._engine, WARM + steps + 1
        self.grant(self.cells)
        params = SamplingParams(temperature=0.0, max_tokens=count + SLACK, ignore_eos=True)
        requests = [engine.add(ids, params) for ids in self._prompts(case.rows, case.prompt)]
        while not all(request.prefill_done for request in requests):
            # Between two prefill steps the requests whose prompts are done decode.
            if decoding := sum(request.prefill_done for request in requests):
                self._plan(Case(decoding, self.top_k), 1)
            engine.step()
        # Hits pin all cells if misses are read through; else as many experts are absent as move.
        most = case.active if case.read_through else min(self.cells + case.missing, self.experts)
        self.grant(case.active if case.own else most - case.missing)
        self._plan(case, count)
        self._watch(case)
        self._steps.clear()
        reads: list[float] = []
        for _ in range(count):
            engine.step()
            reads.append(time.perf_counter())
        engine.control = engine.hooks = None
        # engine.step reads the step before the one that it dispatches. Short steps are read two by
        # two on a CPU, so what each took is known of all together.
        seconds = (reads[WARM + steps] - reads[WARM]) / steps
        found = [self._sample(step, seconds) for step in self._steps[WARM : WARM + steps]]
        engine.abort(requests)
        engine.drain()
        return found

    def prefill(self, prompts: int, tokens: int, cells: int, *, cold: bool) -> StepSample:
        """Measures one prefill step over prompts of `tokens` tokens each, with the model's own
        routing.

        - `cold`: whether the step begins with nothing resident.
        """
        if cold:
            self.grant(0)
        self.grant(cells)
        jax.block_until_ready(self.runner.tables)
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        lists = self._prompts(prompts, tokens)
        self._steps.clear()
        began = time.perf_counter()
        for ids in lists:
            self._engine.add(ids, params)
        while not self._engine.idle:
            self._engine.step()
        return self._sample(self._steps[0], time.perf_counter() - began)

    def grant(self, cells: int) -> None:
        """Gives every layer so many cells."""
        self.runner.grant_cells(self._arena.grant_cells([cells] * self.layers))

    def _watch(self, case: Case) -> None:
        """Sets the policies that a case needs."""
        policies = [Onlooker(frozenset({moment}), NEEDS[moment]) for moment in case.watched]
        controller = Controller(self._spec, policies)
        control = self._engine.control = control_of(self.runner, controller)
        self._engine.hooks = None if control is None else layer_hooks(control, self.runner)
        if self._engine.hooks is not None:
            # The step before the first one is read with these policies.
            controller.see(self.runner.snapshot()())

    def _sample(self, step: Step, seconds: float) -> StepSample:
        shapes = self.runner.shapes
        unknown = PageUse(**dict.fromkeys(USES, -1))
        record = step_record(step, self.runner, step.output.read(), seconds, (), unknown)
        work, rows = step_work(record, shapes.chunk)
        tile = shapes.chunk if rows is None else min(DECODE_TILE, shapes.rows)
        routed = routed_counts(record.ids, self.experts)
        experts, tiles = np.count_nonzero(routed), int(np.sum(-(-routed // tile)))
        fills, reads = record.fills, record.read_through
        return StepSample(
            seconds,
            work._replace(
                experts=experts,
                tiles=tiles - experts,
                filling=np.count_nonzero(fills),
                fills=int(fills.sum()),
                reading=np.count_nonzero(reads),
                reads=int(reads.sum()),
            ),
        )

    def _plan(self, case: Case, steps: int) -> None:
        """Queues the routing of `steps` steps."""
        self._forced.queue.clear()
        if case.own:
            self._forced.queue.extend([None] * steps)
            return
        pager = Pager(Residency(*map(np.array, self.runner.tables)))  # copies, to be written
        for _ in range(steps):
            active = np.zeros((self.layers, self.experts), bool)
            for layer in range(self.layers):
                active[layer, self._choose(pager, layer, case)] = True
            pager.reference(active)
            self._forced.queue.append(self._routing(active, case.rows))

    def _choose(self, pager: Pager, layer: int, case: Case) -> np.ndarray:
        """Returns the layer's active experts: as many absent experts as should be missing, then
        resident ones as far as there are any."""
        there = pager.tables.address[layer] >= 0
        order = self._random.permutation(self.experts)
        absent, resident = order[~there[order]], order[there[order]]
        hits = resident[: case.active - case.missing]
        return np.concatenate([hits, absent, resident[len(hits) :]])[: case.active]

    def _routing(self, active: np.ndarray, tokens: int) -> Routing:
        """Returns routing in which tokens take the active experts, bool[L, E], in turn, so that all
        experts are used and loads are equal."""
        rows = self.runner.shapes.bucket(tokens)
        ids = np.full((self.layers, rows, self.top_k), self.experts, np.int32)
        for layer in range(self.layers):
            chosen = self._random.permutation(np.flatnonzero(active[layer]))
            turns = np.arange(tokens * self.top_k).reshape(tokens, self.top_k)
            ids[layer, :tokens] = np.sort(chosen[turns % len(chosen)], axis=1)
        weights = np.full(ids.shape, 1 / self.top_k, np.float32)
        return Routing(*jax.device_put((ids, weights), self.runner.buffers.sharding))

    def _prompts(self, count: int, tokens: int) -> list[list[int]]:
        vocabulary = self.runner.config.vocab_size
        return self._random.integers(vocabulary, size=(count, tokens)).tolist()

"""Runs some cells of a grid with one engine: one start and one compilation, with other policies and
budgets as contents of tables. Routing without a model has only traces."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from host_offload.control.interface import Policy
from host_offload.policies.budget.mv_wsa import MvWsa
from host_offload.sizing.cost_model import CostModel
from host_offload.traces.reader import Trace, read_trace
from moejax.cache import use_compilation_cache
from moejax.checkpoints.load import load_checkpoint
from moejax.checkpoints.loaded_model import LoadedModel
from moejax.checkpoints.versions import with_versions
from moejax.costs.hardware import stated_costs
from moejax.costs.measure import calibrate
from moejax.costs.rates import measure_link_rate
from moejax.costs.store import find_quiet_costs, identity
from moejax.costs.workload_plan import costs_of_trace
from moejax.engine.loop import Engine
from moejax.errors import UserError, user_errors
from moejax.evaluate.evaluation import sliding_windows
from moejax.evaluate.experiments.arms import TRAIN, Arm
from moejax.evaluate.experiments.counted import (
    VERSION_COLUMNS,
    count_cell,
    count_mixed,
    mixed_columns,
)
from moejax.evaluate.experiments.definition import (
    DRIVERS,
    MEASURE,
    NO_LINK,
    PRICED,
    Cell,
    Experiment,
    Group,
    Run,
)
from moejax.evaluate.experiments.sources.conversations import (
    TRAIN_SEED,
    Conversations,
    draw_sessions,
)
from moejax.evaluate.experiments.sources.corpus import Prompts
from moejax.evaluate.experiments.terms import Terms
from moejax.evaluate.experiments.workload import Workload, run
from moejax.models.config import record_version
from moejax.models.hub import model_directory
from moejax.serve.generation import run_scores
from moejax.start.build import router_weights, start_engine
from moejax.start.decide.drafter import choose_device
from moejax.start.decide.start_plan import StartPlan
from moejax.start.report.dry_run import dry_run
from moejax.start.settings import settings_of
from moejax.traces.tracer import start_trace

Place = tuple[str, int, int, int]
"""The routing of a cell: text, batch, prompt tokens, seed."""


@contextlib.contextmanager
def loaded_model(experiment: Experiment, precision: str) -> Iterator[LoadedModel]:
    """Loads the model in a precision; leaving the context frees it."""
    budget = experiment.budgets[0] if experiment.is_mixed(precision) else None
    driver = DRIVERS[experiment.mixes[precision].needs_host]
    group = Group(driver, precision, NO_LINK, max(experiment.batch), frozenset(), budget=budget)
    options = experiment.engine_options(group)
    model = options.model
    directory = model_directory(model.model)
    settings = settings_of(options).of_model(record_version(directory))
    use_compilation_cache()
    device = choose_device(settings)
    loaded = load_checkpoint(
        directory,
        model.dtype,
        device,
        None,
        model.step,
        model.name_map,
        settings.versions,
    )
    loaded = with_versions(loaded, settings.versions, quantizer=settings.precision.quantizer)
    try:
        yield loaded
    finally:
        for array in jax.tree.leaves(loaded.params):
            array.delete()
        loaded.store.delete()


@contextlib.contextmanager
def engine_bench(
    experiment: Experiment, group: Group, loaded: LoadedModel, root: Path
) -> Iterator[EngineBench]:
    """Starts the bench of a group, with everything compiled that its arms may ask for and the
    machine's rates measured. Leaving the context frees its arena, not the model.

    - `root`: directory of traces.
    """
    options = experiment.engine_options(group)
    settings = dataclasses.replace(settings_of(options), trace_arrays=group.arrays)
    device = choose_device(settings)
    began = time.perf_counter()
    engine, plan = start_engine(loaded, settings, device)
    runner = engine.runner
    try:
        runner.wait_compiled(everything=True)
        compile_s = time.perf_counter() - began
        started = {
            "compile_s": compile_s,
            "link_bytes_per_s": measure_link_rate(runner),
            "device": device.device_kind,
            "platform": device.platform,
        }
        router = router_weights(loaded)
        yield EngineBench(experiment, group.precision, plan, engine, router, started, root)
    finally:
        runner.delete(given=False)


class EngineBench:
    """An engine that runs the cells of a group, one after the other.

    - `root`: directory of traces.
    """

    def __init__(
        self,
        experiment: Experiment,
        precision: str,
        plan: StartPlan,
        engine: Engine,
        router: np.ndarray,
        started: Mapping[str, Any],
        root: Path,
    ):
        self.experiment, self.plan, self.engine = experiment, plan, engine
        self.terms, self.mixed = Terms.of_plan(plan, router), plan.mixed is not None
        self._prompts, self._started, self._root = Prompts(experiment), started, root
        self._precision = precision
        self._traces: dict[Place, Trace] = {}
        self.costs: CostModel | None = None
        """Of predicted cells."""

    def prepare(self, runs: Sequence[Run]) -> Mapping[str, Any]:
        """Records the routing of the runs' prompts, which no policy and no budget changes unless
        residents stand in for missing experts, and runs each policy once, so that no record has a
        first step. Returns what the start took, as plain data. Raises UserError for an error of all
        runs."""
        runner = self.engine.runner
        cells = [
            cell for cell, _ in runs if not self.mixed and cell.mode not in ("quality", PRICED)
        ]
        measured = {cell.policy: cell for cell in cells if cell.mode == "measured"}
        for cell in cells:
            if self.plan.steps.buddies is None and _place(cell) not in self._traces:
                path = self._root / _trace_name(cell, self._precision, _recorded(self.plan))
                self._traces[_place(cell)] = self.record(self._prompts.workload(cell), path)
        if any(cell.mode == "predicted" for cell in cells):
            self.costs = _costs(self.experiment, next(iter(self._traces.values())))
        for cell in measured.values():
            # Its own record reports its error.
            with contextlib.suppress(Exception):
                self._begin(cell, self.experiment.arm_of(cell))
                run(self.engine, self._prompts.workload(cell, warm_up=True))
        runner.wait_compiled(everything=True)
        return {**self._started, "executables": len(runner.executables())}

    def columns(self, cell: Cell) -> dict[str, Any]:
        """Returns the columns of one run of a cell, from a cold start. Raises any error
        of the run."""
        arm, runner = self.experiment.arm_of(cell), self.engine.runner
        if cell.mode == "quality":
            return {"texts": [self._score(cell, text) for text in self.experiment.sources]}
        if cell.mode == "simulated" and self.experiment.is_mixed(cell.precision):
            plan = self.experiment.mixed_plan(cell)
            return count_mixed(plan, self._traces[_place(cell)], cell.driver)
        if cell.mode not in ("measured", PRICED):
            return count_cell(self.terms, cell, arm, self._traces[_place(cell)], self.costs)
        compiled = len(runner.executables())
        columns = self._begin(cell, arm)
        if cell.mode == PRICED:
            columns["moves_memory"] = any("kv_pages" in policy.writes for policy in arm.policies)
            columns |= run(self.engine, self._conversations(cell))
        else:
            columns |= run(self.engine, self._prompts.workload(cell)) | self._versions()
        return {**columns, "compiled": len(runner.executables()) - compiled}

    def _begin(self, cell: Cell, arm: Arm) -> dict[str, Any]:
        """Resets the engine: nothing resident, no KV held, and new policies; with two versions of
        experts the engine is as it started. Returns columns of the budget's result."""
        if self.mixed:
            return mixed_columns(self.plan)
        cells, columns = self.terms.grant(cell.budget, arm)
        policies: tuple[Policy, ...] = arm.policies_in(self._traces.get(_place(cell)))
        if cell.mode == PRICED:
            policies = tuple(self._tell(policy, cell, cells) for policy in policies)
            self._split(cells)
        self.engine.begin_anew(self.terms.spec_for(cell.budget, arm, cell.seed), policies, cells)
        return columns

    def _split(self, cells: Sequence[int]) -> None:
        """Gives KV all memory that experts do not get. KV holds nothing then."""
        engine, arena = self.engine, self.engine.scheduler.arena
        engine.control = engine.hooks = None
        engine.set_budget([0] * len(cells), arena.slots)
        engine.set_budget(cells, arena.slots - sum(cells))

    def _tell(self, policy: Policy, cell: Cell, cells: Sequence[int]) -> Policy:
        """Gives MvWsa the grid's prices and, if it begins with a trace, one of other conversations
        of the same kind with the budget held."""
        if not isinstance(policy, MvWsa):
            return policy
        prices = self.experiment.stated_prices
        assert prices is not None, "a definition with this policy was refused"
        policy = dataclasses.replace(policy, costs=prices.costs)
        if policy.trace != TRAIN:
            return policy
        number = self.experiment.conversations.index(cell.text)
        path = self._root / f"train-{number}-{cell.batch}-{sum(cells)}"
        self._split(cells)
        other = dataclasses.replace(cell, seed=TRAIN_SEED)
        self.record(self._conversations(other), path, cells)
        return dataclasses.replace(policy, trace=str(path))

    def _conversations(self, cell: Cell) -> Conversations:
        asked, vocabulary = self.experiment, self.engine.runner.config.vocab_size
        sessions = draw_sessions(asked.sessions[cell.text], vocabulary, cell.seed)
        return Conversations(sessions, asked.stated_prices, asked.temperature, cell.seed)

    def record(
        self, workload: Workload, directory: Path, cells: Sequence[int] | None = None
    ) -> Trace:
        """Returns the trace of a workload's routing. If it is not there yet, records it with LRU
        and so many cells of each layer, by default all."""
        if directory.exists():
            trace = read_trace(directory)
            if trace.complete:
                return trace
            shutil.rmtree(directory)  # a run that was killed
        engine, plan = self.engine, self.plan
        engine.begin_anew(plan.spec, (), plan.cells if cells is None else cells)
        directory.parent.mkdir(parents=True, exist_ok=True)
        about = {"model": self.experiment.model, "eviction": "lru", "prefetch": None}
        arrays = _recorded(plan)
        engine.tracer = start_trace(
            directory, engine.runner, plan.spec, settings=about, arrays=arrays
        )
        try:
            workload.play(engine)
            engine.tracer.close()
        finally:
            engine.tracer = None
        return read_trace(directory)

    def _score(self, cell: Cell, text: str) -> dict[str, Any]:
        """Returns the quality of a text: its perplexity in windows of as many tokens as the engine
        has room for, and each window's bits, by which two texts are compared. Two versions are
        scored in one run over all texts in their order, from what the start laid out; otherwise
        each text from a cold start, where residents stand in with the cell's policy and budget.
        Raises UserError for log-probabilities that are not finite."""
        if self.plan.steps.buddies is not None:
            self._begin(cell, self.experiment.arm_of(cell))
        elif not self.mixed:
            self.engine.begin_anew(self.plan.spec, (), self.plan.cells)
        engine, ids = self.engine, self._prompts.quality_tokens(text)
        room = engine.scheduler.max_model_len
        windows = sliding_windows(len(ids), room, room)
        bits, tokens = [0.0] * len(windows), [w.end - w.first for w in windows]
        given = (list(ids[w.begin : w.end]) for w in windows)
        with contextlib.closing(
            run_scores(engine, given, 2 * engine.scheduler.prefill_chunks)
        ) as steps:
            for place, scores in (found for ended in steps for found in ended):
                bits[place] = -math.fsum(np.asarray(scores, np.float64)) / math.log(2)
        engine.drain()
        if not np.isfinite(bits).all():
            raise UserError("log-probabilities are not finite; try options: {dtype: float32}")
        return {
            "text": text,
            "tokens": sum(tokens),
            "window": room,
            "perplexity": 2 ** (sum(bits) / sum(tokens)),
            "window_bits": bits,
            "window_tokens": tokens,
            **self._versions(),
        }

    def _versions(self) -> dict[str, Any]:
        """Returns how many experts have which of two versions, and the result of transitions."""
        if not self.mixed:
            return {}
        control = self.engine.control
        stats: dict[str, Any] = (
            {} if control is None else control.controller.stats().get("precision") or {}
        )
        if not stats:
            tables = self.engine.runner.tables
            version = np.asarray(tables.version)[np.asarray(tables.address) >= 0]
            stats = dict(zip(("hi", "lo"), np.bincount(version, minlength=2).tolist(), strict=True))
        return {name: stats[name] for name in VERSION_COLUMNS if name in stats}


class TraceBench:
    """Routing without a model in the place of an engine.

    - `root`: directory of traces.
    """

    def __init__(self, experiment: Experiment, root: Path):
        self.experiment, self._root = experiment, root
        self._known: dict[Place, tuple[Terms, Mapping[str, Arm], Trace, CostModel | None]] = {}

    def prepare(self, runs: Sequence[Run]) -> None:
        """Draws the routing and teaches the policies. Raises UserError for an error of all runs."""
        for cell, _ in runs:
            if _place(cell) not in self._known:
                routing, output = self.experiment.drawn[cell.text], self.experiment.output_tokens
                asked = cell.batch, cell.prompt_tokens, output, cell.seed
                trace = routing.trace(self._root, *asked)
                costs = None
                if "predicted" in self.experiment.modes:
                    costs = _costs(self.experiment, trace)
                arms = teach_from_routing(self.experiment, cell, self._root)
                known = Terms.of_trace(trace), arms, trace, costs
                self._known[_place(cell)] = known

    def columns(self, cell: Cell) -> dict[str, Any]:
        """Returns the columns of a cell. Raises any error of the cell."""
        terms, arms, trace, costs = self._known[_place(cell)]
        return count_cell(terms, cell, arms.get(cell.policy) or Arm(cell.policy), trace, costs)


def teach_from_routing(experiment: Experiment, cell: Cell, root: Path) -> Mapping[str, Arm]:
    """Returns the arms, taught by routing of a cell's place: as many tokens as the prompts have,
    all in decode steps. Raises UserError for routing that is not drawn."""
    if not any(arm.learns for arm in experiment.read_arms.values()):
        return experiment.arms
    routing, most = experiment.drawn[cell.text], max(experiment.batch)
    if routing.directory is not None:
        raise UserError(
            f"routing {routing.name!r} is one trace, which policies are compared on; let them "
            "learn from another one (docs/explanation/policies.md) and write NAME=FILE"
        )
    train = routing.trace(root, most, 0, cell.prompt_tokens, cell.seed)
    return {name: arm.teach(train) for name, arm in experiment.read_arms.items()}


def keep_costs(experiment: Experiment, group: Group, loaded: LoadedModel, root: Path) -> None:
    """Measures and keeps the costs of a group's steps like `moejax calibrate`, unless they are
    kept: by an engine of its own, with room for all experts and without a link, which predictions
    take as given. Raises UserError like calibrate."""
    whole = dataclasses.replace(experiment, budgets=("100%",))
    plain = dataclasses.replace(group, link_rate=NO_LINK, arrays=frozenset())
    plan, _ = dry_run(whole.engine_options(plain))
    with user_errors(where="costs: measure: "):
        if find_quiet_costs(identity(plan.steps)) is None:
            with engine_bench(whole, plain, loaded, root) as bench:
                calibrate(bench.engine.runner)


def _costs(experiment: Experiment, trace: Trace) -> CostModel:
    """Returns the costs of predicted cells: those of a file, or of a device in the table of
    moejax.costs.hardware. Raises UserError if none were measured."""
    named = None if experiment.costs == MEASURE else experiment.costs
    if named is not None and experiment.costs_are_stated:
        header, spec = trace.header, Terms.of_trace(trace)
        rows = max(len(step.ids) for step in trace.step_traces())
        return stated_costs(
            named,
            layers=header.layers,
            experts=header.experts,
            top_k=header.top_k,
            expert_bytes=spec.slot_bytes,
            rows=rows,
        )
    with user_errors(where="modes: predicted (costs: FILE names what was measured): "):
        return costs_of_trace(trace, named)


def _place(cell: Cell) -> Place:
    return cell.text, cell.batch, cell.prompt_tokens, cell.seed


def _recorded(plan: StartPlan) -> frozenset[str]:
    """The optional arrays of the traces of an engine."""
    return plan.steps.trace_arrays | plan.settings.trace_arrays


def _trace_name(cell: Cell, precision: str, arrays: frozenset[str]) -> str:
    parts = cell.driver, *sorted(arrays), precision, f"batch{cell.batch}"
    parts = *parts, f"prompt{cell.prompt_tokens}", cell.text, f"seed{cell.seed}"
    return "-".join([*parts, *([] if cell.link_rate == NO_LINK else [cell.link_rate])]).replace(
        "/", "-"
    )

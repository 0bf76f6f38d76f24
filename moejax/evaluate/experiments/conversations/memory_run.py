"""The grid of conversations: one engine, whose memory experts and KV share."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from host_offload.control.interface import Policy, Spec
from host_offload.policies.budget.mv_wsa import MvWsa
from moejax.checkpoints.loaded_model import LoadedModel
from moejax.device import select_device
from moejax.engine.loop import Engine
from moejax.engine.resize import cells_of
from moejax.evaluate.experiments.bench import Granted, Terms
from moejax.evaluate.experiments.conversations.priced import drawn, played
from moejax.evaluate.experiments.definition import Cell, Experiment, GridSizes
from moejax.start.build import start_engine
from moejax.start.decide.start_plan import StartPlan
from moejax.start.settings import settings_of
from moejax.traces.tracer import start_trace

TRAIN_SEED = 10**6
"""The seed of what mv_wsa=train begins with; no seed of a grid should be it."""


@dataclasses.dataclass(frozen=True)
class SharedBench:
    """An engine that plays conversations under any split and policy."""

    terms: Terms
    plan: StartPlan
    engine: Engine
    root: Path

    def priced(self, cell: Cell) -> dict[str, Any]:
        """The columns of one run of a cell, from a cold start. Raises ValueError for a budget that
        leaves KV too little."""
        asked, arm = self.terms.experiment, self.terms.arms[cell.policy]
        granted = self.terms.granted(cell)
        policies = tuple(self._told(policy, cell, granted) for policy in arm.policies)
        self._begin(self._spec(cell), policies, granted)
        found = drawn(
            asked.conversations[cell.text], self.engine.runner.config.vocab_size, cell.seed
        )
        columns = played(self.engine, found, asked.prices, asked.temperature, cell.seed)
        moves = any("kv_pages" in policy.writes for policy in policies)
        return {**granted.columns, "moves_memory": moves, **columns}

    def _spec(self, cell: Cell) -> Spec:
        return dataclasses.replace(self.plan.spec, seed=cell.seed)

    def _told(self, policy: Policy, cell: Cell, granted: Granted) -> Policy:
        """The policy with the grid's prices, and with what it is to begin with."""
        if not isinstance(policy, MvWsa):
            return policy
        policy = dataclasses.replace(policy, costs=self.terms.experiment.prices.costs)
        if policy.trace != TRAIN:
            return policy
        return dataclasses.replace(policy, trace=str(self._trained(cell, granted)))

    def _begin(self, spec: Spec, policies: Sequence[Policy], granted: Granted) -> None:
        """Nothing resident, no KV held, and the policies as new."""
        engine, arena = self.engine, self.engine.scheduler.arena
        engine.control = engine.hooks = None
        engine.set_budget([0] * len(granted.cells), arena.slots)
        engine.set_budget(granted.cells, arena.slots - sum(granted.cells))
        engine.begin_anew(spec, policies, granted.cells)

    def _trained(self, cell: Cell, granted: Granted) -> Path:
        """A trace of other conversations of the same kind, under the budget held; recorded where it
        is not there yet."""
        asked, engine = self.terms.experiment, self.engine
        names = [*asked.conversations]
        path = self.root / f"train-{names.index(cell.text)}-{cell.batch}-{sum(granted.cells)}"
        if path.exists():
            return path
        path.parent.mkdir(parents=True, exist_ok=True)
        spec, scratch = self._spec(cell), path.with_suffix(f".{cell.seed}-new")
        self._begin(spec, (), granted)
        engine.tracer = start_trace(scratch, engine.runner, spec, settings={})
        try:
            workloads = asked.conversations[cell.text]
            vocabulary = engine.runner.config.vocab_size
            found = drawn(workloads, vocabulary, TRAIN_SEED)
            played(engine, found, asked.prices, asked.temperature, TRAIN_SEED)
            engine.tracer.close()
        finally:
            engine.tracer = None
        scratch.rename(path)  # whole, or not there
        return path


TRAIN = "train"
"""The trace of an MvWsa that begins with what the grid records."""


def shared_bench(
    experiment: Experiment, batch: int, loaded: LoadedModel, root: Path
) -> tuple[SharedBench, Mapping[str, Any]]:
    """(the bench of a batch, what its start took); whoever asks frees the engine's arena."""
    options = experiment.shared_options(batch)
    device: jax.Device = select_device(options.runtime.device, options.runtime.threads)
    engine, plan = start_engine(loaded, settings_of(options), device)
    engine.runner.wait_compiled(everything=True)
    sizes = GridSizes.of_plan(plan)
    kv_bytes = plan.budget.kv_slots * sizes.slot_bytes
    terms = Terms(experiment, experiment.arms, sizes, plan.spec, kv_bytes, None)
    started = {
        "device": device.device_kind,
        "platform": device.platform,
        "slots": engine.scheduler.arena.slots,
        "cells_start": cells_of(engine.scheduler.arena),
        "executables": len(engine.runner.executables()),
    }
    return SharedBench(terms, plan, engine, root), started

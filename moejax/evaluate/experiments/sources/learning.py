"""Prompts of a grid, and what its policies learn before it begins."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from host_offload.traces.reader import Trace, read_trace
from moejax.evaluate.experiments.bench import Group, bench_of, loaded_model
from moejax.evaluate.experiments.definition import Cell, Experiment, check_experiment
from moejax.evaluate.experiments.simulated import recorded
from moejax.evaluate.experiments.sources.corpus import PARTS, TEST, TRAIN, Part, windows
from moejax.evaluate.experiments.workload import Workload
from moejax.models.directory import model_directory
from moejax.requests.tokenizer import load_tokenizer
from moejax.start.build import router_weights

WARM_UP_TOKENS = 16


class Prompts:
    """Prompts from an experiment's texts."""

    def __init__(self, experiment: Experiment):
        self._experiment = experiment
        self._ids: dict[str, list[int]] = {}
        self._cut: dict[tuple[str, int, int, Part], list[list[int]]] = {}
        self._tokenizer: Any = None

    def workload(self, cell: Cell, warm_up: bool = False) -> Workload:
        """The cell's prompts. warm_up: as few tokens as tell an engine everything."""
        asked = self._experiment
        # The same prompts at any batch, or the first of the largest.
        most = asked.prompts or max(asked.batch)
        count = cell.batch if warm_up or asked.prompts is None else most
        prompts = tuple(
            map(tuple, self._windows(cell.text, most, cell.prompt_tokens, TEST)[:count])
        )
        output = min(asked.output_tokens, WARM_UP_TOKENS if warm_up else asked.output_tokens)
        return Workload(prompts, cell.batch, output, asked.temperature, cell.seed)

    def training(self) -> Workload:
        """Prompts from the training parts of all texts together, of the shortest length."""
        asked, length = self._experiment, min(self._experiment.prompt_tokens)
        found = [
            tuple(window)
            for text in asked.texts
            for window in self._windows(text, asked.train_prompts, length, TRAIN)
        ]
        batch = max(asked.batch)
        return Workload(tuple(found), batch, asked.output_tokens, asked.temperature, asked.seeds[0])

    def quality_tokens(self, text: str) -> list[int]:
        """Those whose quality is measured: the first of a part of a text."""
        ids, asked = self._tokens(text), self._experiment
        begin, end = (int(share * len(ids)) for share in PARTS[asked.quality_part])
        return ids[begin:end][: asked.quality_tokens]

    def _windows(self, text: str, count: int, length: int, part: Part) -> list[list[int]]:
        place = text, count, length, part
        if place not in self._cut:
            self._cut[place] = windows(self._tokens(text), count, length, text, part)
        return self._cut[place]

    def _tokens(self, text: str) -> list[int]:
        asked = self._experiment
        if text not in self._ids:
            if self._tokenizer is None:
                words = asked.options.get("tokenizer") or model_directory(asked.model)
                self._tokenizer = load_tokenizer(words, required=True)
            self._ids[text] = self._tokenizer(asked.sources[text].read_text())["input_ids"]
        return self._ids[text]


def learned(experiment: Experiment, prompts: Prompts, traces: Path) -> Experiment:
    """The experiment whose policies have learned what they learn within the grid (NAME=train); the
    same where none does. traces: where the trace of that is, recorded if it is not there yet.

    Every policy gets the one trace, and as many trials of its settings: the one that the definition
    says (docs/ablation.md, "A fair comparison"). Raises UserError for a text that is too short, and
    for what learning shows to be none of this grid.
    """
    if not experiment.learns:
        return experiment
    arrays = frozenset().union(*(arm.train_arrays for arm in experiment.arms.values()))
    by_router = any(arm.learns_by_router for arm in experiment.arms.values())
    trace, router = _lesson(experiment, prompts, traces, arrays, by_router)
    arms = {name: arm.taught(trace, router) for name, arm in experiment.arms.items()}
    mixes = {name: mix.taught(trace) for name, mix in experiment.mixes.items()}
    found = dataclasses.replace(experiment, arms=arms, mixes=mixes)
    check_experiment(found)
    return found


def _lesson(
    experiment: Experiment, prompts: Prompts, traces: Path, arrays: frozenset[str], by_router: bool
) -> tuple[Trace, np.ndarray | None]:
    """The trace to learn from, and the model's routers if they are asked for."""
    path = traces / "-".join(["train", *sorted(arrays)])
    trace = read_trace(path) if path.exists() else None
    if trace is not None and trace.complete and not by_router:
        return trace, None
    precision = next((p for p in experiment.precision if not experiment.mixed(p)), "dense")
    with loaded_model(experiment, precision) as (loaded, _):
        router = router_weights(loaded) if by_router else None
        if trace is not None and trace.complete:
            return trace, router
        workload = prompts.training()
        group = Group("device", precision, experiment.link_rate[0], workload.batch, arrays)
        with bench_of(experiment, group, loaded) as bench:
            return recorded(bench, workload, path), router

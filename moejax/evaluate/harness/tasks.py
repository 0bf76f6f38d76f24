"""Runs tasks of lm-evaluation-harness with a running model."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager

from moejax.checkpoints.conversion import installed_version
from moejax.errors import UserError, shown
from moejax.evaluate.comparison import Units
from moejax.evaluate.evaluation import model_report, run_report
from moejax.evaluate.harness.harness_model import MoejaxLM
from moejax.serve.llm import LLM


@dataclasses.dataclass(frozen=True)
class TaskOptions:
    """Options of the harness's own command line, under the same names."""

    num_fewshot: int | None = None
    limit: int | None = None
    """Number of documents of each task; None: all."""
    include_path: str | os.PathLike[str] | None = None
    apply_chat_template: bool = False


class _Tasks(TaskManager):
    def load(self, task_list: Any) -> Any:
        try:
            return super().load(task_list)
        except UserError:
            raise
        except Exception as error:  # a task is a stranger's program, and its data may be anywhere
            names = ", ".join(map(str, task_list))
            text = shown(f"{type(error).__name__}: {error}")
            raise UserError(f"lm-eval cannot load the task {names}: {text}") from error


def task_manager(tasks: Sequence[str], include_path: str | os.PathLike[str] | None) -> TaskManager:
    """Returns the harness's index of tasks. Raises UserError for a missing directory and for
    unknown tasks."""
    if include_path is not None and not os.path.isdir(include_path):
        raise UserError(f"{include_path} is no directory with files of tasks (--include-path)")
    own = None if include_path is None else str(include_path)
    if own is not None:  # reading the harness's own 10,000 files takes many seconds
        manager = _Tasks(include_path=own, include_defaults=False)
        if all(manager.match_tasks([task]) for task in tasks):
            return manager
    manager = _Tasks(include_path=own)
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise UserError(
            f"lm-eval has no task {', '.join(unknown)}; `lm_eval ls tasks` lists them, and "
            "--include-path DIR adds those whose .yaml files are there"
        )
    return manager


def run_tasks(
    llm: LLM, tasks: Sequence[str], manager: TaskManager, options: TaskOptions
) -> dict[str, Any]:
    """Returns the result of the harness's `simple_evaluate` with the model llm, samples included.
    Raises UserError for a chat template that the tokenizer does not have, and like MoejaxLM."""
    found = simple_evaluate(
        model=MoejaxLM(llm),
        tasks=[*tasks],
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        task_manager=manager,
        log_samples=True,
        apply_chat_template=options.apply_chat_template,
    )
    assert found is not None
    return dict(found)


def tasks_json(llm: LLM, found: Mapping[str, Any], options: TaskOptions) -> dict[str, Any]:
    """Returns a result of run_tasks as plain data for JSON, without its samples. As in
    `result_json` of perplexity, everything outside of `run` is what was computed."""
    report = model_report(llm)
    return {
        "task": f"lm-eval:{','.join(found['results'])}",
        **report,
        "versions": {**report["versions"], "lm_eval": installed_version("lm_eval")},
        "tasks": {
            "versions": dict(found["versions"]),
            "n-shot": dict(found["n-shot"]),
            "n-samples": dict(found["n-samples"]),
            "limit": options.limit,
            "apply_chat_template": options.apply_chat_template,
        },
        "results": {task: dict(figures) for task, figures in found["results"].items()},
        "run": run_report(llm),
    }


_RATIOS = {"bits_per_byte": "bits/byte", "word_perplexity": "bits/word"}
"""Metrics whose documents have (ln p, how many), with the name of the quotient."""


def document_units(found: Mapping[str, Any]) -> list[Units]:
    """Returns the units by which two runs of the same tasks are compared: each metric, by filter,
    that has a number or a likelihood for documents."""
    units: dict[tuple[str, str], Units] = {}
    for task, samples in found["samples"].items():
        for one in samples:
            for name in one["metrics"]:
                value, weight = one[name], 1.0
                figure = name if one["filter"] == "none" else f"{name},{one['filter']}"
                if name in _RATIOS:
                    figure, (ln_p, weight) = _RATIOS[name], value
                    value = -ln_p / math.log(2)
                if isinstance(value, int | float):
                    kept = units.setdefault((task, figure), Units(task, figure, [], [], []))
                    kept.keys.append(f"{task}:{one['doc_id']}:{one['doc_hash'][:16]}")
                    kept.sums.append(float(value))
                    kept.weights.append(float(weight))
    return list(units.values())

"""Conversations, their trace and costs: what tests of budgets and plans share."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np

from host_offload.control.interface import Costs
from host_offload.sizing.cost_model import CostModel, StepCost
from moejax import LLM, SamplingParams
from moejax.start.decide.facts import device_facts
from moejax.start.decide.start_plan import StartPlan, decide
from moejax.start.options import Config
from moejax.start.report.dry_run import facts_without_weights
from moejax.start.report.model_info import read_headers
from moejax.start.settings import settings_of

LIMITS: dict[str, Any] = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256}
MEMORY = 3 << 20
"""Bytes of the arena: 32 of the 64 + 11 slots that everything would take."""
LAYERS, EXPERTS, SLOT, PER_SLOT = 4, 16, 98304, 6
USERS = 5


def planned(costs: Costs | None = None, **options: Any) -> StartPlan:
    """What a start of the demo decides, without one."""
    settings = settings_of(Config.of("demo", **{"memory": MEMORY, **LIMITS, **options}))
    config, _ = read_headers("demo")
    model = facts_without_weights(config, "auto", settings.precision.versions)
    return decide(settings, model, device_facts(jax.devices()[0], automatic=False), costs)


COSTS = CostModel(
    layers=LAYERS,
    experts=EXPERTS,
    top_k=4,
    expert_bytes=SLOT,
    chunk=64,
    row_tile=4,
    decode={
        4: StepCost(step=1e-3, part=1e-5, span=1e-6, expert=1e-5, tile=1e-5, fill=2e-4, read=2e-4),
        16: StepCost(step=2e-3, part=1e-5, span=1e-6, expert=1e-5, tile=1e-5, fill=2e-4, read=2e-4),
    },
    prefill=StepCost(step=5e-3, part=1e-4, span=1e-6, expert=1e-5, tile=1e-5, fill=2e-4, read=2e-4),
    control=1e-5,
    recompute_per_token=1e-4,
    kv_swap_per_byte=2e-9,
    link_per_byte=2e-9,
)
"""Round figures for the demo model: a step of 1 ms, 0.2 ms for an expert that is missing."""


def converse(llm: LLM, rounds: int = 3) -> list[tuple[int, ...]]:
    """Turns of USERS conversations; returns the tokens of every answer."""
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True)
    sessions = [f"user {i}" for i in range(USERS)]
    said: list[list[int]] = [[] for _ in sessions]
    answers = []
    for turn in range(rounds):
        prompts = [
            [*said[i], *range(5 + 9 * i + turn, 30 + 7 * i + 2 * turn)] for i in range(USERS)
        ]
        for i, output in enumerate(llm.generate(prompts, params, session_id=sessions)):
            answers.append(tuple(output.outputs[0].token_ids))
            said[i] = [*prompts[i], *answers[-1]]
    for name in sessions:
        llm.end_session(name)
    return answers


@functools.cache
def recorded() -> tuple[Path, list[tuple[int, ...]]]:
    """A trace of the conversations with half of the memory, and their answers."""
    directory = Path(tempfile.mkdtemp(prefix="moejax-tests-budget-")) / "trace"
    with LLM("demo", memory=MEMORY, trace=directory, progress=False, **LIMITS) as llm:
        return directory, converse(llm)


def cells_now(llm: LLM) -> list[int]:
    return np.sum(np.asarray(llm.engine.runner.tables.cell_row) >= 0, axis=1).tolist()

"""Whole steps of small models, as XLA makes them of kernels for a GPU: every launch of a decode and
of a prefill step, the loops over layers and waves, XLA's own kernels between ours.

What a step is given is what an engine's steps with XLA's ops had on this machine.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any
from unittest import mock

import jax
import numpy as np
import pytest
from flax import nnx

from host_offload.memory.arena import SlotClass
from moejax import LLM, SamplingParams
from moejax.checkpoints.random_model import abstract_params
from moejax.models.families import FAMILIES
from moejax.models.layers import Decoder
from moejax.start.decide.shapes import KERNEL_WAVES
from moejax.step.programs import Program, ProgramKey, Programs
from moejax.step.runner import Runner
from pallas_kernels import resolve_ops
from pallas_kernels.cards import shared_class
from pallas_kernels.verification import FEW_ROWS
from tests.aot.aot_h200 import CARDS, device_of
from tests.moejax.engine_runs import set_budget
from tests.moejax.models.families import write_checkpoint
from tests.ptx.program import compiled_call

pytestmark = pytest.mark.aot

CELLS = (8,), (3, 1, 2), (0,)
"""Cells of each layer, in turns: all experts have one; they are filled in turns; all are read
through."""

SHORT = 4
"""Pages of 16 tokens that hold the prompts and what is generated, of 8 that there may be."""

OPTIONS = {
    "max_model_len": 128,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "kv_budget": "1MiB",
    "enable_prefix_caching": False,  # every budget has the same steps
    "dtype": "bfloat16",
    "prefill_waves": KERNEL_WAVES,
}
TOLERANCE = 0.1
"""Of logits, whose deviation is 1.5: with bfloat16 XLA's and the kernels' are 0.05 from float32's
and from each other."""


KERNELS = {
    kind: {"linear", *others}
    for kind, others in {
        "decode": ("expert_gate_up_hits", "expert_gate_up_filled", "expert_down_combine"),
        "prefill": (
            *("route", "plan", "fill", "expert_gate_up_sorted", "expert_down_sorted", "combine"),
        ),
    }.items()
}
"""Launched in a step of any family."""


@dataclasses.dataclass(frozen=True)
class Step:
    """A step as the engine carried it out."""

    key: ProgramKey
    arguments: tuple
    """Parameters, stores, arena, tables, and what the step computes; numpy."""
    results: tuple
    """Arena, tables, output."""
    programs: Programs


PROMPTS = ([*range(3, 40)], [7, 9, 11])


def recorded(
    llm: LLM, cells: Sequence[int], prompts: Sequence[Sequence[int]] = PROMPTS
) -> list[Step]:
    """The steps of the prompts and some tokens, in order. cells: of each layer, taken in turns."""
    steps: list[Step] = []
    carry_out = Runner._step

    def record(runner, key, args, *others):
        given = runner._params, runner.stores, runner.arena, runner.tables, *args
        before = jax.tree.map(np.array, given)  # copies: arena and tables are donated
        output = carry_out(runner, key, args, *others)
        after = jax.tree.map(np.array, (runner.arena, runner.tables, output))
        steps.append(Step(key, before, after, runner.programs()))
        return output

    layers = llm.engine.runner.tables.address.shape[0]
    kv_slots = llm.engine.scheduler.arena.count(SlotClass.KV)
    set_budget(llm, [cells[i % len(cells)] for i in range(layers)], kv_slots)
    with mock.patch.object(Runner, "_step", record):
        llm.generate([*prompts], SamplingParams(max_tokens=4, temperature=0, ignore_eos=True))
    return steps


def with_kernels(step: Step, card: str) -> Program:
    """The step's program with every op a kernel, for a card."""
    ops = resolve_ops("pallas", platform="gpu", dtype="bfloat16")
    ops = dataclasses.replace(ops, shared_kib=shared_class(device_of(card)))
    steps = dataclasses.replace(step.programs.steps, ops=ops)
    # The model's layers have ops of their own.
    graph, _ = nnx.split(Decoder(steps.config, abstract_params(steps.config), ops))
    return dataclasses.replace(step.programs, steps=steps, graph=graph).program(step.key)


def interpreted(name: str, step: Step, card: str, **launch: Any) -> tuple:
    """Arena, tables and output of the step, its kernels interpreted. name: of the model."""
    program = with_kernels(step, card)
    compiled = compiled_call(
        card,
        program.function,
        step.arguments,
        donated=lambda path: path[0].idx in program.donated,
        on_host=lambda path: path[0].idx == 1,
        key=(name, step.key),
    )
    results, issued = compiled.run(*step.arguments, launch=launch)
    names = {re.sub(r"__\d+$", "", name) for name in issued}
    if step.key.resident:
        assert {"expert_gate_up", "expert_down_combine"} <= names
        assert {"norm_route_list", "route_list", "route_list_last"} & names
    else:
        assert KERNELS[step.key.kind] <= names and {"route_plan", "route"} & names
    return results


def check(name: str, directory, kind: str, card: str, copies: str = "late") -> None:
    """The last step of its kind: as XLA's ops made it, and to the bit as with all experts."""
    options = {"expert_budget": "100%", "eviction": "lru", "ops": "xla", "progress": False}
    with LLM(directory, **options, **OPTIONS) as llm:
        runs = [[s for s in recorded(llm, cells) if s.key.kind == kind][-1] for cells in CELLS]
    found = []
    for seed, (cells, step) in enumerate(zip(CELLS, runs, strict=True)):
        _, tables, output = interpreted(name, step, card, copies=copies, seed=seed)
        _, known, made = step.results
        for field, mine, other in zip(tables._fields, tables, known, strict=True):
            assert np.array_equal(mine, other), f"cells {cells}: {field}"
        assert np.array_equal(output.tokens, made.tokens), f"cells {cells}"
        assert np.max(np.abs(output.logits - made.logits)) < TOLERANCE, f"cells {cells}"
        found.append(output.logits)
        assert np.array_equal(output.logits, found[0]), f"cells {cells}"
    if kind == "decode":
        short = runs[0].key._replace(context=SHORT)
        before, after = (tables.address for tables in (runs[0].arguments[3], runs[0].results[1]))
        assert np.array_equal(before, after)  # nobody whom the step chose was absent
        for key in (short, short._replace(resident=True)):
            step = dataclasses.replace(runs[0], key=key)
            _, tables, output = interpreted(name, step, card, copies=copies)
            assert np.array_equal(output.logits, found[0])
            for field, mine, other in zip(tables._fields, tables, runs[0].results[1], strict=True):
                assert np.array_equal(mine, other), f"{key}: {field}"


@pytest.mark.nightly
@pytest.mark.parametrize("cells", CELLS)
@pytest.mark.parametrize("directory", ["Qwen3MoeForCausalLM"], indirect=True)
def test_rows_have_their_bits_in_every_bucket(directory, cells):
    """Of a step of 8 sequences, the first 1, 2, 4 and 8 rows alone: as among 16."""
    options = {"expert_budget": "100%", "eviction": "lru", "ops": "xla", "progress": False}
    options |= {**OPTIONS, "max_num_seqs": 16, "max_num_batched_tokens": 512}
    prompts = [[*range(3, 5 + 4 * i)] for i in range(8)]
    with LLM(directory, **options) as llm:
        step = [s for s in recorded(llm, cells, prompts) if s.key.kind == "decode"][-1]
    resident = cells == CELLS[0]
    logits = {}
    for rows in (16, *FEW_ROWS):
        one = dataclasses.replace(step, key=step.key._replace(rows=rows, resident=resident))
        _, _, output = interpreted("8 sequences", one, "h200", copies="random")
        logits[rows] = output.logits[: min(rows, len(prompts))]
        assert np.array_equal(logits[rows], logits[16][: len(logits[rows])]), rows
    assert np.all(np.ptp(logits[16], axis=1) > 1)
    assert np.all(np.any(logits[16][1:] != logits[16][:-1], axis=1))


QUICK = ("Qwen3MoeForCausalLM", "decode"), ("DeepseekV3ForCausalLM", "prefill")
"""Norms in attention, a layer without experts; latent pages, groups, shared experts, waves."""


@pytest.fixture(scope="module")
def directory(request, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("family"), request.param)


@pytest.mark.slow
@pytest.mark.parametrize(("directory", "kind"), QUICK, indirect=["directory"])
def test_step(request, directory, kind):
    check(request.node.callspec.params["directory"], directory, kind, "h200")


@pytest.mark.nightly
@pytest.mark.parametrize("card", CARDS)
@pytest.mark.parametrize("kind", ["decode", "prefill"])
@pytest.mark.parametrize("directory", FAMILIES, indirect=True)
def test_every_family(request, directory, kind, card):
    name = request.node.callspec.params["directory"]
    check(name, directory, kind, card, "random")

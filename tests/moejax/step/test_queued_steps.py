"""The parts of a step that a queue of transfers adds, compiled for an H200 at the size of
Qwen3-30B-A3B: each updates what it is given in place, and launches what is listed here."""

from __future__ import annotations

import collections
import dataclasses
import itertools

import pytest

from host_offload.queue.pinned import piece_edges
from host_offload.queue.transfer import QueueSpec
from moejax.checkpoints.random_model import shape
from moejax.step.layer_programs import EXPERT_PARTS, OF_RECORDS, layer_program
from moejax.step.programs import ProgramKey, Programs
from pallas_kernels import resolve_ops
from pallas_kernels.records.absent import AbsentRecords
from tests.aot.aot_h200 import Compiled, compile_for_h200
from tests.moejax.step.test_constant_memory import GiB, MiB, abstract_programs, nbytes

pytestmark = pytest.mark.aot

RECORD = 9 * MiB
"""Three matrices [768, 2048] of bfloat16."""


@pytest.fixture(scope="module")
def programs() -> Programs:
    ops = resolve_ops("pallas", platform="gpu", dtype="bfloat16")
    limits = {"rows": 64, "max_model_len": 4096, "max_num_batched_tokens": 8192}
    made = abstract_programs(shape("qwen3-30b-a3b"), 40 * GiB, ops=ops, waves=8, **limits)
    (record,) = made.steps.layout.records
    edges = piece_edges(record, None)
    rows = tuple(b - a for a, b in itertools.pairwise(edges))
    (store,) = made.stores
    return dataclasses.replace(
        made,
        steps=dataclasses.replace(made.steps, driver="host", queue=QueueSpec()),
        stores=(AbsentRecords(store.shape, rows),),
    )


def compiled(programs: Programs, key: ProgramKey) -> Compiled:
    program = layer_program(programs, key)
    return compile_for_h200(program.function, *program.args, donate_argnums=program.donated)


def test_a_record_is_moved_into_its_cell_in_place(programs):
    """Three copies of a piece into the donated arena, and nothing else."""
    found = compiled(programs, ProgramKey("land"))
    assert found.copies(MiB) == []
    assert found.memory.alias_bytes == nbytes(programs.arena)
    assert found.memory.temp_bytes < MiB
    assert found.memory.argument_bytes - nbytes(programs.arena) <= RECORD + MiB
    assert len(found.kernels()) <= 5, found.kernels()
    assert found.host_copies(1) == []


OURS = {"plan", "expert_gate_up", "expert_down", "combine"}

LAUNCHES = {
    "blank": collections.Counter(),
    "plan": collections.Counter(plan=1),
    "compute": collections.Counter(expert_gate_up=1, expert_down=1),
    "through": collections.Counter(expert_gate_up=1, expert_down=1),
    "combine": collections.Counter(combine=1),
}
"""Our kernels in each part of a decode step."""

OTHERS = {"blank": 2, "plan": 14, "compute": 4, "through": 8, "combine": 1}
"""Most kernels of XLA's own."""


@pytest.mark.parametrize(
    "part",
    # Its kernels are those of compute, whose compilation takes as long.
    [pytest.param(p, marks=[pytest.mark.nightly] * (p == "through")) for p in EXPERT_PARTS],
)
def test_parts_of_a_decode_step_copy_nothing_large(programs, part):
    """But a record without a cell, whose three pieces are put together."""
    found = compiled(programs, ProgramKey("decode", part=part))
    large = [size for _, size in found.copies(MiB)]
    assert large == ([RECORD] if part == "through" else [])
    assert found.host_copies(1) == found.host_copies(1, to_host=True) == []
    memory = found.memory
    assert memory.host_argument_bytes == 0  # no part is given the store, nor a copy of the arena
    assert memory.argument_bytes < (part == "compute") * nbytes(programs.arena) + 64 * MiB
    assert memory.temp_bytes < 24 * MiB
    launches = collections.Counter(found.kernels())
    own = {
        name: n for name, n in launches.items() if name in ("plan", "combine") or "expert" in name
    }
    assert own == LAUNCHES[part], launches
    assert sum(launches.values()) - sum(own.values()) <= OTHERS[part], launches


@pytest.mark.nightly
@pytest.mark.parametrize("kind", OF_RECORDS)
def test_programs_of_records_copy_nothing_large(programs, kind):
    found = compiled(programs, ProgramKey(kind))
    assert [size for _, size in found.copies(MiB) if size > RECORD] == []


@pytest.mark.nightly
@pytest.mark.parametrize("part", EXPERT_PARTS)
def test_parts_of_a_prefill_step_copy_nothing_large(programs, part):
    found = compiled(programs, ProgramKey("prefill", part=part))
    assert [size for _, size in found.copies(MiB) if size > RECORD] == []


def test_an_arena_that_is_not_donated_is_copied(programs):
    program = layer_program(programs, ProgramKey("land"))
    found = compile_for_h200(program.function, *program.args)
    assert nbytes(programs.arena) in [size for _, size in found.copies(MiB)]

"""The parts of a step that a queue of transfers adds, compiled for an H200 at the size of
Qwen3-30B-A3B: each updates what it is given in place, and launches what is listed here."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools

import jax
import pytest

from host_offload.memory.tables import empty_tables
from host_offload.queue.pinned import piece_edges
from host_offload.queue.transfer import QueueSpec
from moejax.checkpoints.random_model import shape
from moejax.step.layer_programs import PUT, layer_program
from moejax.step.programs import LANDED, ProgramKey, Programs
from moejax.step.step_parts import SecondProcessor
from pallas_kernels import resolve_ops
from pallas_kernels.records.absent import AbsentRecords
from pallas_kernels.records.versions import VersionFormats
from tests.aot.aot_h200 import compile_for_h200
from tests.moejax.step.test_constant_memory import GiB, MiB, abstract_programs, nbytes, with_steps

pytestmark = pytest.mark.aot

RECORD = 9 * MiB
"""Three matrices [768, 2048] of bfloat16."""


@functools.cache
def of_kernels() -> Programs:
    ops = resolve_ops("pallas", platform="gpu", dtype="bfloat16")
    limits = {"rows": 64, "max_model_len": 4096, "max_num_batched_tokens": 8192}
    made = abstract_programs(shape("qwen3-30b-a3b"), 40 * GiB, ops=ops, waves=8, **limits)
    return with_steps(made, driver="host", queue=QueueSpec())


def of_pieces(made: Programs, *rows: int) -> Programs:
    """Records are separate arrays of so many rows each."""
    return dataclasses.replace(made, stores=(AbsentRecords(made.stores[0].shape, rows),))


def queued() -> Programs:
    edges = piece_edges(of_kernels().steps.layout.records[0], None)
    return of_pieces(of_kernels(), *(b - a for a, b in itertools.pairwise(edges)))


def placed() -> Programs:
    """Those of a step some of whose experts a CPU computes from the pinned store: a record is one
    piece."""
    second = SecondProcessor(implementation="cpu", same_bits=False)
    rows = of_kernels().steps.layout.records[0].rows
    return of_pieces(with_steps(of_kernels(), second=second), rows)


def streaming() -> Programs:
    """Those of the stream driver: tables with cells of the ring, no part but experts."""
    made = with_steps(queued(), driver="stream")
    layers, experts = made.tables.address.shape
    tables = jax.eval_shape(lambda: empty_tables(layers, experts, 2 * experts))
    return dataclasses.replace(made, tables=tables)


def tiered(tiers: str = "flux-direct") -> Programs:
    """Those with packed residents."""
    made = streaming()
    (dense,), (store,) = made.steps.layout.records, made.stores
    packed = dataclasses.replace(dense, version="lossless12")
    layout = made.steps.config.slot_layout(dense.itemsize, ("dense", "lossless12"), "bfloat16")
    formats = tuple(VersionFormats(cell, cell) for cell in (dense, packed))
    made = with_steps(made, layout=layout, formats=formats, tiers=tiers)
    other = AbsentRecords((*store.shape[:2], packed.rows, packed.hidden))
    return dataclasses.replace(made, stores=(store, other))


@dataclasses.dataclass(frozen=True)
class Case:
    """A program: where it is, our kernels in it and most of XLA's own, scratch, copies."""

    programs: object
    key: ProgramKey
    ours: dict[str, int]
    others: int
    temp: int = 2
    """MiB."""
    copies: tuple[int, ...] = ()
    """Of an MiB and more."""
    in_place: str = ""
    """What is updated: `arena`, `y`."""
    marks: tuple = ()


def decode(part: str) -> ProgramKey:
    return ProgramKey("decode", part=part)


NIGHTLY = (pytest.mark.nightly,)
TWO = {"expert_gate_up": 1, "expert_down": 1}
SORTED = {"expert_gate_up_sorted": 1, "expert_down_sorted": 1, "combine": 1}
CASES = {
    # Three copies of a piece into the donated arena, or one of a record, and nothing else.
    "land": Case(queued, ProgramKey("land"), {}, 5, in_place="arena"),
    "land in one piece": Case(placed, ProgramKey("land"), {}, 3, in_place="arena"),
    "blank": Case(queued, decode("blank"), {}, 2, 24),
    "plan": Case(queued, decode("plan"), {"plan": 1}, 14, 24),
    "compute": Case(queued, decode("compute"), TWO, 4, 24),
    "combine": Case(queued, decode("combine"), {"combine": 1}, 1, 24),
    # A record without a cell, whose three pieces are put together.
    "through": Case(queued, decode("through"), TWO, 8, 24, (RECORD,), marks=NIGHTLY),
    # Beside a second processor: x is copied by the host, y's rows are an argument.
    "absent": Case(placed, decode("absent"), {}, 1),
    "plan beside": Case(placed, decode("plan_beside"), {"plan": 1}, 12),
    "put": Case(placed, decode("put"), {}, 1, in_place="y"),
    "put, prefill": Case(
        placed, ProgramKey("prefill", part="put"), {}, 1, in_place="y", marks=NIGHTLY
    ),
    # A layer streams: in place in the donated arena, from staging that the program is given.
    "seat": Case(streaming, ProgramKey("seat"), {}, 20, 17),
    "land many": Case(streaming, ProgramKey("land_many"), {}, 3 * LANDED + 1, 17, in_place="arena"),
    "experts": Case(streaming, decode("experts"), {**TWO, "combine": 1}, 8, 17, in_place="arena"),
    "experts, prefill": Case(
        # A prefill step's experts' outputs, float32[8192, 8, 2048], and what sorts tokens.
        *(streaming, ProgramKey("prefill", part="experts"), SORTED, 14, 640),
        in_place="arena",
        marks=NIGHTLY,
    ),
    # Packed residents are computed in the launches of dense ones, and decoded in place.
    "land packed": Case(tiered, ProgramKey("land_packed"), {}, 2, 19, in_place="arena"),
    "unpack": Case(
        lambda: tiered("flux"), ProgramKey("unpack"), {}, 4 * LANDED + 4, 19, in_place="arena"
    ),
    "packed": Case(
        tiered, decode("experts"), {**TWO, "combine": 1}, 8, 19, in_place="arena", marks=NIGHTLY
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=case.marks) for name, case in CASES.items()]
)
def test_a_program_copies_nothing_large_and_launches_what_is_listed(name):
    case = CASES[name]
    made = case.programs()
    program = layer_program(made, case.key) if case.key.part else made.program(case.key)
    found = compile_for_h200(program.function, *program.args, donate_argnums=program.donated)
    assert [size for _, size in found.copies(MiB)] == list(case.copies)
    assert found.host_copies(1) == found.host_copies(1, to_host=True) == []
    memory = found.memory
    assert memory.host_argument_bytes == 0  # no part is given the store
    assert memory.temp_bytes < case.temp * MiB
    written, crossed = 0, 0
    if case.in_place == "arena":
        written = nbytes(made.arena)
        many = LANDED if case.key.kind == "land_many" else 1
        crossed = many * RECORD * case.key.kind.startswith("land")
    elif case.in_place == "y":
        written = nbytes(layer_program(made, ProgramKey(case.key.kind, part="put")).args[:1])
        crossed = PUT[case.key.kind] * 2048 * 4
    reads = nbytes(made.arena) if case.key.part == "compute" else written
    assert written <= memory.alias_bytes + MiB and memory.alias_bytes < written + 64 * MiB
    assert memory.argument_bytes < reads + crossed + 80 * MiB
    launches = collections.Counter(found.kernels())
    ours = {n: k for n, k in launches.items() if n in ("plan", "combine") or "expert" in n}
    assert ours == case.ours, launches
    assert sum(launches.values()) - sum(ours.values()) <= case.others, launches


def test_an_arena_that_is_not_donated_is_copied():
    program = queued().program(ProgramKey("land"))
    found = compile_for_h200(program.function, *program.args)
    assert nbytes(queued().arena) in [size for _, size in found.copies(MiB)]

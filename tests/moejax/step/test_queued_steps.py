"""The parts of a step that a queue of transfers adds, compiled for an H200 at the size of
Qwen3-30B-A3B: each updates what it is given in place, and launches what is listed here."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re

import jax
import jax.numpy as jnp
import pytest

from host_offload.memory.tables import empty_tables
from host_offload.queue.pinned import piece_edges
from host_offload.queue.transfer import QueueSpec
from moejax.checkpoints.random_model import shape
from moejax.step.layer_programs import EXPERT_PARTS, LANDED, OF_RECORDS, PUT, layer_program
from moejax.step.parts import SecondProcessor
from moejax.step.programs import ProgramKey, Programs
from pallas_kernels import resolve_ops
from pallas_kernels.records.absent import AbsentRecords
from pallas_kernels.records.versions import VersionFormats
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


# ---- beside a second processor


@pytest.fixture(scope="module")
def placed(programs) -> Programs:
    """Those of a step some of whose experts a CPU computes from the pinned store: a record is one
    piece."""
    (record,), (store,) = programs.steps.layout.records, programs.stores
    second = SecondProcessor(implementation="cpu", same_bits=False)
    return dataclasses.replace(
        programs,
        steps=dataclasses.replace(programs.steps, second=second),
        stores=(AbsentRecords(store.shape, (record.rows,)),),
    )


PLACED_LAUNCHES = {
    "absent": (collections.Counter(), 1),
    "plan_beside": (collections.Counter(plan=1), 12),
    "put": (collections.Counter(), 1),
    "mark": (collections.Counter(), 1),
}
"""Part of a layer → our kernels, and most of XLA's own. `put` runs once for each 64 rows of y that
crossed, of a prefill step for each 1024."""


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(ProgramKey(kind, part=part), marks=[pytest.mark.nightly] * (kind != "decode"))
        for kind in ("decode", "prefill")
        for part in PLACED_LAUNCHES
    ],
    ids=str,
)
def test_what_a_second_processor_adds_copies_nothing_large(placed, key):
    """Nothing crosses inside of a program: x is copied by the host, y's rows are an argument."""
    found = compiled(placed, key)
    assert found.copies(MiB) == []
    assert found.host_copies(1) == found.host_copies(1, to_host=True) == []
    memory = found.memory
    assert memory.host_argument_bytes == 0
    rows = PUT[key.kind]
    y = nbytes(layer_program(placed, ProgramKey(key.kind, part="mark")).args)
    crossed = rows * 2048 * 4
    if key.part == "put":
        assert y <= memory.alias_bytes < y + MiB
        assert crossed <= memory.argument_bytes - y < crossed + MiB
    assert memory.temp_bytes < MiB * (64 if key == ProgramKey("prefill", part="plan_beside") else 2)
    own, others = PLACED_LAUNCHES[key.part or ""]
    launches = collections.Counter(found.kernels())
    assert {name: launches[name] for name in own} == own
    assert sum(launches.values()) - sum(own.values()) <= others, launches


def test_a_record_in_one_piece_is_moved_by_one_copy(placed):
    found = compiled(placed, ProgramKey("land"))
    assert found.copies(MiB) == [] and found.host_copies(1) == []
    assert found.memory.alias_bytes == nbytes(placed.arena)
    assert len(found.kernels()) <= 3, found.kernels()


# ---- the stream driver


@pytest.fixture(scope="module")
def streaming(programs) -> Programs:
    """Those of the stream driver: tables with cells of the ring, no part but experts."""
    layers, experts = programs.tables.address.shape
    return dataclasses.replace(
        programs,
        steps=dataclasses.replace(programs.steps, driver="stream"),
        tables=jax.eval_shape(lambda: empty_tables(layers, experts, 2 * experts)),
    )


STREAM_LAUNCHES = {
    ProgramKey("seat"): (collections.Counter(), 20),
    ProgramKey("land_many"): (collections.Counter(), 3 * LANDED + 1),
    ProgramKey("decode", part="experts"): (
        collections.Counter(expert_gate_up=1, expert_down=1, combine=1),
        8,
    ),
    ProgramKey("prefill", part="experts"): (
        collections.Counter(expert_gate_up_sorted=1, expert_down_sorted=1, combine=1),
        14,
    ),
}
"""Program of a layer → our kernels, and most of XLA's own. Of Qwen3-30B-A3B `land_many` runs 16
times a layer; each of its kernels moves a matrix, 3 MiB."""


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(key, marks=[pytest.mark.nightly] * (key.kind == "prefill"))
        for key in STREAM_LAUNCHES
    ],
    ids=str,
)
def test_a_layer_that_streams_copies_nothing_but_records_into_cells(streaming, key):
    """In place in the donated arena, from staging that the program is given."""
    found = compiled(streaming, key)
    assert found.copies(MiB) == []
    assert found.host_copies(1) == found.host_copies(1, to_host=True) == []
    memory = found.memory
    assert memory.host_argument_bytes == 0
    of_arena = 0 if key.kind == "seat" else nbytes(streaming.arena)
    staged = LANDED * RECORD if key.kind == "land_many" else 0
    assert of_arena <= memory.alias_bytes < of_arena + MiB
    assert of_arena + staged <= memory.argument_bytes < of_arena + staged + 80 * MiB
    # A prefill step's experts' outputs, float32[8192, 8, 2048], and what sorts tokens by expert.
    assert memory.temp_bytes < (640 if key.kind == "prefill" else 17) * MiB
    own, others = STREAM_LAUNCHES[key]
    launches = collections.Counter(found.kernels())
    assert {name: launches[name] for name in own} == own
    assert 0 < sum(launches.values()) - sum(own.values()) <= others, launches


@pytest.fixture(scope="module")
def tiered(streaming) -> Programs:
    """Those with packed residents."""
    (dense,), (store,) = streaming.steps.layout.records, streaming.stores
    packed = dataclasses.replace(dense, version="lossless12")
    layout = streaming.steps.config.slot_layout(dense.itemsize, ("dense", "lossless12"), "bfloat16")
    formats = tuple(VersionFormats(cell, cell) for cell in (dense, packed))
    steps = dataclasses.replace(
        streaming.steps, layout=layout, formats=formats, tiers="flux-direct"
    )
    other = AbsentRecords((*store.shape[:2], packed.rows, packed.hidden))
    return dataclasses.replace(streaming, steps=steps, stores=(store, other))


TIERED_LAUNCHES = {
    ProgramKey("land_packed"): (collections.Counter(), 2),
    ProgramKey("unpack"): (collections.Counter(), 4 * LANDED + 3),
    ProgramKey("decode", part="experts"): STREAM_LAUNCHES[ProgramKey("decode", part="experts")],
}


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(key, marks=[pytest.mark.slow] * (key.kind == "decode"))
        for key in TIERED_LAUNCHES
    ],
    ids=str,
)
def test_packed_residents_are_computed_in_the_launches_of_dense_ones(tiered, key):
    """And a packed record moves into its cell in place; what is decoded into the window goes there
    in place too."""
    if key.kind == "unpack":
        steps = dataclasses.replace(tiered.steps, tiers="flux")
        tiered = dataclasses.replace(tiered, steps=steps)
    found = compiled(tiered, key)
    assert found.copies(MiB) == []
    assert found.host_copies(1) == found.host_copies(1, to_host=True) == []
    memory = found.memory
    assert memory.host_argument_bytes == 0
    assert nbytes(tiered.arena) <= memory.alias_bytes < nbytes(tiered.arena) + MiB
    assert memory.temp_bytes < 19 * MiB
    own, others = TIERED_LAUNCHES[key]
    launches = collections.Counter(found.kernels())
    assert {name: launches[name] for name in own} == own
    assert 0 < sum(launches.values()) - sum(own.values()) <= others, launches


@pytest.mark.nightly
def test_within_one_program_a_layer_would_be_brought_by_a_kernel():
    """Why the host walks through the layers (docs/stream.md): in a scan XLA does bring the next
    layer beside compute, but by a kernel that reads host memory, not by a copy engine."""

    def scanned(store, arena, x):
        def layer(carry, i):
            x, arena = carry
            coming = jax.lax.dynamic_index_in_dim(store, (i + 1) % 8, keepdims=False)
            coming = jax.device_put(coming, jax.memory.Space.Device)
            weights = jax.lax.dynamic_slice(arena, (i % 2 * 4096, 0), (2048, 2048))
            coming, x = jax.lax.optimization_barrier((coming, jnp.tanh(x @ weights)))
            return (x, jax.lax.dynamic_update_slice(arena, coming, ((i + 1) % 2 * 4096, 0))), None

        return jax.lax.scan(layer, (x, arena), jnp.arange(8))[0]

    shapes = (8, 4096, 2048), (2 * 4096, 2048), (64, 2048)
    args = [jax.ShapeDtypeStruct(size, jnp.bfloat16) for size in shapes]
    found = compile_for_h200(scanned, *args, host_argnums=0, donate_argnums=1)
    begun = re.search(
        r"kAsyncStart.*stream=computation_stream.*\n.*(kCustomKernel.*)", found.thunks
    )
    assert begun and "dynamic_slice" in begun[1]


@pytest.mark.nightly
@pytest.mark.parametrize("part", EXPERT_PARTS)
def test_parts_of_a_prefill_step_copy_nothing_large(programs, part):
    found = compiled(programs, ProgramKey("prefill", part=part))
    assert [size for _, size in found.copies(MiB) if size > RECORD] == []


def test_an_arena_that_is_not_donated_is_copied(programs):
    program = layer_program(programs, ProgramKey("land"))
    found = compile_for_h200(program.function, *program.args)
    assert nbytes(programs.arena) in [size for _, size in found.copies(MiB)]

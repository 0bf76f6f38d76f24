"""Contract 3: no program allocates or copies anything of the size of arena, store or KV.

KV lies in the arena, so the arena's copies are its too. Budgets are table contents: a program is
the same at every budget.
"""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import SingleDeviceSharding

import moejax.step.parts
from host_offload.memory.swap import SWAP_PAGES
from host_offload.memory.tables import empty_tables
from moejax import LLM
from moejax.checkpoints.random_model import abstract_params, expert_layout, shape
from moejax.models.config import ModelConfig
from moejax.models.layers import Decoder
from moejax.start.decide.shapes import step_shapes
from moejax.step.parts import StepSpec
from moejax.step.programs import ProgramKey, Programs
from moejax.step.runner import Runner
from pallas_kernels import Ops, resolve_ops
from tests.aot.aot_h200 import Compiled, compile_for_h200
from tests.hlo import compile_to_read
from tests.pallas_kernels.contract import NATIVE

MiB, GiB = 1 << 20, 1 << 30

DEMO_TEMP = {"decode": 2 * MiB, "prefill": 12 * MiB, "score": 12 * MiB, "integrity": MiB}
"""Most bytes a program may need beside its arguments and results. A prefill step's are the experts'
outputs, float32[2048 tokens, 4, 128] = 4 MiB, and two of its hidden states."""

H200_TEMP = {"decode": 32 * MiB, "prefill": 640 * MiB, "score": 640 * MiB, "integrity": 32 * MiB}
"""As above, for Qwen3-30B-A3B. Decode: one expert (9 MiB) and the experts' outputs, float32[64
tokens, 8, 2048] = 4 MiB. A prefill step of 8192 tokens: its experts' outputs, float32[8192, 8,
2048] = 512 MiB, and its hidden states before and after the norm, 2 · 32 MiB."""
DECODE, PREFILL, SCORE = map(ProgramKey, ("decode", "prefill", "score"))
STAGED = DECODE._replace(staged=True)
OTHERS = (
    SCORE,
    DECODE._replace(forced=True),
    PREFILL._replace(forced=True),
    PREFILL._replace(staged=True),
)
EVERY_STEP = [
    DECODE,
    PREFILL,
    *(pytest.param(key, marks=pytest.mark.nightly) for key in (STAGED, *OTHERS)),
]
"""STAGED has a stage more than DECODE: .ci/run compiles it with native ops, and with kernels."""


def nbytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def most(limits: dict[str, int], key: ProgramKey) -> int:
    return limits["score" if key.kind == "prompt_logprobs" else key.kind]


def abstract_programs(
    config: ModelConfig, arena_bytes: int, *, ops: Ops | None = None, waves: int = 1, **limits: int
) -> Programs:
    """The programs of an engine that has no buffers. ops: XLA's by default."""
    ops, record = ops or resolve_ops("xla"), expert_layout(config)
    moe_layers, experts = sum(config.moe_layers), config.num_experts
    layout = config.slot_layout(record.itemsize)
    slots = arena_bytes // layout.slot_bytes
    graph, state = nnx.split(Decoder(config, abstract_params(config), ops))
    store = jax.ShapeDtypeStruct((moe_layers, experts, record.rows, record.hidden), jnp.uint16)
    steps = StepSpec(
        device_kind="",
        runtime="",
        driver="device",
        ops=ops,
        config=config,
        dtype=record.dtype,
        layout=layout,
        shapes=step_shapes(layout, waves=waves, **limits),
    )
    return Programs(
        steps,
        graph,
        state,
        stores=(store,),
        arena=jax.ShapeDtypeStruct((slots * layout.slot_rows, layout.hidden), jnp.uint16),
        tables=jax.eval_shape(lambda: empty_tables(moe_layers, experts, experts)),
    )


def with_steps(programs: Programs, **changes) -> Programs:
    """Programs of steps that are as these but for some fields."""
    return dataclasses.replace(programs, steps=dataclasses.replace(programs.steps, **changes))


# ---- the demo model on this machine


@pytest.fixture(scope="module")
def runner(demo_dir):
    """An engine's, which has not compiled what requests need: a test compiles what it reads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Runner, "_compile_first", lambda runner, runs: None)
        with LLM(demo_dir, expert_budget="25%", ops="xla", progress=False) as llm:
            yield llm.engine.runner


def compile_here(programs: Programs, key: ProgramKey, donate: bool = True) -> Compiled:
    program = programs.program(key)
    lowered = jax.jit(program.function, donate_argnums=program.donated if donate else ()).lower(
        *program.args
    )
    return compile_to_read(lowered)


@pytest.mark.parametrize(
    "key",
    [*EVERY_STEP, pytest.param(ProgramKey("prompt_logprobs"), marks=pytest.mark.nightly)],
    ids=str,
)
def test_step_copies_nothing_large(runner, key):
    compiled = compile_to_read(runner.lower(key))
    assert compiled.copies(MiB) == []
    assert compiled.memory.alias_bytes == nbytes((runner.arena, runner.tables))
    assert compiled.memory.temp_bytes < most(DEMO_TEMP, key)


def test_swapping_copies_nothing_but_pages(runner):
    page = runner.layout.page.nbytes
    pages_in = compile_to_read(runner.lower(ProgramKey("swap_in")))
    assert pages_in.copies(runner.layout.slot_bytes) == []
    assert pages_in.memory.alias_bytes == nbytes(runner.arena)
    assert pages_in.memory.temp_bytes <= 2 * SWAP_PAGES * page
    pages_out = compile_to_read(runner.lower(ProgramKey("swap_out")))
    assert pages_out.memory.temp_bytes <= 2 * SWAP_PAGES * page


def test_moving_pages_copies_nothing_but_pages(runner):
    page = runner.layout.page.nbytes
    moved = compile_to_read(runner.lower(ProgramKey("move_pages")))
    assert moved.copies(runner.layout.slot_bytes) == []
    assert moved.memory.alias_bytes == nbytes(runner.arena)
    assert moved.memory.temp_bytes <= 2 * SWAP_PAGES * page


@pytest.mark.parametrize(
    "ops", [pytest.param("xla", marks=pytest.mark.nightly), pytest.param("cpu", marks=NATIVE)]
)
def test_prefill_step_in_waves_copies_nothing_large(ops):
    programs = abstract_programs(
        shape("demo"),
        32 * MiB,
        ops=resolve_ops(ops),
        waves=3,
        rows=16,
        max_model_len=1024,
        max_num_batched_tokens=1024,
    )
    compiled = compile_here(programs, PREFILL)
    assert compiled.copies(MiB) == []
    assert compiled.memory.temp_bytes < DEMO_TEMP["prefill"]


@pytest.mark.parametrize(
    "key",
    [DECODE, *(pytest.param(k, marks=pytest.mark.nightly) for k in (PREFILL, STAGED, *OTHERS))],
    ids=str,
)
@pytest.mark.parametrize(
    "ops", [pytest.param("xla", marks=pytest.mark.nightly), pytest.param("cpu", marks=NATIVE)]
)
def test_layers_without_experts_and_a_window_copy_nothing_large(ops, key):
    moe = (False, True, True, False, False, True)
    config = dataclasses.replace(
        shape("demo", layers=len(moe)), moe_layers=moe, intermediate_size=256, sliding_window=100
    )
    programs = abstract_programs(
        config,
        32 * MiB,
        ops=resolve_ops(ops),
        rows=16,
        max_model_len=1024,
        max_num_batched_tokens=1024,
    )
    compiled = compile_here(programs, key)
    assert compiled.copies(MiB) == []
    assert compiled.memory.alias_bytes == nbytes((programs.arena, programs.tables))
    assert compiled.memory.temp_bytes < most(DEMO_TEMP, key)


@NATIVE
@pytest.mark.parametrize(
    "key", [DECODE, *(pytest.param(k, marks=pytest.mark.slow) for k in (PREFILL, STAGED))], ids=str
)
def test_native_ops_copy_nothing_large(key):
    """They write KV and tables by aliased operands of custom calls."""
    programs = abstract_programs(
        shape("demo"),
        32 * MiB,
        ops=resolve_ops("cpu"),
        rows=16,
        max_model_len=1024,
        max_num_batched_tokens=1024,
    )
    compiled = compile_here(programs, key)
    assert compiled.copies(MiB) == []
    assert compiled.memory.alias_bytes == nbytes((programs.arena, programs.tables))
    assert compiled.memory.temp_bytes < most(DEMO_TEMP, key)
    if key == DECODE:
        copied = compile_here(programs, key, donate=False).copies(MiB)
        assert nbytes(programs.arena) in [size for _, size in copied]


def test_integrity_check_copies_nothing_large(runner):
    compiled = compile_here(runner.programs(), ProgramKey("integrity"))
    assert compiled.copies(MiB) == []
    assert compiled.memory.temp_bytes < DEMO_TEMP["integrity"]


def test_regrant_updates_the_tables_in_place(runner):
    compiled = compile_here(runner.programs(), ProgramKey("regrant"))
    tables = nbytes(runner.tables)
    # What a regrant does not compute (a table it replaces by its argument) needs no alias.
    assert compiled.memory.alias_bytes > tables // 2
    assert compiled.memory.temp_bytes < tables


@pytest.mark.nightly
def test_missing_donation_is_found(runner):
    compiled = compile_here(runner.programs(), DECODE, donate=False)
    assert runner.arena.nbytes in [size for _, size in compiled.copies(MiB)]
    assert compiled.memory.alias_bytes == 0


@pytest.mark.nightly
def test_fill_that_does_not_wait_for_attention_is_found(runner, monkeypatch):
    def forced(forced, layer, routed, experts):
        return forced.ids[layer], forced.weights[layer]

    monkeypatch.setattr(moejax.step.parts, "_forced", forced)
    compiled = compile_here(runner.programs(), DECODE._replace(forced=True))
    assert runner.arena.nbytes in [size for _, size in compiled.copies(MiB)]
    assert compiled.memory.temp_bytes > runner.arena.nbytes


# ---- Qwen3-30B-A3B on an H200: a 40 GiB arena, a 54 GiB store, and not one buffer here


@pytest.fixture(scope="module")
def large() -> Programs:
    programs = abstract_programs(
        shape("qwen3-30b-a3b"), 40 * GiB, rows=64, max_model_len=4096, max_num_batched_tokens=8192
    )
    assert nbytes(programs.stores) == 54 * GiB
    assert nbytes(programs.arena) > 39.9 * GiB
    return programs


def compile_large(programs: Programs, key: ProgramKey, donate: bool = True) -> Compiled:
    program = programs.program(key)
    return compile_for_h200(
        program.function,
        *program.args,
        donate_argnums=program.donated if donate else (),
        host_argnums=tuple(i for i, arg in enumerate(program.args) if arg is programs.stores),
    )


@pytest.mark.aot
@pytest.mark.parametrize(
    "key",
    # With kernels in place of XLA's ops, .ci/run compiles the others: tests/aot/test_steps.py.
    [PREFILL, *(pytest.param(k, marks=pytest.mark.nightly) for k in (DECODE, STAGED, *OTHERS))],
    ids=str,
)
def test_step_of_a_large_model_copies_nothing_large(large, key):
    compiled = compile_large(large, key)
    (store,) = large.stores
    expert = nbytes(store) // (store.shape[0] * store.shape[1])
    # The XLA ops cut out one expert, and one layer's dense weights: at most 20 MiB each.
    assert [size for _, size in compiled.copies(MiB) if size > 20 * MiB] == []
    assert {size for _, size in compiled.host_copies(MiB)} == {expert}
    assert compiled.host_copies(1, to_host=True) == []
    memory = compiled.memory
    assert memory.host_argument_bytes == 54 * GiB
    assert memory.host_temp_bytes == memory.host_output_bytes == 0
    assert memory.alias_bytes == nbytes((large.arena, large.tables))
    assert memory.temp_bytes < most(H200_TEMP, key)


@pytest.mark.nightly
@pytest.mark.aot
def test_integrity_check_of_a_large_model_copies_nothing_large(large):
    compiled = compile_large(large, ProgramKey("integrity"))
    assert compiled.copies(MiB) == []
    assert compiled.memory.temp_bytes < H200_TEMP["integrity"]


@pytest.mark.aot
def test_swapping_pages_of_a_large_arena_copies_nothing_else(large):
    page, program = large.steps.layout.page.nbytes, large.program(ProgramKey("swap_in"))
    pages_in = compile_for_h200(
        program.function, *program.args, donate_argnums=program.donated, host_argnums=(1,)
    )
    assert [size for _, size in pages_in.copies(MiB) if size > page] == []
    assert pages_in.memory.alias_bytes == nbytes(large.arena)
    assert pages_in.memory.temp_bytes <= 2 * SWAP_PAGES * page

    program = large.program(ProgramKey("swap_out"))
    pinned = SingleDeviceSharding(jax.devices("cpu")[0], memory_kind=program.memory)
    pages_out = compile_for_h200(jax.jit(program.function, out_shardings=pinned), *program.args)
    assert {size for _, size in pages_out.host_copies(MiB, to_host=True)} == {page}
    assert pages_out.memory.host_output_bytes == SWAP_PAGES * page
    assert pages_out.memory.temp_bytes <= 2 * SWAP_PAGES * page


@pytest.mark.aot
def test_moving_pages_of_a_large_arena_copies_nothing_else(large):
    page, program = large.steps.layout.page.nbytes, large.program(ProgramKey("move_pages"))
    moved = compile_for_h200(program.function, *program.args, donate_argnums=program.donated)
    assert [size for _, size in moved.copies(MiB) if size > page] == []
    assert moved.memory.alias_bytes == nbytes(large.arena)
    assert moved.memory.temp_bytes <= 2 * SWAP_PAGES * page


@pytest.mark.nightly
@pytest.mark.aot
def test_missing_donation_of_a_large_arena_is_found(large):
    compiled = compile_large(large, DECODE, donate=False)
    assert nbytes(large.arena) in [size for _, size in compiled.copies()]
    assert compiled.memory.alias_bytes == 0

"""Contract 3 where the native library owns the arena: no program copies or moves it, and each write
comes after every read of what was there before."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import moejax.step.drivers.device
import moejax.step.experts
import moejax.step.parts
from host_offload.memory.tables import empty_tables
from host_offload.queue.transfer import QueueSpec
from moejax import LLM, SamplingParams
from moejax.checkpoints.random_model import shape
from moejax.step.layer_programs import layer_program
from moejax.step.programs import ProgramKey, Programs
from moejax.step.runner import Runner
from pallas_kernels import resolve_ops
from pallas_kernels.cpu.arena import OwnedArena, abstract_arena, read_rows
from tests.faults import delay_arena
from tests.hlo import arena_copies, compile_to_read
from tests.moejax.step.test_constant_memory import (
    DECODE,
    DEMO_TEMP,
    PREFILL,
    STAGED,
    MiB,
    abstract_programs,
    compile_here,
    most,
    nbytes,
    with_steps,
)
from tests.pallas_kernels.contract import NATIVE

pytestmark = NATIVE

FORCED = DECODE._replace(forced=True)
BETWEEN = ("swap_out", "swap_in", "move_pages", "populate", "transfer", "move", "integrity")
PARTS = [
    *(ProgramKey("decode", part="attend", run=0), ProgramKey("decode", part="experts")),
    ProgramKey("stage"),
]

LIMITS = {"max_model_len": 160, "max_num_seqs": 4, "max_num_batched_tokens": 192}
PROMPTS = [[5, 6, 7, 300], list(range(20, 120))]
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2, ignore_eos=True)


@functools.cache
def programs() -> Programs:
    """Two layers of the demo with an arena of 32 MiB that is nowhere."""
    made = abstract_programs(
        shape("demo", layers=2),
        32 * MiB,
        ops=resolve_ops("cpu"),
        rows=16,
        max_model_len=1024,
        max_num_batched_tokens=1024,
    )
    return dataclasses.replace(made, arena=abstract_arena(*made.arena.shape))


def check(compiled, key: ProgramKey, arena=None) -> None:
    arena = arena or programs().arena
    assert arena_copies(compiled, arena) == []
    assert compiled.copies(MiB) == []
    assert compiled.memory.temp_bytes < most({**dict.fromkeys(BETWEEN, MiB), **DEMO_TEMP}, key)


@pytest.mark.parametrize(
    "key",
    [
        *(DECODE, PREFILL, STAGED),
        pytest.param(FORCED, marks=pytest.mark.slow),
        pytest.param(PREFILL._replace(staged=True), marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_a_step_orders_all_that_touches_the_arena(key):
    compiled = compile_here(programs(), key)
    check(compiled, key)
    assert compiled.memory.alias_bytes == nbytes((programs().arena, programs().tables))


@pytest.mark.slow
def test_a_step_in_waves_does_too():
    shapes = dataclasses.replace(programs().steps.shapes, waves=3)
    check(compile_here(with_steps(programs(), shapes=shapes), PREFILL), PREFILL)


def streaming() -> Programs:
    """The programs of the stream driver, which has twice as many cells a layer as experts, for
    layers that are each a run of its own: what orders them is no loop."""
    moe = (True, False, True, False, True)
    config = dataclasses.replace(
        shape("demo", layers=len(moe)), moe_layers=moe, intermediate_size=256
    )
    limits = {"rows": 16, "max_model_len": 1024, "max_num_batched_tokens": 1024}
    made = abstract_programs(config, 32 * MiB, ops=resolve_ops("cpu"), **limits)
    tables = jax.eval_shape(lambda: empty_tables(sum(moe), 16, 32))
    made = with_steps(made, driver="stream", queue=QueueSpec())
    return dataclasses.replace(made, arena=abstract_arena(*made.arena.shape), tables=tables)


@pytest.mark.parametrize("key", [DECODE, pytest.param(PREFILL, marks=pytest.mark.slow)], ids=str)
def test_a_step_through_the_window_does_too(key):
    check(compile_here(streaming(), key), key)


@pytest.mark.parametrize("kind", BETWEEN)
def test_what_runs_between_steps_does_too(kind):
    key = ProgramKey(kind)
    check(compile_here(programs(), key), key)


@pytest.mark.parametrize("key", PARTS, ids=str)
def test_the_host_drivers_parts_do_too(key):
    program = layer_program(programs(), key)
    lowered = jax.jit(program.function, donate_argnums=program.donated).lower(*program.args)
    check(compile_to_read(lowered), DECODE)


def transfers_that_wait_for_nothing(monkeypatch) -> ProgramKey:
    zero = lambda value: jnp.int32(0)  # noqa: E731
    monkeypatch.setattr(moejax.step.drivers.device, "zero_after", zero)
    return STAGED


def fills_that_do_not_wait_for_attention(monkeypatch) -> ProgramKey:
    def forced(forced, layer, routed, experts):
        return forced.ids[layer], forced.weights[layer]

    monkeypatch.setattr(moejax.step.parts, "_forced", forced)
    return FORCED


def test_a_window_that_waits_for_nothing_is_found(monkeypatch):
    monkeypatch.setattr(moejax.step.experts, "zero_after", lambda value: jnp.int32(0))
    assert arena_copies(compile_here(streaming(), DECODE), programs().arena)


@pytest.mark.parametrize(
    "mutant", [transfers_that_wait_for_nothing, fills_that_do_not_wait_for_attention]
)
def test_a_missing_dependence_is_found(mutant, monkeypatch):
    compiled = compile_here(programs(), mutant(monkeypatch))
    assert arena_copies(compiled, programs().arena)


# ---- an engine


@pytest.fixture(scope="module")
def llm():
    with LLM(
        "demo", expert_budget="40%", kv_budget="48MiB", eviction="lru", progress=False, **LIMITS
    ) as llm:
        yield llm


def answers(llm: LLM):
    found = llm.generate(PROMPTS, GREEDY)
    assert not llm.engine.runner.faults()
    return [(one.token_ids, one.logprobs) for request in found for one in request.outputs]


def resident_bytes() -> int:
    with open("/proc/self/statm") as figures:
        return int(figures.read().split()[1]) * 4096


def memory_of(runner: Runner):
    assert runner.memory is not None and isinstance(runner.arena, OwnedArena)
    return runner.memory


def test_an_engine_says_whose_the_arena_is(llm):
    memory = memory_of(llm.engine.runner)
    assert memory.nbytes == llm.plan.budget.slots * llm.plan.steps.layout.slot_bytes > 48 * MiB
    assert llm.stats()["arena_owner"] == "native ops"
    assert "memory of the native ops" in llm.plan.describe()["arena"]
    assert "memory of the native ops" in str(llm.explain())


def test_slow_readers_and_writers_change_no_bit(llm):
    """Whatever XLA runs at once finds the arena in order, and what a step reads is there."""
    memory = memory_of(llm.engine.runner)
    want = answers(llm)
    writes, missed = memory.token()[1], llm.stats()["experts"]["fills"]
    delay_arena(memory, 300)
    try:
        assert answers(llm) == want
    finally:
        delay_arena(memory, 0)
    assert memory.token()[1] - writes > 2 * len(want[0][0]) and missed > 0


def test_steps_leave_the_arena_where_it_is(llm):
    runner = llm.engine.runner
    memory = memory_of(runner)
    address, held = memory.address, sum(array.nbytes for array in jax.live_arrays())
    answers(llm)
    before = resident_bytes()
    answers(llm)
    assert resident_bytes() - before < memory.nbytes // 2
    assert sum(array.nbytes for array in jax.live_arrays()) - held < memory.nbytes // 8
    assert memory.address == address and memory.view().ctypes.data == address
    assert runner.arena.token.nbytes == 8


def test_a_step_that_fails_loses_nothing_of_the_arena(llm):
    """Its page is not in the arena: kv_write refuses. The engine closes and frees as ever."""
    runner = llm.engine.runner
    memory, handle = memory_of(runner), memory_of(runner).handle
    before = memory.view().copy()
    positions = np.full(runner.shapes.rows, -1, np.int32)
    positions[0] = 0
    table = jnp.full((runner.shapes.rows, runner.shapes.blocks), 2**30, jnp.int32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="is not in the arena"):
        runner.decode(positions, table).read()
    np.testing.assert_array_equal(memory.view(), before)
    jax.block_until_ready(memory.on(runner.device).token)  # what comes next has a place to begin
    llm.close()
    assert not memory.close.alive
    gone = OwnedArena(jnp.array([handle, 0], jnp.uint32), memory.rows, memory.hidden)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=f"is no arena {handle}"):
        jax.block_until_ready(read_rows(gone, np.zeros(1, np.int32), 1, width=gone.hidden))


@pytest.mark.slow
def test_a_step_that_says_its_writes_orders_them_too():
    steps = dataclasses.replace(programs().steps, queue=QueueSpec(rate=1e9))
    check(compile_here(dataclasses.replace(programs(), steps=steps), STAGED), STAGED)

"""Contract 3: no program allocates or copies anything of the size of arena, store or KV.

KV lies in the arena, so the arena's copies are its too. Budgets are table contents: a program is
the same at every budget. Where the native library owns the arena, no program copies or moves it,
and each write comes after every read of what was there before.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import moejax.step.compiled_step
import moejax.step.experts
import moejax.step.step_parts
from host_offload.memory.swap import SWAP_PAGES
from host_offload.memory.tables import empty_tables
from host_offload.queue.transfer import QueueSpec
from moejax import LLM, SamplingParams
from moejax.checkpoints.random_model import abstract_params, expert_layout, shape
from moejax.models.config import ModelConfig
from moejax.start.decide.shapes import step_shapes
from moejax.step.layer_programs import layer_program
from moejax.step.programs import ProgramKey, Programs
from moejax.step.step_parts import TRACE_ARRAYS, StepSpec
from pallas_kernels import Ops, resolve_ops
from pallas_kernels.cpu.arena import OwnedArena, abstract_arena, read_rows
from pallas_kernels.records import RecordFormat
from pallas_kernels.records.versions import VersionFormats
from tests.aot.aot_h200 import Compiled, compile_for_h200
from tests.faults import delay_arena
from tests.hlo import arena_copies, compile_to_read
from tests.pallas_kernels.contract import NATIVE

MiB, GiB = 1 << 20, 1 << 30

DEMO_TEMP = {"decode": 2 * MiB, "prefill": 12 * MiB, "score": 12 * MiB}
"""Most bytes a program may need beside its arguments and results. A prefill step's are the experts'
outputs, float32[2048 tokens, 4, 128] = 4 MiB, and two of its hidden states."""
H200_TEMP = {"decode": 32 * MiB, "prefill": 640 * MiB, "score": 640 * MiB}
"""As above, for Qwen3-30B-A3B. Decode: one expert (9 MiB) and the experts' outputs, float32[64
tokens, 8, 2048] = 4 MiB. A prefill step of 8192 tokens: its experts' outputs, float32[8192, 8,
2048] = 512 MiB, and its hidden states before and after the norm, 2 · 32 MiB."""
DECODE, PREFILL, SCORE = map(ProgramKey, ("decode", "prefill", "score"))
STAGED = DECODE._replace(staged=True)
FORCED = DECODE._replace(forced=True)
OTHERS = (SCORE, FORCED, PREFILL._replace(forced=True), PREFILL._replace(staged=True))
BETWEEN = ("swap_out", "swap_in", "move_pages", "populate", "move")
LIMITS = {"rows": 16, "max_model_len": 1024, "max_num_batched_tokens": 1024}


def nbytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def abstract_programs(
    config: ModelConfig, arena_bytes: int, *, ops: Ops | None = None, waves: int = 1, **limits: int
) -> Programs:
    """The programs of an engine that has no buffers. ops: XLA's by default."""
    ops, record = ops or resolve_ops("xla"), expert_layout(config)
    moe_layers, experts = sum(config.moe_layers), config.num_experts
    layout = config.slot_layout(record.itemsize)
    slots = arena_bytes // layout.slot_bytes
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
        abstract_params(config),
        stores=(store,),
        arena=jax.ShapeDtypeStruct((slots * layout.slot_rows, layout.hidden), jnp.uint16),
        tables=jax.eval_shape(lambda: empty_tables(moe_layers, experts, experts)),
    )


def with_steps(programs: Programs, **changes) -> Programs:
    """Programs of steps that are as these but for some fields."""
    return dataclasses.replace(programs, steps=dataclasses.replace(programs.steps, **changes))


def compile_here(programs: Programs, key: ProgramKey, donate: bool = True) -> Compiled:
    program = layer_program(programs, key) if key.part else programs.program(key)
    donated = program.donated if donate else ()
    return compile_to_read(jax.jit(program.function, donate_argnums=donated).lower(*program.args))


# ---- the demo model on this machine: a table of programs


def of_demo(ops: str = "xla", *, owned: bool = False, waves: int = 1, **config) -> Programs:
    """Two layers of the demo with an arena of 32 MiB that is nowhere."""
    made = dataclasses.replace(shape("demo", layers=config.pop("layers", 2)), **config)
    found = abstract_programs(made, 32 * MiB, ops=resolve_ops(ops), waves=waves, **LIMITS)
    arena = abstract_arena(*found.arena.shape) if owned else found.arena
    return dataclasses.replace(found, arena=arena)


def unlike(ops: str, **options) -> Programs:
    """Layers without experts between others, and a window."""
    moe = (False, True, True, False, False, True)
    sizes = {"intermediate_size": 256, "sliding_window": 100}
    return of_demo(ops, layers=len(moe), moe_layers=moe, **sizes, **options)


def streaming() -> Programs:
    """The programs of the stream driver, which has twice as many cells a layer as experts, for
    layers that are each a run of its own: what orders them is no loop."""
    moe = (True, False, True, False, True)
    made = of_demo("cpu", owned=True, layers=len(moe), moe_layers=moe, intermediate_size=256)
    tables = jax.eval_shape(lambda: empty_tables(sum(moe), 16, 32))
    return dataclasses.replace(with_steps(made, driver="stream", queue=QueueSpec()), tables=tables)


def of_versions(made: Programs, versions) -> Programs:
    """The programs of a run of these versions: a name, or (in a cell, in the store)."""
    (dense,) = made.stores
    layers, experts, rows, hidden = dense.shape
    dtype = jax.tree.leaves(made.state["embedding"])[0].dtype.name
    size = hidden, rows * 2 // (3 * jnp.dtype(dtype).itemsize), dtype
    formats, stores = [], []
    for version in versions:
        cell, held = (version, version) if isinstance(version, str) else version
        formats.append(VersionFormats(RecordFormat(cell, *size), RecordFormat(held, *size)))
        records = (layers, experts, formats[-1].store.rows, hidden)
        stores.append(jax.ShapeDtypeStruct(records, jnp.uint16))
    return with_steps(dataclasses.replace(made, stores=tuple(stores)), formats=tuple(formats))


TIERS = (("dense", "lossless12"), "int4")
PROGRAMS = {
    "xla": of_demo,
    "xla, versions": lambda: of_versions(of_demo(), TIERS),
    "xla, traced": lambda: with_steps(of_demo(), trace_arrays=TRACE_ARRAYS),
    "xla, unlike": lambda: unlike("xla"),
    "native": lambda: of_demo("cpu"),
    "native, waves": lambda: of_demo("cpu", waves=3),
    "native, unlike": lambda: unlike("cpu"),
    "owned": lambda: of_demo("cpu", owned=True),
    "owned, waves": lambda: of_demo("cpu", owned=True, waves=3),
    "owned, streaming": streaming,
    "owned, link": lambda: with_steps(
        of_demo("cpu", owned=True), queue=QueueSpec(rate=1e9), driver="device"
    ),
}
programs = functools.cache(lambda name: PROGRAMS[name]())


def part(kind: str, name: str, run: int | None = None, **flags) -> ProgramKey:
    return ProgramKey(kind, part=name, run=run, **flags)


def parts(kind: str) -> tuple[ProgramKey, ...]:
    named = (part(kind, "attend", 0), part(kind, "route", 0), part(kind, "route", 0, forced=True))
    return (*named, part(kind, "experts"), part(kind, "output"))


TRACED = {"traced": True}
QUICK = [
    *(("owned", key) for key in (DECODE, PREFILL, *map(ProgramKey, BETWEEN))),
    ("xla", ProgramKey("swap_in")),
]
SLOW = [
    *(("owned", key) for key in (STAGED, FORCED, ProgramKey("stage"))),
    *(("owned", key) for key in (part("decode", "attend", 0), part("decode", "experts"))),
    *(("owned, waves", PREFILL), ("owned, link", STAGED), ("xla", DECODE)),
    *(("owned, streaming", key) for key in (DECODE, PREFILL)),
    *(("native", key) for key in (DECODE, PREFILL, STAGED)),
    *(("native, waves", PREFILL), ("native, unlike", DECODE)),
    *(("xla", ProgramKey(kind)) for kind in ("swap_out", "move_pages", "stage")),
    *(("xla", key) for key in (PREFILL, *parts("decode"), *parts("prefill"))),
    ("xla", part("score", "output")),
    *(("xla, unlike", part("decode", *p)) for p in (("attend", 1), ("feed_forward", 0))),
]
NIGHTLY = [
    *(("xla", key) for key in (STAGED, *OTHERS, ProgramKey("prompt_logprobs"))),
    *((name, key) for name in ("xla, unlike", "native, unlike") for key in (PREFILL, *OTHERS)),
    *(("xla, versions", key) for key in (STAGED, PREFILL)),
    *(("xla, traced", key._replace(**TRACED)) for key in (DECODE, PREFILL._replace(staged=True))),
]


@NATIVE
@pytest.mark.parametrize(
    ("name", "key"),
    [
        *QUICK,
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in NIGHTLY),
    ],
    ids=str,
)
def test_no_program_copies_or_allocates_anything_large(name, key):
    made = programs(name)
    compiled = compile_here(made, key)
    page = 2 * SWAP_PAGES * made.steps.layout.page.nbytes
    moves_pages = key.kind in ("swap_in", "swap_out", "move_pages")
    # A prefill step's gate inputs of all layers are 1 MiB.
    largest = made.steps.layout.slot_bytes if moves_pages else (4 if key.traced else 1) * MiB
    assert [size for _, size in compiled.copies(1) if size >= largest] == []
    if isinstance(made.arena, OwnedArena):
        assert arena_copies(compiled, made.arena) == []
    step = key.part is None and key.kind in DEMO_TEMP
    if step and name != "owned, streaming":
        assert compiled.memory.alias_bytes == nbytes((made.arena, made.tables))
    elif key.part in ("attend", "experts"):
        assert compiled.memory.alias_bytes >= nbytes(made.arena)
    most = DEMO_TEMP.get(key.kind, 12 * MiB if key.kind == "prompt_logprobs" else MiB)
    if moves_pages and name == "xla":
        most = page
        assert key.kind == "swap_out" or compiled.memory.alias_bytes == nbytes(made.arena)
    assert compiled.memory.temp_bytes <= most + (2 * MiB if "versions" in name else 0)


def test_regrant_updates_the_tables_in_place():
    made = programs("xla")
    compiled = compile_here(made, ProgramKey("regrant"))
    # What a regrant does not compute (a table it replaces by its argument) needs no alias.
    assert compiled.memory.alias_bytes > nbytes(made.tables) // 2
    assert compiled.memory.temp_bytes < nbytes(made.tables)


@pytest.mark.parametrize("key", [DECODE, pytest.param(PREFILL, marks=pytest.mark.slow)], ids=str)
def test_layers_with_other_windows_are_one_loop(key):
    """A model whose windows alternate has the loops of one with a window in all layers."""
    loops = set()
    for window_layers in ((True,) * 4, (True, False) * 2):
        config = dataclasses.replace(shape("demo"), sliding_window=20, window_layers=window_layers)
        program = abstract_programs(config, 32 * MiB, **LIMITS).program(key)
        text = str(jax.make_jaxpr(program.function)(*program.args))
        loops.add(text.count("= while[") + text.count("= scan["))
    (count,) = loops
    assert count > 0


# ---- what is found


@NATIVE
@pytest.mark.parametrize(
    ("name", "key"),
    [("native", DECODE), pytest.param("xla", part("decode", "experts"), marks=pytest.mark.slow)],
    ids=str,
)
def test_missing_donation_is_found(name, key):
    made = programs(name)
    copied = compile_here(made, key, donate=False).copies(MiB)
    assert nbytes(made.arena) in [size for _, size in copied]


@NATIVE
@pytest.mark.slow
def test_a_missing_dependence_is_found(monkeypatch):
    """Transfers that wait for nothing."""
    monkeypatch.setattr(moejax.step.compiled_step, "zero_after", lambda value: jnp.int32(0))
    made = of_demo("cpu", owned=True)
    assert arena_copies(compile_here(made, STAGED), made.arena)


# ---- an engine whose arena the native library owns


def resident_bytes() -> int:
    with open("/proc/self/statm") as figures:
        return int(figures.read().split()[1]) * 4096


@NATIVE
def test_an_engine_leaves_the_arena_where_it_is_and_loses_nothing_of_it():
    """Slow readers and writers change no bit: whatever XLA runs at once finds the arena in order. A
    step that fails loses nothing of it; the engine closes and frees as ever."""
    params = SamplingParams(max_tokens=8, temperature=0.0, logprobs=2, ignore_eos=True)
    limits = {"max_model_len": 160, "max_num_seqs": 4, "max_num_batched_tokens": 192}
    budgets = {"expert_budget": "40%", "kv_budget": "48MiB", "eviction": "lru"}

    def answers():
        found = llm.generate([[5, 6, 7, 300], list(range(20, 120))], params)
        assert not llm.engine.runner.faults()
        return [(one.token_ids, one.logprobs) for request in found for one in request.outputs]

    with LLM("demo", progress=False, **budgets, **limits) as llm:
        runner = llm.engine.runner
        memory = runner.buffers.memory
        assert memory is not None and isinstance(runner.arena, OwnedArena)
        assert memory.nbytes == llm.plan.budget.slots * llm.plan.steps.layout.slot_bytes > 48 * MiB
        assert llm.stats()["arena_owner"] == "native ops"
        assert "memory of the native ops" in llm.plan.describe()["arena"]
        assert "memory of the native ops" in str(llm.explain())
        address, held = memory.address, sum(array.nbytes for array in jax.live_arrays())
        want = answers()
        before, writes = resident_bytes(), memory.token()[1]
        delay_arena(memory, 300)
        assert answers() == want
        delay_arena(memory, 0)
        assert memory.token()[1] - writes > 2 * len(want[0][0])
        assert llm.stats()["experts"]["fills"] > 0
        assert resident_bytes() - before < memory.nbytes // 2
        assert sum(array.nbytes for array in jax.live_arrays()) - held < memory.nbytes // 8
        assert memory.address == address and memory.view().ctypes.data == address
        assert runner.arena.token.nbytes == 8

        # A page that is not in the arena: kv_write refuses.
        bytes_before, handle = memory.view().copy(), memory.handle
        positions = np.full(runner.shapes.rows, -1, np.int32)
        positions[0] = 0
        table = jnp.full((runner.shapes.rows, runner.shapes.blocks), 2**30, jnp.int32)
        with pytest.raises(jax.errors.JaxRuntimeError, match="is not in the arena"):
            runner.decode(positions, table).read()
        np.testing.assert_array_equal(memory.view(), bytes_before)
        jax.block_until_ready(memory.on(runner.device).token)  # where what comes next can begin
    assert not memory.close.alive
    gone = OwnedArena(jnp.array([handle, 0], jnp.uint32), memory.rows, memory.hidden)
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=f"is no arena {handle}"):
        jax.block_until_ready(read_rows(gone, np.zeros(1, np.int32), 1, width=gone.hidden))


# ---- Qwen3-30B-A3B on an H200: a 40 GiB arena, a 54 GiB store, and not one buffer here


@functools.cache
def large() -> Programs:
    limits = {"rows": 64, "max_model_len": 4096, "max_num_batched_tokens": 8192}
    made = abstract_programs(shape("qwen3-30b-a3b"), 40 * GiB, **limits)
    assert nbytes(made.stores) == 54 * GiB and nbytes(made.arena) > 39.9 * GiB
    return made


def compile_large(made: Programs, key: ProgramKey, donate: bool = True) -> Compiled:
    program = layer_program(made, key) if key.part else made.program(key)
    return compile_for_h200(
        program.function,
        *program.args,
        donate_argnums=program.donated if donate else (),
        host_argnums=tuple(i for i, arg in enumerate(program.args) if arg is made.stores),
    )


@pytest.mark.aot
@pytest.mark.nightly  # with kernels in place of XLA's ops .ci/run has it: tests/aot/test_steps.py
@pytest.mark.parametrize(
    "key", [PREFILL, DECODE, STAGED, *OTHERS, part("decode", "experts")], ids=str
)
def test_a_step_of_a_large_model_copies_nothing_large(key):
    made = large()
    compiled = compile_large(made, key)
    (store,) = made.stores
    # The XLA ops cut out one expert, and one layer's dense weights: at most 20 MiB each.
    assert [size for _, size in compiled.copies(MiB) if size > 20 * MiB] == []
    assert compiled.memory.temp_bytes < H200_TEMP[key.kind]
    if key.part:
        return
    expert = nbytes(store) // (store.shape[0] * store.shape[1])
    assert {size for _, size in compiled.host_copies(MiB)} == {expert}
    assert compiled.host_copies(1, to_host=True) == []
    memory = compiled.memory
    assert memory.host_argument_bytes == 54 * GiB
    assert memory.host_temp_bytes == memory.host_output_bytes == 0
    assert memory.alias_bytes == nbytes((made.arena, made.tables))


@pytest.mark.aot
def test_pages_of_a_large_arena_go_and_move_and_nothing_else_does():
    made = large()
    page = made.steps.layout.page.nbytes
    for kind, host in (("swap_in", (1,)), ("move_pages", ())):
        program = made.program(ProgramKey(kind))
        compiled = compile_for_h200(
            program.function, *program.args, donate_argnums=program.donated, host_argnums=host
        )
        assert [size for _, size in compiled.copies(MiB) if size > page] == []
        assert compiled.memory.alias_bytes == nbytes(made.arena)
        assert compiled.memory.temp_bytes <= 2 * SWAP_PAGES * page
    program = made.program(ProgramKey("swap_out"))
    pinned = SingleDeviceSharding(jax.devices("cpu")[0], memory_kind=program.memory)
    pages_out = compile_for_h200(jax.jit(program.function, out_shardings=pinned), *program.args)
    assert {size for _, size in pages_out.host_copies(MiB, to_host=True)} == {page}
    assert pages_out.memory.host_output_bytes == SWAP_PAGES * page
    assert pages_out.memory.temp_bytes <= 2 * SWAP_PAGES * page

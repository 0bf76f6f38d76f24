"""The contract suite on every family: same bits whatever the memory, the driver and the company; no
stale read; no copy of the arena; clear refusals."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors import safe_open

from moejax import LLM, SamplingParams
from moejax.checkpoints.load import load_checkpoint
from moejax.engine.statistics import kv_stats
from moejax.errors import UserError
from moejax.models.families import FAMILIES
from moejax.step.compiler import compiler_options
from tests.hlo import arena_copies, read_executable
from tests.moejax.checkpoints.conversions import assert_same_model
from tests.moejax.engine_runs import Job, Recorded, run, set_budget
from tests.moejax.models.families import config_of, weights_of, write, write_checkpoint
from tests.moejax.step.test_constant_memory import DECODE, PREFILL, STAGED, nbytes

LIMITS = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256}
EXPERTS = 8
MiB = 1 << 20
SHORT = ("DeepseekV3ForCausalLM",)
"""Latent pages, groups, shared experts and a dense layer: what the quick suite looks at."""


def marks(family: str) -> list:
    """.ci/run takes norms behind projections and latent pages; `pytest` takes all."""
    if family not in ("Qwen3MoeForCausalLM", *SHORT):
        return [pytest.mark.nightly]
    return [pytest.mark.slow] * (family not in SHORT)


SEPARATE = tuple(name for name, family in FAMILIES.items() if family.matrices is not None)
"""Families whose checkpoints may hold experts one by one; of the others all are stacked."""


@pytest.fixture(scope="module", params=[pytest.param(f, marks=marks(f)) for f in FAMILIES])
def directory(request, tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("family"), request.param)


def start(directory, **options) -> LLM:
    return LLM(directory, progress=False, **{**LIMITS, **options})


@pytest.fixture(scope="module")
def llm(directory):
    with start(directory, expert_budget="100%", kv_budget="3MiB", eviction="lru") as llm:
        yield llm


def jobs() -> list[Job]:
    """Prompts around the borders of pages, spans and chunks, greedy and sampled, some with the same
    beginning, and a session of three turns."""
    rng = np.random.default_rng(1)
    document = rng.integers(1, 512, 70).tolist()
    found = []
    for i, length in enumerate((1, 16, 63, 65, 129, 20, 30, 9, 12, 7)):
        words = rng.integers(1, 512, length).tolist()
        shared = document if i in (5, 6, 7) else []
        sampling = {"temperature": 0.8, "top_p": 0.9} if i % 2 else {"temperature": 0}
        params = SamplingParams(max_tokens=6 + i, seed=i, ignore_eos=True, **sampling)
        session = "chat" if i >= 7 else None
        found.append(Job((*shared, *words), params, arrival=i // 2, session=session))
    return found


JOBS = jobs()


@pytest.fixture(scope="module")
def solo(llm) -> list[Recorded]:
    """Each job alone, the session's turns in order, everything resident."""
    layers = llm.engine.runner.tables.address.shape[0]
    set_budget(llm, [EXPERTS] * layers, llm.engine.scheduler.arena.slots - layers * EXPERTS)
    alone = [run(llm, [job])[0] for job in JOBS[:7]]
    alone += run(llm, [Job(job.prompt, job.params, 0, job.session) for job in JOBS[7:]])
    llm.end_session("chat")
    return alone


def assert_same(recorded: list[Recorded], solo: list[Recorded]) -> None:
    for i, (found, wanted) in enumerate(zip(recorded, solo, strict=True)):
        assert found.same_bits(wanted), f"job {i}"


@pytest.mark.parametrize("cells", [[0], [3, 0, 5], [1, 8, 2]], ids=str)
def test_memory_and_company_change_no_bit(llm, solo, cells):
    """Every step is followed by the integrity check (no stale read, contract 2)."""
    arena, layers = llm.engine.scheduler.arena, llm.engine.runner.tables.address.shape[0]
    pages = arena.layout.page.pages(LIMITS["max_model_len"])
    set_budget(llm, (cells * layers)[:layers], -(-pages // arena.layout.pages_per_slot), "lfu")
    before = kv_stats(llm.engine.scheduler)
    assert_same(run(llm, JOBS), solo)
    llm.end_session("chat")
    used = kv_stats(llm.engine.scheduler)
    for name in ("preemptions", "prefix_hit_tokens", "session_hit_tokens", "swapped_out_bytes"):
        assert used[name] > before[name], name


@pytest.mark.parametrize(
    "directory",
    [
        pytest.param(f, marks=[pytest.mark.nightly] * (f != "DeepseekV3ForCausalLM"))
        for f in FAMILIES
    ],
    indirect=True,
)
@pytest.mark.slow
def test_driver_waves_and_arena_change_no_bit(directory, solo):
    options = {"driver": "host,waves=3", "expert_budget": "40%", "kv_budget": "1MiB"}
    with start(directory, **options) as other:
        assert_same(run(other, JOBS), solo)


@pytest.mark.parametrize(
    "key",
    [DECODE, *(pytest.param(key, marks=pytest.mark.nightly) for key in (PREFILL, STAGED))],
    ids=str,
)
def test_step_copies_nothing_of_the_arena(llm, key):
    runner = llm.engine.runner
    lowered = runner.lower(key)
    compiled = read_executable(lowered.compile(compiler_options=compiler_options("cpu")))
    assert runner.arena.nbytes > MiB
    assert compiled.copies(MiB) == arena_copies(compiled, runner.arena) == []
    assert compiled.memory.alias_bytes >= nbytes((runner.arena, runner.tables))


@pytest.mark.nightly
def test_experts_of_two_matrices_come_from_files(tmp_path):
    directory, found = write_checkpoint(tmp_path, "NemotronHForCausalLM"), []
    for store in ("memory", "file"):
        with start(directory, expert_budget="25%", store=store) as llm:
            found.append(run(llm, JOBS[:3]))
    assert_same(*found)


@pytest.mark.parametrize(
    "files", [(1, 3), pytest.param((3, 1), marks=pytest.mark.nightly)], ids=str
)
@pytest.mark.parametrize("family", FAMILIES)
def test_layouts_load_to_the_same_bits(family, files, tmp_path):
    """Separate experts, where the family has them, and stacked ones, in so many files."""
    separate = family in SEPARATE
    single = write_checkpoint(tmp_path / "single", family, shards=files[0])
    stack = write_checkpoint(tmp_path / "stack", family, stack=separate, shards=files[1])
    assert (count_tensors(stack) < count_tensors(single)) == separate
    assert_same_model(load_checkpoint(single), load_checkpoint(stack))


@pytest.mark.parametrize("expert", [-1, EXPERTS])
def test_tables_of_experts_that_the_model_lacks_are_refused(expert, tmp_path):
    config = config_of("DeepseekV4ForCausalLM")
    tensors = weights_of(config)
    name = next(name for name in tensors if name.endswith("tid2eid"))
    tensors[name][5, 1] = expert
    with pytest.raises(UserError, match=f"tid2eid.*{expert}.*but the model has experts 0 to 7"):
        load_checkpoint(write(tmp_path, tensors, config))


def count_tensors(directory) -> int:
    """How many tensors a checkpoint has."""
    files = [safe_open(path, "np") for path in directory.glob("*.safetensors")]
    return sum(len(file.keys()) for file in files)

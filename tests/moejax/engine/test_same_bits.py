"""Contract 1: a request's tokens and logits never depend on memory or on other requests."""

from __future__ import annotations

import dataclasses
import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import pallas_kernels.dispatch
import pallas_kernels.fill.api as fill_api
import pallas_kernels.fill.reference as fill_reference
import pallas_kernels.plan.api as plan_api
import pallas_kernels.plan.reference as plan_reference
from host_offload.control.interface import Decision, Moment, Observation, Spec
from moejax import LLM, SamplingParams
from moejax.engine.statistics import kv_stats
from moejax.step.programs import STAGES
from pallas_kernels import resolve_ops
from pallas_kernels.stage import Entries
from tests.moejax.engine_runs import Faulty, Job, Recorded, run, set_budget
from tests.pallas_kernels.contract import NATIVE

LIMITS = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256}
LAYERS, EXPERTS = 4, 16


def make_llm(dtype: str, **options) -> LLM:
    return LLM("demo", dtype=dtype, progress=False, **{"eviction": "lru", **LIMITS, **options})


def job_pool() -> list[Job]:
    """Prompts around every border (chunk and span 64, page 16), greedy and sampled."""
    rng = np.random.default_rng(7)
    pool = []
    for i, length in enumerate((1, 2, 15, 16, 17, 40, 63, 64, 65, 100, 128, 129, 190)):
        # Halves of the vocabulary by turns, so that prompts route to different experts.
        low = 2048 * (i % 2)
        prompt = tuple(rng.integers(low + 1, low + 2048, length).tolist())
        sampling = {"temperature": 0.9, "top_p": 0.95, "top_k": 50} if i % 3 else {"temperature": 0}
        pool.append(
            Job(
                prompt,
                SamplingParams(max_tokens=1 + i % 7, seed=i, ignore_eos=i % 2 == 0, **sampling),
            )
        )
    return pool


POOL = job_pool()


@pytest.fixture(
    scope="module", params=[pytest.param("float32", marks=pytest.mark.nightly), "bfloat16"]
)
def dtype(request):
    return request.param


@pytest.fixture(
    scope="module",
    params=[pytest.param("xla", marks=pytest.mark.slow), pytest.param("cpu", marks=NATIVE)],
)
def ops(request):
    return request.param


@pytest.fixture(scope="module")
def llm(dtype, ops):
    with make_llm(dtype, ops=ops) as llm:
        yield llm


def full_residency(llm: LLM) -> tuple[list[int], int]:
    return [EXPERTS] * LAYERS, llm.engine.scheduler.arena.slots - LAYERS * EXPERTS


@pytest.fixture(scope="module")
def solo(llm) -> list[Recorded]:
    """Each request of the pool alone, everything resident."""
    set_budget(llm, *full_residency(llm))
    return [run(llm, [job])[0] for job in POOL]


mixes = st.lists(
    st.tuples(st.integers(0, len(POOL) - 1), st.integers(0, 12)), min_size=1, max_size=7
)
# XLA's programs take five times as long to compile as those with native ops.
MOSTLY_CPU = pytest.mark.parametrize(
    "ops",
    [pytest.param("xla", marks=pytest.mark.nightly), pytest.param("cpu", marks=NATIVE)],
    indirect=True,
)
cell_counts = st.one_of(
    st.integers(0, EXPERTS).map(lambda n: [n] * LAYERS),
    st.lists(st.integers(0, EXPERTS), min_size=LAYERS, max_size=LAYERS),
)


@given(
    mix=mixes,
    cells=cell_counts,
    more_kv=st.integers(0, 6),
    eviction=st.sampled_from(["lru", "lfu"]),
)
def test_mixes_and_budgets_change_no_bit(llm, solo, mix, cells, more_kv, eviction):
    layout = llm.engine.scheduler.arena.layout
    # From the KV of one sequence to that of four: requests wait for pages, rows or nothing.
    pages = -(-LIMITS["max_model_len"] // layout.page.block_size)
    set_budget(llm, cells, -(-pages // layout.pages_per_slot) + more_kv, eviction)
    jobs = [Job(POOL[i].prompt, POOL[i].params, arrival) for i, arrival in mix]
    for (i, _), recorded in zip(mix, run(llm, jobs), strict=True):
        assert recorded.same_bits(solo[i]), f"request {i} of the pool"


@pytest.mark.parametrize(
    "dtype",
    [pytest.param("float32", marks=pytest.mark.nightly), "bfloat16"],
    indirect=True,
)
@MOSTLY_CPU
@pytest.mark.parametrize(
    "options",
    [
        {"expert_budget": "30%", "prefill_waves": 3, "eviction": "lfu"},
        pytest.param({"expert_budget": "0%", "kv_budget": "1MiB"}, marks=pytest.mark.nightly),
        pytest.param({"memory": "8MiB", "prefill_waves": 5}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_other_arenas_and_waves_change_no_bit(dtype, ops, solo, options):
    with make_llm(dtype, ops=ops, **options) as other:
        jobs = [Job(job.prompt, job.params, i // 3) for i, job in enumerate(POOL)]
        for i, recorded in enumerate(run(other, jobs)):
            assert recorded.same_bits(solo[i]), f"request {i} of the pool"


@MOSTLY_CPU
def test_staged_transfers_change_no_bit(llm, solo, monkeypatch):
    """A step may also carry out transfers that the host chose, wisely or not."""
    set_budget(llm, [5, 2, 0, 9], 30)
    runner, rng, staged = llm.engine.runner, np.random.default_rng(3), []

    def with_stages(step):
        def run(*args, **kwargs):
            layer = rng.integers(-1, LAYERS, STAGES)
            draws = (layer, rng.integers(0, EXPERTS, STAGES), 0 * layer, rng.integers(0, 9, STAGES))
            entries = Entries(*(values.astype(np.int32) for values in draws))
            output = step(*args, **{**kwargs, "stages": entries})
            staged.append(output.staged)
            return output

        return run

    monkeypatch.setattr(runner, "decode", with_stages(runner.decode))
    monkeypatch.setattr(runner, "prefill", with_stages(runner.prefill))
    jobs = [Job(job.prompt, job.params, i) for i, job in enumerate(POOL)]
    for i, recorded in enumerate(run(llm, jobs)):
        assert recorded.same_bits(solo[i]), f"request {i} of the pool"
    assert sum(int(np.sum(done)) for done in staged) > 0


def conversations(rng: np.random.Generator) -> list[Job]:
    """Requests with shared beginnings and sessions of several turns, all at once."""
    document = rng.integers(1, 4096, 60).tolist()
    jobs = []
    for i in range(10):
        session = f"s{i % 3}" if i < 7 else None
        words = rng.integers(1, 4096, int(rng.integers(1, 15))).tolist()
        # Turns of a session have no document in front: it is in their history.
        prompt = words if session and i >= 3 else [*document[: int(rng.integers(20, 61))], *words]
        sampling = {"temperature": 0.9, "top_p": 0.95} if i % 2 else {"temperature": 0}
        penalties = {"repetition_penalty": 1.2, "presence_penalty": 0.5} if i % 4 == 1 else {}
        jobs.append(
            Job(
                tuple(prompt),
                SamplingParams(
                    max_tokens=int(rng.integers(12, 45)),
                    seed=i,
                    ignore_eos=True,
                    logit_bias={7: 2.0} if i % 5 == 0 else None,
                    **sampling,
                    **penalties,
                ),
                arrival=int(rng.integers(0, 4)),
                session=session,
                priority=int(rng.integers(0, 2)),
                abort=int(rng.integers(3, 12)) if i in (6, 8) else None,
            )
        )
    return jobs


@pytest.mark.parametrize(
    ("ops", "seed"),
    [
        pytest.param("xla", 0, marks=pytest.mark.slow),
        pytest.param("xla", 1, marks=pytest.mark.nightly),
        pytest.param("cpu", 0, marks=NATIVE),
        pytest.param("cpu", 1, marks=NATIVE),
    ],
    indirect=["ops"],
)
def test_sessions_prefixes_preemption_and_cancellation_change_no_bit(ops, llm, seed):
    """A session's solo run is the same session alone, its turns in order."""
    jobs = conversations(np.random.default_rng(seed))
    layout, scheduler = llm.engine.scheduler.arena.layout, llm.engine.scheduler
    pages = -(-LIMITS["max_model_len"] // layout.page.block_size)
    set_budget(llm, [3, 0, 9, 16], -(-pages // layout.pages_per_slot))
    before = kv_stats(scheduler)
    together = run(llm, jobs)
    used = {name: n - before[name] for name, n in kv_stats(scheduler).items() if isinstance(n, int)}
    for name in ("preemptions", "prefix_hit_tokens", "session_hit_tokens", "swapped_out_bytes"):
        assert used[name] > 0, (name, used)
    for session in [s.session_id for s in scheduler.sessions.all]:
        llm.end_session(session)

    set_budget(llm, *full_residency(llm))
    alone: dict[int, Recorded] = {}
    for session in ("s0", "s1", "s2"):
        turns = [i for i, job in enumerate(jobs) if job.session == session and not job.abort]
        kept = [dataclasses.replace(jobs[i], arrival=0) for i in turns]
        alone.update(zip(turns, run(llm, kept), strict=True))
        llm.end_session(session)
    for i, job in enumerate(jobs):
        if job.session is None:
            (alone[i],) = run(llm, [dataclasses.replace(job, arrival=0, abort=None)])
    for i, recorded in enumerate(together):
        if jobs[i].abort is None:
            assert recorded.same_bits(alone[i]), f"job {i}"
        elif jobs[i].session is None:
            cut = len(recorded.tokens)
            begun = Recorded(alone[i].tokens[:cut], alone[i].logits[:cut])
            assert recorded.same_bits(begun), f"job {i}"


@dataclasses.dataclass(frozen=True)
class MoveBudgets:
    """Wants other cells and other KV pages after every few steps, while requests run."""

    moments = frozenset({Moment.STEP_END})
    needs = frozenset({"kv_pages"})
    writes = frozenset({"cells", "kv_pages"})

    def init(self, spec: Spec) -> int:
        return spec.seed

    def decide(self, state: int, observation: Observation) -> tuple[int, Decision]:
        rng = np.random.default_rng(state)
        if state % 3:
            return state + 1, Decision()
        cells = rng.integers(0, EXPERTS + 1, LAYERS).astype(np.int32)
        return state + 1, Decision(cells=cells, kv_pages=int(rng.integers(16, 80)))


def test_budgets_that_move_under_running_requests_change_no_bit(dtype, ops, solo):
    with make_llm(dtype, ops=ops, policies=[MoveBudgets()]) as moving:
        arena, seen = moving.engine.scheduler.arena, set()
        jobs = [Job(job.prompt, job.params, i // 2) for i, job in enumerate(POOL)]
        grant = arena.grant_cells

        def granted(cells):
            if moving.engine.scheduler.running:
                seen.add((*cells, arena.pages))
            return grant(cells)

        arena.grant_cells = granted
        for i, recorded in enumerate(run(moving, jobs)):
            assert recorded.same_bits(solo[i]), f"request {i} of the pool"
        assert len(seen) > 5


def test_budgets_do_not_recompile(llm, solo):
    before = set(llm.engine.runner.executables())
    set_budget(llm, [1, 0, 16, 3], 9, "lfu")
    run(llm, POOL[:4])
    assert set(llm.engine.runner.executables()) == before


def test_the_comparison_sees_one_bit(solo):
    changed = Recorded(solo[0].tokens, [a.copy() for a in solo[0].logits])
    changed.logits[-1].view(np.uint32)[5] ^= 1
    assert solo[0].same_bits(solo[0]) and not changed.same_bits(solo[0])


# ---- the checks can fail: deliberately broken ops, registered as implementations of their own


def mutated(function, old: str, new: str):
    """The function with one piece of its source replaced."""
    source = inspect.getsource(function)
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
    namespace = dict(vars(inspect.getmodule(function)))
    exec(compile(source.replace(old, new), f"<mutated {function.__name__}>", "exec"), namespace)
    return namespace[function.__name__]


@pytest.fixture
def broken(monkeypatch):
    def register(op, api, function):
        monkeypatch.setitem(api.IMPLEMENTATIONS, "broken", function)
        monkeypatch.setitem(pallas_kernels.dispatch.OPS, op, ("xla", "broken"))
        return {**resolve_ops("cpu").chosen(), op: "broken"}

    return register


def run_broken(ops, cells, *, check: bool) -> list[Recorded]:
    with make_llm("float32", ops=ops) as llm:
        set_budget(llm, cells, 9)
        return run(
            llm, [Job(job.prompt, job.params, i) for i, job in enumerate(POOL[:6])], check=check
        )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32"], indirect=True)
@pytest.mark.parametrize("ops", [pytest.param("cpu", marks=NATIVE)], indirect=True)
class TestBrokenOpsAreCaught:
    def test_plan_that_evicts_a_needed_expert(self, broken, dtype, ops):
        plan = mutated(plan_reference.plan, "candidate = granted & ~pinned", "candidate = granted")
        with pytest.raises(Faulty, match="hits"):
            run_broken(broken("plan", plan_api, plan), [3] * LAYERS, check=True)

    @pytest.mark.nightly
    def test_plan_that_leaves_a_stale_address(self, broken, dtype, solo):
        plan = mutated(plan_reference.plan, "jnp.where(evicted, -1, address)", "address")
        ops = broken("plan", plan_api, plan)
        with pytest.raises(Faulty, match="address is not the cell"):
            run_broken(ops, [3] * LAYERS, check=True)
        recorded = run_broken(ops, [3] * LAYERS, check=False)
        assert not all(a.same_bits(b) for a, b in zip(recorded, solo, strict=False))

    @pytest.mark.nightly
    def test_fill_off_by_one_row(self, broken, dtype, solo):
        fill = mutated(fill_reference.fill, "(row[i], 0)", "(row[i] + 1, 0)")
        ops = broken("fill", fill_api, fill)
        with pytest.raises(Faulty, match="bytes of a resident expert differ"):
            run_broken(ops, [12] * LAYERS, check=True)
        recorded = run_broken(ops, [12] * LAYERS, check=False)
        assert not all(a.same_bits(b) for a, b in zip(recorded, solo, strict=False))

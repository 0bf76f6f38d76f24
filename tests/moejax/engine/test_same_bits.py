"""Contract 1: a request's tokens and logits never depend on memory or on other requests."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pallas_kernels.dispatch
import pallas_kernels.plan.api as plan_api
import pallas_kernels.plan.reference as plan_reference
from moejax import LLM, SamplingParams
from moejax.engine.statistics import kv_stats
from moejax.start import kernels
from moejax.start.decide import shapes
from moejax.start.kernels import native_note
from pallas_kernels import OPS, resolve_ops
from pallas_kernels.cpu.library import instruction_set
from tests.moejax.engine.scenes import EXPERTS, LAYERS, LIMITS, open_llm, same_bits
from tests.moejax.engine_runs import Faulty, Job, Recorded, run, set_budget
from tests.moejax.interpreted_engine import interpreted_llm, three_jobs
from tests.moejax.models.families import write_checkpoint
from tests.pallas_kernels.contract import NATIVE

NATIVE_OPS = {
    *("linear", "expert_ffn", "paged_attention", "rms_norm", "route", "plan"),
    *("kv_write", "combine", "fill", "stage", "move", "sample"),
}


INTEGERS = {"ops": "cpu", "precision": "int4", "arithmetic": "int8"}


def make_llm(dtype: str, *, ops: str = "auto", **options) -> LLM:
    chosen = INTEGERS if ops == "integers" else {"ops": ops}
    return open_llm(dtype=dtype, **{"eviction": "lru", **chosen, **options})


def job_pool() -> list[Job]:
    """Prompts around every border (chunk and span 64, page 16), greedy and sampled."""
    rng = np.random.default_rng(7)
    pool = []
    for i, length in enumerate((1, 2, 15, 16, 17, 40, 63, 64, 65, 100, 128, 129, 190)):
        # Halves of the vocabulary by turns, so that prompts route to different experts.
        low = 2048 * (i % 2)
        prompt = tuple(rng.integers(low + 1, low + 2048, length).tolist())
        sampling = {"temperature": 0.9, "top_p": 0.95, "top_k": 50} if i % 3 else {"temperature": 0}
        params = SamplingParams(max_tokens=1 + i % 7, seed=i, ignore_eos=i % 2 == 0, **sampling)
        pool.append(Job(prompt, params))
    return pool


POOL = job_pool()


@functools.cache
def solo(dtype: str, ops: str) -> list[Recorded]:
    """Each request of the pool alone with the device driver, everything resident."""
    with make_llm(dtype, ops=ops) as llm:
        set_budget(llm, *full_residency(llm))
        return [run(llm, [job])[0] for job in POOL]


def full_residency(llm: LLM) -> tuple[list[int], int]:
    return [EXPERTS] * LAYERS, llm.engine.scheduler.arena.slots - LAYERS * EXPERTS


@dataclasses.dataclass(frozen=True)
class Subject:
    llm: LLM
    dtype: str
    ops: str

    def check(self, recorded: list[Recorded], numbers) -> None:
        alone = solo(self.dtype, self.ops)
        for i, each in zip(numbers, recorded, strict=True):
            assert each.same_bits(alone[i]), f"request {i} of the pool"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("bfloat16", "cpu", "device"), marks=NATIVE),
        pytest.param(("bfloat16", "cpu", "host"), marks=[NATIVE, pytest.mark.slow]),
        pytest.param(("bfloat16", "integers", "device"), marks=[NATIVE, pytest.mark.slow]),
        pytest.param(("bfloat16", "xla", "device"), marks=pytest.mark.slow),
        pytest.param(("float32", "cpu", "device"), marks=[NATIVE, pytest.mark.nightly]),
        pytest.param(("float32", "xla", "host"), marks=pytest.mark.nightly),
    ],
    ids=" ".join,
)
def subject(request) -> Iterator[Subject]:
    dtype, ops, driver = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "LEAST_NATIVE_PREFILL", 1)
        with make_llm(dtype, ops=ops, driver=driver) as llm:
            found = llm.engine.runner.shapes.prefills
            assert found == ((1, 4) if ops != "xla" else (4,))
            yield Subject(llm, dtype, ops)


cell_counts = st.one_of(
    st.integers(0, EXPERTS).map(lambda n: [n] * LAYERS),
    st.lists(st.integers(0, EXPERTS), min_size=LAYERS, max_size=LAYERS),
)


@given(
    mix=st.lists(
        st.tuples(st.integers(0, len(POOL) - 1), st.integers(0, 12)), min_size=1, max_size=7
    ),
    cells=cell_counts,
    more_kv=st.integers(0, 6),
    eviction=st.sampled_from(["lru", "lfu"]),
)
@settings(max_examples=20)
def test_mixes_and_budgets_change_no_bit(subject, mix, cells, more_kv, eviction):
    llm, layout = subject.llm, subject.llm.engine.scheduler.arena.layout
    # From the KV of one sequence to that of four: requests wait for pages, rows or nothing.
    pages = -(-LIMITS["max_model_len"] // layout.page.block_size)
    set_budget(llm, cells, -(-pages // layout.pages_per_slot) + more_kv, eviction)
    jobs = [Job(POOL[i].prompt, POOL[i].params, arrival) for i, arrival in mix]
    subject.check(run(llm, jobs), [i for i, _ in mix])


def test_budgets_do_not_recompile(subject):
    run(subject.llm, POOL[:4])
    before = set(subject.llm.engine.runner.executables())
    set_budget(subject.llm, [1, 0, 16, 3], 9, "lfu")
    run(subject.llm, POOL[:4])
    assert set(subject.llm.engine.runner.executables()) == before


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
        params = SamplingParams(
            max_tokens=int(rng.integers(12, 45)),
            seed=i,
            ignore_eos=True,
            logit_bias={7: 2.0} if i % 5 == 0 else None,
            **sampling,
            **penalties,
        )
        jobs.append(
            Job(
                tuple(prompt),
                params,
                arrival=int(rng.integers(0, 4)),
                session=session,
                priority=int(rng.integers(0, 2)),
                abort=int(rng.integers(3, 12)) if i in (6, 8) else None,
            )
        )
    return jobs


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_sessions_prefixes_preemption_and_cancellation_change_no_bit(subject, seed):
    """A session's solo run is the same session alone, its turns in order."""
    llm, jobs = subject.llm, conversations(np.random.default_rng(seed))
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


# ---- which ops run, and how near they are to each other


@NATIVE
def test_statistics_and_the_log_say_which_ops_are_native(subject, monkeypatch):
    chosen = subject.llm.stats()["ops"]
    native = set() if subject.ops == "xla" else NATIVE_OPS
    assert {op for op, name in chosen.items() if name == "cpu"} == native
    steps = subject.llm.plan.steps
    with_native = dataclasses.replace(steps, ops=resolve_ops("cpu"))
    said = f"native CPU ops with the {instruction_set()} instructions"
    assert native_note(with_native, "cpu") == said
    xla = dataclasses.replace(steps, ops=resolve_ops("xla"))
    assert native_note(xla, "cpu") == native_note(xla, "gpu") == ""
    monkeypatch.setattr(kernels, "why_not_cpu", lambda: "they are not built; `command` builds them")
    note = "they are not built; `command` builds them; all ops run in XLA"
    assert native_note(xla, "cpu") == note


# ---- every op a kernel, interpreted: slow programs, so few and short requests


@pytest.fixture(scope="module", params=["demo", "latent attention"])
def interpreted(request, tmp_path_factory):
    """Decode is compiled for contexts of 64 tokens too: one job's is longer. Prefill is compiled
    for one chunk too: one job has two."""
    limits = {"max_model_len": 128, "max_num_seqs": 20, "max_num_batched_tokens": 192}
    model, vocabulary = "demo", 4096
    if request.param != "demo":
        directory = tmp_path_factory.mktemp("latent") / "m"
        model, vocabulary = write_checkpoint(directory, "DeepseekV3ForCausalLM"), 512
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"CONTEXT": 32, "PREFILL": 1}.items():
            patch.setattr(shapes, f"LEAST_{name}", value)
        patch.setattr(shapes, "APART", 3)
        with interpreted_llm(model, **limits) as llm:
            yield llm, model, limits, three_jobs(vocabulary)


@pytest.mark.nightly
def test_kernels_change_no_bit_and_agree_with_the_reference_ops(interpreted):
    llm, model, limits, jobs = interpreted
    ops, runner = llm.stats()["ops"], llm.engine.runner
    assert all((name == "pallas") == ("pallas" in OPS[op]) for op, name in ops.items())
    assert runner.shapes.contexts == (4, 8) and runner.shapes.prefills == (1, 3)
    layers, experts = runner.tables.address.shape
    kv = llm.engine.scheduler.arena.slots - layers * experts
    set_budget(llm, [experts] * layers, kv)
    alone = [run(llm, [job])[0] for job in jobs]
    # 5 and 17 more requests: decode runs in its buckets of 8 and 32 rows as well, and all in the
    # context of the longest.
    company = [dataclasses.replace(job, arrival=0) for job in jobs[:1] * 17]
    for cells, others in ((0, []), (experts, company[:5]), (experts // 3, company)):
        set_budget(llm, [cells] * layers, kv)
        assert same_bits(run(llm, [*others, *jobs])[len(others) :], alone)
    assert {"prefill@1", "prefill", "decode", "decode@4", "decode@16"} <= {
        *map(str, runner.executables())
    }
    with LLM(model, ops="xla", progress=False, **limits) as reference:
        for got, want in zip(alone, run(reference, jobs, check=False), strict=True):
            difference = np.abs(got.logits[0] - want.logits[0])
            assert np.max(difference) < 0.2 * np.std(want.logits[0])


# ---- the checks can fail: deliberately broken ops, registered as implementations of their own


def test_the_comparison_sees_one_bit():
    first = Recorded([3], [np.ones((1, 9), np.float32)])
    changed = Recorded([3], [a.copy() for a in first.logits])
    changed.logits[-1].view(np.uint32)[0, 5] ^= 1
    assert first.same_bits(first) and not first.same_bits(changed)


@pytest.mark.slow
@NATIVE
def test_a_plan_that_evicts_who_is_needed_is_caught(monkeypatch):
    source = inspect.getsource(plan_reference.plan)
    namespace = dict(vars(plan_reference))
    exec(source.replace("candidate = granted & ~pinned", "candidate = granted"), namespace)
    assert namespace["plan"].__code__ != plan_reference.plan.__code__
    monkeypatch.setitem(plan_api.IMPLEMENTATIONS, "broken", namespace["plan"])
    monkeypatch.setitem(pallas_kernels.dispatch.OPS, "plan", ("xla", "broken"))
    with make_llm("float32", ops={**resolve_ops("cpu").chosen(), "plan": "broken"}) as llm:
        set_budget(llm, [3] * LAYERS, 9)
        with pytest.raises(Faulty, match="hits"):
            run(llm, [Job(job.prompt, job.params, i) for i, job in enumerate(POOL[:6])])

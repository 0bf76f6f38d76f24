"""The engine with the native CPU ops: contract 1 within "cpu", and agreement with "xla"."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moejax import LLM, SamplingParams
from moejax.start import kernels
from moejax.start.kernels import native_note
from pallas_kernels import resolve_ops
from pallas_kernels.cpu.library import instruction_set
from tests.moejax.engine_runs import Job, run, set_budget
from tests.pallas_kernels.contract import NATIVE

pytestmark = [NATIVE, pytest.mark.slow]

LIMITS = {"max_model_len": 160, "max_num_seqs": 20, "max_num_batched_tokens": 192}
NATIVE_OPS = {
    *("linear", "expert_ffn", "paged_attention", "rms_norm", "route", "plan"),
    *("kv_write", "combine", "fill", "stage", "move"),
}


@pytest.fixture(
    scope="module", params=[pytest.param("float32", marks=pytest.mark.nightly), "bfloat16"]
)
def llm(request):
    with LLM(
        "demo", dtype=request.param, ops="cpu", eviction="lru", progress=False, **LIMITS
    ) as llm:
        yield llm


def jobs():
    rng = np.random.default_rng(5)
    for i, length in enumerate((1, 17, 66, 130)):
        sampling = {"temperature": 0.9, "top_p": 0.9} if i else {"temperature": 0}
        params = SamplingParams(max_tokens=6, seed=i, ignore_eos=True, **sampling)
        yield Job(tuple(rng.integers(1, 4096, length).tolist()), params, arrival=i)


def alone(llm):
    """Each job alone, every expert resident."""
    arena, config = llm.engine.scheduler.arena, llm.engine.runner.config
    layers, experts = sum(config.moe_layers), config.num_experts
    kv = arena.slots - layers * experts
    set_budget(llm, [experts] * layers, kv)
    return [run(llm, [job])[0] for job in jobs()], layers, experts, kv


def test_the_log_says_whether_native_ops_run(llm, monkeypatch):
    steps = llm.plan.steps
    assert native_note(steps, "cpu") == f"native CPU ops with the {instruction_set()} instructions"
    xla = dataclasses.replace(steps, ops=resolve_ops("xla"))
    assert native_note(xla, "cpu") == ""
    monkeypatch.setattr(kernels, "why_not_cpu", lambda: "they are not built; `command` builds them")
    note = "they are not built; `command` builds them; all ops run in XLA"
    assert native_note(xla, "cpu") == note
    assert native_note(xla, "gpu") == ""


def test_stats_say_which_ops_ran_native(llm):
    assert {op for op, name in llm.stats()["ops"].items() if name == "cpu"} == NATIVE_OPS
    assert {op for op, name in llm.stats()["ops"].items() if name != "cpu"} == {"truncate"}


def test_budgets_and_company_change_no_bit(llm):
    want, layers, experts, kv = alone(llm)
    company = [dataclasses.replace(job, arrival=0) for job in list(jobs())[:1] * 17]
    rng = np.random.default_rng(1)
    for cells, others in (
        ([0] * layers, []),
        (rng.integers(0, experts + 1, layers).tolist(), company),
    ):
        set_budget(llm, cells, kv)
        together = run(llm, [*others, *jobs()])[len(others) :]
        assert all(a.same_bits(b) for a, b in zip(want, together, strict=True))


def test_agrees_with_the_reference_ops(llm):
    # The limits of test_same_bits, whose programs may be compiled: no bit depends on them.
    limits = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256}
    with LLM(
        "demo", dtype=llm.dtype, ops="xla", eviction="lru", progress=False, **limits
    ) as reference:
        wanted = run(reference, list(jobs()), check=False)
    for got, want in zip(run(llm, list(jobs()), check=False), wanted, strict=True):
        # The first token's logits: later ones may follow another token. In bfloat16 a rounding
        # more or less also moves what is routed; logits have a standard deviation of about 2.5.
        difference = np.abs(got.logits[0] - want.logits[0])
        most, mean = (2e-3, 2e-4) if llm.dtype == "float32" else (0.5, 0.08)
        assert np.max(difference) < most and np.mean(difference) < mean


@pytest.mark.nightly
@pytest.mark.parametrize("precision", ["int8", "int4", "lossless12"])
def test_encoded_experts_keep_the_contract(precision):
    with LLM(
        "demo", precision=precision, ops="cpu", eviction="lru", progress=False, **LIMITS
    ) as llm:
        want, layers, experts, kv = alone(llm)
        set_budget(llm, [experts // 3] * layers, kv)
        for a, b in zip(want, run(llm, list(jobs())), strict=True):
            assert a.same_bits(b)


@pytest.mark.nightly
def test_the_host_driver_keeps_the_contract():
    with LLM("demo", driver="host", ops="cpu", eviction="lru", progress=False, **LIMITS) as llm:
        want, layers, experts, kv = alone(llm)
        set_budget(llm, [experts // 3] * layers, kv)
        for a, b in zip(want, run(llm, list(jobs())), strict=True):
            assert a.same_bits(b)


@pytest.mark.nightly  # other shapes: test_families
def test_another_model_keeps_the_contract(shared):
    with LLM(shared / "models" / "tri", ops="cpu", eviction="lru", progress=False, **LIMITS) as llm:
        want, layers, experts, kv = alone(llm)
        set_budget(llm, [experts // 3] * layers, kv)
        for a, b in zip(want, run(llm, list(jobs())), strict=True):
            assert a.same_bits(b)

"""The engine with every op a kernel, interpreted on the CPU: contract 1 within "pallas".

Slow programs, so few and short requests; numerics of each kernel are its contract test's matter.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import host_offload.memory.store
import tests.pallas_kernels.cpu_lowerings  # noqa: F401  (what the interpreter lacks)
from moejax import LLM, SamplingParams
from pallas_kernels import OPS
from pallas_kernels.triton import interpreted
from tests.moejax.engine_runs import Job, run, set_budget

LIMITS = {"max_model_len": 128, "max_num_seqs": 20, "max_num_batched_tokens": 192}
EXPERTS, LAYERS = 16, 4


@pytest.fixture(scope="module")
def llm():
    with pytest.MonkeyPatch.context() as patch:
        # The interpreter of jax 0.10.2 takes no operand that is typed as host memory, as a store is
        # that jax took over from numpy; one that a jitted function made is not, on the CPU.
        patch.setattr(host_offload.memory.store, "shares_memory", lambda device: False)
        with (
            interpreted(),
            LLM("demo", ops="pallas", progress=False, prefill_waves=2, **LIMITS) as llm,
        ):
            yield llm


def jobs():
    rng = np.random.default_rng(5)
    for i, length in enumerate((1, 17, 66)):
        sampling = {"temperature": 0.9, "top_p": 0.9} if i else {"temperature": 0}
        params = SamplingParams(max_tokens=3, seed=i, ignore_eos=True, **sampling)
        yield Job(tuple(rng.integers(1, 4096, length).tolist()), params, arrival=i)


@pytest.mark.nightly
def test_every_op_is_a_kernel(llm):
    ops = llm.stats()["ops"]
    assert set(OPS) - set(ops) == {"layer_norm", "latent_write", "head_linear"}
    assert all((name == "pallas") == ("pallas" in OPS[op]) for op, name in ops.items())


@pytest.mark.nightly
def test_budgets_and_company_change_no_bit(llm):
    kv = llm.engine.scheduler.arena.slots - LAYERS * EXPERTS
    set_budget(llm, [EXPERTS] * LAYERS, kv)
    alone = [run(llm, [job])[0] for job in jobs()]
    # 17 more requests: decode runs in its bucket of 32 rows as well.
    company = [dataclasses.replace(job, arrival=0) for job in list(jobs())[:1] * 17]
    for cells, others in (([0] * LAYERS, []), ([5, 0, 16, 2], company)):
        set_budget(llm, cells, kv)
        together = run(llm, [*others, *jobs()])[len(others) :]
        assert all(a.same_bits(b) for a, b in zip(alone, together, strict=True))
    assert {"decode@16", "decode"} <= {*map(str, llm.engine.runner.executables())}


@pytest.mark.nightly
def test_kernels_agree_with_the_reference_ops(llm):
    with LLM("demo", ops="xla", progress=False, **LIMITS) as reference:
        wanted = run(reference, list(jobs()), check=False)
    for got, want in zip(run(llm, list(jobs()), check=False), wanted, strict=True):
        # The first token's logits: later ones may follow another token. In bfloat16 a rounding
        # more or less also moves what is routed; logits have a standard deviation of about 2.5.
        difference = np.abs(got.logits[0] - want.logits[0])
        assert np.max(difference) < 0.5 and np.mean(difference) < 0.08

"""The engine with every op a kernel, interpreted on the CPU: contract 1 within "pallas".

Slow programs, so few and short requests; numerics of each kernel are its contract test's matter.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moejax import LLM
from moejax.start.decide import shapes
from pallas_kernels import OPS
from tests.moejax.engine_runs import run, set_budget
from tests.moejax.interpreted_engine import interpreted_llm, three_jobs

LIMITS = {"max_model_len": 128, "max_num_seqs": 20, "max_num_batched_tokens": 192}
EXPERTS, LAYERS = 16, 4
JOBS = three_jobs(vocabulary=4096)


@pytest.fixture(scope="module")
def llm():
    """Decode is compiled for contexts of 64 tokens too: one job's is longer. Prefill is compiled
    for one chunk too: one job has two."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shapes, "LEAST_CONTEXT", 32)
        patch.setattr(shapes, "LEAST_PREFILL", 1)
        patch.setattr(shapes, "PREFILLS_APART", 3)
        with interpreted_llm("demo", **LIMITS) as llm:
            assert llm.engine.runner.shapes.contexts == (4, 8)
            assert llm.engine.runner.shapes.prefills == (1, 3)
            yield llm


@pytest.mark.nightly
def test_every_op_is_a_kernel(llm):
    ops = llm.stats()["ops"]
    assert set(OPS) - set(ops) == {"layer_norm", "latent_write", "head_linear"}
    assert all((name == "pallas") == ("pallas" in OPS[op]) for op, name in ops.items())


@pytest.mark.nightly
def test_budgets_and_company_change_no_bit(llm):
    kv = llm.engine.scheduler.arena.slots - LAYERS * EXPERTS
    set_budget(llm, [EXPERTS] * LAYERS, kv)
    alone = [run(llm, [job])[0] for job in JOBS]
    # 5 and 17 more requests: decode runs in its buckets of 8 and 32 rows as well, and all in the
    # context of the longest.
    company = [dataclasses.replace(job, arrival=0) for job in JOBS[:1] * 17]
    budgets = [0] * LAYERS, [EXPERTS] * LAYERS, [5, 0, 16, 2]
    for cells, others in zip(budgets, ([], company[:5], company), strict=True):
        set_budget(llm, cells, kv)
        together = run(llm, [*others, *JOBS])[len(others) :]
        assert all(a.same_bits(b) for a, b in zip(alone, together, strict=True))
    ran = {*map(str, llm.engine.runner.executables())}
    assert {"prefill@1", "prefill", "decode"} <= ran
    assert {"decode_pages4@1", *(f"decode@{rows}" for rows in (1, 2, 4, 8, 16))} <= ran


@pytest.mark.nightly
def test_kernels_agree_with_the_reference_ops(llm):
    with LLM("demo", ops="xla", progress=False, **LIMITS) as reference:
        wanted = run(reference, JOBS, check=False)
    for got, want in zip(run(llm, JOBS, check=False), wanted, strict=True):
        # The first token's logits: later ones may follow another token. In bfloat16 a rounding
        # more or less also moves what is routed; logits have a standard deviation of about 2.5.
        difference = np.abs(got.logits[0] - want.logits[0])
        assert np.max(difference) < 0.5 and np.mean(difference) < 0.08

"""As test_kernels_in_engine, a model with multi-head latent attention: contract 1 within "pallas".

Slow programs, so few and short requests; numerics of each kernel are its contract test's matter.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from moejax import LLM
from tests.moejax.engine_runs import run, set_budget
from tests.moejax.interpreted_engine import interpreted_llm, three_jobs
from tests.moejax.models.families import write_checkpoint

pytestmark = pytest.mark.nightly

LIMITS = {"max_model_len": 128, "max_num_seqs": 20, "max_num_batched_tokens": 128}
EXPERTS, LAYERS = 8, 2
"""Of the two of three layers that have experts."""

JOBS = three_jobs(vocabulary=512)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("latent") / "m", "DeepseekV3ForCausalLM")


@pytest.fixture(scope="module")
def llm(checkpoint):
    with interpreted_llm(checkpoint, **LIMITS) as llm:
        yield llm


def test_every_op_is_a_kernel(llm):
    ops = llm.stats()["ops"]
    assert set(ops.values()) == {"pallas"}
    assert {"latent_write", "head_linear", "paged_attention"} <= set(ops)
    assert not {"kv_write", "layer_norm"} & set(ops)


def test_budgets_and_company_change_no_bit(llm):
    kv = llm.engine.scheduler.arena.slots - LAYERS * EXPERTS
    set_budget(llm, [EXPERTS] * LAYERS, kv)
    alone = [run(llm, [job])[0] for job in JOBS]
    # 17 more requests: decode runs in its bucket of 32 rows as well.
    company = [dataclasses.replace(job, arrival=0) for job in JOBS[:1] * 17]
    for cells, others in (([0] * LAYERS, []), ([3, 5], company)):
        set_budget(llm, cells, kv)
        together = run(llm, [*others, *JOBS])[len(others) :]
        assert all(a.same_bits(b) for a, b in zip(alone, together, strict=True))
    assert {"decode@4", "decode@16", "decode"} <= {*map(str, llm.engine.runner.executables())}


def test_kernels_agree_with_the_reference_ops(llm, checkpoint):
    with LLM(checkpoint, ops="xla", progress=False, **LIMITS) as reference:
        wanted = run(reference, JOBS, check=False)
    for got, want in zip(run(llm, JOBS, check=False), wanted, strict=True):
        # The first token's logits: later ones may follow another token.
        difference = np.abs(got.logits[0] - want.logits[0])
        assert np.max(difference) < 0.1 * np.std(want.logits[0])

"""Experts that come beside compute, beyond the drivers' contract (test_drivers.py): whose the
arena's memory is and what a failed step leads to."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from host_offload.control.interface import Moment
from host_offload.queue.pinned import PinnedRecords
from moejax import SamplingParams
from moejax.step.programs import STAGES
from moejax.step.transports.copies import CopyTransport
from pallas_kernels.stage import Entries
from tests.faults import Faults, inject
from tests.moejax.engine.scenes import EXPERTS, LINK, QUEUE, at_rest, delay, open_llm, same_bits
from tests.moejax.engine_runs import mixed_jobs, run
from tests.pallas_kernels.contract import NATIVE

pytestmark = NATIVE


def test_results_name_the_link_and_a_failed_step_leads_to_nobodys_prefix():
    """A prompt of several steps of which the first fails when the next is dispatched already: that
    one's blocks are wrong too, and no later prompt may share them. Nothing has a cell, so the next
    step itself does not fail."""
    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=1)
    prompt = list(range(30, 230))
    with open_llm(expert_budget=0, **LINK, max_num_batched_tokens=64) as llm:
        stats = llm.stats()
        assert stats["transfers"]["link_rate"] == 5e8
        assert stats["transfers"]["chunk_bytes"] == 16 << 10
        said = "experts pass a link of 0.5 GB/s, 50 us, beside compute"
        assert said in stats["notes"] and said in str(llm.explain())
        engine, queue = llm.engine, llm.engine.runner.transport.queue
        inject(queue, Faults(seed=1, errors=1.0))
        failed = engine.add(prompt, params)
        engine.step()
        jax.block_until_ready(engine._pending.results)
        inject(queue, Faults())
        while not engine.idle:
            engine.step()
        assert failed.error is not None
        found = [llm.generate(prompt, params)[0].outputs[0].logprobs for _ in range(2)]
        assert engine.scheduler.prefixes.hit_tokens > 128
        engine.scheduler.cache.drop_idle()
        want = llm.generate(prompt, params)[0].outputs[0].logprobs
        assert found == [want, want]


class Bringing:
    """Hooks that bring what a layer was routed to, just before it computes that, or into the next
    layer's cells, which has other wishes. The first 8 experts."""

    def __init__(self, ahead: int):
        self.ahead = ahead

    def __call__(self, moment, layer, known):
        if moment != Moment.ROUTED:
            return None
        ids, _ = known
        lists = np.full((len(Entries._fields), STAGES), -1, np.int32)
        for i, expert in enumerate(np.unique(ids[ids < EXPERTS])[:STAGES]):
            lists[:, i] = layer + self.ahead, expert, 0, i
        return Entries._make(lists)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 1])
def test_what_tables_have_and_cells_have_not(ahead):
    """Hits, by the tables, whose copies begin when they are needed, are waited for; what was on its
    way into a cell that another expert got is not taken for that. The store is separate arrays in
    place of one, of which no program gets any."""
    with open_llm(expert_budget=["60%", "25%"][ahead], **QUEUE) as llm:
        runner, llm.engine.hooks = llm.engine.runner, lambda _: Bringing(ahead)
        (records,) = runner.store.arrays.values()
        assert isinstance(records, PinnedRecords)
        assert same_bits(run(llm, mixed_jobs()[:4], check=False), at_rest())
        assert not runner.faults()
        stats = llm.stats()["transfers"]
        assert min(stats["late"], stats["cancelled"] + (not ahead) * 100) > 20
        for compiled in runner.compiler.compiled:
            assert records.shape not in [a.shape for a in jax.tree.leaves(compiled.in_avals)]


VERSIONS = {
    "int8": {"precision": "int8", "expert_budget": "40%"},
    "resident": {"precision": "dynaexq,margin=0,interval=8 steps,hi_share=50%"},
    "paged": {"precision": "dynaexq,paged=true,interval=8 steps", "expert_budget": "40%"},
    "prefetched": {
        "precision": "dynaexq,paged=true,interval=8 steps",
        "expert_budget": "40%",
        "prefetch": "random",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VERSIONS)
def test_copies_of_several_versions_have_the_bits_of_ops(name):
    """What is decided does not depend on how experts come, so neither do the versions."""
    given = {**VERSIONS[name], "enable_prefix_caching": False}
    with open_llm(driver="host", ops="move=xla", **given) as llm:
        wanted = run(llm, mixed_jobs(), check=False)
        before = llm.stats()["experts"], llm.stats()["precision"].get("promotions")
    with open_llm(**QUEUE, **given) as llm:
        delay(llm)
        assert same_bits(run(llm, mixed_jobs(), check=False), wanted)
        runner = llm.engine.runner
        assert isinstance(runner.transport, CopyTransport) and not runner.faults()
        assert (llm.stats()["experts"], llm.stats()["precision"].get("promotions")) == before

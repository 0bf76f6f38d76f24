"""An engine that begins anew with other policies and cells is one that has just started so."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest

from host_offload.control.rules import PolicyError
from host_offload.policies.eviction.names import POLICIES
from host_offload.policies.prefetch.random_prefetch import RandomPrefetch
from moejax import SamplingParams
from moejax.engine.resize import check_one_version
from tests.moejax.engine.scenes import EXPERTS, LAYERS, open_llm

pytestmark = pytest.mark.slow  # contents of tables, whatever the version of jax

PROMPTS = ["The old house", "def main():", "Question: how many apples"]


def counted(llm):
    """Text and counts of one batch."""
    before = dict(llm.engine.statistics.paging)
    params = SamplingParams(temperature=0.8, max_tokens=12, seed=3, ignore_eos=True)
    tokens = [out.outputs[0].token_ids for out in llm.generate(PROMPTS, params, use_tqdm=False)]
    llm.engine.drain()
    control = llm.engine.control
    transfers = None if control is None else control.controller.stats()["transfers"]
    return tokens, {k: v - before[k] for k, v in llm.engine.statistics.paging.items()}, transfers


@pytest.fixture(scope="module")
def engine():
    with open_llm(eviction="lru", enable_prefix_caching=False) as llm:
        yield llm


@pytest.mark.parametrize(
    ("policies", "share"),
    [
        ([POLICIES["fifo"]()], 0.25),
        ([POLICIES["lru"](), RandomPrefetch()], 0.5),
        ([POLICIES["lru"]()], 0.0),
    ],
    ids=["fifo", "prefetch", "none resident"],
)
def test_it_counts_what_a_new_one_counts(engine, policies, share):
    options = {"expert_budget": f"{share:.0%}", "policies": policies}
    with open_llm(enable_prefix_caching=False, **options) as new:
        wanted, spec = counted(new), new.plan.spec
    engine.generate(PROMPTS, use_tqdm=False)  # which leaves experts, clocks and frequencies
    engine.engine.begin_anew(spec, policies, [round(share * EXPERTS)] * LAYERS)
    compiled = len(engine.engine.runner.executables())
    assert counted(engine) == wanted
    assert len(engine.engine.runner.executables()) == compiled
    assert not engine.engine.runner.faults()


def test_what_cannot_begin_anew_says_so(engine):
    spec, cells = engine.plan.spec, [4] * LAYERS

    @dataclasses.dataclass(frozen=True)
    class NoInit(RandomPrefetch):
        def init(self, spec):
            raise ValueError("not with this model")

    with pytest.raises(PolicyError, match="both write 'victim_weights'"):
        engine.engine.begin_anew(spec, [POLICIES["lru"](), POLICIES["lfu"]()], cells)
    with pytest.raises(ValueError, match="not with this model"):
        engine.engine.begin_anew(spec, [NoInit()], cells)
    assert engine.engine.control is None
    with pytest.raises(ValueError, match="cells per layer must be"):
        engine.engine.begin_anew(spec, [], [99] * LAYERS)
    engine.engine.tracer = object()
    try:
        with pytest.raises(ValueError, match="a trace is of one run's policies"):
            engine.engine.begin_anew(spec, [], cells)
    finally:
        engine.engine.tracer = None
    engine.engine.begin_anew(spec, [], cells)
    assert np.all(np.asarray(engine.engine.runner.tables.owner) == -1)
    two = SimpleNamespace(placement=None, layout=SimpleNamespace(records=("dense", "int4")))
    with pytest.raises(ValueError, match="two versions are laid out once"):
        check_one_version(two)

"""What an engine cannot begin anew with. That one which does counts as a new one: test_grid.py."""

from types import SimpleNamespace

import numpy as np
import pytest

from host_offload.control.rules import PolicyError
from host_offload.policies.eviction.eviction_names import POLICIES
from host_offload.policies.prefetch.random_prefetch import RandomPrefetch
from moejax.engine.resize import check_one_version
from tests.moejax.engine.scenes import LAYERS, open_llm

pytestmark = pytest.mark.slow  # contents of tables, whatever the version of jax


class NoInit(RandomPrefetch):
    def init(self, spec):
        raise ValueError("not with this model")


@pytest.fixture(scope="module")
def engine():
    with open_llm(eviction="lru") as llm:
        yield llm


def test_what_cannot_begin_anew_says_so(engine):
    spec, cells = engine.plan.spec, [4] * LAYERS
    with pytest.raises(PolicyError, match="both write 'victim_weights'"):
        engine.engine.begin_anew(spec, [POLICIES["lru"](), POLICIES["lfu"]()], cells)
    with pytest.raises(ValueError, match="not with this model"):
        engine.engine.begin_anew(spec, [NoInit()], cells)
    assert engine.engine.control is None
    with pytest.raises(ValueError, match="cells per layer must be"):
        engine.engine.begin_anew(spec, [], [99] * LAYERS)
    engine.engine.tracer = object()
    try:
        with pytest.raises(ValueError, match="a trace records one run"):
            engine.engine.begin_anew(spec, [], cells)
    finally:
        engine.engine.tracer = None
    engine.engine.begin_anew(spec, [], cells)
    assert np.all(np.asarray(engine.engine.runner.tables.owner) == -1)
    two = SimpleNamespace(placement=None, layout=SimpleNamespace(records=("dense", "int4")))
    with pytest.raises(ValueError, match="two versions are laid out once"):
        check_one_version(two)

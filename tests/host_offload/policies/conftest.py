"""A trace of kinds of tokens, and what policies are told of its engine."""

import dataclasses

import numpy as np
import pytest

from host_offload.control.interface import Spec
from host_offload.simulate.simulator import spec_of
from host_offload.traces.reader import Trace
from tests.host_offload.policies.kinds import ROUTER, trace_of_kinds


@pytest.fixture(scope="module")
def trace(tmp_path_factory) -> Trace:
    """Two requests, of kinds 0…2 and of kinds 3…5."""
    rng = np.random.default_rng(0)
    kinds = [[int(rng.integers(3)), int(rng.integers(3, 6))] for _ in range(40)]
    return trace_of_kinds(tmp_path_factory.mktemp("trace"), kinds)


@pytest.fixture(scope="module")
def told(trace) -> Spec:
    return dataclasses.replace(spec_of(trace.header), driver="host", router=ROUTER)

"""An engine whose ops are kernels, interpreted on the CPU, and a few short requests for it: the
programs are slow."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import host_offload.memory.store
import tests.pallas_kernels.cpu_lowerings  # noqa: F401  (what the interpreter lacks)
from moejax import LLM, SamplingParams
from pallas_kernels.triton import interpreted
from tests.moejax.engine_runs import Job


@contextlib.contextmanager
def interpreted_llm(model: str | os.PathLike, **options: Any) -> Iterator[LLM]:
    with pytest.MonkeyPatch.context() as patch:
        # The interpreter of jax 0.10.2 takes no operand that is typed as host memory, as a store is
        # that jax took over from numpy; one that a jitted function made is not, on the CPU.
        patch.setattr(host_offload.memory.store, "shares_memory", lambda device: False)
        with (
            interpreted(),
            LLM(
                model, ops="pallas", progress=False, **{"driver": "device,waves=2", **options}
            ) as llm,
        ):
            yield llm


def three_jobs(vocabulary: int) -> list[Job]:
    rng = np.random.default_rng(5)
    jobs = []
    for i, length in enumerate((1, 17, 66)):
        sampling = {"temperature": 0.9, "top_p": 0.9} if i else {"temperature": 0}
        params = SamplingParams(max_tokens=3, seed=i, ignore_eos=True, **sampling)
        prompt = tuple(rng.integers(1, vocabulary, length).tolist())
        jobs.append(Job(prompt, params, arrival=i))
    return jobs

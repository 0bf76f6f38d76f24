"""The engine misses what the miss curve of another run says, at every budget."""

from __future__ import annotations

import numpy as np
import pytest

from host_offload.simulate.simulator import simulate
from host_offload.sizing.miss_curves import trace_curves
from moejax import LLM, SamplingParams
from moejax.traces import read_trace


@pytest.mark.nightly
@pytest.mark.parametrize(("prompt", "waves"), [(1, 1), (21, 2)])
def test_a_trace_predicts_another_budget_exactly(tmp_path, prompt, waves):
    """The curves of a run that had everything resident are the misses of the one with half, layer
    by layer. Prompts of a token each, so that prefill steps fit as decode steps do; then of many,
    whose experts fit in two waves."""
    params = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    traces, misses = {}, {}
    for cells in (16, 8):
        with LLM(
            "demo",
            max_num_seqs=2,
            max_model_len=64,
            max_num_batched_tokens=64,
            expert_budget=f"{cells / 16 * 100}%",
            trace=tmp_path / str(cells),
            prefill_waves=waves,
            progress=False,
        ) as llm:
            for i in range(0, 6, 2):
                prompts = [[7 * j + 3 + 29 * n for n in range(prompt)] for j in (i, i + 1)]
                llm.generate(prompts, params, use_tqdm=False)
        traces[cells] = read_trace(tmp_path / str(cells))
        assert traces[cells].header.spec["cells"] == [cells] * 4
        fills, read_through = (traces[cells].array(f"step.{n}") for n in ("fills", "read_through"))
        misses[cells] = fills + read_through
    curves = trace_curves(traces[16])
    decode = trace_curves(traces[16], kind="decode")
    assert (curves.exact_from <= 8).all(), "steps of two tokens and waves have at most 8 experts"
    assert (traces[8].array("step.waves")[traces[8].array("step.kind") == 0] == waves).all()
    for cells, trace in traces.items():
        np.testing.assert_array_equal(curves.misses[:, cells], misses[cells].sum(axis=0))
        decoded = misses[cells][trace.array("step.kind") == 1]
        np.testing.assert_array_equal(decode.misses[:, cells], decoded.sum(axis=0))
    assert misses[8].sum() > misses[16].sum() + 100
    for cells in range(17):
        found = simulate(traces[8], eviction="lru", cells=cells).misses.sum(axis=0)
        exact = cells >= curves.exact_from
        np.testing.assert_array_equal(curves.misses[exact, cells], found[exact])
        assert (curves.least[:, cells] <= found).all()

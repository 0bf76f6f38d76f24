"""Forced routing: the recorded routing gives the recorded bits, another one gives others."""

from __future__ import annotations

import numpy as np
import pytest

from host_offload.traces.generators import RoutedTokens, routing_generator
from moejax import LLM, SamplingParams
from moejax.step.parts import Routing

PROMPTS = [[5, 6, 7], list(range(100, 170)), [9] * 20]
PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("float32", marks=pytest.mark.nightly),
        pytest.param("bfloat16", marks=pytest.mark.nightly),
    ],
)
def llm(request, demo_dir):
    with LLM(
        demo_dir,
        dtype=request.param,
        expert_budget="25%",
        max_num_seqs=4,
        max_model_len=128,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,  # every run prefill steps the same tokens
        progress=False,
    ) as llm:
        yield llm


def _run(llm: LLM, monkeypatch, forced: list[Routing] | None = None):
    """Logits of every step in bits, uint32[R', V] of the rows in use, and the steps' routing.
    forced: routing of each step, in the order of steps."""
    logits: list[np.ndarray] = []
    routing: list[Routing] = []

    def record(step):
        rows = [row for row, _ in step.sampled()]
        logits.append(np.asarray(step.output.logits)[rows].view(np.uint32))
        routing.append(Routing(*map(np.asarray, step.output.routing)))

    # A decode step's routing is by row: every run gives its requests the same rows.
    llm.engine.scheduler.free_rows.sort()
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "listener", record)
        if forced is not None:
            runner, left = llm.engine.runner, iter(forced)
            decode, prefill = runner.decode, runner.prefill
            patch.setattr(
                runner, "decode", lambda *a, **kw: decode(*a, **kw | {"forced": next(left)})
            )
            patch.setattr(
                runner, "prefill", lambda *a, **kw: prefill(*a, **kw | {"forced": next(left)})
            )
        llm.generate(PROMPTS, PARAMS)
    return logits, routing


def _others(routing: Routing, experts: int) -> Routing:
    """The neighbours of the chosen experts, with the same weights."""
    return Routing(np.sort((routing.ids + 1) % experts, axis=-1), routing.weights)


def test_recorded_routing_gives_the_same_bits(llm, monkeypatch):
    free, routing = _run(llm, monkeypatch)
    assert len(free) == PARAMS.max_tokens  # one prefill step, then decode steps
    forced, traced = _run(llm, monkeypatch, routing)
    for a, b in zip(free, forced, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(routing, traced, strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)
        np.testing.assert_array_equal(a.weights, b.weights)


@pytest.mark.parametrize("step", [0, 3], ids=["prefill", "decode"])
def test_other_routing_gives_other_logits(llm, monkeypatch, step):
    free, routing = _run(llm, monkeypatch)
    experts = llm.config.num_experts
    changed = [r if i != step else _others(r, experts) for i, r in enumerate(routing)]
    forced, traced = _run(llm, monkeypatch, changed)
    for before in range(step):
        np.testing.assert_array_equal(free[before], forced[before])
    different = np.any(free[step] != forced[step], axis=-1)
    assert different.all()
    used = routing[step].ids < experts
    np.testing.assert_array_equal(traced[step].ids[used], changed[step].ids[used])
    assert (traced[step].ids[~used] == experts).all()  # padding stays padding


def _forced(tokens: RoutedTokens, experts: int, rows: int, places: np.ndarray) -> Routing:
    """Routing of a step of so many rows, padding but for the places where the tokens stand."""
    _, layers, k = tokens.ids.shape
    ids = np.full((layers, rows, k), experts, np.int32)
    weights = np.zeros(ids.shape, np.float32)
    ids[:, places] = tokens.ids.swapaxes(0, 1)
    weights[:, places] = tokens.weights.swapaxes(0, 1)
    return Routing(ids, weights)


def test_generated_routing_is_forced(llm, monkeypatch):
    _, recorded = _run(llm, monkeypatch)
    layers, _, k = recorded[0].ids.shape
    experts = llm.config.num_experts
    generator = routing_generator("qwen3-like", layers, experts, k)
    forced = []
    for i, routing in enumerate(recorded):
        places = np.flatnonzero((routing.ids[0] < experts).all(axis=-1))
        tokens = next(generator.steps(len(places), 1, seed=i))
        forced.append(_forced(tokens, experts, routing.ids.shape[1], places))
    _, traced = _run(llm, monkeypatch, forced)
    for a, b in zip(forced, traced, strict=True):
        np.testing.assert_array_equal(a.ids, b.ids)
        used = a.ids < experts
        np.testing.assert_array_equal(a.weights[used], b.weights[used])

"""Generated routing has the figures that it was fitted to, by seed, and fits engine and traces."""

import numpy as np
import pytest

from host_offload.traces.generators import RoutingGenerator, routing_generator
from moejax.traces import read_trace
from moejax.traces.generated_traces import write_generated_trace
from moejax.traces.published import MODELS

E, K, LAYERS, ROWS, TOKENS = 128, 8, 3, 32, 90
QWEN = MODELS[0]


def active(generator: RoutingGenerator, seed: int, tokens: int = TOKENS) -> np.ndarray:
    """bool[tokens, rows, L, E]."""
    ids = np.stack([step.ids for step in generator.steps(ROWS, tokens, seed)]).astype(np.int64)
    sets = np.zeros((*ids.shape[:3], generator.experts), bool)
    np.put_along_axis(sets, ids, True, axis=-1)
    assert (sets.sum(axis=-1) == generator.top_k).all()
    assert (np.diff(ids, axis=-1) > 0).all()
    return sets


def activated(sets: np.ndarray, batch: int) -> float:
    return sets[:, :batch].any(axis=1).mean()


def kept(sets: np.ndarray) -> float:
    return (sets[1:] & sets[:-1]).sum(axis=-1).mean() / K


def assert_qwen3_like(sets: np.ndarray) -> None:
    assert (QWEN.experts, QWEN.top_k) == (E, K)
    for batch, share in QWEN.activated.items():
        assert activated(sets, batch) == pytest.approx(share, rel=0.05), batch
    assert kept(sets) == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize("seed", [0, 1])
def test_qwen3_like_has_the_published_figures(seed):
    assert_qwen3_like(active(routing_generator("qwen3-like", LAYERS), seed))


def test_phases_change_the_hot_experts():
    generator = routing_generator("phases", LAYERS, phase_tokens=TOKENS)
    assert [generator.phase(t) for t in (0, TOKENS - 1, TOKENS, 3 * TOKENS)] == [0, 0, 1, 0]
    sets = active(generator, 0, tokens=2 * TOKENS)
    assert_qwen3_like(sets[:TOKENS])
    counts = [part.sum(axis=(0, 1)) for part in (sets[:TOKENS], sets[TOKENS:])]
    for layer in range(LAYERS):
        hot = [set(np.argsort(-c[layer])[:10].tolist()) for c in counts]
        assert not hot[0] & hot[1]


def test_a_sequence_is_the_same_in_any_company():
    generator = routing_generator("qwen3-like", 2, 16, 4)
    many = list(generator.steps(3, 6, seed=5))
    few = list(generator.steps(2, 4, seed=5))
    for a, b in zip(many, few, strict=False):
        np.testing.assert_array_equal(a.ids[:2], b.ids)
        np.testing.assert_array_equal(a.weights[:2], b.weights)
        np.testing.assert_allclose(b.weights.sum(axis=-1), 1, rtol=1e-6)
    other = list(generator.steps(2, 4, seed=6))
    assert any((a.ids != b.ids).any() for a, b in zip(few, other, strict=True))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(top_k=5), "top_k ≤ experts"),
        (dict(layers=0), "layers ≥ 1"),
        (dict(skew=-1.0), "at least 0"),
        (dict(memory=1.0), r"memory is in \[0, 1\)"),
        (dict(exponent=1.0, skew=0.5), "goes without skew"),
    ],
)
def test_impossible_generators_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        RoutingGenerator(**dict(layers=2, experts=4, top_k=2) | fields)


def test_a_generated_trace_has_the_routing_that_was_generated(tmp_path):
    sizes = dict(layers=2, experts=16, top_k=4)
    write_generated_trace(
        tmp_path / "t", "phases", sequences=3, tokens=9, prompt_tokens=4, phase_tokens=3, **sizes
    )
    trace = read_trace(tmp_path / "t")
    wanted = list(routing_generator("phases", phase_tokens=3, **sizes).steps(3, 9))
    prefill, *decode = trace.step_traces()
    assert trace.complete and (prefill.kind, {s.kind for s in decode}) == ("prefill", {"decode"})
    for row in range(len(prefill.ids)):
        token = wanted[prefill.position[row]]
        np.testing.assert_array_equal(prefill.ids[row], token.ids[prefill.request[row]])
    for step, token in zip(decode, wanted[4:], strict=True):
        np.testing.assert_array_equal(step.ids, token.ids)
        np.testing.assert_array_equal(step.weights, token.weights)
        assert step.position.tolist() == [step.number + 3] * 3
    assert prefill.seconds is None and prefill.hits is None
    assert [(m.step, m.name) for m in trace.marks()] == [
        (0, "phase 0"),
        (0, "phase 1"),
        (3, "phase 2"),
    ]
    assert trace.header.spec["generator"] == "phases" and trace.header.spec["skew"] > 0
    assert [p.name for p in tmp_path.iterdir()] == ["t"]

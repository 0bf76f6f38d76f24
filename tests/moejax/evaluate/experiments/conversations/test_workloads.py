"""Workloads are the same for a seed, and have the rates, lengths and turns that were asked for."""

import dataclasses

import numpy as np
import pytest

from moejax.errors import UserError
from moejax.evaluate.experiments.conversations.workloads import (
    ConversationWorkload,
    bursty_arrivals,
    conversations,
    poisson_arrivals,
    synthetic_corpus,
)

CORPUS = synthetic_corpus(512, seed=1, tokens=4096)
MANY = ConversationWorkload(sessions=200, turns=12, tool_share=0.3, shift_share=0.2, seed=5)


@pytest.fixture(scope="module")
def found():
    return conversations(MANY, CORPUS)


def test_a_seed_decides_everything(found):
    assert conversations(MANY, synthetic_corpus(512, seed=1, tokens=4096)) == found
    other = conversations(dataclasses.replace(MANY, seed=6), CORPUS)
    assert all(a.turns != b.turns for a, b in zip(found, other, strict=True))
    assert other[0].arrival_s != found[0].arrival_s
    # Fewer sessions are the first of more, and another arrival process changes no turn.
    assert conversations(dataclasses.replace(MANY, sessions=7), CORPUS) == found[:7]
    bursty = conversations(dataclasses.replace(MANY, arrival="bursty"), CORPUS)
    assert [c.turns for c in bursty] == [c.turns for c in found]
    assert [c.arrival_s for c in bursty] != [c.arrival_s for c in found]


def counts(times: np.ndarray, window: float) -> np.ndarray:
    return np.bincount((times // window).astype(int))[:-1]


def test_arrivals_have_their_rate_and_only_bursty_ones_are_bursty():
    dispersion = {}
    for name, process in (("poisson", poisson_arrivals), ("bursty", bursty_arrivals)):
        times = process(np.random.default_rng(0), 4.0, 40_000)
        assert (np.diff(times) > 0).all() and times[0] > 0
        assert len(times) / times[-1] == pytest.approx(4.0, rel=0.05), name
        seen = counts(times, 5.0)
        dispersion[name] = seen.var() / seen.mean()
    assert dispersion["poisson"] == pytest.approx(1.0, abs=0.1)
    # The rate is 20/s or 0/s, 0.5 and 2 s long in the mean; its covariance 20²·0.2·0.8·e^(−2.5 t)
    # integrated over a window of 5 s gives the dispersion of the counts.
    rate_of_change, variance = 1 / 0.5 + 1 / 2, 20**2 * 0.2 * 0.8
    within = 1 - (1 - np.exp(-rate_of_change * 5)) / (rate_of_change * 5)
    expected = 1 + 2 * variance / rate_of_change / 4 * within
    assert dispersion["bursty"] == pytest.approx(expected, rel=0.1)
    steady = bursty_arrivals(np.random.default_rng(0), 4.0, 40_000, on_share=1.0)
    assert len(steady) / steady[-1] == pytest.approx(4.0, rel=0.05)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("sessions", 0, "sessions must be at least 1, got 0"),
        ("answer_tokens", 0, "answer_tokens must be at least 1"),
        ("document_tokens", -1, "document_tokens must be at least 0"),
        ("tool_share", 1.5, "tool_share is a share from 0 to 1"),
        ("think_s", float("nan"), "think_s must not be negative"),
        ("arrival", "uniform", "arrival is one of poisson, bursty, not 'uniform'"),
    ],
)
def test_what_cannot_be_is_refused(field, value, message):
    with pytest.raises(UserError, match=message):
        ConversationWorkload(**{field: value})


def test_what_the_processes_cannot_do_is_refused():
    rng = np.random.default_rng(0)
    with pytest.raises(UserError, match="rate must be above 0, got 0"):
        poisson_arrivals(rng, 0.0, 1)
    with pytest.raises(UserError, match="on_share is in"):
        bursty_arrivals(rng, 1.0, 1, on_share=0.0)
    with pytest.raises(UserError, match="at least 2 tokens"):
        synthetic_corpus(1)
    with pytest.raises(UserError, match="the corpus has no domain"):
        conversations(ConversationWorkload(), {})

"""Recall, precision and wasted bytes of a trace made by hand, and of a simulated run."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from examples.recent_prefetch import RecentPrefetch
from host_offload.control.interface import Transfer
from host_offload.simulate.simulator import simulate
from host_offload.traces.reader import TraceError, TransferTrace, read_trace
from host_offload.traces.writer import TraceWriter
from scripts.policies.prefetch_score import PrefetchScore, score_of_stats, score_of_trace
from tests.host_offload.traces.traces_of import random_routing, write_trace


def test_a_trace_made_by_hand(tmp_path):
    rng = np.random.default_rng(0)
    plain = write_trace(tmp_path / "plain", random_routing(rng, 2, 2, 8, 2), 8)

    def transfer(published: int, first_use: int, cause: str = "fate") -> TransferTrace:
        return TransferTrace(0, 1, 0, 100, 0, published, first_use, cause)

    with TraceWriter(tmp_path / "scored", plain.header) as writer:
        for step in plain.step_traces():
            writer.append(
                step._replace(
                    fills=np.array([1, 0], np.int32), read_through=np.array([0, 1], np.int32)
                )
            )
        # Two were used, one was not, one was skipped; a change of version is no prefetch.
        for published, first_use in ((0, 1), (0, 1), (0, -1), (-1, -1)):
            writer.transfer(transfer(published, first_use))
        writer.transfer(transfer(0, 1, "promotion"))
    score = score_of_trace(read_trace(tmp_path / "scored"))
    assert score == PrefetchScore(transfers=3, used=2, misses=4, bytes=300, wasted_bytes=100)
    assert (score.precision, score.recall, score.wasted_share) == (2 / 3, 2 / 6, 1 / 3)


def test_without_any_transfer():
    score = PrefetchScore(0, 0, 0, 0, 0)
    assert (score.precision, score.recall, score.wasted_share) == (0, 0, 0)


def test_a_trace_that_no_engine_wrote_has_no_score(tmp_path):
    rng = np.random.default_rng(0)
    routed = random_routing(rng, 2, 2, 8, 2)
    trace = write_trace(tmp_path, routed, 8, absent=("step.fills",))
    with pytest.raises(TraceError, match=r"has no step.fills: it was converted or generated"):
        score_of_trace(trace)


def test_the_counts_of_a_run_say_what_its_trace_would(tmp_path):
    """From the simulator's events and steps on one side, from its statistics on the other."""
    rng = np.random.default_rng(3)
    trace = write_trace(tmp_path, random_routing(rng, 40, 2, 8, 2), 8)
    events: list[Transfer] = []

    def listen(event) -> None:
        if isinstance(event, Transfer):
            events.append(event)

    run = simulate(trace, cells=3, policies=[RecentPrefetch()], listener=listen)
    assert run.control is not None
    score = score_of_stats(run.control["transfers"], int(run.misses.sum()), 100)
    done = [event for event in events if event.published >= 0]
    used = [event for event in done if event.first_use >= 0]
    assert 0 < len(used) < len(done)
    found = PrefetchScore(
        *(len(done), len(used), int(run.misses.sum())),
        *(sum(event.bytes for event in done), 100 * (len(done) - len(used))),
    )
    assert score == found
    other = dataclasses.replace(found, used=0)
    assert other.recall == 0 < score.recall < 1

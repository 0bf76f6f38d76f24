"""What policies saw of transfers beside compute comes back from a trace as it was."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_offload.control.interface import Moment
from host_offload.queue.transfer import Flying, Progress, Settled, Transfer
from host_offload.traces.progress import STATES, ProgressTrace, Recorded, decoded, encoded
from host_offload.traces.reader import TraceError, TraceHeader, read_trace
from host_offload.traces.writer import TraceWriter

FACTS = dict(config_digest="0f", spec={"hidden": 8}, machine={}, command=["run"], created="now")

small = st.integers(0, 99)
transfers = st.builds(
    Transfer, small, small, small, st.integers(-5, 2**40), st.sampled_from(["demand", "a", "b"])
)
looks = st.builds(
    ProgressTrace,
    small,
    st.sampled_from([Moment.EMBEDDED, Moment.ROUTED, Moment.EXPERTS_BEGIN]),
    st.integers(-1, 9),
    st.builds(
        Progress,
        st.floats(0, 1e6),
        st.lists(st.builds(Flying, small, transfers, small, small, st.booleans())).map(tuple),
        st.lists(st.builds(Settled, small, transfers, st.sampled_from(STATES))).map(tuple),
    ),
)


@given(st.lists(looks))
def test_what_was_seen_comes_back_equal(seen):
    assert [*decoded(*encoded(seen))] == seen


def look(step: int, moment: Moment, layer: int, *ended: int) -> ProgressTrace:
    settled = tuple(Settled(n, Transfer(0, n, 0, n, "prefetch"), "done") for n in ended)
    flying = (Flying(70, Transfer(1, 2, 0, 3), 100, 40, True),)
    return ProgressTrace(step, moment, layer, Progress(0.25 * step, flying, settled))


SEEN = [
    look(0, Moment.EMBEDDED, -1, 1),
    look(0, Moment.ROUTED, 0, 2, 3),
    look(0, Moment.EXPERTS_BEGIN, 0),
    look(2, Moment.ROUTED, 0, 4),
]


def written(directory, seen=()):
    with TraceWriter(directory, TraceHeader(layers=2, experts=10, top_k=2, **FACTS)) as writer:
        for each in seen:
            writer.progress(each)
    return read_trace(directory)


def test_a_trace_has_it_in_order_and_older_ones_have_none(tmp_path):
    trace = written(tmp_path / "t", SEEN)
    assert [*trace.progress()] == SEEN
    path = tmp_path / "t" / "trace.json"
    said = json.loads(path.read_text())
    assert said["version"] == 2
    path.write_text(json.dumps(said | {"version": 1}))
    assert [*read_trace(tmp_path / "t").progress()] == []


def test_a_look_that_is_left_out_loses_nothing_that_settled(tmp_path):
    recorded = Recorded(SEEN, "it")
    assert recorded.at(0, Moment.ROUTED, 0).settled == (
        *SEEN[0].progress.settled,
        *SEEN[1].progress.settled,
    )
    assert recorded.at(2, Moment.ROUTED, 0) == SEEN[3].progress
    for place in ((0, Moment.LAYER_BEGIN, 0), (1, Moment.ROUTED, 0), (2, Moment.ROUTED, 1)):
        with pytest.raises(TraceError, match=r"'progress', which it does not have at .* of step"):
            Recorded(SEEN, "it").at(*place)


def test_messages_of_failures_are_not_kept():
    failed = Settled(1, Transfer(0, 1, 0, 1), "failed", "file.bin: gone")
    seen = [ProgressTrace(0, Moment.ROUTED, 0, Progress(0.0, (), (failed,)))]
    (found,) = decoded(*encoded(seen))
    assert found.progress.settled == (dataclasses.replace(failed, message=""),)

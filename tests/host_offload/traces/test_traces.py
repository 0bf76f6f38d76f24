"""Traces come back as they were written, appear whole or not at all, and bad ones are named."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from host_offload.control.interface import Moment
from host_offload.control.step_record import USES, LinkUse, StepRecord
from host_offload.traces import writer as trace_writer
from host_offload.traces.link import LinkTrace, RecordedLink
from host_offload.traces.reader import Mark, TraceError, TraceHeader, TransferTrace, read_trace
from host_offload.traces.writer import TraceWriter, require_new

FACTS = dict(config_digest="0f", spec={"hidden": 8}, machine={}, command=["run"], created="now")
HEADER = TraceHeader(layers=2, experts=10, top_k=2, **FACTS)
CHUNK = 1000
"""Bytes of a chunk of a few steps of HEADER's shape."""


def step(header=HEADER, number=0, tokens=3, seed=0) -> StepRecord:
    rng = np.random.default_rng([seed, number])
    layers, experts, k = header.layers, header.experts, header.top_k

    def integers(dtype, *shape):
        return rng.integers(np.iinfo(dtype).max, size=shape, dtype=dtype, endpoint=True)

    def half(width, *shape):
        return rng.random((tokens, *shape)).astype(np.float16) if width else None

    drafts: dict = {}
    if header.token:
        count = int(rng.integers(4))
        drafts = {
            "token": integers(np.int32, tokens),
            "draft_token": integers(np.int32, count),
            "draft_ids": rng.integers(experts, size=(count, layers, k)).astype(np.int16),
        }
    return StepRecord(
        **drafts,
        request=integers(np.int32, tokens),
        user=integers(np.int32, tokens) - 1,
        position=integers(np.int32, tokens),
        phase=integers(np.uint8, tokens),
        ids=rng.integers(experts, size=(tokens, layers, k)).astype(np.int16),
        weights=rng.random((tokens, layers, k)).astype(np.float32),
        number=number,
        kind=["prefill", "decode"][number % 2],
        start_s=rng.random(),
        read_s=rng.random(),
        seconds=rng.random(),
        rows=int(rng.integers(1 << 20)),
        compiled=bool(rng.integers(2)),
        hits=integers(np.int32, layers),
        fills=integers(np.int32, layers),
        read_through=integers(np.int32, layers),
        waves=integers(np.int16, layers),
        missed=rng.random((layers, experts)) < 0.5,
        bytes=integers(np.int64, len(header.causes)),
        use=integers(np.int64, len(USES)) - 1,
        finished=tuple(rng.integers(100, size=rng.integers(3)).tolist()),
        probabilities=half(header.probabilities, layers, experts),
        gate_input=half(header.gate_input, layers, header.gate_input),
        embedding=half(header.embedding, header.embedding),
        rejected=rng.random((layers, experts)) < 0.5 if header.rejected else None,
    )


def assert_equal(found: StepRecord, wanted: StepRecord) -> None:
    for name, a, b in zip(StepRecord._fields, found, wanted, strict=True):
        if isinstance(b, np.ndarray):
            assert a.dtype == b.dtype, name
            np.testing.assert_array_equal(a, b, err_msg=name)
        else:
            assert a == b, name


def write(directory, steps=20, header=HEADER, close=True) -> TraceWriter:
    writer = TraceWriter(directory, header, chunk_bytes=CHUNK)
    for number in range(steps):
        writer.append(step(header, number))
    if close:
        writer.close()
    return writer


@given(
    header=st.builds(
        TraceHeader,
        layers=st.integers(1, 3),
        experts=st.integers(1, 20),
        top_k=st.integers(1, 3),
        config_digest=st.just("0f"),
        spec=st.just({}),
        machine=st.just({}),
        command=st.just(["run"]),
        created=st.just("now"),
        causes=st.sampled_from([("fill",), ("fill", "read_through", "stage", "swap")]),
        probabilities=st.booleans(),
        gate_input=st.integers(0, 2),
        embedding=st.integers(0, 2),
        rejected=st.booleans(),
        token=st.booleans(),
    ),
    sizes=st.lists(st.integers(0, 9), max_size=12),
    chunk_bytes=st.sampled_from([1, CHUNK, 1 << 20]),
    seed=st.integers(0, 2**32 - 1),
)
@settings(max_examples=40)
def test_every_step_comes_back_as_it_was(header, sizes, chunk_bytes, seed):
    written = [step(header, i, n, seed) for i, n in enumerate(sizes)]
    with tempfile.TemporaryDirectory() as directory:
        with TraceWriter(directory, header, chunk_bytes) as writer:
            for each in written:
                writer.append(each)
        trace = read_trace(directory)
        assert trace.complete and trace.header.experts == header.experts
        assert (trace.steps, trace.tokens) == (len(sizes), sum(sizes))
        for found, wanted in zip(trace.step_traces(), written, strict=True):
            assert_equal(found, wanted)
        if sizes:
            np.testing.assert_array_equal(
                trace.array("token.ids"), np.concatenate([s.ids for s in written])
            )


def test_a_trace_of_fewer_uses_says_what_it_lacks(tmp_path):
    """One that was written before there were the last ones, and in another order."""
    older = dataclasses.replace(HEADER, uses=(*USES[1:5], USES[0]))
    written = step(older)._replace(use=np.arange(5))
    with TraceWriter(tmp_path / "t", older) as writer:
        writer.append(written)
    (found,) = read_trace(tmp_path / "t").step_traces()
    assert found.use.tolist() == [4, 0, 1, 2, 3, *[-1] * (len(USES) - 5)]


@pytest.mark.parametrize("name", ["rejected", "token"])
def test_a_trace_from_before_this_was_recorded_can_be_read(copy, name):
    found = json.loads((copy / "trace.json").read_text())
    del found[name]
    (copy / "trace.json").write_text(json.dumps(found))
    assert all(getattr(step, name) is None for step in read_trace(copy).step_traces())


def test_events_come_back_and_no_number_of_them_fills_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_writer, "MAX_LINES", 4)
    transfers = [TransferTrace(1, i, 0, 512, i, i + 1, -1, f"cause {i % 3}") for i in range(10)]
    marks = (Mark(0, 0.5, "warm-up"), Mark(7, 1.5, "ünïcode\n"))
    with TraceWriter(tmp_path / "a" / "b", HEADER) as writer:
        writer.mark(marks[0])
        for transfer in transfers:
            writer.transfer(transfer)
        writer.mark(marks[1])
        writer.decision(3, {"prior": np.arange(2, dtype=np.int32), "pause": np.bool_(True)})
        with pytest.raises(TypeError, match="cannot hold object"):
            writer.decision(4, {"prior": object()})
    trace = read_trace(tmp_path / "a" / "b")
    assert len(trace.chunks) == 4 and trace.steps == 0
    assert (list(trace.transfers()), trace.marks()) == (transfers, marks)
    assert list(trace.decisions()) == [{"step": 3, "prior": [0, 1], "pause": True}]


def test_memory_is_two_chunks_while_the_disk_is_slow(tmp_path, monkeypatch):
    """A step fills a chunk here: one is being written, the next one is full and waits."""
    writer = TraceWriter(tmp_path / "t", HEADER, chunk_bytes=1)
    go_on, fsync = threading.Event(), os.fsync
    done: list[int] = []
    monkeypatch.setattr(trace_writer.os, "fsync", lambda f: (go_on.wait(20), fsync(f)))

    def fill():
        for number in range(6):
            writer.append(step(number=number))
            done.append(number)

    thread = threading.Thread(target=fill)
    thread.start()
    while not done and thread.is_alive():
        time.sleep(0.005)
    thread.join(0.2)
    assert thread.is_alive() and done == [0] and not list((tmp_path / "t").glob("chunk-*"))
    go_on.set()
    thread.join(20)
    writer.close()
    assert read_trace(tmp_path / "t").steps == 6


# ---- directories that must not be written


def test_only_a_new_directory_is_written(tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    (tmp_path / "empty").mkdir()
    require_new(tmp_path / "empty")
    for path in (tmp_path / "full", tmp_path / "full" / "notes"):
        for refuses in (require_new, lambda p: TraceWriter(p, HEADER)):
            with pytest.raises(TraceError, match="not an empty directory; a trace is never"):
                refuses(path)
    for path in (tmp_path / "full" / "notes" / "t", Path("/proc/moejax-trace")):
        with pytest.raises(TraceError, match=r"cannot write the trace in .*(notes/t|moejax)"):
            TraceWriter(path, HEADER)
    assert (tmp_path / "full").exists() and not any((tmp_path / "empty").iterdir())


def test_a_directory_without_permission_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(trace_writer.os, "access", lambda *_: False)  # root may write anywhere
    with pytest.raises(TraceError, match="no permission to write in"):
        require_new(tmp_path / "t")


def append_all(writer, numbers):
    for number in numbers:
        writer.append(step(number=number))


def test_a_full_disk_stops_the_run_and_spares_what_is_there(tmp_path, monkeypatch):
    writer = TraceWriter(tmp_path / "t", HEADER, CHUNK)
    numbers = iter(range(1000))
    while not list((tmp_path / "t").glob("chunk-*")):
        writer.append(step(number=next(numbers)))

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(trace_writer.os, "fsync", full)
        with pytest.raises(TraceError, match=r"cannot write .*: No space left on device; make"):
            append_all(writer, numbers)
        with pytest.raises(TraceError, match="No space left"):
            writer.mark(Mark(0, 0.0, "later"))
    writer.close()  # it has been said
    trace = read_trace(tmp_path / "t")
    assert not trace.complete
    for found, number in zip(trace.step_traces(), range(1000), strict=False):
        assert_equal(found, step(number=number))
    assert 0 < trace.steps < next(numbers)

    last = write(tmp_path / "last", steps=1, close=False)
    with monkeypatch.context() as patch:
        patch.setattr(trace_writer.os, "fsync", full)
        with pytest.raises(TraceError, match="No space left"):
            last.close()
    with pytest.raises(TraceError, match="is closed"):
        last.append(step())


def test_a_step_of_another_shape_is_refused(tmp_path):
    with TraceWriter(tmp_path / "t", HEADER) as writer:
        wrong = step()
        with pytest.raises(ValueError, match=r"ids \(3, 1, 2\).*must be \(3, 2, 2\)"):
            writer.append(wrong._replace(ids=wrong.ids[:, :1]))
    with pytest.raises(ValueError, match="32767 experts, not 1, 1 and 40000"):
        TraceHeader(layers=1, experts=40000, top_k=1, **FACTS)


# ---- runs that end early

RUN = """
import itertools, sys
from tests.host_offload.traces.test_traces import *
writer = TraceWriter(sys.argv[1], HEADER, CHUNK)
for number in itertools.islice(itertools.count(), None if sys.argv[2] == "killed" else 20):
    writer.append(step(number=number))
"""


@pytest.mark.slow
@pytest.mark.parametrize("ending", ["killed", "exited"])
def test_a_run_that_does_not_close_keeps_its_chunks(tmp_path, repository, ending):
    process = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path), ending], cwd=repository)
    if ending == "killed":
        while len(list(tmp_path.glob("chunk-*"))) < 5:
            assert process.poll() is None
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
    status = process.wait(60)
    assert status == (-signal.SIGKILL if ending == "killed" else 0)
    (tmp_path / ".chunk-000900.safetensors.partial").write_bytes(b"half")
    trace = read_trace(tmp_path)
    assert trace.complete == (ending == "exited")
    found = list(trace.step_traces())
    assert len(found) == 20 if ending == "exited" else len(found) >= 5
    for number, each in enumerate(found):
        assert_equal(each, step(number=number))


def test_half_a_line_of_decisions_is_left_out_only_after_a_crash(tmp_path):
    writer = write(tmp_path / "t", steps=1, close=False)
    writer.decision(0, {"max_running": 3})
    writer.close()
    with open(tmp_path / "t" / "decisions.jsonl", "a") as file:
        file.write('{"step": 1, "max_')
    with pytest.raises(TraceError, match=r"decisions.jsonl, line 2: not JSON"):
        list(read_trace(tmp_path / "t").decisions())
    edit(tmp_path / "t", complete=None)
    assert list(read_trace(tmp_path / "t").decisions()) == [{"step": 0, "max_running": 3}]


# ---- traces that cannot be read


def edit(directory, **fields) -> None:
    path = directory / "trace.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    directory = tmp_path_factory.mktemp("traces") / "t"
    write(directory)
    return directory


@pytest.fixture
def copy(whole, tmp_path):
    for file in whole.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def cut_in_header(path):
    path.write_bytes(path.read_bytes()[:5])


def foreign(path):
    save_file(load_file(path), path, {"trace": "another", "chunk": "1"})


def of_other_shape(path):
    arrays, trace = load_file(path), json.loads((path.parent / "trace.json").read_text())["id"]
    arrays["token.ids"] = arrays["token.ids"][:, :1].copy()
    counts = {"steps": len(arrays["step.kind"]), "tokens": len(arrays["token.ids"])}
    metadata = {name: str(count) for name, count in counts.items()}
    save_file(arrays, path, {"trace": trace, "chunk": "1", **metadata})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, r"is damaged or cut short"),
        (cut_in_header, r"is damaged or cut short"),
        (Path.unlink, r"is missing"),
        (foreign, r"belongs to another trace"),
        (of_other_shape, r"has token.ids as I16\[\d+, 1, 2\], trace.json says int16\[\d+, 2, 2\]"),
    ],
)
def test_a_bad_chunk_is_named_and_those_before_it_can_be_read(copy, damage, message):
    damage(copy / "chunk-000001.safetensors")
    trace = read_trace(copy)
    assert_equal(next(trace.step_traces()), step(number=0))
    with pytest.raises(TraceError, match=rf"chunk-000001.*{message}.*chunks\[:1\]"):
        list(trace.step_traces())


def test_what_is_no_trace_of_this_version_is_refused(copy):
    with pytest.raises(TraceError, match=r"cannot read trace.json \(No such file.*--trace wrote"):
        read_trace(copy / "absent")
    edit(copy, version=2)
    with pytest.raises(TraceError, match="format version 2, this moejax reads 3"):
        read_trace(copy)
    edit(copy, version=3, layers=None)
    with pytest.raises(TraceError, match="is damaged"):
        read_trace(copy)
    edit(copy, format="other")
    with pytest.raises(TraceError, match="is not of a moejax trace"):
        read_trace(copy)
    (copy / "trace.json").write_text("{")
    with pytest.raises(TraceError, match="is damaged"):
        read_trace(copy)


def test_files_that_are_pipes_or_enormous_are_refused(copy):
    """Reading them whole would wait for ever, or take all memory."""
    os.truncate(copy / "trace.json", 200 << 30)
    with pytest.raises(TraceError, match=r"trace.json is damaged"):
        read_trace(copy)
    for name in ("trace.json", "marks.jsonl"):
        (copy / name).unlink(missing_ok=True)
        os.mkfifo(copy / name)
    with pytest.raises(TraceError, match=r"trace.json is not a regular file"):
        read_trace(copy)


def test_an_array_that_is_not_there_is_named(whole):
    with pytest.raises(KeyError, match=r"token.text is not in chunk-000000.*token.ids"):
        read_trace(whole).chunks[0].array("token.text")


def test_an_empty_trace_can_be_read(tmp_path):
    TraceWriter(tmp_path / "t", HEADER).close()
    trace = read_trace(tmp_path / "t")
    assert trace.complete and trace.steps == 0 and not list(trace.step_traces())
    with pytest.raises(TraceError, match="has no chunk yet"):
        trace.array("token.ids")


# ---- what policies saw of the queue beside compute


SEEN = [
    LinkTrace(0, Moment.EMBEDDED, -1, LinkUse(1, 2, 3, 4, 5)),
    LinkTrace(0, Moment.ROUTED, 0, LinkUse(2, 1 << 40, 3, 4, 6)),
    LinkTrace(0, Moment.EXPERTS_BEGIN, 0, LinkUse()),
    LinkTrace(2, Moment.ROUTED, 0, LinkUse(0, 0, 6, 4, 9)),
]


def test_a_trace_has_the_queue_in_order(tmp_path):
    with TraceWriter(tmp_path / "t", HEADER) as writer:
        for each in SEEN:
            writer.link(each)
    assert [*read_trace(tmp_path / "t").link()] == SEEN


def test_the_queue_is_found_by_step_moment_and_layer():
    recorded = RecordedLink(SEEN, "it")
    assert recorded.find(0, Moment.ROUTED, 0) == SEEN[1].use
    assert recorded.find(2, Moment.ROUTED, 0) == SEEN[3].use
    for place in ((0, Moment.LAYER_BEGIN, 0), (1, Moment.ROUTED, 0), (2, Moment.ROUTED, 1)):
        with pytest.raises(TraceError, match=r"link_\*.*, which it does not have at .* of step"):
            RecordedLink(SEEN, "it").find(*place)

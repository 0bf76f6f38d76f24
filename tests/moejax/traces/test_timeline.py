"""Timelines as files: whose layer an op is, what a picture shows, what is refused."""

import json

import pytest

from host_offload.queue.native import Span
from host_offload.simulate.timeline import DEVICE, TimelineEvent
from moejax.commands import main as cli
from moejax.errors import UserError
from moejax.traces.timeline import measured_events, write_timeline
from pallas_kernels.cpu.spans import OpSpan
from tests.pallas_kernels.contract import NATIVE

LAYER = ("rms_norm", "linear", "kv_write", "decode_attention", "linear", "rms_norm", "route")
EXPERTS = ("plan", "fill", "expert_ffn", "combine")
HEAD = ("rms_norm", "linear")
CHUNKS = [Span(3, 0, 10, 6.0, 7.0, "demand"), Span(2, 0, 10, 4.0, 4.5)]


def step_of(*layers):
    """(op, the layer that it says, the layer that it is of) of a step. layers: with experts?"""
    for number, sparse in enumerate(layers):
        for op in (*LAYER, *(EXPERTS if sparse else ("linear", "linear"))):
            yield op, number if op == "kv_write" else None, number
    yield from ((op, None, None) for op in HEAD)


@pytest.mark.parametrize("layers", [(True, True, True), (False, True, True), (True,)])
def test_every_op_finds_its_layer(layers):
    said = [*step_of(*layers), *step_of(*layers)]
    ops = [OpSpan(op, layer, 5.0 + i, 5.5 + i) for i, (op, layer, _) in enumerate(said)]
    events = measured_events(ops, CHUNKS)
    device = [event for event in events if event.track == DEVICE]
    assert [event.layer for event in device] == [layer for *_, layer in said]
    assert (device[1].begin, device[1].end) == (1.0, 1.5)
    assert [event.name for event in events if event.track == "link"] == ["demand 3 from byte 0"]
    # What moved before the first op is not of this run.
    assert [(e.begin, e.end) for e in events if e.track == "link"] == [(1.0, 2.0)]
    assert measured_events([]) == []


def events_of(steps, layers):
    number, found = 0, []
    for _ in range(steps):
        for layer in range(layers):
            found.append(TimelineEvent(DEVICE, f"layer {layer}", number, number + 1, layer))
            found.append(
                TimelineEvent("link", f"prefetch {layer}.1 part 0", number, number + 2, layer)
            )
            number += 1
    return found


def test_files(tmp_path):
    events = events_of(2, 4)
    write_timeline(tmp_path / "t.json", events)
    read = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in read) == len(events)


def test_what_cannot_be_written_is_said(tmp_path):
    with pytest.raises(UserError, match=r"a timeline is FILE\.json"):
        write_timeline(tmp_path / "t.svg", [])
    with pytest.raises(UserError, match="cannot be written"):
        write_timeline(tmp_path / "none" / "t.json", [])


@NATIVE
@pytest.mark.slow
def test_a_run_draws_itself(tmp_path, capsys):
    path = tmp_path / "t.json"
    arguments = ["generate", "The old", "--max-tokens", "3", "--quiet"]
    assert cli.main([*arguments, "--timeline", str(path)]) == 0
    read = json.loads(path.read_text())["traceEvents"]
    layers = [e["args"]["layer"] for e in read if e["ph"] == "X" and e["name"] == "expert_ffn"]
    assert layers[:4] == [0, 1, 2, 3] and len(layers) % 4 == 0
    assert cli.main([*arguments, "--timeline", "t.gif"]) == 2
    assert cli.main([*arguments, "--ops", "fill=xla", "--timeline", str(path)]) == 2
    assert "--timeline records native CPU ops" in capsys.readouterr().err

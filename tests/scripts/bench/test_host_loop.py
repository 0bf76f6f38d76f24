"""The host loop's profile: its parts add up, and the fake device is served as a real one."""

import dataclasses
import time

import numpy as np
import pytest

from moejax.checkpoints.random_model import shape
from moejax.engine.step_work import prefill_batch
from scripts.bench import host_loop as bench_host_loop
from scripts.bench.host_loop import Arrivals, Profile, lines, make_engine, measure
from tests.scripts.runs import json_lines, refusal

TINY = (
    *("--sequences", "4", "--shape", "demo", "--experts", "16", "--mean-tokens", "20"),
    *("--max-model-len", "160", "--steps", "60", "--warm-up", "5"),
)


@pytest.fixture
def engine():
    return make_engine(shape("demo"), sequences=4, max_model_len=160, seed=0)


def test_parts_add_up(engine):
    began = time.perf_counter()
    taken = measure(engine, Arrivals(engine, 20, 0), 80)
    wall = time.perf_counter() - began
    assert sum(map(len, taken.values())) == 80
    for kind, steps in taken.items():
        parts = set().union(*steps)
        assert {"schedule", "read", "choose arrays", "dispatch", "loop"} <= parts
        assert "device" not in parts
        found = {line["part"]: line for line in lines("plain", {kind: steps}, 1e-6)}
        whole = found.pop("step")
        assert whole["mean_us"] == pytest.approx(sum(line["mean_us"] for line in found.values()))
        assert whole["steps"] == len(steps) and whole["share"] == 1
    every = sum(sum(parts.values()) for steps in taken.values() for parts in steps)
    assert 0 < every < wall
    assert any("prefill step arrays" in parts for parts in taken["prefill"])
    # What was timed is as it was.
    assert not [name for name in vars(engine) if name in ("_read", "_place")]
    assert bench_host_loop.sys.modules["moejax.engine.loop"].prefill_batch is prefill_batch


def test_time_within_a_part_is_not_counted_twice(monkeypatch):
    clock = iter((0.0, 1.0, 4.0, 5.0, 7.0, 10.0))
    monkeypatch.setattr(bench_host_loop.time, "perf_counter", lambda: next(clock))
    profile = Profile()

    def outer():
        profile.call("inner", int)
        profile.call("other", int)

    profile.call("outer", outer)
    seconds = profile.take()
    monkeypatch.undo()
    assert seconds == {"inner": 3.0, "other": 2.0, "outer": 5.0}
    assert profile.take() == {}


def test_the_state_is_steady(engine):
    arrivals = Arrivals(engine, 20, 0)
    measure(engine, arrivals, 100)
    scheduler = engine.scheduler
    assert len(scheduler.running) == 4 and len(scheduler.waiting) >= 1
    assert engine.statistics.requests > 15
    assert scheduler.counts["preemptions"] == 0


def test_the_policy_follows_the_routing():
    policy = bench_host_loop.FollowRouting()
    observation = dataclasses.make_dataclass("Observed", ["ids", "step"])
    ids = np.array([[[0, 2], [1, 3]]], np.int16)
    state, decision = policy.decide(np.zeros((2, 4), np.int32), observation(ids, 6))
    assert state.tolist() == [[7, 0, 7, 0], [0, 7, 0, 7]]
    assert decision.prior is state


def test_the_command(capsys):
    shown = json_lines(capsys, bench_host_loop.main, *TINY)
    assert {line["mode"] for line in shown} == {"plain", "control", "trace", "both"}
    for mode, parts in {"both": {"control", "trace", "record"}, "plain": set()}.items():
        of_mode = [li for li in shown if li["mode"] == mode and li["kind"] == "decode"]
        found = {line["part"] for line in of_mode}
        assert found & {"control", "trace", "record"} == parts
        (whole,) = [line["mean_us"] for line in of_mode if line["part"] == "step"]
        added = sum(line["mean_us"] for line in of_mode if line["part"] != "step")
        assert added == pytest.approx(whole) and whole > of_mode[-1]["floor_us"] > 0


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--mean-tokens", "100"], "--max-model-len must be at least 250"),
        (["--steps", "0"], "must be at least 1"),
        (["--experts", "2"], "--experts must be at least 4, the top-k"),
        (["--shape", "none"], "shape 'none' is unknown"),
    ],
)
def test_refusals(capsys, options, match):
    assert match in refusal(capsys, bench_host_loop.main, *TINY, *options)

"""The device's trace as a profile: kernels, gaps, idle between programs."""

import json
import os

import pytest

from scripts.bench import kernel_profile


@pytest.mark.parametrize(
    ("flags", "then"),
    [
        ("", kernel_profile.GRAPHS),
        ("--xla_dump_to=x", f"--xla_dump_to=x {kernel_profile.GRAPHS}"),
        (kernel_profile.GRAPHS.replace("true", "false"),) * 2,
    ],
)
def test_graphs_stay_on_unless_the_user_says_otherwise(monkeypatch, flags, then):
    monkeypatch.setenv("XLA_FLAGS", flags)
    kernel_profile.profile_graphs()
    assert os.environ["XLA_FLAGS"] == then


def track(pid: int, tid: int, process: str, thread: str) -> list[dict]:
    return [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": process}},
        {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": thread}},
    ]


def event(tid: int, name: str, ts: float, dur: float, program: str | None, pid: int = 1) -> dict:
    args = {} if program is None else {"hlo_module": program, "hlo_op": name}
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": ts, "dur": dur, "args": args}


def trace() -> dict:
    """Two steps of 100 µs: ffn 30, gap 5, fill 40 (10 of it beside ffn on another stream), gap 10
    before the sampler of 5, and a copy to the host that belongs to no program."""
    step, sampler = "jit_run", "jit_choose"
    events = [
        *track(1, 13, "/device:GPU:0", "Stream #13(Compute)"),
        *track(1, 14, "/device:GPU:0", "Stream #14(MemcpyD2H)"),
        *track(1, 2, "/device:GPU:0", "XLA Ops"),
        *track(2, 1, "/host:CPU", "python"),
        *track(3, 13, "/device:GPU:1", "Stream #13(Compute)"),
    ]
    for start in (1000.0, 1100.0):
        events += [
            event(13, "ffn", start, 30, step),
            event(14, "ffn_beside", start + 20, 10, step),
            event(13, "fill", start + 35, 40, step),
            event(13, "sample", start + 85, 5, sampler),
            event(14, "MemcpyD2H", start + 92, 2, None),
            event(2, "ffn", start, 30, step),  # the same again, on a line derived from streams
            event(1, "python", start, 100, None, pid=2),
            event(13, "ffn", start, 100, step, pid=3),
        ]
    return {"traceEvents": [*events[::-1], {}]}  # in no order, with jax's empty last one


def test_kernels_gaps_and_idle():
    profile = kernel_profile.parse_trace(trace(), steps=2)
    found = {k.name: (k.calls, k.us, round(k.share, 4)) for k in profile.kernels}
    assert found == {
        "fill": (1, 40, 0.4598),
        "ffn": (1, 30, 0.3448),
        "ffn_beside": (1, 10, 0.1149),
        "sample": (1, 5, 0.0575),
        "MemcpyD2H": (1, 2, 0.023),
    }
    assert [kernel.name for kernel in profile.kernels][:2] == ["fill", "ffn"]
    assert profile.span_us == 194 / 2
    assert profile.busy_us == 77  # the union: ffn_beside counts once
    # 5 before each fill, 2 before the last copy, after which no program begins.
    assert (profile.gaps, profile.gap_us, profile.gap_median_us) == (1.5, 6, 5)
    # 10 before each sampler; 2 and 6 around the copy between the first sampler and the next step.
    assert profile.between_us == (10 + 10 + 2 + 6) / 2
    assert profile.idle_percent == pytest.approx(100 * 20 / 97)
    assert profile.idle_between_percent == pytest.approx(100 * 14 / 97)
    json.dumps(profile.as_json())

"""Predictions for machines that are not at hand."""

import json

import pytest

from host_offload.memory.budget import Share
from host_offload.traces.reader import read_trace
from moejax.commands.main import main
from moejax.costs.hardware import HARDWARE, find_hardware, hardware_of
from moejax.models.config import parse_config
from moejax.start.report.forecast import Machine, forecast
from moejax.traces.generated_traces import write_generated_trace
from tests.moejax.models.test_published_configs import FILES

H200 = Machine(HARDWARE["H200"], 141 << 30)


@pytest.fixture(scope="module")
def qwen3():
    return parse_config(FILES["Qwen3-30B-A3B"], "config.json")


@pytest.mark.parametrize(
    ("batch", "budget", "measured_ms"),
    [
        *((1, None, 3.93), (8, None, 8.01), (1, Share(0.0), 75.1)),
        pytest.param(8, Share(0.0), 388, marks=pytest.mark.slow),
    ],
)
def test_a_measured_gpu_is_predicted(qwen3, batch, budget, measured_ms):
    """docs/research/benchmarks.md, "On an NVIDIA H200"."""
    asked = {"batches": [batch], "context": 1024, "prompt": 64, "expert_budgets": [budget]}
    one = forecast(qwen3, H200, **asked)[0]
    best, likely, worst = (1e3 * seconds for seconds in one.step_s)
    assert best < measured_ms < worst
    assert likely == pytest.approx(measured_ms, rel=0.1)
    assert one.tokens_per_s[1] == pytest.approx(batch * 1e3 / likely)


def test_less_memory_and_slower_tiers_cost_time(qwen3, tmp_path):
    routing = {"layers": 48, "experts": 128, "top_k": 8, "sequences": 1}
    write_generated_trace(tmp_path / "t", "qwen3-like", **routing, tokens=60, prompt_tokens=20)
    asked = {"prompt": 64, "trace": read_trace(tmp_path / "t")}

    def step_s(gib=12, **machine):
        found = forecast(qwen3, Machine(HARDWARE["RTX 4090"], gib << 30, **machine), **asked)
        return {one.driver: one.step_s[1] for one in found}

    found, tight = step_s(24), step_s()
    assert found["least"] < found["device"] < min(found["stream"], tight["device"])
    assert tight["device"] < step_s(host_memory=16 << 30)["device"]
    assert step_s(24, disk=1e6) == found  # host memory holds what the device does not
    ddr4 = forecast(qwen3, Machine(HARDWARE["CPU DDR4"], 24 << 30), **asked)
    faster = Machine(HARDWARE["CPU DDR4"], 24 << 30, disk=7e9)
    assert ddr4[0].step_s > forecast(qwen3, faster, **asked)[0].step_s


def test_recorded_routing_counts(tmp_path, capsys):
    write_generated_trace(tmp_path / "t", "uniform", sequences=2, tokens=24, prompt_tokens=8)
    (tmp_path / "config.json").write_text(json.dumps(FILES["Qwen3-30B-A3B"]))
    config = str(tmp_path / "config.json")
    asked = ["plan", config, "--gpu", "GeForce RTX 3090", "--prompt-tokens", "64", "--json"]
    assert main([*asked, "--trace", str(tmp_path / "t")]) == 0
    (uniform, *_) = json.loads(capsys.readouterr().out)
    assert main([*asked, "--batch", "2"]) == 0
    (skewed, *_) = json.loads(capsys.readouterr().out)
    assert uniform["batch"] == skewed["batch"] == 2
    assert uniform["moved"] > 1.2 * skewed["moved"]
    assert main(["plan", "demo", "--gpu", "a100", "--trace", str(tmp_path / "t")]) == 2
    assert "the trace is of 48 MoE layers" in capsys.readouterr().err


def test_info_and_plan_hold_the_same_experts_in_a_memory(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(FILES["Qwen3-30B-A3B"]))
    asked = [str(tmp_path / "config.json"), "--memory", "24GiB", "--batch", "2", "--json"]
    asked += ["--context", "1024"]
    assert main(["info", *asked]) == 0
    (fit,) = json.loads(capsys.readouterr().out)["fits"]
    assert main(["plan", *asked, "--gpu", "rtx4090", "--prompt-tokens", "64"]) == 0
    (device, *_) = json.loads(capsys.readouterr().out)
    assert 0 < device["resident"] == fit["resident_share"] < 1


def test_budgets_and_evictions_are_compared(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(FILES["Qwen3-30B-A3B"]))
    asked = ["plan", str(tmp_path), "--gpu", "rtx4090", "--prompt-tokens", "64"]
    asked += ["--batch", "1", "--eviction", "lru,lfu", "--expert-budget", "10%,20%", "--json"]
    assert main(asked) == 0
    rows = [row for row in json.loads(capsys.readouterr().out) if row["driver"] != "stream"]
    drivers = ["device", "device, lfu", "least"]
    assert [row["driver"] for row in rows] == 2 * drivers
    assert [round(row["resident"], 2) for row in rows] == 3 * [0.1] + 3 * [0.2]
    moved = [row["moved"] for row in rows]
    assert moved[0] != moved[1] and moved[2] < min(moved[:2]) and moved[3] < moved[0]


def test_the_table_says_what_it_knows(capsys):
    assert main(["plan", "demo", "--gpu", "rtx4090", "--batch", "1", "--context", "128"]) == 0
    shown = capsys.readouterr().out
    assert "demo on RTX 4090: 24 GiB at 1,010 GB/s, link 32 GB/s, as stated" in shown
    assert [line.split()[:4] for line in shown.splitlines() if " device " in line] == [
        ["1", "device", "100%", "0"]
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpu", "rtx409"], "Did you mean 'RTX 4090'?"),
        (["--gpu", "cpu-ddr5"], "needs --memory"),
        (["--gpu", "h100", "--batch", "1,x"], "whole numbers from 1 on"),
        (["--gpu", "h100", "--memory", "1MiB"], "too small for the dense part"),
        (
            ["--gpu", "h100", "--context", "64", "--prompt-tokens", "65"],
            "longer than the context, 64",
        ),
        (["--gpu", "h100", "--context", "0"], "context must be at least 1 token, got 0"),
        (["--gpu", "h100", "--prompt-tokens", "-5"], "prompt must be at least 1 token, got -5"),
        (["--gpu", "h100", "--precision", "int3"], "int3"),
        (["--gpu", "h100", "--eviction", "lru,fifo"], "predicts --eviction lru, lfu, lfru"),
        (["--gpu", "h100", "--expert-budget", "25%,x"], "'x' is not an expert budget"),
        (["--gpu", "h100", "--prefetch", "fate"], "--prefetch does not go with --gpu"),
        (["--gpu", "h100", "--dry-run"], "--dry-run does not go with --gpu"),
        (["--gpu", "h100", "--trace", "t", "--batch", "1"], "leave --batch or --trace out"),
        (["--disk", "1GB/s"], "--disk goes with --gpu"),
    ],
)
def test_wrong_questions_are_refused(options, said, capsys):
    assert main(["plan", "demo", *options]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA GeForce RTX 4060 Ti", "RTX 4060 Ti"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA GeForce RTX 4070 Ti", None),
        ("TFRT_CPU_0", None),
    ],
)
def test_devices_are_found_by_their_names(kind, name):
    assert hardware_of(kind) is (None if name is None else HARDWARE[name])
    if name is not None and "RTX" in name:
        assert find_hardware(kind) == (name, HARDWARE[name])

"""Whole steps beside their roofs: the arithmetic, the refusals, and a run of a small model."""

import dataclasses

import numpy as np
import pytest

from scripts.cpu import steps
from scripts.cpu.engines.checkpoint import OLMOE
from tests.pallas_kernels.contract import NATIVE
from tests.scripts.cpu.test_peers import SMALL
from tests.scripts.runs import json_lines, refusal

TINY = steps.Group("tiny", OLMOE | SMALL, 2, (1, 3), ("dense", "int8"), {1: 0.5, 3: 0.5})
RUN = ("--context", "40", "--rounds", "1", "--block", "0", "--threads", "1")


@NATIVE
@pytest.mark.slow
def test_it_measures_steps_and_says_what_they_read(capsys, monkeypatch):
    monkeypatch.setattr(steps, "GROUPS", {"tiny": TINY})
    monkeypatch.setattr(steps, "READ_BYTES", 1 << 20)
    lines = json_lines(capsys, steps.main, "--only", "tiny", *RUN)
    found = [(line["version"], line["batch"]) for line in lines]
    assert found == [("dense", 1), ("dense", 3), ("int8", 1), ("int8", 3)]
    record, kv = 3 * 64 * 128 * 2, 2 * 2 * 128 * 40 * 2
    norms = 2 * 4 * 128 + 128
    others = 2 * (2 * (4 * 128 * 128 + 8 * 128) + norms) + 2 * 300 * 128
    one = lines[0]
    assert one["active"] == 4 and one["layers"] == 2
    # The inverse frequencies of rotary positions are float32, 32 a run.
    assert one["gb"] * 1e9 == pytest.approx(4 * record + kv + others, abs=2000)
    assert all(line["ms"] > 0 and line["memory"][0] > 0 for line in lines)
    assert 0.5 < lines[2]["of_bytes"] < 1 and lines[2]["bar"].startswith("≤")
    assert lines[0]["bar"] == "≥ 50%" and "of_dense" not in lines[0]
    encoded = dataclasses.replace(TINY, batches=(3,))
    monkeypatch.setattr(steps, "GROUPS", {"tiny": encoded})
    assert steps.main(["--only", "tiny", *RUN, "--account"]) == 0
    text = capsys.readouterr().out
    assert "### tiny, 2 layers, context 40" in text and "| expert_ffn | 2 |" in text
    assert "| linear, once | 1 |" in text and "int8, batch 3:" in text


def test_it_refuses_what_cannot_be(capsys, monkeypatch):
    monkeypatch.setattr(steps, "why_not_cpu", lambda: None)
    assert "rows are olmoe, versions" in refusal(capsys, steps.main, "--only", "mixtral")
    assert "numbers are positive" in refusal(capsys, steps.main, "--rounds", "0")
    monkeypatch.setattr(steps, "host_available_bytes", lambda: 1 << 30)
    for name, group in steps.GROUPS.items():
        assert f"{group.title} with {group.layers} layers" in refusal(
            capsys, steps.main, "--only", name
        )
    monkeypatch.setattr(steps, "host_available_bytes", lambda: 8 << 30)
    said = refusal(capsys, steps.main, "--only", "olmoe")
    assert "OLMoE-1B-7B with 16 layers needs" in said and "give fewer --layers" in said
    monkeypatch.setattr(steps, "why_not_cpu", lambda: "they are not built")
    assert "they are not built" in refusal(capsys, steps.main)


def test_the_shapes_are_configs_of_their_families():
    found = {}
    for name, group in steps.GROUPS.items():
        config = steps.parse_config(group.raw | {"num_hidden_layers": group.layers}, name)
        found[name] = (config.num_experts, config.num_experts_per_tok, config.mla is not None)
    assert found == {
        "olmoe": (64, 8, False),
        "versions": (64, 8, False),
        "qwen3": (128, 8, False),
        "deepseek": (64, 6, True),
    }
    assert dataclasses.replace(steps.GROUPS["olmoe"], layers=2).layers == 2


def test_the_spread_of_few_values_is_their_range():
    assert steps.spread(np.array([3.0, 1.0, 2.0])) == (2.0, 1.0, 3.0)
    assert steps.spread(np.arange(9.0)) == (4.0, 1.0, 7.0)

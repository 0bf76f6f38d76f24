"""llm.explain(): tables that add up, and an arena that takes what steps leave."""

from __future__ import annotations

import types
from typing import Any

import pytest

from host_offload.memory import device_memory
from host_offload.memory.store import ExpertStore
from moejax import LLM, UserError
from moejax.start.probe import activation_bytes, find_activation_bytes
from moejax.start.report.explain import Explanation
from tests.moejax.engine.budget_workload import LIMITS, MEMORY

MiB = 1 << 20


def check_sums(explanation: Explanation) -> dict[str, int]:
    """Every block adds up to its last line, and a name means one number. Returns them."""
    found: dict[str, int] = {}
    for *parts, total in explanation.blocks:
        assert sum(line.bytes for line in parts) == total.bytes, total
        for line in (*parts, total):
            if line.what != "ends of slots":
                assert found.setdefault(line.what, line.bytes) == line.bytes, line
    shown = str(explanation)
    for line in (line for block in explanation.blocks for line in block):
        assert f"{line.bytes:,}" in shown
    return found


def test_given_numbers_add_up_also_after_a_move():
    with LLM("demo", memory=MEMORY, progress=False, **LIMITS) as llm:
        before = check_sums(llm.explain())
        assert before["arena"] == before["experts"] + before["KV"] == MEMORY
        assert "cut from 6 MiB" in str(llm.explain())
        llm.engine.set_budget([3, 4, 5, 6], 9)
        after = check_sums(llm.explain())
        assert after["experts"] == 18 * 98304 and after["KV"] == 9 * 98304
        assert "3 to 6 of 16 in each of 4 layers" in str(llm.explain())
        # KV could use them, so that is not why they are free.
        assert after["free"] == 5 * 98304 and "given to neither" in str(llm.explain())


@pytest.mark.slow
def test_without_numbers_the_arena_takes_what_the_steps_leave(monkeypatch, tmp_path):
    """Where not everything fits, activations are measured, and kept: less is left than by the
    share."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(device_memory, "host_available_bytes", lambda: 7 * MiB)
    monkeypatch.setattr(ExpertStore, "unread", 0)  # the same free bytes, however far reading is
    limits = LIMITS | {"max_num_batched_tokens": 64, "eviction": "lru"}
    with LLM("demo", progress=False, **limits) as llm:
        sums = check_sums(llm.explain())
        # The steps that run fit into what was measured with the smallest arena, and the reserve.
        left = sums["free device memory"] - sums["largest arena"]
        assert 0.8 * -sums["activations"] < activation_bytes(llm.engine.runner) < left
        arena = llm.stats()["arena"]["bytes"]
        # The next start with these programs measures nothing.
        named: Any = types.SimpleNamespace(
            executables=llm.engine.runner.executables, delete=lambda given: None
        )
        again = find_activation_bytes(llm.plan.steps, lambda: named)
        assert again == -sums["activations"]
    assert sums["free device memory"] == 7 * MiB and arena == sums["arena"]
    assert sums["largest arena"] - arena < 98304, "a slot more would not fit"


def test_a_device_that_does_not_say_what_steps_need():
    silent = types.SimpleNamespace(memory_analysis=lambda: None)
    runner: Any = types.SimpleNamespace(
        wait_compiled=lambda everything: None, compiler=types.SimpleNamespace(compiled=[silent])
    )
    with pytest.raises(UserError, match=r"does not say what memory a step needs.*--memory"):
        activation_bytes(runner)

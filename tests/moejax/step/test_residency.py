"""What the host knows of who is resident, and the steps that need no plan."""

import contextlib
from typing import Any
from unittest import mock

import numpy as np
import pytest

from moejax import LLM
from moejax.step import walk as residency
from moejax.step.step_parts import StepSpec
from moejax.step.walk import LOOK_EVERY, Completeness
from tests.moejax.engine_runs import run, set_budget
from tests.moejax.interpreted_engine import interpreted_llm, three_jobs


def answer(value, ready=True) -> Any:
    """An array that the device may not have made yet."""
    made = mock.MagicMock()
    made.__int__.return_value = value
    made.is_ready.return_value = ready
    return made


def tables(count) -> list[Any]:
    """Stand-ins: only which is which matters."""
    return [object() for _ in range(count)]


def test_an_answer_counts_for_what_steps_made_meanwhile():
    first, second, third = tables(3)
    asked, known = answer(0, ready=False), Completeness()
    known.look(asked, first)
    known.follow_step(first, second)
    assert not known.is_complete(second)
    asked.is_ready.return_value = True
    assert known.is_complete(second)
    known.look(answer(0, ready=False), second)
    assert not known.is_complete(third) and known.looked is None


def test_an_absent_expert_is_looked_for_again():
    first, second = tables(2)
    known = Completeness()
    assert known.due(first)
    known.look(answer(-1), first)
    assert not known.due(first) and not known.is_complete(first) and not known.due(first)
    for _ in range(LOOK_EVERY):
        assert not known.due(first)
        known.follow_step(first, second)
    assert known.due(second)


LIMITS = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 64}
JOBS = three_jobs(vocabulary=4096)


@contextlib.contextmanager
def with_xla(model, **options):
    """An engine of XLA's ops that has steps without a plan too, which compile sooner."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepSpec, "resident_steps", True)
        with LLM(model, ops="xla", progress=False, **options) as llm:
            yield llm


@pytest.mark.slow
@pytest.mark.usefixtures("own_programs")
@pytest.mark.parametrize(
    "engine", [with_xla, pytest.param(interpreted_llm, marks=pytest.mark.nightly)]
)
def test_steps_without_a_plan_change_no_bit_and_a_smaller_budget_ends_them(engine, monkeypatch):
    monkeypatch.setattr(residency, "LOOK_EVERY", 1)
    with engine("demo", expert_budget="100%", **LIMITS) as llm:
        runner, asked = llm.engine.runner, []
        layers, experts = runner.tables.address.shape
        kv = llm.engine.scheduler.arena.slots - layers * experts
        call = runner.compiler.call
        monkeypatch.setattr(
            runner.compiler, "call", lambda key, *args: asked.append(key) or call(key, *args)
        )

        def runs(cells, times):
            """(the last of so many runs of the jobs, how often experts were referred to in it, its
            decode steps without and with a plan)."""
            set_budget(llm, [cells] * layers, kv)
            for _ in range(times):
                runner.wait_compiled(everything=True)
                asked.clear()
                before = np.asarray(runner.tables.frequency)
                found = run(llm, JOBS)
            decodes = [key.resident for key in asked if key.kind == "decode"]
            referred = np.asarray(runner.tables.frequency) - before
            return found, referred, (sum(decodes), len(decodes) - sum(decodes))

        with monkeypatch.context() as patch:
            patch.setattr(runner.walk, "_all_fit", False)
            wanted, references, (without, steps) = runs(experts, 2)
        assert without == 0 and np.asarray(runner.tables.address).min() >= 0  # nobody is absent
        found, referred, taken = runs(experts, 3)
        assert taken == (steps, 0)
        np.testing.assert_array_equal(referred, references)
        smaller, _, taken = runs(experts // 2, 2)
        assert taken == (0, steps)
        for other in (found, smaller):
            assert all(a.same_bits(b) for a, b in zip(other, wanted, strict=True))

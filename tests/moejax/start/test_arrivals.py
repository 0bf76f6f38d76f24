"""Steps begin before all experts are read: they wait for those that they need."""

import threading
import time

import pytest

from host_offload.memory.store import StoreBuilder
from moejax import LLM, SamplingParams, UserError
from moejax.checkpoints.checkpoint import wanted_first
from moejax.checkpoints.read_ahead import _go
from moejax.checkpoints.tensor_tasks import OpenTensor
from moejax.costs import measure
from pallas_kernels.cpu.arrivals import Arrivals
from tests.pallas_kernels.contract import NATIVE

pytestmark = NATIVE
FIRST, MORE = (SamplingParams(temperature=0, max_tokens=n) for n in (1, 24))
LIMITS = {"max_model_len": 256, "max_num_seqs": 2, "progress": False}


def loading_threads():
    names = "moejax-load", "moejax-read"
    return [one for one in threading.enumerate() if one.name.startswith(names)]


@pytest.fixture
def disk(monkeypatch):
    """A disk that reads nothing before `begun`, and then slowly."""
    read, begun = OpenTensor.read_record, threading.Event()

    def slow(*args):
        assert begun.wait(60)
        time.sleep(0.02)
        return read(*args)

    monkeypatch.setattr(OpenTensor, "read_record", slow)
    return begun


def text(llm, params):
    (output,) = llm.generate([[5]], params)
    return output.outputs[0].token_ids


def test_wanted_records_come_first():
    wanted = iter(["b", None, "a", None, "c", None])
    tasks = [(record, f"{record}{part}") for part in (0, 1) for record in "abcd"]
    found = list(wanted_first(tasks, lambda: next(wanted, None)))
    assert [task for task, _ in found] == ["b0", "b1", "a0", "a1", "c0", "c1", "d0", "d1"]
    assert [urgent for _, urgent in found] == [True, True, False, True, False, True, False, False]


@pytest.mark.parametrize("budget", [None, "50%"])
def test_a_first_token_waits_for_its_experts_alone(disk, budget):
    disk.set()
    with LLM("demo", expert_budget=budget, **LIMITS) as llm:
        wanted = text(llm, MORE)
    disk.clear()
    with LLM("demo", expert_budget=budget, **LIMITS) as llm:
        nbytes = llm.engine.runner.store.nbytes
        assert llm.stats()["store"]["unread_bytes"] == nbytes, "the start waits for no expert"
        disk.set()
        assert text(llm, FIRST) == wanted[:1]
        # 4 of 16 experts of each layer, where the order of the files has some near its end.
        assert llm.stats()["store"]["unread_bytes"] > 0.4 * nbytes
        assert text(llm, MORE) == wanted
        llm.engine.runner.store.wait()
        assert llm.stats()["store"]["unread_bytes"] == 0 and _go.is_set()
        assert text(llm, MORE) == wanted
    assert not loading_threads()


def test_a_model_is_closed_while_it_is_read(disk, monkeypatch):
    built, ahead = [], StoreBuilder.ahead
    monkeypatch.setattr(StoreBuilder, "ahead", lambda self: built.append(self) or ahead(self))
    with LLM("demo", **LIMITS) as llm:
        disk.set()
        text(llm, FIRST)
        assert llm.stats()["store"]["unread_bytes"]
    assert not loading_threads() and _go.is_set()
    assert [builder._memory for builder in built] == [None], "its memory is free, though llm lives"


def test_a_store_that_ended_ends_no_later_one_at_its_address():
    first, second = (Arrivals.begin(1 << 12, 64, 2) for _ in range(2))
    assert first is not None and second is not None
    first.end()
    first.end()
    assert first.name != second.name
    second.end()


def test_costs_are_measured_once_all_is_read(disk, monkeypatch):
    class Measured(Exception):
        pass

    def link_rate(runner):
        assert runner.store.unread == 0
        raise Measured

    monkeypatch.setattr(measure, "measure_link_rate", link_rate)
    with LLM("demo", expert_budget="50%", **LIMITS) as llm:
        assert llm.engine.runner.store.unread
        disk.set()
        with pytest.raises(Measured):
            measure.measure(llm.engine.runner)


@pytest.mark.parametrize("budget", [None, "50%"])
def test_requests_hear_of_an_error_of_reading(disk, monkeypatch, budget):
    slow = OpenTensor.read_record

    def damaged(tensor, place, expert, at, *args):
        if at[0] == 3:
            disk.wait(60)
            raise UserError("the disk says no")
        return slow(tensor, place, expert, at, *args)

    monkeypatch.setattr(OpenTensor, "read_record", damaged)
    with LLM("demo", expert_budget=budget, **LIMITS) as llm:
        disk.set()
        for _ in range(3):
            with pytest.raises(UserError, match="the disk says no"):
                llm.generate(["The old house was"] * 4, MORE)
    assert not loading_threads() and _go.is_set()

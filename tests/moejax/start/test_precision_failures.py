"""The device refuses something while experts change versions: that request fails, and the ones that
follow find every expert where the tables say, with the bytes of its version."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from host_offload.control.control import Control
from host_offload.control.controller import Controller
from host_offload.control.interface import Decision, Moment
from host_offload.control.transfers import DeviceChanges
from host_offload.memory.tables import Copy
from moejax import LLM, SamplingParams, UserError
from tests.host_offload.control.policy_runs import EXPERTS, LAYERS, scripted, spec
from tests.moejax.engine.scenes import QUEUE, delay
from tests.moejax.engine.test_control import FakeRunner, step_record

PROMPT = ["The old house stood on"]
LONG = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)

OPTIONS: dict[str, Any] = dict(
    precision="dynaexq,margin=0,alpha=0,interval=4 tokens",
    memory="6MiB",
    max_model_len=256,
    max_num_seqs=2,
    max_num_batched_tokens=64,
    progress=False,
)
"""Cells move for lack of whole slots, in several steps of a request."""


class Refused(MemoryError):
    pass


def refuse(monkeypatch, llm: LLM, what: str, calls: tuple[int, ...]) -> list[int]:
    """Those calls of `what` fail, counted from 1, `in part` behind a first cell; returns a list
    whose length is how many calls there were."""
    runner, made = llm.engine.runner, []
    real = getattr(runner, what.removesuffix(" in part"))

    def maybe(*args, **kwargs):
        made.append(len(made) + 1)
        if made[-1] not in calls:
            return real(*args, **kwargs)
        if what.endswith("in part"):
            (moves,) = args
            real(moves[:1])
        raise Refused(what)

    monkeypatch.setattr(runner, what.removesuffix(" in part"), maybe)
    return made


def faults(llm: LLM) -> list[str]:
    """Of the device, and where the host's books say something else."""
    engine = llm.engine
    engine.drain()
    control: Any = engine.control
    books = control.controller.transitions
    tables = engine.runner.snapshot()()
    found = engine.runner.faults()
    if not np.array_equal(tables.version, books.version):
        found.append("the books have other versions")
    if not np.array_equal(tables.address, np.take_along_axis(books.cell_row, books.column, 1)):
        found.append("the books have other places")
    return found


REFUSALS = [
    ("move_cells", (1,)),
    ("move_cells in part", (2, 3)),
    ("snapshot", (4,)),
    ("decode", (5, 9)),
]


def check_requests(monkeypatch, llm, what: str, calls: tuple[int, ...]) -> None:
    """Each refusal fails one request, and no other has a wrong byte."""
    made, failed = refuse(monkeypatch, llm, what, calls), 0
    for _ in range(5):
        try:
            llm.generate(PROMPT, LONG)
        except Refused:
            failed += 1
        else:
            assert faults(llm) == []
    assert failed == len(calls) and len(made) > max(calls)


@pytest.mark.nightly
@pytest.mark.parametrize(("what", "calls"), REFUSALS)
def test_what_the_device_refused_is_made_up_for(monkeypatch, what, calls):
    with LLM("demo", **OPTIONS) as llm:
        check_requests(monkeypatch, llm, what, calls)
        said = llm.stats()["precision"]
        assert said["moves"] > 3 and said["hi"] + said["lo"] == 64


@pytest.mark.nightly
def test_a_move_that_is_forgotten_is_found(monkeypatch):
    """A mutation: what the runner refused is not asked for again."""

    def forgetful(control: Control) -> None:
        changes = control.controller.changes
        moves, changes.moves = changes.moves, []
        if moves:
            control.device.move_cells(moves)

    monkeypatch.setattr(Control, "_move_cells", forgetful)
    with LLM("demo", **OPTIONS) as llm:
        refuse(monkeypatch, llm, "move_cells", (1,))
        with pytest.raises(Refused):
            llm.generate(PROMPT, LONG)
        llm.generate(PROMPT, LONG)
        assert "the bytes of a resident expert differ" in " ".join(faults(llm))


ARRIVAL: dict[str, Any] = OPTIONS | dict(
    precision=OPTIONS["precision"] + ",publish=arrival",
    transfers="queue,rate=30MB/s,chunk_bytes=16KiB",
)


def watch_copies(monkeypatch, llm: LLM) -> list[int]:
    """Every decode step looks where its entries point; returns, for each, how many cells were being
    written meanwhile."""
    runner, beside = llm.engine.runner, []
    decode = runner.decode

    def watched(*args, **kwargs):
        queue = runner.transport.queue or runner.transport.device_queue
        written = {each.transfer.cell for each in queue.observe().flying}
        held = set(np.asarray(runner.tables.address).ravel().tolist())
        assert held.isdisjoint(written), "an entry points to bytes that are still to come"
        beside.append(len(written))
        return decode(*args, **kwargs)

    monkeypatch.setattr(runner, "decode", watched)
    return beside


@pytest.mark.slow
@pytest.mark.parametrize("options", [ARRIVAL, ARRIVAL | QUEUE], ids=["link", "jax"])
def test_versions_that_arrive_beside_steps_make_none_wait(monkeypatch, options):
    """DynaExq's handle changes after the last byte: over a slow link experts keep their old version
    through many steps, also by jax's own copies. Planted: one that takes the new version at
    once."""
    with LLM("demo", **options) as llm:
        if options is not ARRIVAL:
            delay(llm)
        beside = watch_copies(monkeypatch, llm)
        waited = -waits_of(llm)
        for _ in range(3):
            llm.generate(PROMPT, LONG)
            waited += waits_of(llm)
            assert faults(llm) == []  # which waits
            waited -= waits_of(llm)
        said = llm.stats()["precision"]
        waited += waits_of(llm)
        assert said["promotions"] > 8 and said["publish"] == "arrival"
        assert waited == 0 and sum(map(bool, beside)) > 8
        monkeypatch.setattr(
            llm.engine.runner, "ended_copies", lambda: dict.fromkeys(places(llm), True)
        )
        delay(llm, 0.1)  # a step looks meanwhile, also where others take the processors
        others = ["12 + 30 = 42, 42 + 8 =", "def add(a, b):", "She had never seen the sea"]
        with pytest.raises(AssertionError, match="bytes that are still to come"):
            llm.generate(others, LONG)


def waits_of(llm: LLM) -> float:
    return llm.stats()["transfers"]["wait_seconds"] or 0.0


def places(llm: LLM) -> set[tuple[int, int]]:
    control: Any = llm.engine.control
    return control.controller.transitions.flying_places()


def test_versions_arrive_by_a_queue():
    with pytest.raises(
        UserError, match=r"publish=arrival without a queue: .*add transfers='queue'"
    ):
        LLM("demo", **{**ARRIVAL, "transfers": "ops"})


def test_contents_that_were_refused_are_set_before_the_next_step(monkeypatch):
    prior = np.arange(LAYERS * EXPERTS).reshape(LAYERS, EXPERTS)
    decided = {(Moment.STEP_END, 0): Decision(prior=prior)}
    runner: Any = FakeRunner()
    control = Control(runner, Controller(spec(), [scripted(decided, writes={"prior"})]))
    control.before_step(0)
    control.after_dispatch(0)
    control.after_read(step_record(0))
    with monkeypatch.context() as patch:
        patch.setattr(runner, "set_tables", lambda *args: no_memory())
        with pytest.raises(Refused):
            control.before_step(1)
    assert not np.asarray(runner.tables.prior).any()
    control.before_step(2)
    np.testing.assert_array_equal(runner.tables.prior, prior)


def test_of_copies_only_a_refused_one_is_begun_again():
    """The queue would write to the memory of the first one's mark after that was freed."""
    copies, begun, refused = [Copy(0, expert, 1, 8 * expert) for expert in range(3)], [], []

    def begin(given):
        for copy in given:
            if copy == copies[1] and not refused:
                refused.append(1)
                no_memory()
            begun.append(copy)

    changes = DeviceChanges(copies=copies[:])
    controller: Any = SimpleNamespace(arriving=None, changes=changes, stages=lambda number: [])
    device: Any = SimpleNamespace(prepare=lambda controller: None, begin_copies=begin)
    control = Control(device, controller)
    with pytest.raises(Refused):
        control._stages(0)
    control._stages(1)
    assert begun == copies and not changes.copies


def no_memory() -> None:
    raise Refused("no memory")

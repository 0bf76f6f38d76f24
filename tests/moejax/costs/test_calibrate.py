"""Calibration measures what it says, keeps it, and refuses what is not its own."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import types
from typing import Any

import numpy as np
import pytest

import moejax.serve.llm
from host_offload.control.interface import Decision, Moment
from host_offload.memory.layout import PageLayout
from host_offload.sizing.cost_model import CostModel, StepCost, Work
from moejax import LLM, SamplingParams
from moejax.commands import main as cli
from moejax.costs import forced, measure, other_programs, store
from moejax.costs.store import (
    cost_file,
    find_quiet_costs,
    identity,
    load_cost_model,
    write_cost_model,
)
from moejax.costs.workload_plan import _warn_if_busy
from moejax.errors import UserError
from moejax.serve import costs
from moejax.serve.costs import cost_model_for
from tests.host_offload.sizing.cost_models import MODEL

SMALL = dict(
    eviction="lru", max_num_seqs=2, max_model_len=64, max_num_batched_tokens=128, progress=False
)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def quick(monkeypatch):
    """Calibration of one round, which holds though other tests run beside it."""
    monkeypatch.setattr(store, "is_busy_now", lambda: True)
    monkeypatch.setattr(measure, "ROUNDS", 1)
    monkeypatch.setattr(measure, "STEPS", 1)


ABOUT = {"device": "Some GPU", "machine": "here", "jax": "1"}


def test_a_file_round_trips_and_is_found_by_what_it_is_of():
    path = cost_file(ABOUT)
    assert path.name.startswith("some-gpu-") and path.parent.name == "costs"
    assert cost_file(dict(reversed(ABOUT.items()))) == path
    assert cost_file(ABOUT | {"machine": "there"}) != path
    model = dataclasses.replace(MODEL, about=ABOUT)
    write_cost_model(path, model)
    assert load_cost_model(path, ABOUT).to_json() == model.to_json()
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "damaged: it is no JSON.*calibrate --force"),
        ("[]", "not a file of costs"),
        (json.dumps(MODEL.to_json() | {"version": 2}), "version 2, this moejax reads 8"),
        (json.dumps(MODEL.to_json() | {"figures": {}}), "missing or unknown"),
    ],
)
def test_a_damaged_file_is_refused(tmp_path, text, message):
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_cost_model(path)


def test_costs_of_another_machine_are_refused_and_name_it(tmp_path):
    path = tmp_path / "costs.json"
    write_cost_model(path, dataclasses.replace(MODEL, about=ABOUT))
    with pytest.raises(UserError, match="another machine: here, here it is there"):
        load_cost_model(path, ABOUT | {"machine": "there"})
    with pytest.raises(UserError, match="another driver: None"):
        load_cost_model(path, ABOUT | {"driver": "host"})
    with pytest.raises(UserError, match=r"none\.json cannot be read"):
        load_cost_model(tmp_path / "none.json")


def test_costs_are_not_those_of_a_link():
    steps = types.SimpleNamespace(store="memory", queue=object())
    queued: Any = types.SimpleNamespace(stores=[None], steps=steps)
    with pytest.raises(UserError, match="measured without a link"):
        measure.measure(queued)


def test_rows_and_spans_have_costs_of_their_own_in_every_executable():
    """Steps of 8 rows have as many spans as rows; only the others have a long prompt. Forced steps
    take longer or shorter than those of a run."""
    true = {4: StepCost(100, 50, 3, 7, 0), 8: StepCost(200, 40, 3, 9, 0)}
    work = {
        4: [Work(1, 1, 4), Work(4, 4, 8), Work(2, 2, 12), Work(3, 24, 4)],
        8: [Work(5, 5, 8), Work(8, 8, 8), Work(6, 6, 20), Work(8, 8, 30)],
    }
    steps = [
        (rows, forced, true[rows].seconds(one) + (10 * rows - 60) * forced, one)
        for rows in true
        for one in work[rows]
        for forced in (True, False)
    ]
    for rows, cost in measure._fit_decode(steps).items():
        asked = Work(rows, 3 * rows, 9)
        assert cost.seconds(asked) == pytest.approx(true[rows].seconds(asked))


@pytest.mark.parametrize(
    ("seconds", "rows", "pages", "blocks", "steps"),
    [
        (1e-3, 2, 16, 8, 32),
        (4e-3, 2, 16, 8, 15),  # which take 60 ms
        (1.0, 2, 16, 8, 4),
        (1e-3, 8, 16, 8, 21),  # in two pages of 16 tokens
        (1e-3, 8, 8, 8, 5),
        (1e-3, 2, 16, 2, 21),  # a context of 32 tokens
    ],
)
def test_short_steps_are_timed_over_as_many_as_there_is_room_for(
    seconds, rows, pages, blocks, steps
):
    page = PageLayout(1, 1, 16, 4, block_size=16)
    runner = types.SimpleNamespace(
        shapes=types.SimpleNamespace(blocks=blocks), layout=types.SimpleNamespace(page=page)
    )
    sample = forced.StepSample(seconds, Work(1, 1))
    steady: Any = types.SimpleNamespace(
        runner=runner, pages=pages, measure=lambda case, steps: [sample] * steps
    )
    assert measure._steps_of(steady, measure.Case(rows, 4)) == steps


def test_costs_measured_beside_others_are_measured_again_on_a_quiet_machine(monkeypatch, caplog):
    model = dataclasses.replace(MODEL, about=ABOUT | {"others": 0.4})
    write_cost_model(cost_file(ABOUT), model)
    monkeypatch.setattr(store, "is_busy_now", lambda: True)
    assert find_quiet_costs(ABOUT) == model
    monkeypatch.setattr(store, "is_busy_now", lambda: False)
    assert find_quiet_costs(ABOUT) is None
    _warn_if_busy(model, "costs.json")
    assert "costs.json: other programs took 40% of the processors" in caplog.text
    write_cost_model(cost_file(ABOUT), dataclasses.replace(MODEL, about=ABOUT | {"others": 0.1}))
    assert find_quiet_costs(ABOUT) is not None


def test_the_share_of_other_programs(monkeypatch):
    clock_busy_own = iter([(0.0, 10.0, 1.0), (2.0, 13.0, 2.0), None])
    monkeypatch.setattr(other_programs, "_processor_times", lambda: next(clock_busy_own))
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    watch = other_programs.ProcessorWatch()
    assert watch.others() == (3 - 1) / (2 * 4)
    assert watch.others() is None and not other_programs.is_busy(None)
    monkeypatch.undo()
    assert 0 <= (other_programs.ProcessorWatch().others() or 0) <= 1


@dataclasses.dataclass(frozen=True)
class Priced:
    """Keeps the costs that it is told."""

    moments = frozenset({Moment.STEP_END})
    needs = frozenset({"costs"})
    writes = frozenset()

    def init(self, spec):
        return spec.costs

    def decide(self, state, observation):
        assert observation.costs is state
        return state, Decision()


@pytest.mark.slow
def test_demo_is_calibrated_once_and_runs_as_before(quick, caplog):
    """The first use measures; another LLM, and a policy that needs costs, read the file."""
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with LLM("demo", **SMALL) as llm:
        cells = np.array(llm.engine.runner.tables.cell_row)
        model = cost_model_for(llm)
        runner = llm.engine.runner
        path = cost_file(identity(llm.plan.steps))
        assert path.exists() and not llm.engine.runner.faults()
        # The tables are those of a start; nothing that was measured is counted.
        assert np.array_equal(np.array(runner.tables.cell_row), cells)
        assert np.array(runner.tables.clock).max() == 0
        assert np.array(runner.tables.address).max() == -1
        assert llm.stats()["requests"] == 0
        after = llm.generate("Once", params)[0].outputs[0].token_ids
        with pytest.raises(UserError, match="has run nothing"):
            cost_model_for(llm, force=True)
        assert cost_model_for(llm).costs().step_s == model.costs().step_s  # from the file
        # Steps that are read two by two, after 1 and 3 seconds, took 2 each.
        steps = measure.ForcedSteps(runner, measure._most_pages(runner))
        reads = itertools.accumulate(itertools.cycle([1.0, 3.0]))
        clock = types.SimpleNamespace(perf_counter=reads.__next__)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forced, "time", clock)
            samples = steps.measure(measure.Case(1, runner.config.num_experts_per_tok), 4)
            # Only some cases are forced.
            decode, routed = runner.decode, []
            patch.setattr(
                runner,
                "decode",
                lambda *a, forced=None, **k: (
                    routed.append(forced) or decode(*a, forced=forced, **k)
                ),
            )
            for own in (False, True):
                steps.measure(measure.Case(1, 8, own=own), 4)
                assert len(routed) == 6 and all((one is None) == own for one in routed)
                routed.clear()
        assert [sample.seconds for sample in samples] == [2.0] * 4
    assert (model.layers, model.experts, model.top_k) == (4, 16, 4)
    assert model.expert_bytes == 3 * 128 * 128 * 2
    assert list(model.decode) == [1, 2] and model.row_tile == 2 and model.chunk == 64
    # How a step's time is shared over its parts is the fit's; where it is noisy a part may be 0.
    assert sum(dataclasses.astuple(model.decode[2])) > 0
    assert model.link_per_byte > 0 and model.kv_swap_per_byte > 0
    assert model.recompute_per_token > 0 and model.cpu_expert is not None
    assert CostModel.from_json(json.loads(path.read_text())).to_json() == model.to_json()

    with caplog.at_level(logging.INFO, "moejax"), LLM("demo", policies=[Priced()], **SMALL) as llm:
        assert llm.generate("Once", params)[0].outputs[0].token_ids == after
        told = llm.engine.control.controller.spec.costs
    assert told.step_s == model.costs().step_s
    assert not [r for r in caplog.records if "measuring what steps cost" in r.message]


class StartedLLM:
    """What calibration asks of an LLM: its identity is ABOUT."""

    def __init__(self, model, **options):
        self.options, self.closed = options, False
        self.engine = self
        self.runner = "a runner"
        self.plan = types.SimpleNamespace(steps=None)
        type(self).last = self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True


@pytest.fixture
def started(monkeypatch):
    monkeypatch.setattr(moejax, "LLM", StartedLLM, raising=False)
    monkeypatch.setattr(costs, "LLM", StartedLLM)
    monkeypatch.setattr(store, "identity", lambda _: ABOUT)
    return StartedLLM


SIZES = {"layers": 2, "experts": 4}
MICRO = 1e-6


def in_microseconds(cost):
    return StepCost(**{name: value * MICRO for name, value in vars(cost).items()})


def test_the_command_shows_costs_and_the_file(started, capsys, monkeypatch):
    names = ("control", "recompute_per_token")
    model = dataclasses.replace(
        MODEL,
        look=17 * MICRO,
        **{name: getattr(MODEL, name) * MICRO for name in names},
        decode={rows: in_microseconds(cost) for rows, cost in MODEL.decode.items()},
        prefill=in_microseconds(MODEL.prefill),
        cpu_expert=(70 * MICRO, MICRO),
        about={**ABOUT, "driver": "device", "sizes": SIZES},
    )
    path = cost_file(ABOUT)
    write_cost_model(path, model)
    monkeypatch.setattr(costs, "cost_model_for", lambda llm, **_: model)
    assert cli.main(["calibrate", "m", "--max-num-seqs", "3"]) == 0
    shown = capsys.readouterr().out
    assert started.last.options["max_num_seqs"] == 3 and started.last.closed
    words = " ".join(shown.split())
    assert "m: 2 layers, 4 experts Some GPU, jax 1, driver device" in words
    assert f"measured before, in {path}" in words
    for name, figures in (
        ("step", [1000, 2000, 5000]),
        ("expert", [100, 100, 200]),
        ("fill", [4, 4, 40]),
    ):
        row = " ".join(f"{value:,.1f}" for value in figures)
        assert f"{name} {row}" in words, name
    assert cli.main(["calibrate", "m", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": str(path), **model.to_json()}
    path.unlink()
    assert cli.main(["calibrate", "m", "--quiet"]) == 2
    assert "cannot be kept" in capsys.readouterr().err


def test_experts_of_several_versions_are_refused():
    class TwoVersions:
        stores = (None, None)

    with pytest.raises(UserError, match=r"one version of the experts, .* or state .*per_token"):
        measure.measure(TwoVersions())  # type: ignore[arg-type]

"""`python -m scripts.policies processors`: arms of a second processor, at equal memory."""

import argparse
import dataclasses
import json

import pytest

from host_offload.policies.eviction.hot_table import HotTable
from host_offload.policies.placement.policy import Placement
from host_offload.policies.prefetch.expertflow.training import Training, fit
from host_offload.traces.reader import read_trace
from moejax import LLM, SamplingParams
from moejax.commands.train_predictor import routers_of
from scripts.policies import beside, crossover, processors
from scripts.policies.processors import COLUMNS, main
from tests.pallas_kernels.contract import NATIVE

TIMES = "threads=1+1,accelerator=50us,startup=200us,per_token=50us,attention=1ms"
SMALL = ["demo", "--rows", "2", "--input", "16", "--output", "6", "--rounds", "1"]
GIVEN = [*SMALL, "--expert-budget", "40%", "--link-rate", "100MB/s", "--test", TIMES]


@NATIVE
@pytest.mark.slow
def test_arms_differ_by_their_rule_alone(tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 100)
    forests = tmp_path / "forests"
    with LLM("demo", driver="host", trace=tmp_path / "run", trace_arrays="gate_input") as llm:
        llm.generate([[*range(1, 30)]] * 4, SamplingParams(max_tokens=4), use_tqdm=False)
    trace = read_trace(tmp_path / "run")
    router = routers_of("demo", trace.header.config_digest)
    quick = Training(trees=2, leaves=16)
    fit(trace, router, training=quick).fitted.write(forests)
    arms = "prescope,no-hot-table,no-async,buffers-2,fiddler,load-all,expertflow"
    command = [*GIVEN, "--arms", arms, "--predict", "gates", "--text", str(text)]
    command += ["--forest", str(forests)]
    assert main([*command, "--json"]) == 0
    found = {row["arm"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(found) == arms.split(",")
    for arm, row in found.items():
        assert row["tokens_per_s"] > 0 and row["missed"] > 0 and row["between_ms"] >= 1, arm
        assert row["over"] == found["prescope"]["tokens_per_s"] / row["tokens_per_s"] - 1
    # Cells that hold nobody are filled first, so Fiddler too loads.
    assert found["fiddler"]["beside"] > 0.5 and found["load-all"]["beside"] == 0
    # Nobody computes beside; forests bring some ahead, and others stay.
    assert found["expertflow"]["missed"] != found["load-all"]["missed"]
    assert found["expertflow"]["beside"] == 0
    record_ms = 1e3 * 3 * 128 * 128 * 2 / 100e6
    assert found["load-all"]["load_ms"] > 0.98 * record_ms  # the stated rate at the least
    # What computes after the loads is done later by all that it takes.
    assert found["no-async"]["gap_ms"] > 0.25
    assert len(COLUMNS) == 13


@NATIVE
@pytest.mark.slow
def test_a_measurement_in_pieces_goes_on(tmp_path, capsys):
    """A group's arms one after the other, each once, their tokens compared over the pieces."""
    cells, runs = tmp_path / "cells.yaml", tmp_path / "runs"
    cells.write_text(
        "groups:\n- {name: a, rows: [2], arms: [fiddler, load-all], input: 16, output: 4, "
        "link_rate: 100MB/s}\n"
    )
    group = ["--cells", str(cells), "--group", "a", "--runs", str(runs), "--test", TIMES]
    command = ["demo", *group, "--rounds", "1", "--json"]
    assert main([*command, "--arms", "load-all"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == len(runs.read_text().splitlines()) == 1
    assert main(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["arm"] for row in found] == ["load-all", "fiddler"]
    first, second = map(json.loads, runs.read_text().splitlines())
    assert first["said"] == second["said"] and first["link_rate"] == "100MB/s"
    kept = runs.read_text()
    assert main(command) == 0 and runs.read_text() == kept
    assert json.loads(capsys.readouterr().out) == found
    runs.write_text(json.dumps(first | {"said": "other"}) + "\n")
    assert main(command) == 2
    assert "fiddler gave other tokens than load-all" in capsys.readouterr().err
    assert main([*command, "--group", "b"]) == 2
    assert "--group b" in capsys.readouterr().err


def test_arms_with_buffers_have_a_hot_table_beside_them():
    args = argparse.Namespace(
        model="demo", link_rate="1GB/s", test=TIMES, attention=None, predict=None, learned=None
    )
    table, placement = processors._policies(args, "buffers-4")
    assert isinstance(table, HotTable) and table.spare == 4
    assert isinstance(placement, Placement) and placement.buffers == 4
    _, plain = processors._policies(args, "prescope")
    assert plain == dataclasses.replace(placement, buffers=None)


def test_what_is_refused(capsys):
    for given, match in (
        (["--arms", "nobody"], "there is no arm 'nobody'; there are prescope"),
        (["--arms", "no-llapor"], "no-llapor is prescope without --learned FILE"),
        (["--arms", "expertflow"], "expertflow prefetches by --forest FILE"),
    ):
        assert main([*GIVEN, *given]) == 2
        assert match in capsys.readouterr().err


@NATIVE
@pytest.mark.slow
def test_from_how_many_tokens_a_load_is_first(capsys):
    """By what was measured, and for a machine of other cores and memory by arithmetic."""
    sizes = ["--hidden", "128", "--width", "64", "--threads", "1", "--cores", "4"]
    command = [*sizes, "--link", "1MB/s", "--memory", "100MB/s,1TB/s"]
    assert crossover.main([*command, "--json"]) == 0
    here, slow, fast = json.loads(capsys.readouterr().out)
    nbytes = 3 * 128 * 64 * 2
    assert list(here["us_by_rows"]) == ["1", "2", "4", "8", "16", "32", "64"]
    for row in (here, slow, fast):
        assert row["load_us"] == pytest.approx(nbytes)
        left = row["load_us"] - row["startup_us"]
        assert row["tokens"] == pytest.approx(left / row["per_token_us"])
    assert slow["startup_us"] == pytest.approx(nbytes / 100)
    assert fast["startup_us"] == pytest.approx(max(here["startup_us"] / 4, nbytes / 1e6))
    assert fast["per_token_us"] == pytest.approx(here["per_token_us"] / 4)
    assert crossover.main([*sizes, "--link", "fast"]) == 2
    assert "fast" in capsys.readouterr().err


@NATIVE
@pytest.mark.slow
def test_what_a_cpu_adds_beside_a_device_of_its_own_memory(capsys, monkeypatch):
    """Costs, arms, and a recorded placement that repeats; where it does not, the command fails."""
    command = ["--shape", "demo", "--layers", "1", "--batch", "2", "--tokens", "4"]
    command += ["--expert-budget", "40%", "--ops", "move=xla", "--json"]
    assert beside.main(command) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    costs, all_loaded, none_loaded, divided, repeated = lines
    assert min(costs[name] for name in ("per_token", "startup", "load")) > 0
    assert [line["arm"] for line in lines[1:4]] == list(beside.ARMS)
    assert all(line["tokens_per_s"] > 0 for line in lines[1:4])
    assert all_loaded["beside"] == 0 < none_loaded["beside"] and 0 <= divided["beside"] <= 1
    assert repeated["same"] and repeated["same_bits"]
    run, runs = beside._run, iter(range(100))
    monkeypatch.setattr(beside, "_run", lambda *args, **kw: [*run(*args, **kw), next(runs)])
    monkeypatch.setattr(beside, "_batch", lambda *args: iter(()))
    assert beside.main(command) == 1

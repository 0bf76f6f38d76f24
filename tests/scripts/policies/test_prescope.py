"""`python -m scripts.policies prescope`: what is stated, and the paper's cells."""

import json

import numpy as np
import pytest

from scripts.policies.prescope import (
    FITTED,
    MACHINES,
    MODELS,
    Cell,
    costs_of,
    fitted_flops,
    main,
    predicted,
    prefill_seconds,
    resident_experts,
    routed,
    work_of,
)

pytestmark = pytest.mark.slow

MIXTRAL = MODELS["Mixtral-8x7B"]


def test_what_is_stated_is_what_the_paper_says_where_it_says_it():
    """One Mixtral expert over PCIe 4 takes about 14 ms (section 6.5), and Klotski on the V100 at
    batch 64, which loads all that is missing, 5.82 s a step (6.2.3)."""
    costs = costs_of(MIXTRAL, MACHINES["A100"], 64, 1e12)
    assert costs.load == pytest.approx(14e-3, rel=0.02)
    v100 = costs_of(MIXTRAL, MACHINES["V100"], 64, 1e12)
    missing = 8 * 32 - resident_experts(MIXTRAL, 128)
    assert missing * v100.load == pytest.approx(5.82, rel=0.06)
    assert resident_experts(MIXTRAL, 128) < resident_experts(MIXTRAL, 64)
    assert resident_experts(MIXTRAL._replace(expert=1.0), 1) == 8 * 32
    assert resident_experts(MIXTRAL, 10**6) == 0


def test_a_prefill_waits_for_the_slower_of_loads_and_compute():
    machine = MACHINES["V100"]
    few, many = (prefill_seconds(MIXTRAL, machine, rows, 0.0) for rows in (1, 64))
    loads = 32 * 8 * costs_of(MIXTRAL, machine, 1, 1e12).load
    assert few == pytest.approx(loads, rel=0.01) and many > 10
    assert prefill_seconds(MIXTRAL, machine, 1, 1.0) < few
    assert prefill_seconds(MIXTRAL, machine, 64, 1.0) == many


def test_predictions_are_right_for_their_share():
    routing = routed(MODELS["Moonlight-16B-A3B"], 16, 2)
    work = work_of(MODELS["Moonlight-16B-A3B"], routing, 16)
    found = {}
    for name, predictions in work.predicted.items():
        there = np.minimum(predictions[:, :-1, 0], work.tokens[:, 1:]).sum()
        found[name] = there / work.tokens[:, 1:].sum()
    assert found["learned"] > 0.97 and 0.7 < found["gate"] < 0.85
    assert work.resident.sum() == resident_experts(MODELS["Moonlight-16B-A3B"], 16)


def test_the_cpu_is_fitted_to_the_paper_s_latency():
    flops = fitted_flops(2)
    model, machine, batch, wanted = FITTED
    line = predicted(Cell(model, machine, batch), routed(MIXTRAL, batch, 2), flops)
    assert line["step_s"]["prescope"] == pytest.approx(wanted, rel=0.01)
    assert line["tokens_s"]["fiddler"] < line["tokens_s"]["prescope"]
    slow = predicted(Cell(model, machine, batch), routed(MIXTRAL, batch, 2), flops / 4)
    assert slow["tokens_s"]["fiddler"] < line["tokens_s"]["fiddler"] / 2
    assert slow["tokens_s"]["klotski"] == line["tokens_s"]["klotski"]


def test_the_table_is_beside_the_paper_s(capsys):
    given = ["--models", "Mixtral-8x7B", "--machines", "A100", "--batches", "1,64"]
    given += ["--steps", "2", "--cpu-flops", "0.2e12"]
    assert main(given) == 0
    said = capsys.readouterr().out
    assert "the CPU: 0.200 TFLOP/s" in said and "over fate  +264.0%" in said
    assert "no PreSched   -54.1%" in said and "no hot table" not in said
    assert main([*given, "--json"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["machine"], line["batch"]) for line in lines] == [("A100", 1), ("A100", 64)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--models", "Mixtral"], "unknown 'Mixtral'; known: Mixtral-8x7B"),
        (["--machines", "H200"], "unknown 'H200'; known: V100, A100"),
        (["--batches", "0"], "batches are of 1 row and more"),
        (["--steps", "1"], "--steps is 2 or more"),
    ],
)
def test_what_is_refused(given, message, capsys):
    assert main(given) == 2
    assert message in capsys.readouterr().err

"""Costs add up as they say, survive a file, and refuse what cannot be."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from host_offload.sizing.cost_model import CostError, CostModel, RunCosts, fit_costs
from tests.host_offload.sizing.cost_models import MODEL


def moved(*counts):
    return np.array(counts, np.int32)


NONE = moved(0, 0)


def test_experts_that_move_are_looked_up_by_layer():
    def seconds(fills=NONE, read_through=NONE, staged=NONE, prefill=False):
        counts = np.stack([fills, read_through, staged])[:, :, None]
        return RunCosts((MODEL,)).moves_s(counts, None if prefill else 8).sum()

    assert seconds() == 0
    assert seconds(fills=moved(1, 0)) == 10
    assert seconds(fills=moved(1, 1)) == 20
    assert seconds(fills=moved(2, 0)) == 14  # both at once cost less than one after the other
    assert seconds(fills=moved(6, 0)) == 30
    assert seconds(read_through=moved(0, 2)) == 16
    assert seconds(staged=moved(1, 1)) == 2 * 100 * 0.05  # they pass the link
    assert seconds(fills=moved(2, 1), read_through=moved(1, 0), prefill=True) == 3 * 40 + 60


def test_more_rows_than_were_measured_are_refused():
    assert [MODEL.bucket(rows) for rows in (1, 8, 9, 16)] == [8, 8, 16, 16]
    with pytest.raises(CostError, match="at most 16 rows, not 17; calibrate with max_num_seqs=17"):
        MODEL.bucket(17)


def test_policies_see_totals():
    costs = MODEL.costs()
    assert costs.fill.tolist() == [6, 4 / 100]
    assert costs.stage.tolist() == [0, 0.05]
    # 8 rows in 2 layers of top-2 of 4 experts: 8 active, 32 pairs in tiles of 4.
    assert costs.step_s[8] == 1000 + 8 * 10 + 8 * 1 + 8 * 100 + 0 * 50
    assert costs.step_s[16] == 2000 + 16 * 10 + 16 * 1 + 8 * 100 + 8 * 50
    assert costs.attention_s == 0.5
    assert costs.prefill_s_per_token == (500 + 20 + 100 * 4) / 64
    assert costs.recompute_s_per_token == 11
    assert costs.kv_swap_s_per_byte == 12
    assert costs.gpu_expert.tolist() == [[1, 100], [4, 100], [5, 150], [8, 150]]
    assert costs.cpu_expert.tolist() == [70, 1]
    assert np.isnan(dataclasses.replace(MODEL, cpu_expert=None).costs().cpu_expert).all()


@pytest.mark.parametrize("changed", [{}, {"cpu_expert": None}])
def test_a_file_gives_the_same_costs_back(changed):
    model = dataclasses.replace(MODEL, **changed)
    again = CostModel.from_json(json.loads(json.dumps(model.to_json())))
    for field in dataclasses.fields(CostModel):
        one, other = getattr(again, field.name), getattr(model, field.name)
        assert np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other


def broken(**figures):
    found = json.loads(json.dumps(MODEL.to_json()))
    for name, value in figures.items():
        if value is ...:
            del found["figures"][name]
        else:
            found["figures"][name] = value
    return found


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([], "not a file of costs"),
        ({"format": "moejax-trace", "version": 1}, "not a file of costs"),
        (MODEL.to_json() | {"version": 99}, "version 99, this moejax reads 8; calibrate again"),
        (broken(control=...), "missing or unknown.*control"),
        (broken(extra=1), "missing or unknown.*extra"),
        (broken(decode={"8": {"step": 1}}), "missing or unknown"),
        (broken(decode={"x": vars(MODEL.prefill)}), "invalid literal"),
        (broken(cpu_expert=[1, "slow"]), "could not convert"),
    ],
)
def test_what_is_no_cost_model_is_refused(found, message):
    with pytest.raises(CostError, match=message):
        CostModel.from_json(found)


# ---- from measured seconds to figures


@given(
    st.lists(st.floats(1e-6, 1e-2), min_size=5, max_size=5),
    st.lists(st.tuples(*[st.integers(0, 50)] * 4), min_size=30, max_size=30),
)
def test_a_fit_finds_the_costs_that_made_the_seconds(costs, works):
    seconds = [float(np.dot(costs, [1, *work])) for work in works]
    found = fit_costs([[1, *work] for work in works], seconds)
    again = [float(np.dot(found, [1, *work])) for work in works]
    np.testing.assert_allclose(again, seconds, rtol=1e-6)


def test_a_fit_has_no_cost_below_zero():
    # Alone, least squares would give experts −2.
    step, expert, never = fit_costs([[1, n, 0] for n in (1, 2, 3)], [8.0, 6.0, 4.0])
    assert expert == never == 0 and 4 < step < 8

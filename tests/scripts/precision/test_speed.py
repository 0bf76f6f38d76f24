"""What the command `speed` predicts is the arithmetic of its stated costs, and what it names as
crossovers is where the figures cross."""

import json

import numpy as np
import pytest

from host_offload.sizing.cost_model import Work
from moejax.checkpoints.random_model import shape
from scripts.precision import speed as bench_precision
from scripts.precision.costs import (
    Decoding,
    Machine,
    check,
    other_bytes,
    stated_costs,
    version_bytes,
)
from scripts.precision.predicted import (
    PREFILL,
    WARM_SEQUENCES,
    WARM_STEPS,
    WARM_TOKENS,
    Routing,
    Settings,
    figures,
    foretold,
    plans,
    predicted,
    write_run,
)

pytestmark = pytest.mark.slow  # nothing here depends on the version of Python or jax

QWEN = shape("qwen3-30b-a3b")
DENSE = 3 * 768 * 2048 * 2
"""Bytes of an expert."""


def settings(**changed):
    given = dict(config=QWEN, machine=Machine(), steps=4, interval="16 tokens", spares=1)
    return Settings(**given | changed)


# ---- stated costs


def test_a_decode_step_by_hand():
    """Dense, 1 row at context 1000, 8 experts in each of 48 layers."""
    machine = Machine(link=50e9, memory=4e12, overhead=1e-3)
    attention = 2048 * (32 + 2 * 4) * 128 + 32 * 128 * 2048  # q, k, v and output
    norms = 2 * 2048 + 2 * 128
    others = 2 * (48 * (attention + norms + 2048 * 128) + 2048 + 151936 * 2048)
    assert other_bytes(QWEN) == others
    kv = 16 * 64 * 48 * 2 * 4 * 128 * 2  # 16 spans of 64 tokens
    wanted = 1e-3 + (others + kv + 48 * 8 * DENSE) / 4e12
    model = stated_costs(QWEN, machine, "dense", 32)
    assert model.step_cost(1).seconds(Work(1, 16, 48 * 8, 0)) == pytest.approx(wanted, rel=1e-12)
    # Two experts that are missing in one layer, over the link.
    moved = model.moves_s("fill", np.array([2] + 47 * [0]), prefill=False).sum()
    assert moved == pytest.approx(2 * DENSE / 50e9)


def test_a_row_in_int4_by_hand():
    machine = Machine(
        memory=4e12, overhead=1e-3, decoding=Machine().decoding | {"int4": Decoding(0.5, 2e-3)}
    )
    model = stated_costs(QWEN, machine, "int4", 32)
    # Half a byte a weight and two of scales for each 128; in rows of 4096 bytes.
    assert version_bytes(QWEN, "int4") == model.expert_bytes
    assert DENSE // 4 + DENSE // 2 // 128 * 2 <= model.expert_bytes < 0.27 * DENSE
    work = Work(8, 8 * 2, 48 * 40, 0)
    kv = 16 * 64 * 48 * 2 * 4 * 128 * 2
    wanted = 3e-3 + (other_bytes(QWEN) + kv) / 4e12 + 48 * 40 * 0.5 * DENSE / 4e12
    assert model.step_cost(8).seconds(work) == pytest.approx(wanted, rel=1e-12)


def test_a_prefill_step_by_hand():
    """256 tokens of one prompt that need 100 experts of each layer, 20 of them twice."""
    machine = Machine(memory=4e12, overhead=1e-3, matrix=5e14, link=50e9)
    model = stated_costs(QWEN, machine, "dense", 32)
    head = 2 * 151936 * 2048
    products = 256 * (other_bytes(QWEN) - head) / 5e14  # two operations for two bytes
    scores = (1 + 2 + 3 + 4) * 4 * 64 * 64 * 32 * 128 * 48 / 5e14
    # 64 rows take 604 million operations, 1.2 µs: less than reading the expert, 2.4 µs.
    reads = 48 * 120 * DENSE / 4e12
    wanted = 1e-3 + other_bytes(QWEN) / 4e12 + products + scores + reads
    found = model.step_cost(None).seconds(Work(4, 1 + 2 + 3 + 4, 48 * 100, 48 * 20))
    assert found == pytest.approx(wanted, rel=1e-12)


def test_stated_costs_are_near_the_steps_that_design_measured():
    for line in check(QWEN, Machine()):
        stated, measured = (float(part.split()[0]) for part in line.split(": ")[1].split(", "))
        assert abs(stated / measured - 1) < 0.1, line


# ---- arms


@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_every_arm_stays_within_its_bytes(share):
    given = settings()
    memory = int(share * given.dense_bytes)
    scores = np.random.default_rng(0).random((48, 128))
    arms = plans(given, memory, scores)
    assert len(arms) == 6
    for made in arms.values():
        assert made is not None and made.used <= memory
        size = max(version_bytes(QWEN, version) for version in made.versions)
        # What is left over is less than an expert of each layer, or all have room.
        assert memory - made.used < 48 * size * 1.04 or made.note == "all resident"
    on, fixed = arms["DynaExq"], arms["DynaExq off"]
    assert on is not None and fixed is not None
    start = np.array(fixed.spec["resident"]["start"])
    assert np.array_equal(start, np.array(on.spec["resident"]["start"]))
    # The hottest of each layer, as many as fit beside all others in int4.
    assert (start == 0).sum() * DENSE + (start == 1).sum() * version_bytes(QWEN, "int4") <= memory


def test_dynaexq_does_not_fit_below_all_in_int4():
    given = settings()
    arms = plans(given, int(0.25 * given.dense_bytes), np.ones((48, 128)))
    assert arms["DynaExq"] is None and "DynaExq off" not in arms


def small_routing(sequences, tokens):
    rng = np.random.default_rng(1)

    def ids(*shape):
        drawn = rng.random((*shape, 48, 128)).argpartition(8, axis=-1)
        return np.sort(drawn[..., :8], axis=-1).astype(np.int16)

    warm = ids(WARM_TOKENS + WARM_STEPS, WARM_SEQUENCES)
    return Routing(ids(tokens, sequences), warm, np.ones((48, 128)))


def test_a_run_is_prefilled_in_order_and_decoded_together(tmp_path):
    given, routing = settings(), small_routing(3, 100)
    written = write_run(tmp_path / "t", given, routing, 3, 90)
    trace = written.trace
    assert written.first == 1 + WARM_STEPS and written.ends.tolist() == [0, 0, 0]
    assert trace.steps == written.first + 1 + given.steps
    *_, prefill = (s for s in trace.step_traces() if s.kind == "prefill")
    assert np.bincount(prefill.request).tolist() == [90, 90, 90]
    assert np.array_equal(prefill.ids[90:180], routing.ids[:90, 1])
    last = list(trace.step_traces())[-1]
    assert last.position.tolist() == [93] * 3 and np.array_equal(last.ids, routing.ids[93, :3])
    # 200 prompts of 90 tokens take three prefill steps, 91 end in the first.
    assert PREFILL // 90 == 91


def test_static_arms_never_move_and_paged_ones_pay_for_each_miss(tmp_path):
    given, routing = settings(), small_routing(1, 100)
    written = write_run(tmp_path / "t", given, routing, 1, 90)
    costs = {v: stated_costs(QWEN, given.machine, v, 8) for v in ("dense", "int8", "int4")}
    arms = plans(given, int(0.5 * given.dense_bytes), routing.scores)
    low, paged = arms["int4, static"], arms["dense, paged"]
    assert low and paged and low.one_resident and not paged.resident
    still = figures(given, written, low, costs)
    assert still["tpot_s"] == still["compute_s"] and still["misses"] == still["link_floor_s"] == 0
    found = foretold(written.trace, paged, costs, 128)
    took, misses = found.seconds, found.simulation.misses.sum(axis=1)
    assert misses[written.first :].any()
    # A step is whole nanoseconds.
    np.testing.assert_allclose(took - found.compute_s, misses * DENSE / 48e9, atol=1e-9)


@pytest.mark.nightly
@pytest.mark.slow
def test_predicted_lines_are_complete_and_ordered_as_their_floors(monkeypatch):
    monkeypatch.setattr(
        "scripts.precision.predicted.route", lambda s, n, t: small_routing(n, max(t, 100))
    )
    lines = list(predicted(settings(), [1, 4], [64], [0.4, 1.0]))
    assert {line["what"] for line in lines} == {"predicted"}
    assert len(lines) == 2 * 2 * 6
    for line in lines:
        # A step is whole nanoseconds.
        assert line["read_floor_s"] <= line["compute_s"] <= line["tpot_s"] + 1e-9
        assert line["link_floor_s"] <= line["tpot_s"] - line["compute_s"] + 1e-9
        assert line["tpot_s"] <= line["tpot_p99_s"] * (1 + 1e-9) and line["ttft_s"] > 0
    found = {(x["batch"], x["share"], x["arm"]): x for x in lines}
    assert found[1, 0.4, "dense, paged"]["misses"] > 0
    assert found[1, 1.0, "dense, paged"]["misses"] == 0
    # What is all resident takes the same in any memory.
    low = [found[4, share, "int4, static"]["tpot_s"] for share in (0.4, 1.0)]
    assert low[0] == low[1]


def test_predict_says_what_it_is_of_and_writes_all_of_it(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        "scripts.precision.predicted.route", lambda s, n, t: small_routing(n, max(t, 100))
    )
    told = ["--batch=1,2", "--prompt=64", "--shares=0.25,1", "--steps=2"]
    assert bench_precision.main([str(tmp_path), *told]) == 0
    out = capsys.readouterr().out
    assert out.startswith("predicted: the cost model at the size of Qwen3-30B-A3B")
    assert "48 GB/s" in out and "ASSUMED" in out and "none measured here" in out
    # DynaExq does not fit in a quarter: a dash in the tables of TPOT and of TTFT.
    rows = [line.split() for line in out.splitlines() if "   DynaExq   " in line]
    assert [row[3] for row in rows] == ["–"] * 4
    assert "crossovers by memory" in out and "DynaExq on / off" in out
    lines = [json.loads(line) for line in (tmp_path / "predicted.jsonl").read_text().splitlines()]
    assert {line["what"] for line in lines} == {"predicted"}
    assert (tmp_path / "predicted.png").stat().st_size > 10_000


# ---- crossovers


def crossing(share, one, other, batch=1):
    place = {"batch": batch, "prompt": 64, "share": share}
    return [
        {**place, "arm": a, "tpot_s": s} for a, s in (("dense, paged", one), ("DynaExq", other))
    ]


def test_a_crossover_is_from_where_on_it_holds_throughout():
    # Faster at 30%, not at 50%, faster from 70% on.
    lines = crossing(0.3, 1, 2) + crossing(0.5, 3, 2) + crossing(0.7, 1, 2) + crossing(1.0, 1, 2)
    found = list(bench_precision.crossovers(lines))
    what = "prompt 64, batch 1: dense, paged is faster than DynaExq"
    assert found == [f"{what} from 70% on (not at 50%)"]
    (never,) = bench_precision.crossovers(crossing(0.3, 2, 1) + crossing(1.0, 2, 1))
    assert never == f"{what} never (not at 100%)"
    (always,) = bench_precision.crossovers(crossing(0.3, 1, 2))
    assert always == f"{what} from 30% on (the least at which both run)"
    nobody = [{**line, "tpot_s": None} for line in crossing(0.3, 1, 2)]
    assert not list(bench_precision.crossovers(nobody))


def test_the_policys_own_cost_is_on_over_off():
    line = {"batch": 1, "prompt": 64, "share": 0.5, "staged": 2.0}
    lines = [{**line, "arm": "DynaExq", "tpot_s": 1.1}, {**line, "arm": "DynaExq off", "tpot_s": 1}]
    (text,) = bench_precision.overheads(lines)
    assert "at most 1.100 (prompt 64, 50%, 2.00 transitions a step); above 1.05 in 1 of 1" in text


# ---- what is refused


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ("{} --shares 0", "--shares are numbers above 0 and up to 1, not '0'"),
        ("{} --shares a", "--shares are numbers"),
        ("{} --steps 0", "--steps is from 1 on"),
        ("{} --batch 0", "--batch must be at least 1"),
        ("{} --prompt x", "--prompt takes whole numbers"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path, capsys, told, message):
    assert bench_precision.main(told.replace("{}", str(tmp_path)).split()) == 2
    assert message in capsys.readouterr().err

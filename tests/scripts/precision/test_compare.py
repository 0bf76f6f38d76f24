"""What the command `compare` says is what the windows say, and pictures show what a trace has."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest

from host_offload.control.interface import Transition
from host_offload.traces.reader import TraceError, TransferTrace, read_trace
from moejax.errors import UserError
from pallas_kernels.records import RecordFormat
from scripts.parts.places import SHARED
from scripts.parts.version_history import steps_to_converge, version_history
from scripts.precision import arms as precision_arms
from scripts.precision import compare as compare_precision
from scripts.precision import engine as precision_engine
from scripts.precision import plot as plot_versions
from scripts.precision import report as precision_report
from scripts.precision import stream as precision_stream
from tests.host_offload.traces.traces_of import write_trace


def line(values, arm="an arm", **more):
    nll = {name: list(map(float, of)) for name, of in values.items()}
    return {"pair": "a/b@int8", "arm": arm, "nll": nll, "tokens": 10, **more}


# ---- figures


def test_perplexity_counts_every_token_alike():
    found = line({"x": [10, 20], "y": [30]})
    assert precision_report.perplexity(found) == pytest.approx(np.exp(60 / 30))
    assert precision_report.perplexity(found, ["y"]) == pytest.approx(np.exp(3))


def test_a_paired_interval_is_narrow_where_windows_differ_and_arms_do_not():
    rng = np.random.default_rng(1)
    windows = {"x": rng.normal(30, 8, 40), "y": rng.normal(20, 8, 40)}
    worse = {name: values + 0.1 + rng.normal(0, 0.02, 40) for name, values in windows.items()}
    gap, low, high = precision_report.difference(line(worse), line(windows))
    assert low < gap < high and high - low < 0.2
    # A hundredth of a nat a token is one per cent of perplexity.
    assert gap == pytest.approx(100 * np.expm1(0.01), rel=0.1) and low > 0
    # The other way about, with the same draws.
    back = precision_report.difference(line(windows), line(worse))
    assert back[1] < back[0] < back[2] < 0
    same = precision_report.difference(line(windows), line(windows))
    assert same == (0, 0, 0)


def test_an_interval_covers_the_truth_as_often_as_it_says():
    """95% of intervals over drawn windows hold the difference that they were drawn with."""
    rng, inside = np.random.default_rng(0), 0
    for _ in range(200):
        base = {"x": np.zeros(25)}
        gaps = {"x": rng.normal(0.1, 0.3, 25)}
        _, low, high = precision_report.difference(line(gaps), line(base))
        inside += low <= 100 * np.expm1(0.01) <= high
    assert 0.88 < inside / 200 <= 0.99


def test_orders_and_seeds_are_one_arm():
    lines = [
        line({"x": [1, 2]}, "random 0"),
        line({"x": [3, 4]}, "random 1"),
        line({"x": [5, 5]}, "calibrated on all"),
    ]
    arms = precision_report.arms_of(lines, "a/b@int8")
    assert [arm["arm"] for arm in arms] == ["random (mean of 2)", "calibrated on all"]
    assert arms[0]["nll"] == {"x": [2, 3]}


def test_pairs():
    pair = compare_precision.parse_pair("dense/int4@int8")
    assert (pair.hi, pair.lo, pair.rival, pair.share) == ("dense", "int4", "int8", None)
    assert compare_precision.parse_pair("int4/int2@0.5").name == "int4/int2@50%"
    for text in ("dense/int4", "dense/int5@int8", "dense@int8", "int4/int2@1", "int4/int2@x"):
        with pytest.raises(UserError, match="is no pair; give HI/LO@VERSION or HI/LO@SHARE"):
            compare_precision.parse_pair(text)


def arms_of_tri():
    """Arms without an engine: what bytes are needs formats only."""
    arms = object.__new__(precision_arms.Arms)
    arms.engine = SimpleNamespace(
        layers=6, experts=32, format=lambda version: RecordFormat(version, 320, 128, "bfloat16")
    )
    return arms


@pytest.mark.parametrize("text", ["dense/int4@int8", "int8/int2@int4", "int4/int2@0.5"])
@pytest.mark.parametrize("spares", [0, 1, 2, 8])
def test_every_arm_has_the_rivals_bytes(text, spares):
    """Within one per cent, spare cells included, for experts of the size of tri's."""
    pair, total, arms = compare_precision.parse_pair(text), 6 * 32, arms_of_tri()
    line = arms.line(pair, "an arm", {}, spares)
    hi, lo = arms.bytes_of(pair.hi), arms.bytes_of(pair.lo)
    assert line["bytes"] == (line["high"] + spares) * hi + (total - line["high"] + spares) * lo
    assert line["budget"] == (line["rival_bytes"] or (hi + lo) * total / 2)
    assert abs(line["bytes"] / line["budget"] - 1) < 0.01


def test_an_arm_that_is_off_its_bytes_is_refused():
    arms = arms_of_tri()
    with pytest.raises(UserError, match="has room for -1 high experts of 192 beside 2 spare cells"):
        arms.high(compare_precision.parse_pair("dense/int2@0.01"), 2)
    arms.engine.layers, arms.engine.experts = 1, 3
    with pytest.raises(UserError, match=r"dense/int4@int8 with 0 spares is [+-]\d.*off its bytes"):
        arms.high(compare_precision.parse_pair("dense/int4@int8"))


def test_bytes_beyond_a_per_cent_are_marked():
    stats = {"peak_bytes": 1020}
    found = line({}, bytes=1005, budget=1000, stats=stats)
    assert precision_report.bytes_told(found) == "+0.50% (+2.00%!)"
    assert precision_report.bytes_told(line({}, bytes=985, budget=1000)) == "-1.50%"
    assert precision_report.bytes_told(line({})) == ""


# ---- how soon the high set follows


def test_agreement_is_of_the_domain_that_a_step_is_in():
    version = np.array([[[1, 1, 1, 1]], [[0, 1, 1, 1]], [[0, 0, 1, 1]], [[1, 0, 1, 0]]], np.int8)
    history = SimpleNamespace(tokens=np.array([4, 4, 4, 4]), version=version)
    order = [SimpleNamespace(name="x"), SimpleNamespace(name="y")]
    wanted = {"x": np.array([[1, 1, 0, 0]], bool), "y": np.array([[0, 0, 0, 1]], bool)}
    found = precision_stream.agreement(history, order, [7, 9], wanted)
    # The step that begins with token 4 is x's, although y's first token, 7, is in it.
    assert found == {"x": [[0, 0.0], [4, 0.5]], "y": [[1, 0.0], [5, 1.0]]}


def test_tokens_to_follow():
    curve = [[0, 0.2], [100, 0.4], [200, 0.7], [300, 0.8], [400, 0.8]]
    assert precision_stream.tokens_to_follow(curve, 0.8) == 300
    assert precision_stream.tokens_to_follow(curve, 0.7) == 200
    assert precision_stream.tokens_to_follow(curve, 1.0) is None
    assert precision_stream.tokens_to_follow(curve, 0.1) == 0  # it began beyond that
    assert precision_stream.level(curve) == pytest.approx(np.mean([0.7, 0.8, 0.8]))
    assert precision_stream.by_window([[0, 0.2], [600, 0.4], [700, 0.6]], 3) == [0.2, 0.5, 0.5]


def test_shifts_are_measured_against_transitions_that_block(capsys):
    def run(arm, curve, steps=10):
        stats = {"promotions": 3, "demotions": 2, "peak_bytes": 1}
        first = [[0, 0.0], [100, 1.0]]
        values = {} if arm.startswith("decode") else {"x": [1.0], "y": [2.0]}
        told = dict(order=["x", "y"], stats=stats, steps=steps, high=7, study="shifts")
        return line(values, arm, agreement={"x": first, "y": curve}, **told)

    slow = [[0, 0.2], [50, 0.4], [100, 0.6]]
    quick = [[0, 0.2], [50, 0.8], [100, 0.8]]
    lines = [run("2 spares", slow), run("8 spares", [[0, 0.2], [50, 0.75], [100, 0.75]])]
    lines += [run("blocking", quick), run("decode, 2 spares", slow)]
    lines += [run("decode, blocking", [[0, 0.2], [50, 0.6], [100, 0.6]])]
    rows = {row["arm"]: row for row in precision_report.shifts_of(lines)}
    assert rows["2 spares"]["tokens"] == [None] and rows["2 spares"]["reach"] == 0.8
    assert rows["8 spares"]["tokens"] == [50] and rows["8 spares"]["moves"] == 0.5
    assert rows["decode, 2 spares"]["tokens"] == [100]  # 0.6 is all that decode reaches
    dense = dict(pair=None, version="dense", bytes=1, dense_bytes=1)
    precision_report.show([{**line({"x": [1]}), **dense}, *lines])
    said = capsys.readouterr().out
    assert "1 of 1 shifts, mean 50" in said and "0 of 1 shifts" in said and "(sampled)" in said


# ---- what cannot be done


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ablation"], "give the ablation's --name: no-hysteresis, no-ema"),
        (["run", "--windows", "0"], "--orders and --prefill are at least 1"),
        (["run", "--pairs", "dense"], "is no pair"),
        (["run", "--text", "/nowhere.txt"], "cannot read /nowhere.txt"),
    ],
)
def test_what_cannot_be_asked_is_said(tmp_path, capsys, arguments, message):
    what, *rest = arguments
    assert compare_precision.main([what, str(tmp_path), "--no-plots", *rest]) == 2
    assert message in capsys.readouterr().err


def test_results_of_other_sizes_are_not_mixed(tmp_path, capsys, monkeypatch):
    """A directory's second run adds to the first one's lines, unless it is of something else."""

    def lines(args, pairs, known):
        yield line({"x": [1.0]}, f"line {len(known)}", order=["x"], study="shifts")

    monkeypatch.setattr(compare_precision, "_lines", lines)
    monkeypatch.setattr(compare_precision, "show", lambda lines: print(len(lines), "lines"))
    arguments = [str(tmp_path), "--no-plots", "--windows", "2"]
    assert [compare_precision.main(["run", *arguments]) for _ in range(2)] == [0, 0]
    assert capsys.readouterr().out.split("\n")[:2] == ["1 lines", "2 lines"]
    assert compare_precision.main(["run", str(tmp_path), "--no-plots"]) == 2
    assert "has results of --windows 2; give that, or another" in capsys.readouterr().err


def test_what_is_known_is_not_made_again():
    arms, pair = arms_of_tri(), compare_precision.parse_pair("dense/int4@int8")
    arms.known = [
        {"pair": None, "arm": "all int8"},
        {"pair": pair.name, "arm": "random 0"},
        {"pair": pair.name, "arm": "DynaExq", "order": ["x", "y"]},
        {"pair": pair.name, "arm": "blocking", "order": ["x", "y"], "study": "shifts"},
    ]
    assert arms.has(None, "all int8") and not arms.has(None, "all int4")
    assert arms.has(pair, "random 0") and not arms.has(pair, "random 0", study="hi-share")
    assert arms.has(pair, "DynaExq", ["x", "y"]) and not arms.has(pair, "DynaExq", ["y", "x"])
    assert arms.has(pair, "blocking", ["x", "y"], "shifts")
    arms.score, arms.say = pytest.fail, lambda text: None
    assert list(arms.fixed(pair, iter([("random 0", None)]))) == []


@pytest.fixture(scope="module")
def map_engine(tmp_path_factory):
    """demo's experts, calibrated on two windows of one text."""
    model = str(SHARED / "models/demo")
    domains = precision_engine.read_domains([str(SHARED / "corpora/math.txt")])
    directory = tmp_path_factory.mktemp("calibration")
    found = precision_engine.calibrate(model, domains, 2, 1, directory)
    engine = precision_engine.MapEngine(model, found.inputs)
    yield SimpleNamespace(engine=engine, model=model, domains=domains, found=found)
    engine.close()


@pytest.mark.nightly
def test_the_checkpoint_and_the_maps_have_the_same_weights(map_engine, tmp_path):
    """gptq is among them. With other quantizers the two differ, and that is said."""
    m = map_engine
    quantizers = {"int4": "gptq", "int2": "rtn"}
    precision_engine.write_versions(m.engine, m.model, quantizers, tmp_path / "versions")
    experts = np.zeros((m.engine.layers, m.engine.experts), np.int8)
    experts[:, ::2] = 1
    told = dict(versions=("int4", "int2"), experts=experts, domains=m.domains)
    check = functools.partial(
        precision_stream.check_agreement, m.engine, tmp_path / "versions", **told
    )
    check(quantizers=quantizers, dynamic=True)
    with pytest.raises(UserError, match="the arms would not compute with the same weights"):
        check(quantizers={"int4": "rtn", "int2": "rtn"}, dynamic=False)


@pytest.mark.nightly
def test_gptq_s_outputs_are_nearer_where_the_calibration_looked(map_engine):
    m = map_engine
    errors = {
        quantizer: precision_engine.output_errors(m.engine, m.found, "int2", quantizer)
        for quantizer in ("rtn", "gptq")
    }
    used = errors["rtn"] > 0
    assert np.mean(errors["gptq"][used]) < 0.9 * np.mean(errors["rtn"][used])
    assert (m.found.counts["math"].sum(1) == 2 * 511 * 4).all()


def test_what_cannot_be_read_is_said(tmp_path, capsys):
    assert compare_precision.main(["draw", str(tmp_path)]) == 2
    assert "run it first" in capsys.readouterr().err
    assert plot_versions.main([str(tmp_path), str(tmp_path)]) == 2
    assert "is no trace" in capsys.readouterr().err


# ---- the history of a trace


START = [[1, 1, 1, 1], [0, 1, 1, 1]]


@pytest.fixture
def trace(tmp_path):
    """Six steps of two layers of four experts. Decided after step 1: two promotions and a
    demotion; step 3 carries out two of them, step 4 the last one."""
    spec = {"version_bytes": {"dense": 100, "int4": 30}, "precision": {"start": START}}
    ids = np.zeros((3, 2, 1))
    write_trace(tmp_path / "t", [ids] * 6, 4, spec=spec, chunk_bytes=1)
    # The writer of traces_of writes no transfers, so they are put behind it.
    return read_trace(tmp_path / "t")


MOVED = (
    TransferTrace(0, 2, 0, 100, 3, 3, 4, "promotion"),
    TransferTrace(1, 0, 1, 30, 3, 3, -1, "demotion"),
    TransferTrace(1, 3, 0, 100, 3, -1, -1, "promotion"),
    TransferTrace(1, 3, 0, 100, 4, 4, 5, "promotion"),
    TransferTrace(0, 0, 0, 100, 4, 4, 5, "prefetch"),
)


def test_a_history_is_what_the_transfers_made(trace, monkeypatch):
    wanted = [Transition(0, 2, 0), Transition(1, 3, 0), Transition(1, 0, 1)]
    decisions = [
        {"step": 1, "moment": "INTERVAL", "decision": {"transitions": [[*t] for t in wanted]}},
        {"step": 3, "moment": "INTERVAL", "decision": {"transitions": "as before"}},
    ]
    monkeypatch.setattr(type(trace), "transfers", lambda self: iter(MOVED))
    monkeypatch.setattr(type(trace), "decisions", lambda self: iter(decisions))
    history = version_history(trace)
    assert history.version[3].tolist() == START  # carried out behind its experts
    assert history.version[4].tolist() == [[1, 1, 0, 1], [1, 1, 1, 1]]
    assert history.version[5].tolist() == [[1, 1, 0, 1], [1, 1, 1, 0]]
    assert history.moved["promotion"].tolist() == [0, 0, 0, 1, 1, 0]
    assert history.moved["demotion"].tolist() == [0, 0, 0, 1, 0, 0]
    assert history.bytes.tolist() == [0, 0, 0, 130, 100, 0]
    assert history.waiting.tolist() == [0, 0, 3, 3, 1, 0]
    assert history.resident_bytes.tolist() == [310] * 4 + [310, 380]
    assert history.tokens.tolist() == [3] * 6
    top = np.array([[0, 0, 1, 0], [0, 0, 0, 1]], bool)
    assert steps_to_converge(history, top, 1, 6) == 4
    assert steps_to_converge(history, top, 1, 6, within=0.5) == 3
    assert steps_to_converge(history, top, 0, 4) is None


def test_a_run_with_one_version_has_no_history(tmp_path):
    trace = write_trace(tmp_path / "t", [np.zeros((1, 1, 1))], 2)
    with pytest.raises(TraceError, match="one version of each expert; record one with --precision"):
        version_history(trace)

"""Bytes of transitions in a step: where the bound comes from, and that a step keeps to it."""

from __future__ import annotations

from typing import Any

import pytest

from host_offload.policies.precision.names import Precision, precision_of
from moejax import LLM, SamplingParams, UserError
from moejax.costs.transition_bound import step_bound
from moejax.progress import versions_progress
from moejax.start.precision import made_by
from tests.host_offload.sizing.cost_models import MODEL

DYNAEXQ = precision_of("dynaexq")


SMALL: dict[str, Any] = dict(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=256)


GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


def bound(
    platform="gpu", kind="NVIDIA H200", precision: Precision = DYNAEXQ, costs=None, read=4 * 10**9
):
    return step_bound(precision, platform, kind, costs=costs, step_read_bytes=read)


@pytest.mark.parametrize(
    ("options", "nbytes", "source"),
    [
        # 4 GB at 4.8 TB/s are 833 µs; a twentieth of that at 48 GB/s.
        ({}, 2_000_000, "stated"),
        # 500 µs at 8 TB/s; a twentieth at 12 GB/s.
        ({"kind": "Another GPU"}, 300_000, "assumed"),
        ({"kind": "NVIDIA A100-SXM4-80GB"}, 2_400_000, "stated"),
        # A row that reads 2 · 2 experts: 1000 + 10 + 1 + 4 · 100 s; a twentieth at 20 bytes/s.
        ({"costs": MODEL}, 1411, "costs"),
        ({"costs": MODEL, "precision": precision_of("dynaexq,step_bytes=7")}, 7, "given"),
        ({"platform": "cpu", "kind": "cpu"}, None, "list"),
        ({"platform": "cpu", "precision": precision_of("dynaexq,step_bytes=7")}, 7, "given"),
        ({"precision": precision_of("dynaexq,blocking=true")}, None, "list"),
        ({"read": 1}, 1, "stated"),
    ],
)
def test_where_the_bound_comes_from(options, nbytes, source):
    found, where = bound(**options)
    assert where == source
    assert found == (None if nbytes is None else pytest.approx(nbytes, abs=1))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dynaexq,step_bytes=0", "step_bytes='0' is not a whole number, 1 or more"),
        ("dynaexq,step_bytes=1MiB", "step_bytes='1MiB' is not a whole number"),
        ("dynaexq,paged=true,step_bytes=9", "step_bytes means nothing where experts are paged"),
        ("random,step_bytes=9", "precision 'random' has no setting 'step_bytes=9'"),
    ],
)
def test_bounds_that_mean_nothing_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        LLM("/no/such/model", precision=text)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """An LLM whose bound is smaller than one expert, with its statistics after a run."""
    text = "dynaexq,margin=0,spares=4,step_bytes=30000"
    options = dict(interval="8 tokens", hi_share=0.25, quantizer="mse", progress=False, **SMALL)
    with LLM("demo", precision=text, **options) as llm:
        llm.generate(["The old house stood", "def area(width, height):"], GREEDY)
        yield llm, llm.stats()


@pytest.mark.nightly
def test_a_step_has_no_more_than_one_transition_beyond_its_bound(ran):
    """30,000 bytes are one int4 expert (26,112) and no dense one (98,304): a step may have either,
    never two, and the steps with a dense one are counted."""
    llm, stats = ran
    found = stats["precision"]
    low, high = sorted(llm.engine.runner.link_bytes)
    assert low < found["step_bytes"] == 30_000 < high and found["step_bytes_from"] == "given"
    assert found["most_step_bytes"] == high
    assert found["over_step_bytes"] == found["promotions"] > 2
    assert any("of at most 30000 bytes a step (as given; one" in text for text in stats["notes"])


def test_a_maker_that_nobody_names_is_the_checkpoint():
    found = made_by(("dense", "int8", "int4"), {"int4": "gptq, 32768 tokens 1234", "int2": "rtn"})
    assert found == {"dense": "checkpoint", "int8": "checkpoint", "int4": "gptq, 32768 tokens 1234"}


def test_the_bar_while_versions_are_made(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    with versions_progress(True) as report:
        assert report is not None
        report("int4", 5 * 10**6, 10**7)
        report("int8", 10**6, 10**7)
    err = capsys.readouterr().err
    assert "making int4" in err and "5.0/10.0 MB" in err and "making int8" in err
    with versions_progress(False) as report:
        assert report is None
    assert capsys.readouterr().err == ""

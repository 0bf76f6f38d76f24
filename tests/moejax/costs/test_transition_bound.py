"""Bytes of transitions in a step: where the bound comes from, and that a step keeps to it."""

from __future__ import annotations

import pytest

from host_offload.policies.precision.precision_names import Precision, precision_of
from moejax import LLM, UserError
from moejax.costs.store import cost_file, identity
from moejax.costs.transition_bound import step_bound
from moejax.progress import byte_progress
from moejax.start.precision import name_makers
from tests.moejax.engine.budget_workload import planned

DYNAEXQ = precision_of("dynaexq")


def bound(platform="gpu", kind="NVIDIA H200", precision: Precision = DYNAEXQ, read=4 * 10**9):
    return step_bound(precision, platform, kind, read)


@pytest.mark.parametrize(
    ("options", "nbytes", "source"),
    [
        # 4 GB at 4.8 TB/s are 833 µs; a twentieth of that at 48 GB/s.
        ({}, 2_000_000, "stated"),
        # 500 µs at 8 TB/s; a twentieth at 12 GB/s.
        ({"kind": "Another GPU"}, 300_000, "assumed"),
        ({"kind": "NVIDIA A100-SXM4-80GB"}, 2_400_000, "stated"),
        ({"precision": precision_of("dynaexq,step_bytes=7")}, 7, "given"),
        ({"platform": "cpu", "kind": "cpu"}, None, "list"),
        ({"platform": "cpu", "precision": precision_of("dynaexq,step_bytes=7")}, 7, "given"),
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
        ("dynaexq,paged=true,step_bytes=9", "step_bytes does not apply with paged=true"),
        ("random,step_bytes=9", "step_bytes bounds what versions that change move; add spares=1"),
    ],
)
def test_bounds_that_mean_nothing_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        LLM("/no/such/model", precision=text)


def test_costs_are_kept_by_version(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    versions = ("dense", "lossless12", "lossless12,in_transit=true", "dynaexq")
    steps = [planned(precision=version, memory="8MiB").steps for version in versions]
    assert len({cost_file(identity(each)) for each in steps}) == 4


def test_a_maker_that_nobody_names_is_the_checkpoint():
    found = name_makers(("dense", "int8", "int4"), {"int4": "mse", "int2": "rtn"})
    assert found == {"dense": "checkpoint", "int8": "checkpoint", "int4": "mse"}


def test_the_bar_while_versions_are_made(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    with byte_progress("making", True) as report:
        report("int4", 5 * 10**6, 10**7)
        report("int8", 10**6, 10**7)
    err = capsys.readouterr().err
    assert "making int4" in err and "5.0/10.0 MB" in err and "making int8" in err
    with byte_progress("making", False) as report:
        report("int4", 1, 2)
    assert capsys.readouterr().err == ""

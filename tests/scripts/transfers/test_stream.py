"""The measured cells of streaming: what a file of them says, what is refused, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import scripts.transfers.streaming
from moejax.errors import UserError
from scripts.transfers import handles
from scripts.transfers.stream import main, measured
from scripts.transfers.streaming.arms import Group, arm_options, load, read_groups, sizes_of
from tests.pallas_kernels.contract import NATIVE

pytestmark = pytest.mark.slow

SUBSET = Path(scripts.transfers.streaming.__path__[0]) / "cells.yaml"

DEMO = """groups:
- {name: small, shape: demo, residents: 8, rate: 200MB/s, places: [[2, 32], [4, 16]], steps: 2,
   arms: [stream, paging, paging-48]}
- {name: tiers, shape: demo, residents: 8, rate: 200MB/s, places: [[2, 32]], steps: 2,
   arms: [stream, flux, flux-h]}
- {name: files, shape: demo, residents: 4, store: file, places: [[2, 32]], steps: 2, arms: [stream]}
"""


def test_the_measured_subset_has_at_most_60_places_of_the_shape():
    groups = read_groups(SUBSET)
    assert sum(len(group.places) for group in groups) <= 60
    assert {(group.shape, group.layers) for group in groups} == {("qwen3-30b-a3b", 4)}
    assert any(group.store == "file" for group in groups)
    assert {batch for group in groups for batch, _ in group.places} >= {8, 256}
    assert all("stream" in group.arms for group in groups)


def test_arms_have_equal_bytes_and_paging_n_those_of_a_deeper_model():
    group = Group("a", ((2, 32),), 8, 1e9, ("stream",), "demo", 4)
    loaded = load(group, None)
    try:
        slot = loaded.layout.nbytes
        # Of 16 experts 8 are kept in each of four layers, beside two layers' other 8.
        for name in ("stream", "paging"):
            assert arm_options(name, loaded, group)["expert_budget"] == (4 * 8 + 2 * 8) * slot
        # Of 48 layers each has a third of an expert of the window.
        assert arm_options("paging-48", loaded, group)["expert_budget"] == 4 * 8 * slot
        assert arm_options("vllm-o", loaded, group)["tiers"] == "flux,by=layers,dense=0.25"
        with pytest.raises(UserError, match="leave vllm-o 0 whole layers"):
            arm_options("vllm-o", loaded, Group("a", ((2, 32),), 4, 1e9, (), "demo", 4))
    finally:
        loaded.store.delete()


def test_engines_have_one_size_for_all_groups():
    small = Group("a", ((2, 32), (64, 1024)), 8, 1e9, ())
    large = Group("b", ((16, 4096),), 100, 1e9, ())
    sizes = sizes_of([small, large], 128)
    assert (sizes.batch, sizes.context) == (64, 4096 + 5)
    assert sizes.tokens == 64 * (1024 + 5 + 16) and sizes.experts == 4 * 100 + 2 * 28


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("places: 3", "has no list `groups`"),
        ("groups: [{name: a}]", "a group is of name, places"),
        ("groups: [{name: a, places: [[1, 2]], residents: 0, arms: [swap]}]", "not 'swap'"),
        (
            "groups: [{name: a, places: [[1, 2]], residents: 0, arms: [stream], routing: real}]",
            "routing is one of",
        ),
        ("groups: [{name: a, places: [[0, 2]], residents: 0, arms: [stream]}]", "positive"),
        (
            "groups: [{name: a, places: [[1, 2]], residents: 0, arms: [stream], layers: 2}]",
            "layers 3 on",
        ),
        (
            "groups: [{name: a, places: [[1, 2]], residents: 0, arms: [stream], rate: fast}]",
            "'fast' is not a rate",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(text, message, tmp_path, capsys):
    path = tmp_path / "cells.yaml"
    path.write_text(text)
    assert main([str(path)]) == 2
    assert message in capsys.readouterr().err


def test_groups_rounds_files_and_options_that_are_not_there_are_refused(tmp_path, capsys):
    for arguments, message in (
        ([str(SUBSET), "--only", "all"], "has no group all"),
        ([str(SUBSET), "--rounds", "0"], "--rounds is 1 or more"),
        ([str(SUBSET), "--only", "files"], "say with --folder"),
        ([str(tmp_path / "none.yaml")], "cannot be read"),
    ):
        assert main(arguments) == 2
        assert message in capsys.readouterr().err
    assert handles.main(["--folder", str(tmp_path), "--layers", "2"]) == 2
    assert "--layers 3 or more" in capsys.readouterr().err


@NATIVE
@pytest.mark.nightly
def test_it_runs_small_and_goes_on_where_it_ended(tmp_path, capsys):
    cells, output = tmp_path / "cells.yaml", tmp_path / "out.jsonl"
    cells.write_text(DEMO)
    common = [str(cells), "--folder", str(tmp_path), "--output", str(output)]
    assert main(common) == 0
    rows = [json.loads(text) for text in output.read_text().splitlines()]
    by = {(row["name"], row["batch"], row["arm"]): row for row in rows}
    assert len(rows) == len(by) == 2 + 2 * 3 + 3 + 1
    assert len(measured(output)) == len(rows) and len({row["began"] for row in rows}) == 1
    # Eight experts of each of four layers stream, half of them used or not.
    assert by["small", 2, "stream"]["link_mb"] == pytest.approx(4 * 8 * 98304 / 1e6, rel=0.5)
    assert by["small", 2, "paging"]["link_mb"] < by["small", 2, "paging-48"]["link_mb"]
    assert by["tiers", 2, "flux"]["decoded_mb"] > 0
    assert all(len(row["seconds"]) == 2 for row in rows)
    # It goes on with what the file lacks, and with nothing else.
    lines = output.read_text().splitlines(keepends=True)
    lost = [row["name"] == "small" and row["batch"] == 4 for row in rows]
    output.write_text("".join(t for t, gone in zip(lines, lost, strict=True) if not gone))
    assert main(common) == 0
    again = [json.loads(text) for text in output.read_text().splitlines()][-4:]
    assert [(row["arm"], row["batch"]) for row in again] == [
        ("compute", 4),
        ("stream", 4),
        ("paging", 4),
        ("paging-48", 4),
    ]
    assert len(measured(output)) == len(rows)


@NATIVE
@pytest.mark.nightly
def test_handles_run_small(tmp_path, capsys):
    sizes = "--shape demo --batch 2 --context 32 --rounds 2 --steps 2 --json"
    assert handles.main(["--folder", str(tmp_path), *sizes.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["handles / plain"][0] > 0 and found["rounds"] == 2

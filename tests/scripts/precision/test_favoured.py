"""What routers that favour residents cost: by the text's own tokens, whatever a model says."""

import json

import pytest

from scripts.precision import favoured


@pytest.mark.slow  # three engines
def test_hits_rise_and_without_a_delta_nothing_changes(tmp_path, capsys):
    (tmp_path / "text").write_text("It was a bright cold day in April, and the clocks struck. " * 9)
    told = ["demo", "--text", str(tmp_path / "text"), "--deltas", "0,0.2", "--rows", "2", "--json"]
    assert favoured.main([*told, "--sequences", "3", "--tokens", "40"]) == 0
    plain, biased = json.loads(capsys.readouterr().out)
    assert (plain["agreement"], plain["change"], plain["tokens"]) == (1, 0, 3 * 24)
    assert biased["agreement"] < 1 and biased["change"] != 0
    assert plain["hit_rate"] + 0.1 < biased["hit_rate"]
    assert plain["missed_per_token"] > biased["missed_per_token"] > 0
    assert 1 < plain["perplexity"] < 4096


def test_what_cannot_be_measured_is_said(tmp_path, capsys):
    assert favoured.main(["demo", "--text", str(tmp_path / "no"), "--deltas", "a"]) == 2
    assert "--deltas are numbers such as 0,0.05, not 'a'" in capsys.readouterr().err
    (tmp_path / "text").write_text("Too short.")
    assert favoured.main(["demo", "--text", str(tmp_path / "text"), "--rows", "1"]) == 2
    assert "tokens, less than 16 times 128" in capsys.readouterr().err

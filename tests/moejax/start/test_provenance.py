"""What binds results to what made them cannot be forgotten."""

import dataclasses
import hashlib

import numpy as np
import pytest

from moejax.requests.sampling_params import SamplingParams
from moejax.start.decide import start_plan
from moejax.start.options import OPTIONS, Keywords
from moejax.start.provenance import DEFAULTS, decided_by
from tests.host_offload.traces.traces_of import write_trace

KNOWN = {1: "4f6773e6caf6a2c3", 2: "b7dc5264cf6384a3", 3: "e52d7cbb4ef29cd1", 4: "b0f30df95f5254b6"}
"""provenance.DEFAULTS -> a digest of the defaults that decide bits."""


def test_another_default_is_another_number():
    """Whoever changes one raises provenance.DEFAULTS, and adds the digest that is said here."""
    defaults = {
        f.name: f.default
        for f in dataclasses.fields(Keywords)
        if f.name in OPTIONS and f.name != "model"
    }
    options = [(n, defaults[n]) for n in sorted(defaults) if OPTIONS[n].changes_bits]
    decided = repr((options, sorted(vars(SamplingParams()).items()), start_plan._LIMITS))
    assert hashlib.sha256(decided.encode()).hexdigest()[:16] == KNOWN[DEFAULTS]


def test_options_that_are_files_count_by_content(tmp_path, demo_dir):
    (tmp_path / "a").write_text("one")
    before = decided_by(demo_dir, {"name_map": tmp_path / "a", "expert_budget": "1GiB"})
    assert set(before) == {"defaults", "name_map", "weights"}
    (tmp_path / "a").rename(tmp_path / "b")
    assert decided_by(demo_dir, {"name_map": str(tmp_path / "b")}) == before
    (tmp_path / "b").write_text("two")
    assert decided_by(demo_dir, {"name_map": tmp_path / "b"}) != before


@pytest.mark.parametrize(
    ("option", "prefix", "settings"),
    [("cache_aware_routing", "buddies=", ",spread=10%"), ("placement", "recorded=", "")],
)
def test_traces_that_options_name_count_by_what_they_say(
    tmp_path, demo_dir, option, prefix, settings
):
    def decided(name: str) -> str:
        given = {option: f"{prefix}{tmp_path / name}{settings}"}
        return decided_by(demo_dir, given)[option]

    ids = [np.array([[[0, 1]], [[1, 2]]])]
    write_trace(tmp_path / "a", ids, 4)
    before = decided("a")
    (tmp_path / "a").rename(tmp_path / "b")
    assert decided("b") == before and before.endswith(settings)
    write_trace(tmp_path / "a", [ids[0] + 1], 4)
    assert decided("a") != before
    assert str(tmp_path / "gone") in decided("gone")  # the workers of a cluster may have it

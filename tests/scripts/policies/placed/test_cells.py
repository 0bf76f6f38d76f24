"""The cells of PreScope's grid that are measured, as a file names them."""

from pathlib import Path

import pytest

from moejax.errors import UserError
from scripts.policies.placed import cells
from scripts.policies.processors import ARMS

GROUP = "groups:\n- {name: a, rows: [1, 4], arms: [prescope, fate], input: 8, output: 4}\n"


def test_what_is_measured_is_at_most_60_cells():
    groups = cells.read_groups(str(Path(cells.__file__).with_name("cells.yaml")), ARMS)
    assert sum(group.cells for group in groups.values()) == cells.MOST == 60
    assert {(group.input, group.output) for group in groups.values()} == {(512, 64)}
    assert {group.rows[0] for group in groups.values()} == {1, 4, 16, 64}
    assert groups["files"].store == "file" and groups["link-slow"].link_rate == "61MB/s"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GROUP.replace("fate", "nobody"), "there is no arm 'nobody'"),
        (GROUP.replace("input: 8, ", ""), "is no definition of cells"),
        (GROUP.replace("rows: [1, 4]", f"rows: {[*range(1, 32)]}"), "names 62 cells"),
        (GROUP + GROUP.split("\n")[1] + "\n", "two groups have a name"),
        ("- 1", "is no definition of cells"),
    ],
)
def test_what_is_no_definition_is_refused(text, message, tmp_path):
    path = tmp_path / "cells.yaml"
    path.write_text(GROUP)
    assert cells.read_groups(str(path), ARMS)["a"].cells == 4
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        cells.read_groups(str(path), ARMS)

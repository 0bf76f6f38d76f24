"""docs/reference/grids.md has every key."""

import re

import pytest

from moejax.evaluate.experiments.definition import KEYS


@pytest.fixture(scope="module")
def page(repository):
    return (repository / "docs/reference/grids.md").read_text()


def test_the_page_has_every_key(page):
    section = page[page.index("## Keys") : page.index("## Two versions")]
    first = "".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`(\w+)`", first)) == set(KEYS)

"""docs/how-to/compare_policies.md has every key; its commands are run by .ci/run."""

import re

import pytest

from moejax.evaluate.experiments.definition import KEYS


@pytest.fixture(scope="module")
def page(repository):
    return (repository / "docs/how-to/compare_policies.md").read_text()


def test_the_page_has_every_key(page):
    section = page[page.index("## What a grid says") : page.index("## How it runs")]
    first = "".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`(\w+)`", first)) == set(KEYS)

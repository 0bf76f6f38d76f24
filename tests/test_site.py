"""The site's generated reference has everything that the code has."""

from __future__ import annotations

import argparse
import html
import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml

from moejax import LLM, SamplingParams
from moejax.commands.main import COMMANDS, main
from moejax.start.options import OPTIONS
from scripts.site.headlines import IMAGES, NO_NUMBER, NUMBERS
from scripts.site.hooks import GENERATED, MARK, flat, link_pages, other_architectures, runs
from tests.conftest import REPOSITORY

EXPERTS = re.compile(
    r"\b(num_experts|n_routed_experts|num_local_experts|moe_num_experts|expert_layer_period)\b"
)


def test_every_command_and_every_option_is_there():
    commands = argparse.ArgumentParser(prog="moejax").add_subparsers()
    for command in COMMANDS:
        command.add_parser(commands)
    page = GENERATED["command_line"]()
    for parser in flat(commands):
        assert f"## {parser.prog.partition('] ')[2] or parser.prog}\n" in page
    assert "moejax generate" in page and "moejax trace convert" in page
    page = GENERATED["options"]()
    assert set(re.findall(r"^### `(\w+)`$", page, re.MULTILINE)) == set(OPTIONS)


@pytest.mark.torch
def test_every_architecture_with_experts_is_in_the_table():
    """Of transformers: each whose configuration names a number of experts. Its sources are read and
    not imported, since torch takes a second."""
    spec = importlib.util.find_spec("transformers")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "models"
    table = (folder / "auto" / "modeling_auto.py").read_text()
    known, page = {*runs(), *other_architectures()}, GENERATED["models"]()
    assert all(f"`{name}`" in page for name in known)
    for path in folder.glob("*/configuration_*.py"):
        kind = path.parent.name
        if path.stem != f"configuration_{kind}" or not EXPERTS.search(path.read_text()):
            continue
        names = set(re.findall(rf'\("{kind}", "(\w+For(?:Causal|Cond|Block)\w+)"\)', table))
        assert names <= known, f"{kind} is not in scripts/site/architectures.tsv: {names - known}"


def test_figures_of_claims_have_the_numbers_that_were_measured():
    """Drawn by `python -m scripts.site.headlines`; a changed number needs it again. Each has its
    figure on a page of claims."""
    folder = REPOSITORY / "docs" / "research"
    said = "".join((folder / f"{name}.md").read_text() for name in ("papers", "benchmarks"))
    for paper, claims in yaml.safe_load(NUMBERS.read_text()).items():
        drawn = html.unescape((IMAGES / f"claims-{paper}.svg").read_text())
        texts = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
        for claim in claims:
            numbers = (f"{claim[n]:g}" for n in NO_NUMBER if claim[n] is not None)
            assert {claim["claim"], *numbers} <= {*texts} and claim["command"], paper
            assert claim["page"] in said, claim["page"]


@pytest.mark.parametrize("name", ["trace_arrays", "trace_uses"])
def test_every_array_of_a_trace_is_described(name):
    rows = GENERATED[name]().splitlines()[2:]
    assert len(rows) > 10
    assert not [row for row in rows if re.search(r"\|\s*\|$", row)]


def test_pages_ask_for_what_is_generated():
    pages = (REPOSITORY / "docs").rglob("*.md")
    asked = [name for page in pages for name in MARK.findall(page.read_text())]
    assert sorted(asked) == sorted(GENERATED)


def test_pages_that_help_names_become_links(tmp_path):
    assert (
        link_pages("see docs/a/b_c.md.", tmp_path.relative_to(tmp_path)) == "see [b c](a/b_c.md)."
    )


@pytest.mark.slow
def test_every_statistic_is_described():
    with LLM("demo", expert_budget="25%", max_model_len=64, progress=False) as llm:
        llm.generate([[5, 17]], SamplingParams(max_tokens=2))
        found = llm.stats()
    said = re.findall(r"^ +- ((?:`\w+`(?:, )?)+):", LLM.stats.__doc__ or "", re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", "".join(said))) == set(found)


@pytest.mark.slow
def test_every_field_of_an_evaluation_is_described(tmp_path, capsys):
    text, output = tmp_path / "text", tmp_path / "results.jsonl"
    text.write_text("The old house stood at the end of the road.")
    files = ["--data", str(text), "--output", str(output)]
    options = ["--window", "8", "--expert-budget", "25%", "--json"]
    assert main(["eval", "demo", "--task", "perplexity", *files, *options]) == 0
    found = json.loads(capsys.readouterr().out) | json.loads(output.read_text())
    page = (REPOSITORY / "docs/reference/evaluation.md").read_text()
    said = set(re.findall(r"`(?:run\.)?(\w+)`", page))
    assert not (set(found) | set(found["run"])) - said - {"run"}

"""Experiments are files of tens of lines that can be read and run, and figures name them."""

import re
from pathlib import Path

import pytest

from moejax.evaluate.experiments.definition import read_changes, read_experiment
from moejax.evaluate.experiments.grid import ablate

FOLDER = Path("scripts") / "experiments"
HERE = Path(__file__).parents[2] / FOLDER
DEFINITIONS = [str(path.relative_to(HERE)) for path in sorted(HERE.rglob("*.yaml"))]

SMALL = {"budgets": ["50%"], "prompt_tokens": 8, "output_tokens": 4, "batch": 2, "seeds": 0}
OF_A_MODEL = {"texts": "story", "prompts": 2, "train_prompts": 2, "repeats": 1}


@pytest.fixture(scope="module")
def definitions(repository):
    return [repository / FOLDER / name for name in DEFINITIONS]


def test_each_can_be_read_and_is_short(definitions):
    for path in definitions:
        assert read_experiment(path).policies
        assert len(path.read_text().splitlines()) < 50, path


def small(experiment):
    """Changes by which a definition runs in seconds: one cell for each policy or precision."""
    if experiment.conversations:
        few = "turns,sessions=2,turns=2,document_tokens=40"
        first = experiment.budgets[0]
        return {"conversations": few, "seeds": [0, 1], "budgets": first, "prompt_tokens": 320}
    if any(map(experiment.is_mixed, experiment.precision)):
        # Bytes that these versions fit into; random maps differ by their seed alone.
        kept = [p for p in experiment.precision if "seed=" not in p or "seed=0" in p]
        quality = {} if experiment.quality_tokens is None else {"quality_tokens": 40}
        budget = {"precision": kept, "budgets": experiment.budgets[-1]}
        return SMALL | OF_A_MODEL | quality | budget
    if experiment.drawn:  # costs in a file are of so many layers and rows
        return SMALL | ({"batch": 1} if experiment.costs else {"routing": "qwen3-like,layers=2"})
    return SMALL | OF_A_MODEL


def fitting(policies):
    """The policies with distances that the embedded model's four layers have."""
    return [*dict.fromkeys(re.sub(r"distance=[4-9]", "distance=3", name) for name in policies)]


@pytest.mark.nightly  # tests of grids run the same policies
@pytest.mark.parametrize("name", DEFINITIONS)
def test_all_run(repository, name, tmp_path):
    path = repository / FOLDER / name
    experiment = read_experiment(path)
    changes = {"policies": fitting(experiment.policies), **small(experiment)}
    found = ablate(path, tmp_path / "out", changes=changes, progress=False)
    assert found.rows and not found.failures


def test_changes_are_yaml():
    found = read_changes(["repeats=1", "batch=[1, 8]", "model=a/b=c"])
    assert found == {"repeats": 1, "batch": [1, 8], "model": "a/b=c"}
    for wrong, said in (("repeats", "write KEY=VALUE"), ("=1", "write KEY"), ("a=[", "no YAML")):
        with pytest.raises(ValueError, match=said):
            read_changes([wrong])

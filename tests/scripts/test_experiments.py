"""Experiments are files of tens of lines that can be read and run, and figures name them."""

import json
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from moejax import LLM, SamplingParams
from moejax.commands.main import main as moejax_main
from moejax.costs import measure
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


@pytest.fixture(scope="module")
def quick_costs(tmp_path_factory):
    """Costs are of one short round, kept for the definitions that come next alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(measure, "ROUNDS", 1)
        patch.setattr(measure, "MORE_STEPS", measure.STEPS)
        yield


def small(experiment):
    """Changes by which a definition runs in seconds: one cell for each policy or precision."""
    return {**_small(experiment), "link_rate": experiment.link_rate[0]}


def _small(experiment):
    if experiment.conversations:
        few = "turns,sessions=2,turns=2,document_tokens=40,answer_tokens=8"
        first, seeds = experiment.budgets[0], [0, 1]
        if experiment.stated_prices is None:
            seeds = 0  # over a link, by the clock
        few = {"conversations": few, "seeds": seeds, "budgets": first, "batch": 2}
        return few | {"prompt_tokens": 320}
    if any(map(experiment.is_mixed, experiment.precision)):
        # Bytes that these versions fit into. One of each kind: each is an engine of its own, and a
        # random map's is that of another map.
        kinds = {("," in p) and p.partition(",")[0]: p for p in reversed(experiment.precision)}
        kept = [p for kind, p in reversed(kinds.items()) if kind != "random"]
        quality = {} if experiment.quality_tokens is None else {"quality_tokens": 40}
        budget = {"precision": kept, "budgets": experiment.budgets[-1]}
        return SMALL | OF_A_MODEL | quality | budget
    if experiment.drawn:  # costs in a file are of so many layers and rows
        return SMALL | ({"batch": 1} if experiment.costs else {"routing": "qwen3-like,layers=2"})
    return SMALL | OF_A_MODEL


def fitting(policies):
    """The policies with distances that the embedded model's four layers have."""
    return [*dict.fromkeys(re.sub(r"distance=[4-9]", "distance=3", name) for name in policies)]


@pytest.mark.claims
@pytest.mark.nightly  # tests of grids run the same policies
@pytest.mark.parametrize("name", DEFINITIONS)
def test_all_run(repository, name, tmp_path, quick_costs):
    path = repository / FOLDER / name
    experiment = read_experiment(path)
    changes = {"policies": fitting(experiment.policies), **small(experiment)}
    found = ablate(path, tmp_path / "out", changes=changes, progress=False)
    assert len(found.rows) == found.total > 0 and not found.failures


def test_changes_are_yaml():
    found = read_changes(["repeats=1", "batch=[1, 8]", "model=a/b=c"])
    assert found == {"repeats": 1, "batch": [1, 8], "model": "a/b=c"}
    for wrong, said in (("repeats", "write KEY=VALUE"), ("=1", "write KEY"), ("a=[", "no YAML")):
        with pytest.raises(ValueError, match=said):
            read_changes([wrong])


# ---- the pages of claims

PAGES = ("docs/research/papers.md", "docs/research/precision.md")
OTHERS = {
    "moejax train-predictor": None,
    "python -m scripts.bench layers": (
        *("--whole", "1,4", "--tokens", "8", "--rounds", "1", "--runs", "1"),
    ),
    "python -m scripts.bench decode": (
        *("--layers", "1", "--cells", "all,4", "--batch", "1", "--context", "16"),
        *("--routing", "qwen3-like", "--steps", "4", "--warmup", "2", "--repeats", "1"),
    ),
    "python -m scripts.bench planner": ("--tokens", "16", "--requests", "2", "--rounds", "1"),
    "python -m scripts.bench users": ("--sessions", "1", "--prompt", "8", "--tokens", "8"),
    "python -m scripts.bench decoders": (),
    "python -m scripts.bench predictors": (
        *("--model", "demo", "--count", "4", "--seeds", "2", "--length", "48"),
        *("--width", "16", "--epochs", "1", "--domains", "arithmetic", "python"),
    ),
    "python -m scripts.bench maps": (
        *("--model", "demo", "--count", "4", "--seeds", "2", "--prompt", "16", "--tokens", "8"),
    ),
    "python -m scripts.bench answers": (
        *("--count", "2", "--seeds", "2", "--domains", "arithmetic", "--precision", "int4"),
        "cache_aware_routing=buddies=train",
        *("map=own,hi=int8,lo=int2,hi_share=33%", "random,seed=each,hi=int8,lo=int2,hi_share=33%"),
    ),
    "pytest tests/host_offload/control": ("-m", "not slow", "-k", "test_precision_transitions"),
    "pytest tests/moejax/engine/test_same_bits.py": ("-m", "not slow"),
}
"""Other commands of the pages, with arguments by which they run in seconds."""


def page_commands(repository):
    """The commands that the pages name, without their options."""
    text = "".join((repository / page).read_text() for page in PAGES)
    named = re.findall(r"`((?:moejax|pytest|python -m) [^`]*|[\w/]+\.yaml)`", text)
    apart = "pytest -m claims tests/scripts", "scripts/site/headlines.yaml"
    named = (command for command in named if command not in apart)
    named = (command.removeprefix("moejax ablate scripts/experiments/") for command in named)
    return {command.partition(" --")[0] for command in named} - {"NAME.yaml", "moejax ablate"}


def test_each_command_of_the_claims_is_run_at_small_size(repository):
    found = page_commands(repository)
    grids = {name for name in found if name.endswith(".yaml")}
    assert len(grids) > 12 and grids <= {*DEFINITIONS}  # by test_all_run
    assert found - grids == {*OTHERS}
    for claim in re.findall(r"^\|(?! claim|-).*\|$", claims_of(repository), re.MULTILINE):
        verdict = claim.split("|")[-2].strip()
        assert re.match(r"supported|partly|contradicted|not (tested|settled)", verdict), claim


def claims_of(repository):
    """The tables of claims, those with a verdict."""
    text = (repository / PAGES[0]).read_text()
    tables = re.findall(r"^\| claim .*?(?=^(?!\|))", text, re.MULTILINE | re.DOTALL)
    assert len(tables) == 5
    return "".join(tables)


@pytest.mark.claims
@pytest.mark.nightly
@pytest.mark.parametrize("command", OTHERS)
def test_other_commands_run(command, tmp_path, monkeypatch, capsys, repository):
    program, *arguments = command.split()
    small = OTHERS[command]
    if program == "pytest":
        assert small is not None
        run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments, *small]
        found = subprocess.run(run, cwd=repository, capture_output=True, text=True)
        assert found.returncode == 0, found.stdout[-2000:]
    elif small is None:
        monkeypatch.chdir(tmp_path)
        prompts = ["The old house", "12 + 30 =", "def add(a, b):", "She had never seen"]
        options = {"max_model_len": 64, "trace": "run,arrays=gate_input", "progress": False}
        with LLM("demo", **options) as llm:
            llm.generate(prompts, SamplingParams(max_tokens=24))
        assert moejax_main([*arguments, "run", "out.safetensors"]) == 0
        assert (tmp_path / "out.safetensors").stat().st_size
    else:
        group, name = arguments[1].rpartition(".")[2], arguments[2]
        assert import_module(f"scripts.{group}.{name}").main([*small, "--json"]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[0])

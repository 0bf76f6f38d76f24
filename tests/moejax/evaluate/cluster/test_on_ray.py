"""Perplexity on a real Ray on this machine. MOEJAX_RAY names one that runs already."""

from __future__ import annotations

import os

import pytest

from moejax import LLM, UserError
from moejax.commands import main as cli
from moejax.evaluate.cluster.perplexity import cluster_perplexity
from moejax.evaluate.evaluation import perplexity
from moejax.serve.cluster.fleet import Scale
from moejax.serve.cluster.ray_cluster import LOCAL, connected

# What they share with jobs is in `.ci/run`: tests/moejax/serve/cluster/test_scale_out.py.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

LIMITS = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256}
TEXTS = {
    "a": "The old house by the river was empty. " * 30,
    "b": "It had been so since winter. " * 9,
}


@pytest.fixture(scope="module")
def ray():
    pytest.importorskip("ray", reason="needs Ray")
    with connected(os.environ.get("MOEJAX_RAY", LOCAL), 2):
        yield os.environ.get("MOEJAX_RAY", LOCAL)


@pytest.mark.nightly
def test_perplexity_has_the_bits_of_one_process(ray):
    windows = {"window": 32, "stride": 16}
    with LLM("demo", progress=False, **LIMITS) as llm:
        one = perplexity(llm, TEXTS, **windows)
    many, model, run = cluster_perplexity("demo", TEXTS, LIMITS, Scale(ray, 2, 1), **windows)
    assert many.texts == one.texts and many.total == one.total
    assert many.cost.computed_tokens == one.cost.computed_tokens
    assert model["model"]["path"] == "demo" and run["workers"] >= 1
    with pytest.raises(UserError, match="is empty"):
        cluster_perplexity("demo", {"a": ""}, LIMITS, Scale(ray, 1, 1))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--task", "perplexity", "--data", "T", "--workers", "2"], "need --ray"),
        (
            ["demo", "--task", "perplexity", "--data", "T", "--ray", "local", "--trace", "t"],
            "--trace",
        ),
        (["demo", "--task", "perplexity", "--data", "T", "--ray", "what"], "is no address of Ray"),
        (
            ["demo", "--task", "lm-eval:arc_easy", "--ray", "local"],
            "--ray is for --task perplexity",
        ),
    ],
)
def test_a_mistake_in_the_arguments_of_eval(tmp_path, capsys, arguments, message):
    pytest.importorskip("ray", reason="needs Ray")
    text = tmp_path / "t"
    text.write_text("The old house")
    arguments = [str(text) if a == "T" else a for a in arguments]
    try:
        status = cli.main(["eval", *arguments])
    except SystemExit as error:
        status = error.code
    assert status == 2 and message in capsys.readouterr().err

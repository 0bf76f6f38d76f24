"""GGUF files: their codes are paged, and mean what the gguf package says."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from moejax import LLM, SamplingParams
from moejax.checkpoints.load import load_checkpoint
from tests.moejax.gguf_models import ARCHITECTURES, gguf_model
from tests.moejax.transformers_models import logprobs

pytestmark = pytest.mark.torch
GREEDY = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True, logprobs=0)
PROMPTS = [[5, 6, 7, 30], list(range(20, 90))]
LIMITS = {"max_model_len": 128, "max_num_seqs": 4, "progress": False}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("gguf")


def run(path, **options):
    with LLM(path, dtype="float32", **LIMITS, **options) as llm:
        outputs = [one.outputs[0] for one in llm.generate(PROMPTS, GREEDY)]
        return llm.stats(), [(o.token_ids, [*(o.logprobs or ())]) for o in outputs]


def leaves(loaded):
    found = jax.tree_util.tree_leaves_with_path(loaded.params)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in found}


@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_weight_is_that_of_the_dequantized_checkpoint(family, directory):
    path = directory / f"{family}.gguf"
    gguf_model(path, family)
    found, wanted = (
        load_checkpoint(each, "float32") for each in (path, directory / f"{family}-dense")
    )
    first, second = (np.asarray(each.store.arrays["dense"]) for each in (found, wanted))
    assert np.array_equal(first, second)
    assert leaves(found).keys() == leaves(wanted).keys()
    for name, leaf in leaves(wanted).items():
        assert np.array_equal(leaves(found)[name], leaf), name


@pytest.mark.parametrize("family", ["Qwen3Moe", pytest.param("Mixtral", marks=pytest.mark.slow)])
def test_tokens_and_logits_are_those_of_the_dequantized_model(family, directory):
    path = directory / f"{family}-run.gguf"
    model = gguf_model(path, family)
    stats, found = run(path)
    assert stats["precision"]["versions"] == ["checkpoint"]
    for prompt, (tokens, chosen) in zip(PROMPTS, found, strict=True):
        wanted = logprobs(model, [*prompt, *tokens])[len(prompt) - 1 : -1]
        for each, token, row in zip(chosen, tokens, wanted, strict=True):
            assert token == row.argmax() and abs(each[token].logprob - row[token]) < 1e-4

"""The trained checkpoints reproduce what transformers computed for them (../shared/models)."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moejax import LLM, SamplingParams

MODELS = ("demo", pytest.param("tri", marks=pytest.mark.slow))
DOMAINS = ("text", "math", "code")
WINDOW = 512
TIE = 1e-4
"""A gap between the two best logits below which a correct implementation may choose either."""


@dataclasses.dataclass(frozen=True)
class Stored:
    """A checkpoint and its stored results; ../shared/models/README.md says how they were made."""

    directory: Path
    json: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def windows(self, domain: str) -> list[list[int]]:
        tokens = self.arrays[f"tokens_{domain}"].tolist()
        return [tokens[i : i + WINDOW] for i in range(0, len(tokens), WINDOW)]


@pytest.fixture(scope="module")
def stored(request, shared, demo_dir) -> Stored:
    beside = shared / "models" / request.param
    with np.load(beside / "reference.npz") as arrays:
        return Stored(
            demo_dir if request.param == "demo" else beside,  # the embedded copy is what ships
            json.loads((beside / "reference.json").read_text()),
            dict(arrays),
        )


@pytest.fixture(scope="module")
def llm(request, stored):
    with LLM(
        stored.directory,
        dtype="float32",
        expert_budget=request.param,
        max_num_seqs=8,
        max_model_len=WINDOW + 1,
        progress=False,
    ) as llm:
        yield llm


on_both_models = pytest.mark.parametrize("stored", MODELS, indirect=True)

at_both_budgets = pytest.mark.parametrize(
    "llm", ["25%", pytest.param("100%", marks=pytest.mark.nightly)], indirect=True
)

at_a_quarter = pytest.mark.parametrize("llm", ["25%"], indirect=True)


@on_both_models
@at_both_budgets
def test_greedy_continuations(llm, stored):
    prompts = stored.json["prompts"]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    outputs = llm.generate([prompt["text"] for prompt in prompts], params)
    for output, prompt in zip(outputs, prompts, strict=True):
        assert output.prompt_token_ids == prompt["ids"]
        expected, completion = prompt["continuation_ids"], output.outputs[0]
        ties = [i for i, margin in enumerate(prompt["top2_margin"]) if margin < TIE]
        sure = ties[0] if ties else len(expected)
        assert completion.token_ids[:sure] == expected[:sure]
        if completion.token_ids == expected:
            assert completion.text == prompt["continuation_text"]


@on_both_models
@at_a_quarter
def test_routing_of_the_first_window(llm, stored, monkeypatch):
    traces: list[np.ndarray] = []
    monkeypatch.setattr(
        llm.engine, "listener", lambda step: traces.append(np.asarray(step.output.routing.ids))
    )
    windows = [stored.windows(domain)[0] for domain in DOMAINS]
    llm.generate(windows, SamplingParams(temperature=0, max_tokens=1))
    assert len(traces) == 1
    for i, domain in enumerate(DOMAINS):
        found = traces[0][:, i * WINDOW : (i + 1) * WINDOW]
        expected = stored.arrays[f"topk_window0_{domain}"].astype(int)
        # Where two experts are equally likely to float32, a correct router may choose either one.
        other = (found[..., :, None] != expected[..., None, :]).all(axis=-1).sum(axis=-1)
        assert other.max() <= 1
        assert other.mean() < 1e-3


@on_both_models
@at_a_quarter
def test_scores_of_some_windows(llm, stored):
    """The first two windows and the short last one, whose sums perplexity is made of."""
    for domain in DOMAINS:
        windows, expected = stored.windows(domain), stored.arrays[f"window_nll_{domain}"]
        chosen = [0, 1, len(windows) - 1]
        found = [-scores.sum() for scores in llm.score_batch([windows[i] for i in chosen])]
        np.testing.assert_allclose(found, expected[chosen], rtol=1e-5)

"""The model in the package: the first thing that a newcomer sees."""

from __future__ import annotations

import re

import pytest

from moejax import LLM, SamplingParams
from tests.conftest import PACKAGED_DEMO
from tests.moejax.commands.test_chat import LIMITS

GREEDY = SamplingParams(temperature=0, max_tokens=48)


@pytest.fixture(scope="module")
def llm():
    with LLM(str(PACKAGED_DEMO), expert_budget="25%", progress=False, **LIMITS) as llm:
        yield llm


def ask(llm, question: str) -> str:
    return llm.chat([[{"role": "user", "content": question}]], GREEDY)[0].outputs[0].text


def test_it_does_small_sums(llm):
    assert "42" in ask(llm, "What is 3 times 14?")


def test_it_goes_on_with_a_story_in_whole_sentences(llm):
    story = "The old house" + llm.generate(["The old house"], GREEDY)[0].outputs[0].text
    sentences = re.findall(r"[A-Z][^.!?]+[.!?]", story)
    assert len(sentences) >= 2 and all(len(one.split()) >= 3 for one in sentences[:2]), story

"""Clients against servers of a trained checkpoint in shards and of a quantized one."""

from __future__ import annotations

import shutil

import pytest

from moejax import LLM, SamplingParams
from tests.conftest import PACKAGED_DEMO
from tests.moejax.quantized_models import quantized_model
from tests.moejax.serve.conftest import LIMITS
from tests.moejax.serve.http.test_http import (
    CHAT,
    COMPLETIONS,
    MESSAGES,
    TEMPLATE,
    Served,
    ask_by_harness,
)

pytestmark = [pytest.mark.slow, pytest.mark.torch]


@pytest.fixture(params=["tri", "fp8"])
def served(request, shared, tmp_path):
    model = shared / "models" / "tri"
    if request.param == "fp8":
        model = tmp_path / "fp8"
        quantized_model(model, "fp8-16x32-f32", vocab_size=4096)
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(PACKAGED_DEMO / name, model)
    with LLM(model, expert_budget="25%", progress=False, **LIMITS) as llm:
        tokenizer = llm.get_tokenizer()
        assert tokenizer is not None
        tokenizer.chat_template = TEMPLATE
        params = SamplingParams(temperature=0, max_tokens=12)
        prompts = ["The old house", {"messages": MESSAGES}]
        texts = [out.outputs[0].text for out in llm.generate(prompts, params, use_tqdm=False)]
        server = Served(llm, key=None)
        yield server.port, texts
        server.close()


def test_clients_get_the_texts_of_generate(served, tmp_path, monkeypatch):
    import anthropic  # two seconds each, and no quick test needs them
    import openai

    port, (story, answer) = served
    url = f"http://127.0.0.1:{port}"
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 12}
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        done = client.completions.create(
            model="tiny", prompt="The old house", max_tokens=12, temperature=0
        )
        assert done.choices[0].text == story
        chat = client.chat.completions.create(**asked, temperature=0)
        assert chat.choices[0].message.content == answer
        stream = client.chat.completions.create(**asked, temperature=0, stream=True)
        assert "".join(each.choices[0].delta.content or "" for each in stream) == answer
        found = client.responses.create(
            model="tiny", input=MESSAGES[0]["content"], max_output_tokens=12, temperature=0
        )
        assert found.output_text == answer
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as other:
        message = other.messages.create(**asked, extra_body={"temperature": 0})
        assert "".join(part.text for part in message.content) == answer
    for path in (COMPLETIONS, CHAT):  # the template is the message alone
        found = ask_by_harness(monkeypatch, tmp_path, port, path, "none")
        assert found["The old house"] == story.split(".")[0]

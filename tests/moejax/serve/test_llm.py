"""What a user calls: results, streaming, refusals, interruption, clean-up."""

from __future__ import annotations

import json
import shutil
import signal

import jax
import numpy as np
import pytest

from host_offload.memory.budget import ArenaTooSmall, BudgetError
from moejax import LLM, SamplingParams, UserError
from pallas_kernels import resolve_ops
from pallas_kernels.triton import interpreted

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


LIMITS = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256}


@pytest.fixture(scope="module")
def llm():
    with LLM("demo", expert_budget="25%", progress=False, **LIMITS) as llm:
        yield llm


def test_generate_takes_text_ids_and_dicts(llm):
    ids = llm.get_tokenizer()("The old house")["input_ids"]
    prompts = ["The old house", ids, {"prompt": "The old house"}, {"prompt_token_ids": ids}]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.prompt for o in outputs] == ["The old house", None, "The old house", None]
    assert len({tuple(o.outputs[0].token_ids) for o in outputs}) == 1
    first = outputs[0]
    assert first.prompt_token_ids == ids and first.finished
    assert len(first.outputs[0].token_ids) == 8
    assert first.outputs[0].finish_reason == "length"
    assert first.outputs[0].text == llm.get_tokenizer().decode(first.outputs[0].token_ids)
    assert 0 < first.metrics.ttft_s <= first.metrics.finished_s - first.metrics.arrival_s
    # A single prompt need not be in a list.
    assert llm.generate("The old house", GREEDY)[0].outputs[0] == first.outputs[0]
    assert llm.generate(ids, GREEDY)[0].outputs[0] == first.outputs[0]


def test_seeds(llm):
    def tokens(**kwargs):
        params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, **kwargs)
        return llm.generate("Once", params)[0].outputs[0].token_ids

    assert tokens(seed=3) == tokens(seed=3)
    assert tokens(seed=3) != tokens(seed=4)
    # Without a seed every request draws its own.
    assert tokens() != tokens()


def test_end_of_sequence_stops(llm, monkeypatch):
    params = SamplingParams(temperature=0, max_tokens=12)
    whole = llm.generate("The old house", params)[0].outputs[0]
    assert whole.finish_reason == "length"
    end = whole.token_ids[5]
    cut = whole.token_ids.index(end) + 1
    monkeypatch.setattr(llm.engine, "eos_token_ids", frozenset([end]))
    stopped = llm.generate("The old house", params)[0].outputs[0]
    assert stopped.finish_reason == "stop" and stopped.token_ids == whole.token_ids[:cut]
    on = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    assert llm.generate("The old house", on)[0].outputs[0] == whole


def test_logprobs(llm):
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=3, ignore_eos=True)
    with_others = llm.generate(["The old", [4, 5]], [params, GREEDY])
    out = with_others[0].outputs[0]
    assert with_others[1].outputs[0].logprobs is None
    assert out.cumulative_logprob == sum(
        entry[token].logprob for token, entry in zip(out.token_ids, out.logprobs, strict=True)
    )
    for token, entry in zip(out.token_ids, out.logprobs, strict=True):
        assert sorted(e.rank for e in entry.values()) == [1, 2, 3]
        assert entry[token].rank == 1
        assert entry[token].decoded_token == llm.get_tokenizer().decode([token])
    zero = SamplingParams(temperature=0, max_tokens=1, logprobs=0, ignore_eos=True)
    (entry,) = llm.generate("The old", zero)[0].outputs[0].logprobs
    assert list(entry) == out.token_ids[:1]


def test_score_agrees_with_generation(llm):
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=0, ignore_eos=True)
    prompt = llm.get_tokenizer()("It was a cold evening in")["input_ids"]
    out = llm.generate(prompt, params)[0].outputs[0]
    scores = llm.score(prompt + out.token_ids)
    assert scores.shape == (len(prompt) + 5,)
    chosen = [e[t].logprob for t, e in zip(out.token_ids, out.logprobs, strict=True)]
    # Scoring takes the prefill path, generation the decode path: equal but for bfloat16 rounding.
    np.testing.assert_allclose(scores[-6:], chosen, atol=0.05)
    with pytest.raises(UserError, match="at least two tokens"):
        llm.score([5])


def test_interrupt_in_the_middle(llm):
    def interrupt(step):
        if step.kind == "decode":
            signal.raise_signal(signal.SIGINT)

    llm.engine.listener = interrupt
    try:
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["The old house", "A"], SamplingParams(max_tokens=100, ignore_eos=True))
    finally:
        llm.engine.listener = None
    arena = llm.engine.scheduler.arena
    assert llm.engine.scheduler.cache.available == arena.pages
    # The engine goes on.
    assert len(llm.generate("The old house", GREEDY)[0].outputs[0].token_ids) == 8


def test_a_step_is_dispatched_before_the_one_before_it_is_read(llm):
    llm.engine.events.clear()
    llm.generate("The old house", GREEDY)
    order = [(event.what, event.step) for event in llm.engine.events]
    steps = [step for what, step in order if what == "dispatch"]
    assert len(steps) == 8
    for step in steps[1:]:
        assert order.index(("dispatch", step)) < order.index(("read", step - 1))


def test_stats(llm):
    llm.generate("The old house", GREEDY)
    stats = json.loads(json.dumps(llm.stats()))
    experts, arena = stats["experts"], stats["arena"]
    assert experts["activations"] == (experts["hits"] + experts["fills"] + experts["read_through"])
    record = llm.engine.runner.layout.records[0].nbytes
    assert stats["bytes"]["fill"] == experts["fills"] * record
    assert arena["cells_per_layer"] == [4, 4, 4, 4]
    assert arena["slots"] == arena["expert_slots"] + arena["kv_slots"] + arena["free_slots"]
    ops = resolve_ops(dtype="bfloat16").chosen()
    assert stats["ops"] == {op: ops[op] for op in stats["ops"]}
    assert stats["tpot_s"]["p99"] >= stats["tpot_s"]["p50"] > 0
    phases = stats["time"]["start"]
    assert {"backend", "headers", "allocate", "read", "transfer", "load", "engine"} < set(phases)
    assert min(phases.values()) >= 0 and sum(phases.values()) == pytest.approx(
        stats["time"]["start_s"]
    )


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"text": "x"}, "needs 'prompt', 'prompt_token_ids' or 'messages'"),
        ({"prompt": None}, "needs 'prompt', 'prompt_token_ids' or 'messages'"),
        ([1.5, 2.5], "text or a list of token ids"),
        ({"prompt_token_ids": ["a"]}, "text or a list of token ids"),
        (None, "text or a list of token ids"),
        (range(10**9), "the prompt has more than 256 tokens"),
    ],
)
def test_what_is_no_prompt_leaves_nothing_of_those_beside_it(llm, prompt, message):
    before = llm.engine.statistics.requests
    with pytest.raises(UserError, match=message):
        llm.generate([[1, 2], prompt], GREEDY)
    assert llm.engine.scheduler.idle and llm.engine.statistics.requests == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"priority": 1.5}, "priority cannot be 1.5"),
        ({"priority": [1, 2, 3]}, "2 prompts but 3 priority"),
        ({"session_id": 5}, "session_id cannot be 5"),
        ({"session_id": ["a", 5]}, "session_id cannot be"),
        ({"sampling_params": "greedy"}, "sampling_params cannot be 'greedy'"),
        ({"session_id": "s", "sampling_params": SamplingParams(n=2)}, "goes on from one answer"),
        (
            {"session_id": "s", "sampling_params": SamplingParams(prompt_logprobs=1)},
            "leave out session_id or prompt_logprobs",
        ),
    ],
)
def test_options_of_requests_refused(llm, options, message):
    with pytest.raises(UserError, match=message):
        llm.generate([[1, 2], [3]], **options)
    assert llm.engine.scheduler.sessions.all == ()


@pytest.mark.parametrize("prompts", [5, None, {1, 2}])
def test_what_is_no_prompt_at_all(llm, prompts):
    with pytest.raises(UserError, match="prompts are text, token ids, or a list"):
        llm.generate(prompts)


def test_chat_uses_the_template(demo_dir, tmp_path):
    model = tmp_path / "chatty"
    shutil.copytree(demo_dir, model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    with LLM(model, progress=False, **LIMITS) as llm:
        (answer,) = llm.chat([{"role": "user", "content": "Hello"}], GREEDY)
        (plain,) = llm.generate("user: Hello\nassistant:", GREEDY)
    assert answer.prompt_token_ids == plain.prompt_token_ids
    assert answer.outputs == plain.outputs


def test_closing_frees_arena_store_and_parameters():
    with LLM("demo", progress=False, **LIMITS) as llm:
        runner = llm.engine.runner
        llm.generate([5, 6], GREEDY)
        arrays = jax.tree.leaves((runner.arena, runner.tables, runner.stores, runner.state))
        assert not any(array.is_deleted() for array in arrays)
    assert all(array.is_deleted() for array in arrays)
    llm.close()  # twice is fine
    with pytest.raises(UserError, match="closed"):
        llm.generate([5, 6], GREEDY)


@pytest.mark.slow
def test_arena_too_small_says_what_works():
    with pytest.raises(ArenaTooSmall, match="smallest arena that works") as found:
        LLM("demo", memory="200KB", expert_budget=0, progress=False, **LIMITS)
    smallest = found.value.smallest_bytes
    with LLM("demo", memory=smallest, expert_budget=0, progress=False, **LIMITS) as llm:
        # 249 + 8 tokens is the longest sequence.
        assert len(llm.generate([[3] * 248], GREEDY)[0].outputs[0].token_ids) == 8
        assert llm.stats()["experts"]["hit_rate"] == 0.0


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"memory": "4MiB", "expert_budget": "3MiB", "kv_budget": "3MiB"},
            BudgetError,
            "lower a budget",
        ),
        ({"expert_budget": "120%"}, UserError, "120%"),
        ({"max_model_len": 2000}, UserError, "max_position_embeddings, 1024"),
        ({"eviction": "random"}, UserError, "unknown eviction policy 'random'; known: lru, lfu"),
        ({"ops": "cuda"}, UserError, "no implementation 'cuda'; it has xla"),
        ({"ops": {"attention": "xla"}}, UserError, "unknown op 'attention'"),
        ({"dtype": "float8"}, UserError, "float8"),
    ],
    ids=str,
)
def test_options_refused(options, error, message):
    with pytest.raises(error, match=message):
        LLM("demo", progress=False, **options)


def test_kernels_are_refused_where_they_cannot_run():
    with pytest.raises(UserError, match="Pallas kernels need an NVIDIA GPU; here use xla or auto"):
        LLM("demo", ops="pallas", progress=False, **LIMITS)
    with interpreted(), pytest.raises(UserError, match="not float32; use xla or auto"):
        LLM("demo", ops="route=pallas", dtype="float32", progress=False, **LIMITS)

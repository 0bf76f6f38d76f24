"""What a user calls: results, streaming, refusals, interruption, clean-up."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import shutil
import signal
import threading
from typing import Any

import jax
import numpy as np
import pytest

from host_offload.memory.arena import SlotClass
from host_offload.memory.budget import ArenaTooSmall, BudgetError
from moejax import LLM, SamplingParams, UserError
from moejax.engine.resize import cells_of
from moejax.engine.sampling import _PARAMETERS
from moejax.interrupt import deferred_interrupt
from moejax.requests.sampling_params import _RANGES
from pallas_kernels import resolve_ops
from pallas_kernels.triton import interpreted
from scripts.check.flat import calls_of
from tests.moejax.serve.conftest import LIMITS

pytestmark = pytest.mark.usefixtures("engine_is_free")

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


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
    asked = SamplingParams(max_tokens=1, prompt_logprobs=1)
    (output,) = llm.generate([[5, 6, 8]], asked)
    first, *others = output.prompt_logprobs
    assert first is None and [6 in others[0], 8 in others[1]] == [True, True]
    assert others[1][8].decoded_token == llm.get_tokenizer().decode([8])


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


def test_a_step_is_dispatched_before_the_one_before_it_is_read(llm, monkeypatch):
    order, read = [], llm.engine._read
    monkeypatch.setattr(
        llm.engine, "_read", lambda step: order.append(("read", step.number)) or read(step)
    )
    dispatch = llm.engine._dispatch

    def dispatched(*work):
        step = dispatch(*work)
        order.append(("dispatch", step.number))
        return step

    monkeypatch.setattr(llm.engine, "_dispatch", dispatched)
    llm.generate("The old house", GREEDY)
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
    assert stats["products"] == f"exact, of {stats['dtype']} numbers"
    assert stats["tpot_s"]["p99"] >= stats["tpot_s"]["p50"] > 0
    phases = stats["time"]["start"]
    assert {"backend", "headers", "allocate", "read", "load", "engine"} < set(phases)
    assert min(phases.values()) >= 0 and sum(phases.values()) == pytest.approx(
        stats["time"]["start_s"]
    )


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"promt": "x"}, r"^prompts\[1\]: unknown key of a prompt 'promt', did you mean 'prompt'"),
        ({"prompt": "x", "multi_modal_data": {}}, "unknown key of a prompt 'multi_modal_data'"),
        (b"bytes", r"prompts\[1\]: a prompt is text or a list of token ids, not b'bytes'"),
        ("x " * 5000, r"prompts\[1\]: the prompt has 10000 characters"),
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
        ({"priority": np.zeros(0)}, "2 prompts but 0 priority"),
        ({"session_id": range(10**9)}, "2 prompts but 1000000000 session_id"),
        ({"session_id": 5}, "session_id cannot be 5"),
        ({"session_id": ["a", 5]}, "session_id cannot be"),
        ({"sampling_params": "greedy"}, "sampling_params cannot be 'greedy'"),
        ({"session_id": "s", "sampling_params": SamplingParams(n=2)}, "continues one answer"),
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


@pytest.mark.parametrize("prompts", [5, None, {1, 2}, b"bytes"])
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
        begun = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good"}]
        asked: list[tuple[dict[str, Any], str]] = [
            ({"add_generation_prompt": False}, "user: Hello\nassistant: Good\n"),
            (
                {"add_generation_prompt": False, "continue_final_message": True},
                "user: Hello\nassistant: Good",
            ),
            ({"chat_template": "{{ messages[0].content }}!"}, "Hello!"),
            ({"chat_template": "{{ a }}", "chat_template_kwargs": {"a": 5}}, "5"),
            ({"chat_template": "{{ tools[0].name }}", "tools": [{"name": "f"}]}, "f"),
        ]
        for given, text in asked:
            assert llm.chat(begun, GREEDY, **given)[0].prompt == text
        refused: list[tuple[dict[str, Any], str]] = [
            ({"continue_final_message": True}, "set add_generation_prompt=False"),
            ({"add_generation_prompt": 1}, "must be True or False, got 1"),
            ({"chat_template": 5}, "must be text, got 5"),
        ]
        for given, words in refused:
            with pytest.raises(UserError, match=words):
                llm.chat(begun, GREEDY, **given)
    assert answer.prompt_token_ids == plain.prompt_token_ids
    assert answer.outputs == plain.outputs


def test_without_max_tokens_a_text_ends_with_the_context(llm):
    params = dataclasses.replace(GREEDY, max_tokens=None)
    ids = [5 + i % 90 for i in range(64)]
    first, again = (llm.generate(ids, params)[0] for _ in range(2))
    assert len(first.outputs[0].token_ids) == llm.engine.scheduler.max_model_len - 64
    assert first.outputs[0].finish_reason == "length" and again.outputs == first.outputs
    assert again.num_cached_tokens == 48


def test_requests_without_parameters_have_the_models_and_given_ones_win_whole(demo_dir, tmp_path):
    model = shutil.copytree(demo_dir, tmp_path / "model")
    file = model / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": 0, "temperature": 0.5, "top_k": 3}))
    stated = SamplingParams(temperature=0.5, top_k=3)
    with LLM(model, progress=False, **LIMITS) as llm:
        assert llm.get_default_sampling_params() == stated
        assert "sampling defaults temperature=0.5, top_k=3" in str(llm.explain())
        assert any("top_k=3" in note for note in llm.stats()["notes"])
        seen = []
        llm.engine.check = lambda ids, params, **_: seen.append(params)
        given = SamplingParams(top_p=0.9)
        for params, expected in ((None, stated), (given, given)):
            llm.generate("The old house", params)
            next(llm.stream("The old house", params), None)
            assert set(seen) == {expected}
            seen.clear()


def test_closing_frees_arena_store_and_parameters():
    with LLM("demo", progress=False, **LIMITS) as llm:
        runner = llm.engine.runner
        llm.generate([5, 6], GREEDY)
        arrays = jax.tree.leaves((runner.arena, runner.tables, runner.stores, runner.params))
        assert not any(array.is_deleted() for array in arrays)
    assert all(array.is_deleted() for array in arrays)
    llm.close()  # twice is fine
    for use in (llm.stats, lambda: llm.generate([5, 6], GREEDY), lambda: llm.stream("a", GREEDY)):
        with pytest.raises(UserError, match="closed"):
            use()


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
        ({"max_model_len": 2000}, UserError, "max_position_embeddings, 1024"),
        ({"ops": "cuda"}, UserError, "no implementation 'cuda'; it has xla"),
        ({"ops": {"attention": "xla"}}, UserError, "unknown op 'attention'"),
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


# ---- one request, one interrupt or one thread never takes the rest down


WIDE = [2**31, -(2**31), 2**63, -(2**64), 10**400, -(10**400), 10**5000, 1e39, 1e308, 1e-320]


@pytest.mark.parametrize("name", _RANGES)
def test_a_number_is_refused_by_name_or_fits_what_the_step_reads(name):
    for value in WIDE:
        given: Any = {name: value}
        refusal, params = None, None
        try:
            params = SamplingParams(**given)
        except UserError as error:
            refusal = str(error)
        if params is None:
            assert refusal is not None and f"{name} must be" in refusal and len(refusal) < 300
        elif name in _PARAMETERS:
            dtype, _ = _PARAMETERS[name]
            with np.errstate(all="raise", under="ignore"):
                assert np.isfinite(np.array(getattr(params, name), dtype))


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_token_ids_of_any_size_are_refused(llm, field):
    for token in (2**31, 10**400, 10**5000):
        given: Any = {"logit_bias": {token: 1}, "stop_token_ids": [token]}[field]
        with pytest.raises(UserError):
            llm.generate([[5]], SamplingParams(**{field: given}))
    with pytest.raises(UserError, match=r"logit_bias\[3\] must be a finite number"):
        SamplingParams(logit_bias={3: 10**400})
    with pytest.raises(UserError, match="outside of the vocabulary"):
        llm.generate([[10**5000]], GREEDY)


@pytest.mark.slow
def test_the_extremes_of_all_ranges_run(llm):
    for name, allowed in _RANGES.items():
        for value in (allowed.least, allowed.most):
            if name in ("n", "max_tokens", "min_tokens"):
                continue
            params = SamplingParams(**{"max_tokens": 2, name: value})
            assert llm.generate([[5, 6]], params, use_tqdm=False)[0].finished


# ---- interrupts and threads


@pytest.mark.parametrize("seed", range(3))
def test_an_interrupt_at_any_moment_leaves_the_engine_idle(llm, seed):
    """Also while requests are still being encoded and submitted."""
    prompts = [[5 + i % 90, 6, 7] for i in range(2000)]
    main = threading.main_thread().ident
    assert main is not None
    wait = random.Random(seed).uniform(0.0, 0.2)
    timer = threading.Timer(wait, lambda: signal.pthread_kill(main, signal.SIGINT))

    def generate() -> None:
        with deferred_interrupt() as held:  # in generate, and neither before nor after it
            timer.start()
            while not held:
                llm.generate(prompts, SamplingParams(max_tokens=2), use_tqdm=False)
                assert llm.engine.idle

    with pytest.raises(KeyboardInterrupt):
        generate()
    timer.join()
    arena = llm.engine.scheduler.arena
    llm.engine.set_budget(cells_of(arena), arena.count(SlotClass.KV))


def test_a_second_thread_is_refused_by_name(llm):
    alone = llm.generate([[7, 8, 9]], GREEDY)[0].outputs[0].token_ids
    wrong, refused, right = [], [], []

    def call():
        for _ in range(5):
            try:
                found = llm.generate([[7, 8, 9]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
                (right if found == alone else wrong).append(found)
            except UserError as error:
                refused.append(str(error))

    threads = [threading.Thread(target=call, name=f"caller-{i}") for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong and right
    assert all("caller-" in text and "one thread at a time" in text for text in refused)


@pytest.mark.parametrize("ids", [5, [1.5, 2], [[1], [2]], np.zeros((3, 2), int), "text"])
def test_what_is_no_list_of_token_ids_cannot_be_scored(llm, ids):
    with pytest.raises(UserError, match="scoring takes lists of token ids"):
        llm.score(ids)
    with pytest.raises(UserError, match=r"outside of the vocabulary|tokens"):
        llm.score(itertools.count())


@pytest.mark.parametrize(
    "messages", [5, "hello", np.zeros((2, 2)), None, range(10**9), ["hello"], [None, []]]
)
def test_messages_that_are_no_list_are_refused(llm, messages):
    with pytest.raises(UserError, match="messages are a list of messages or of conversations"):
        llm.chat(messages)


def test_a_streamed_prompt_is_checked_once(llm, monkeypatch):
    checks, check = [], llm.engine.check
    monkeypatch.setattr(
        llm.engine, "check", lambda *given, **named: checks.append(check(*given, **named))
    )
    assert "".join(llm.stream("The old house", GREEDY)) and len(checks) == 1


@pytest.mark.slow
def test_a_prompt_costs_the_same_in_a_call_of_many(llm):
    """The host's work, in function calls: no step walks what waits or what has ended."""
    prompts = [[1 + i % 50, 2 + i // 50] for i in range(600)]
    once = SamplingParams(max_tokens=1)

    def costs(count):
        given = prompts[:count]
        answer = calls_of(lambda: llm.generate(given, once))
        return answer / count, calls_of(lambda: llm.score_batch(given)) / count

    few, many = costs(60), costs(600)
    assert np.less(many, np.multiply(few, 1.1)).all(), (few, many)

"""Speculative decoding: bits are those of steps without drafts, and it stops where it is slower."""

from __future__ import annotations

import inspect
import json
import textwrap
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from moejax import LLM, SamplingParams, StructuredOutputsParams, UserError
from moejax.commands.main import main
from moejax.engine import loop, scheduler
from moejax.engine.drafts import WINDOW, Choice, Drafts, look_up
from moejax.start.option_values import read_speculation
from moejax.start.options import Config
from moejax.step.step_parts import PageTables, decode_tokens
from pallas_kernels.kv_write import KVPage
from tests.moejax.engine.scenes import LIMITS, open_llm, same_bits
from tests.moejax.engine_runs import Job, Recorded, run
from tests.moejax.models.families import write_checkpoint

NGRAM = {"method": "ngram", "num_speculative_tokens": 4}


class Known(Drafts):
    """Guesses what runs without drafts gave, with mistakes.

    - `answers`: by seed of the request.
    """

    def __init__(self, answers: dict[int, list[int]], mistakes: float = 0.3):
        super().__init__(5, 1, 1, adaptive=False)
        self.answers, self.rng, self.mistakes = answers, np.random.default_rng(0), mistakes

    def propose(self, request, most):
        done = len(request.output)
        assert request.params.seed is not None
        tokens = self.answers[request.params.seed][done : done + most]
        wrong = self.rng.random(len(tokens)) < self.mistakes
        return [int(t) ^ int(w) for t, w in zip(tokens, wrong, strict=True)]


def jobs_of(vocabulary: int) -> list[Job]:
    """Sessions and shared beginnings, greedy and sampled, with everything that changes a token."""
    rng = np.random.default_rng(2)
    document = rng.integers(1, vocabulary, 70).tolist()
    words = list(range(5, vocabulary, 7))
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0.9, "top_p": 0.9, "logprobs": 2},
        {"temperature": 0.7, "top_k": 20, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        {"temperature": 0, "presence_penalty": 0.8, "logit_bias": {7: 3.0}, "min_tokens": 12},
        {"temperature": 0.8, "allowed_token_ids": words, "stop_token_ids": words[:9]},
    ]
    found = []
    for i in range(12):
        prompt = [*document[: int(rng.integers(1, 71))], *rng.integers(1, vocabulary, 5).tolist()]
        params = SamplingParams(
            seed=i, max_tokens=70 - 4 * i, ignore_eos=i % 2 == 0, **kinds[i % 5]
        )
        session = f"s{i % 2}" if i >= 8 else None
        found.append(Job(tuple(prompt[-40:] if session else prompt), params, i // 6, session))
    return found


class Pair:
    """An engine, and what jobs give without drafts."""

    def __init__(self, llm: LLM):
        self.llm, self.jobs = llm, jobs_of(llm.config.vocab_size)
        self.plain = self.run()
        self.answers = {i: each.tokens for i, each in enumerate(self.plain)}

    def run(self, drafts: Drafts | None = None) -> list[Recorded]:
        self.llm.engine.drafts = drafts
        try:
            return run(self.llm, self.jobs)
        finally:
            for session in [s.session_id for s in self.llm.engine.scheduler.sessions.all]:
                self.llm.end_session(session)


def pairs(model, kv: str) -> Iterator[Pair]:
    """KV is so small that requests are moved out, and a third of the experts has a cell."""
    with open_llm(model, max_num_seqs=8, expert_budget="33%", kv_budget=kv) as llm:
        yield Pair(llm)


@pytest.fixture(scope="module")
def demo() -> Iterator[Pair]:
    yield from pairs("demo", "288KiB")


def test_drafts_change_no_bit(demo):
    drafts = Known(demo.answers)
    before = demo.llm.engine.scheduler.counts["preemptions"]
    assert same_bits(demo.run(drafts), demo.plain)
    counts = drafts.counts
    assert counts["accepted"] > 60 and counts["drafted"] - counts["accepted"] > 30, counts
    assert demo.llm.engine.scheduler.counts["preemptions"] > before


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        *("DeepseekV3ForCausalLM", "GptOssForCausalLM"),
        pytest.param("DeepseekV32ForCausalLM", marks=pytest.mark.nightly),
        pytest.param("Llama4ForCausalLM", marks=pytest.mark.nightly),
    ],
)
def test_latent_pages_windows_and_chunks_change_no_bit(family, tmp_path):
    for pair in pairs(write_checkpoint(tmp_path / "m", family), "192KiB"):
        drafts = Known(pair.answers)
        assert same_bits(pair.run(drafts), pair.plain)
        right, drafted = drafts.counts["accepted"], drafts.counts["drafted"]
        assert right > 50 and drafted - right > 20, drafts.counts


MISTAKES = {
    "accepts one too many": (
        loop.Engine,
        "_accept",
        "request.output[-1] != guessed",
        "request.output[-1] != guessed and draft.accepted != 1",
    ),
    "keeps keys of a rejected row": (
        loop.Engine,
        "_accept",
        "return",
        "return setattr(request, 'computed', request.computed + 1)",
    ),
    "is off by one position": (
        loop.Engine,
        "_dispatch_step",
        "draft.request.computed + np",
        "draft.request.computed + 1 + np",
    ),
    "reads other pages": (
        scheduler.Scheduler,
        "share_tables",
        "self.block_table[row] = own",
        "self.block_table[row] = own[::-1]",
    ),
    "leaves the counts of penalties behind": (
        loop.Engine,
        "_place",
        "self._sampler.recount(request)",
        "pass",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_found(mistake, demo, monkeypatch):
    owner, name, right, wrong = MISTAKES[mistake]
    source = textwrap.dedent(inspect.getsource(getattr(owner, name)))
    assert right in source
    namespace = dict(vars(inspect.getmodule(owner)))
    exec(source.replace(right, wrong), namespace)
    monkeypatch.setattr(owner, name, namespace[name])
    try:
        found = demo.run(Known(demo.answers))
    except Exception:  # a step refuses what the mistake makes, or a check finds it
        return
    assert not same_bits(found, demo.plain)


def test_structured_outputs_and_stop_strings_are_drafted(demo):
    params = SamplingParams(
        temperature=0.9,
        seed=1,
        max_tokens=40,
        structured_outputs=StructuredOutputsParams(regex="(the |old |sea ){3,50}"),
        stop=["sea old the"],
        bad_words=["old old"],
    )
    found = []
    for drafts in (None, Drafts(4, 3, 1, adaptive=False)):
        demo.llm.engine.drafts = drafts
        (out,) = demo.llm.generate(["The old man"], params, use_tqdm=False)
        found.append((out.outputs[0].token_ids, out.outputs[0].text, out.outputs[0].finish_reason))
    assert found[0] == found[1] and drafts is not None and drafts.counts["accepted"] > 5


@pytest.mark.parametrize("drafts", [False, True])
def test_all_rows_write_their_keys_before_any_row_reads(drafts):
    """A kernel that does both at once has no such order."""
    context: Any = SimpleNamespace(drafts=drafts, row_tile=4, page=KVPage(16, 1, 8))
    tables = PageTables(jnp.zeros((4, 2), jnp.int32), jnp.zeros((4, 0), jnp.int32))
    tokens = decode_tokens(jnp.arange(4), tables, context)
    assert (tokens.write_and_attend is None) == drafts


# ---- guesses, and whether they pay


@pytest.mark.parametrize(
    ("tokens", "longest", "shortest", "guess"),
    [
        ([1, 2, 3, 9, 1, 2, 4, 1, 2], 5, 2, [4, 1, 2, 4]),  # the last of equal matches
        ([1, 2, 3, 9, 5, 2, 4, 1, 2], 5, 1, [3, 9, 5, 2]),  # the longest match
        ([1, 2, 3, 9, 5, 2, 4, 1, 2], 1, 1, [4, 1, 2, 4]),
        ([7, 7, 7], 5, 2, [7, 7, 7, 7]),  # a match that overlaps the end
        ([1, 2, 3, 2], 5, 2, []),
        ([1], 5, 1, []),
    ],
)
def test_guesses_are_what_followed_before(tokens, longest, shortest, guess):
    assert look_up(np.array(tokens, np.int32), longest, shortest, 4).tolist() == guess


def test_drafts_stop_where_they_are_slower_and_begin_again_where_they_pay():
    choice, ways = Choice(), []

    def steps(count: int, tokens: float, seconds: float) -> None:
        """Steps with drafts take so long for so many tokens, others 1 s for a token."""
        for _ in range(count):
            ways.append(choice.drafts)
            choice.add(*((tokens, seconds) if choice.drafts else (1.0, 1.0)))

    steps(64 * WINDOW, 1.3, 1.5)
    assert not choice.on and sum(ways[-32 * WINDOW :]) <= WINDOW  # tried now and then
    steps(64 * WINDOW, 1.52, 1.5)
    assert not choice.on  # not enough of a gain
    steps(128 * WINDOW, 3.0, 1.5)
    assert choice.on and sum(ways[-32 * WINDOW :]) >= 31 * WINDOW
    assert choice.rates == {True: pytest.approx(2.0), False: pytest.approx(1.0)}


# ---- options


def test_names_are_those_of_vllm(capsys):
    text = json.dumps({**NGRAM, "prompt_lookup_max": 3})
    found = Config.of("demo", speculative_config=text).runtime.speculative_config
    assert found == read_speculation({**NGRAM, "prompt_lookup_max": 3})
    assert found is not None and (found.prompt_lookup_max, found.prompt_lookup_min) == (3, 2)
    for wrong, why in (
        ({"num_speculative_tokens": 4}, "speculative_config names no method; give it as in"),
        ({"method": "eagle"}, "unknown speculative method 'eagle'; known: ngram"),
        ({**NGRAM, "model": "x"}, "unknown key of speculative_config 'model'"),
        ({**NGRAM, "num_speculative_tokens": 0}, "num_speculative_tokens is a whole number"),
        ({**NGRAM, "prompt_lookup_max": 1, "prompt_lookup_min": 2}, "2 is more than prompt_lookup"),
        ("ngram", "is JSON such as"),
    ):
        with pytest.raises(UserError, match=why):
            Config.of("demo", speculative_config=wrong)
    assert main(["generate", "The", "--speculative-config", '{"method": "mtp"}']) == 2
    assert "unknown speculative method 'mtp'; known: ngram" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"max_num_seqs": 1}, "raise max_num_seqs"),
        ({"driver": "host"}, "by the rows of requests alone"),
        ({"driver": "stream"}, "however few tokens"),
        ({"cache_aware_routing": 0.1}, "which experts are resident"),
        ({"precision": "dynaexq"}, "would change the experts' versions"),
        ({"kv_overflow": "recompute"}, "which KV is computed again"),
    ],
)
def test_what_does_not_go_together_with_drafts(options, why):
    with pytest.raises(UserError, match=f"speculative_config.*{why}"):
        LLM("demo", speculative_config=NGRAM, progress=False, **LIMITS | options)


def test_a_state_cannot_go_back(tmp_path):
    model = write_checkpoint(tmp_path / "m", "Qwen3NextForCausalLM")
    with pytest.raises(UserError, match=r"keeps a state.* cannot go back over rejected tokens"):
        LLM(model, speculative_config=NGRAM, progress=False, **LIMITS)


def test_statistics_say_what_was_accepted_and_traces_hold_tokens_of_sequences_alone(tmp_path):
    from moejax.traces import read_trace

    config = {**NGRAM, "prompt_lookup_min": 1, "adaptive": False}
    params = SamplingParams(temperature=0, max_tokens=60, allowed_token_ids=[300, 301])
    trace = str(tmp_path / "t")
    with open_llm("demo", speculative_config=config, trace=trace) as llm:
        (out,) = llm.generate([[5, 300, 301, 300]], params, use_tqdm=False)
        said, steps = llm.stats()["speculation"], llm.stats()["steps"]
        assert llm.plan.steps.drafts
    count = len(out.outputs[0].token_ids)
    assert said["accepted_tokens"] > 5 and 0 < said["acceptance_rate"] <= 1
    assert 1 + steps["decode"] + said["accepted_tokens"] in (count, count + 1)
    assert said["choices"][0]["on"] and said["choices"][0]["requests_at_most"] == 1
    seen = np.concatenate([step.position for step in read_trace(trace).step_traces()])
    assert sorted(seen.tolist()) == list(range(4 + count - 1))

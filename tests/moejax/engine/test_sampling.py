"""Choosing with truncation, penalties, biases and log-probabilities, seen from outside: from the
logits of each step follows what each request says next, and neighbours change nothing of it. The
formulas are step/test_sampler.py's; rows that move are in test_same_bits.py."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import jax
import numpy as np
import pytest
from scipy import special

from moejax import SamplingParams, UserError
from moejax.engine.sampling import TokenSampler
from moejax.engine.step_work import Draw
from moejax.step.programs import ProgramKey
from tests.moejax.engine.scenes import open_llm
from tests.moejax.engine_runs import Job, Recorded, run

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPT = (7, 8, 9)
EXTRAS = {"adjust", "add_bias", "tally", "recount", "logprobs"}


@pytest.fixture(scope="module")
def llm():
    with open_llm() as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(llm) -> Recorded:
    """The greedy text of the prompt; before any other, so that nothing is compiled for extras."""
    (found,) = run(llm, [Job(PROMPT, GREEDY)])
    assert not EXTRAS & {*map(str, llm.engine.runner.executables())}
    assert llm.engine.runner.tokens.counts is None
    return found


def chosen(prompt, params: SamplingParams, logits: list[np.ndarray]) -> tuple[list[int], bool]:
    """Greedy tokens by the formulas in float64, and whether each is clear of the second."""
    counts: dict[int, int] = {}
    tokens, clear = [], True
    for step_logits in logits:
        x = step_logits.astype(np.float64)
        for token, bias in params.logit_bias or ():
            x[token] += bias
        if len(tokens) < params.min_tokens:
            x[[0, *(params.stop_token_ids or ())]] = -np.inf
        seen = [*{*prompt, *counts}]
        factor = params.repetition_penalty
        x[seen] = np.where(x[seen] > 0, x[seen] / factor, x[seen] * factor)
        for token, count in counts.items():
            x[token] -= count * params.frequency_penalty + params.presence_penalty
        tokens.append(int(np.argmax(x)))
        clear &= bool(np.sort(x)[-1] - np.sort(x)[-2] > 1e-4)
        counts[tokens[-1]] = counts.get(tokens[-1], 0) + 1
    return tokens, clear


def test_each_parameter_is_its_requests_and_leaves_neighbours_alone(llm, alone):
    """Positions go on from step to step, requests begin and end beside each other."""
    drawn = dataclasses.replace(GREEDY, temperature=1.0, seed=5)
    params = [
        dataclasses.replace(drawn, top_k=1),
        dataclasses.replace(drawn, top_p=1e-6),
        dataclasses.replace(drawn, min_p=1.0),
        drawn,
        dataclasses.replace(drawn, seed=6),
        dataclasses.replace(GREEDY, max_tokens=3),
    ]
    found = run(llm, [Job(PROMPT, p, arrival=i) for i, p in enumerate(params)])
    for each in found[:3]:
        assert each.tokens == [int(np.argmax(logits)) for logits in each.logits]
        assert each.tokens == alone.tokens
    assert found[5].tokens == alone.tokens[:3]
    texts = [found[0].tokens, found[3].tokens, found[4].tokens]
    assert len({*map(tuple, texts)}) == 3, "draws are by seed, and not the likeliest"
    (again,) = run(llm, [Job(PROMPT, drawn)])
    assert again.tokens == found[3].tokens


def test_penalties_and_biases_follow_the_formulas_and_leave_neighbours_alone(llm, alone):
    """Two requests with penalties come one after the other, in the same row too."""
    penalized = dataclasses.replace(
        GREEDY,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.7,
        logit_bias={alone.tokens[1]: -100, 11: 3.5},
    )
    ended = alone.tokens[0]
    shy = dataclasses.replace(GREEDY, min_tokens=5, stop_token_ids=[ended], ignore_eos=False)
    frequent = dataclasses.replace(GREEDY, frequency_penalty=0.5)
    params = [GREEDY, penalized, shy, frequent, penalized]
    prompts = [PROMPT] * 4 + [(5, 9)]
    jobs = [Job(p, q, 8 * (i == 4)) for i, (p, q) in enumerate(zip(prompts, params, strict=True))]
    found = run(llm, jobs)
    assert found[0].same_bits(alone)
    for prompt, asked, each in zip(prompts[1:], params[1:], found[1:], strict=True):
        wanted, clear = chosen(prompt, asked, each.logits)
        assert clear and each.tokens == wanted
    assert alone.tokens[1] not in found[1].tokens and ended not in found[2].tokens[:5]
    assert found[1].tokens != alone.tokens


def test_a_drafts_row_that_was_its_requests_own_is_counted_anew():
    """A request was moved out of row 3, came back in row 0, and has a draft in row 3."""
    recounted = []
    tokens = types.SimpleNamespace(recount=lambda row, _, output: recounted.append((row, output)))
    runner: Any = types.SimpleNamespace(tokens=tokens, shapes=types.SimpleNamespace(rows=4))
    request: Any = types.SimpleNamespace(prompt=(1,), output=[2, 3], dispatched=3)
    batch: Any = types.SimpleNamespace(penalized=np.ones(4, bool))
    sampler = TokenSampler(runner, ())
    sampler._counted = {0: request, 3: request}
    sampler._count(batch, [Draw(0, request, None), Draw(3, request, None, (4,))])
    assert recounted == [(3, [2, 3, 4])]


def test_log_probabilities_are_of_the_logits_before_penalties(llm, alone):
    params = dataclasses.replace(GREEDY, repetition_penalty=2.0, logprobs=2)
    (said,) = llm.generate([[*PROMPT]], params)[0].outputs
    (found,) = run(llm, [Job(PROMPT, params)])
    assert said.token_ids == found.tokens != alone.tokens
    for token, entry, logits in zip(said.token_ids, said.logprobs, found.logits, strict=True):
        logp = special.log_softmax(logits.astype(np.float64))
        assert entry[token].logprob == pytest.approx(logp[token], abs=2e-5)
        likeliest = [t for t, e in entry.items() if e.rank <= 2]
        assert likeliest == np.argsort(-logits, kind="stable")[:2].tolist()


@pytest.mark.slow
def test_prompt_logprobs_are_those_of_each_prefix(llm):
    """A prompt of two chunks; generation goes on from the same logits."""
    prompt = np.random.default_rng(1).integers(1, 4096, 70).tolist()
    once = dataclasses.replace(GREEDY, max_tokens=1)
    asked = dataclasses.replace(once, prompt_logprobs=4)
    llm.engine.scheduler.cache.drop_idle()
    (output,) = llm.generate([prompt], asked)
    assert len(output.prompt_logprobs) == len(prompt) and output.prompt_logprobs[0] is None
    (whole,) = run(llm, [Job(tuple(prompt), once)])
    assert output.outputs[0].token_ids == whole.tokens
    for place in (1, 2, 3, 63, 64, 65, 69):
        (prefix,) = run(llm, [Job(tuple(prompt[:place]), once)])
        logits = prefix.logits[0].astype(np.float64)
        logp, order = special.log_softmax(logits), np.argsort(-logits, kind="stable")
        entry = output.prompt_logprobs[place]
        assert [t for t, e in entry.items() if e.rank <= 4] == order[:4].tolist()
        assert order[entry[prompt[place]].rank - 1] == prompt[place]
        for token, each in entry.items():
            assert each.logprob == pytest.approx(logp[token], abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adjust", "add_bias"])
def test_logits_of_fewer_rows_become_those_of_all_rows(llm, name):
    programs, rng = llm.engine.runner.programs(), np.random.default_rng(0)
    program = programs.program(ProgramKey(name, 2))
    logits, *others = (rng.integers(0, 3, a.shape).astype(a.dtype) for a in program.args)
    others[-2][:] = np.arange(others[-2].shape[1])  # ids, each once
    rows = llm.engine.runner.shapes.rows
    whole = np.concatenate([logits, np.zeros((rows - 2, logits.shape[1]), logits.dtype)])
    found = jax.jit(program.function)(logits, *others)
    expected = jax.jit(programs.program(ProgramKey(name)).function)(whole, *others)
    np.testing.assert_array_equal(found, expected)


def test_what_is_refused(llm):
    for name, ids in (("logit_bias", {9: 1, 4096: 1}), ("stop_token_ids", [9, 4096])):
        with pytest.raises(UserError, match=f"token id 4096 in {name} is outside of the vocab"):
            llm.generate([[5]], SamplingParams(**{name: ids}))
    runner = llm.engine.runner
    with pytest.raises(ValueError, match="85 end-of-sequence tokens, at most 84"):
        TokenSampler(runner, range(85))
    params = dataclasses.replace(GREEDY, frequency_penalty=0.5)
    moved = types.SimpleNamespace(
        prompt=[1, 2],
        params=params,
        row=1,
        seed=0,
        dispatched=5,
        output=[3, 4],
        request_id="7",
        rules=None,
    )
    sampler = TokenSampler(runner, {0})
    sampler.place(moved)
    with pytest.raises(ValueError, match="request 7 got a row while 4 tokens were dispatched and"):
        sampler.sample(None, [Draw(1, moved, None)])

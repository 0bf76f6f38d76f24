"""What a request's sequences become: texts, log-probabilities, times."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import moejax
from moejax import SamplingParams
from moejax.requests.outputs import (
    Logprob,
    RequestMetrics,
)
from moejax.requests.request import append_logprobs, append_prompt_logprobs
from moejax.requests.stopping import Ending
from moejax.requests.submission import Submission
from moejax.requests.tokenizer import load_tokenizer

EOS = 0


@dataclasses.dataclass(eq=False)
class Sequence:
    """What Submission.output reads of a request."""

    request_id: str
    prompt: list
    params: SamplingParams
    ending: Ending
    output: list = dataclasses.field(default_factory=list)
    logprobs: list = dataclasses.field(default_factory=list)
    prompt_logprobs: list = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: None = None
    arrival_s: float = 10.0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    token_times: list = dataclasses.field(default_factory=list)
    missed_routes: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    recomputed: bool = False

    def push(self, *tokens):
        for token in tokens:
            self.output.append(token)
            finish = self.ending.push(token)
            if finish is not None:
                self.finish_reason, self.stop_reason = finish
        return self


def request_output(requests, prompt, tokenizer):
    return Submission(prompt, tuple(requests)).output(tokenizer)


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(Path(moejax.__path__[0]) / "demo")


def _sequence(tokenizer, number=0, prompt=(3,), **params):
    given = SamplingParams(**params)
    ending = Ending(given, {EOS}, tokenizer, prompt)
    return Sequence(str(number), list(prompt), given, ending)


def test_a_request_of_several_sequences(tokenizer):
    (old,), (house,) = tokenizer.encode(" old"), tokenizer.encode(" house")
    stopped = _sequence(tokenizer, 4, n=1, stop="house").push(old, house)
    running = _sequence(tokenizer, 5, n=1).push(old)
    stopped.scheduled_s, stopped.first_token_s, stopped.finished_s = 11.0, 12.0, 13.0
    stopped.token_times, stopped.missed_routes, stopped.cached_tokens = [0.5], 3, 16
    running.scheduled_s, running.first_token_s = 11.5, 11.75
    running.missed_routes, running.recomputed, running.preemptions = 2, True, 1

    output = request_output([stopped, running], "The", tokenizer)
    assert (output.request_id, output.prompt, output.prompt_token_ids) == ("4", "The", [3])
    assert not output.finished
    first, second = output.outputs
    assert (first.index, first.text, first.token_ids) == (0, " old ", [old, house])
    assert (first.finish_reason, first.stop_reason) == ("stop", "house")
    assert (second.index, second.text, second.finish_reason) == (1, " old", None)
    assert output.metrics == RequestMetrics(
        arrival_s=10.0,
        scheduled_s=11.0,
        first_token_s=11.75,
        tpot_s=[[0.5], []],
        missed_routes=5,
        cached_tokens=16,
        preemptions=1,
        recomputed=True,
    )

    running.finish_reason, running.finished_s = "abort", 14.0
    output = request_output([stopped, running], None, tokenizer)
    assert output.finished and output.metrics is not None
    assert (output.prompt, output.metrics.finished_s) == (None, 14.0)


def test_text_needs_a_tokenizer_and_the_rest_does_not():
    sequence = _sequence(None, logprobs=0).push(7, EOS)
    sequence.logprobs = [(Logprob(-0.5, 1), {}), (Logprob(-0.25, 1), {})]
    (completion,) = request_output([sequence], None, None).outputs
    assert (completion.text, completion.token_ids) == ("", [7, EOS])
    assert completion.cumulative_logprob == -0.75
    assert completion.logprobs == [{7: Logprob(-0.5, 1)}, {EOS: Logprob(-0.25, 1)}]
    assert completion.finish_reason == "stop"


def test_logprobs_are_as_many_as_asked_for_and_the_chosen_one(tokenizer):
    sequence = _sequence(tokenizer, logprobs=2).push(7)
    host = (
        np.array([0.0, -3.0], np.float32),
        np.array([1, 3], np.int32),
        np.array([[1, 2, 3], [5, 6, 7]], np.int32),
        np.array([[0, 0, 0], [-1, -2, -3]], np.float32),
    )
    append_logprobs(sequence, host, row=1)
    (completion,) = request_output([sequence], None, tokenizer).outputs
    assert completion.logprobs is not None
    assert [(t, e.logprob, e.rank) for t, e in completion.logprobs[0].items()] == [
        (5, -1.0, 1),
        (6, -2.0, 2),
        (7, -3.0, 3),
    ]
    assert completion.logprobs[0][7].decoded_token == tokenizer.decode([7])
    assert completion.cumulative_logprob == -3.0


def test_prompt_logprobs_begin_with_none(tokenizer):
    prompt = [5, 6, 8, 9]
    sequence = _sequence(tokenizer, prompt=prompt, prompt_logprobs=1)
    chosen = np.array([[-1, -2], [-3, 0]], np.float32)
    rank = np.array([[1, 2], [3, 0]], np.int32)
    top_ids, top = np.full((2, 2, 20), 6), np.full((2, 2, 20), -0.5, np.float32)
    append_prompt_logprobs(sequence, (chosen, rank, top_ids, top), 0, range(2))
    append_prompt_logprobs(sequence, (chosen, rank, top_ids, top), 1, range(1))
    found = request_output([sequence, _sequence(tokenizer)], None, tokenizer).prompt_logprobs
    assert found is not None and found[0] is None
    values = [{t: (e.logprob, e.rank) for t, e in entry.items()} for entry in found[1:]]
    assert values == [
        {6: (-1.0, 1)},
        {6: (-0.5, 1), 8: (-2.0, 2)},
        {6: (-0.5, 1), 9: (-3.0, 3)},
    ]
    assert found[2][8].decoded_token == tokenizer.decode([8])
    one = _sequence(tokenizer, prompt=[5], prompt_logprobs=0)
    assert request_output([one], None, tokenizer).prompt_logprobs == [None]

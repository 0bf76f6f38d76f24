"""What a request's sequences become: texts, log-probabilities, times."""

import dataclasses
from pathlib import Path

import pytest

import moejax
from moejax import SamplingParams
from moejax.requests.outputs import (
    Logprob,
    RequestMetrics,
)
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

"""Prompts through the engine: what the methods of LLM and AsyncLLM do with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from moejax.engine.loop import Engine
from moejax.errors import UserError
from moejax.interrupt import deferred_interrupt
from moejax.requests.outputs import RequestOutput
from moejax.requests.prompts import EncodedPrompt, list_of_prompts, one_each
from moejax.requests.request import GenerationRequest, Prompt
from moejax.requests.sampling_params import SamplingParams, child_params
from moejax.requests.submission import Submission

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def asked_for(
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams] | None,
    session_id: str | Sequence[str | None] | None,
    priority: int | Sequence[int] | None,
) -> list[GenerationRequest]:
    """What LLM.generate was asked for, a request a prompt. Raises UserError for lists that do not
    match."""
    given, params = list_of_prompts(prompts), sampling_params
    params = SamplingParams() if params is None else params
    each = (
        given,
        one_each("sampling_params", params, len(given), SamplingParams),
        one_each("session_id", session_id, len(given), (str, type(None))),
        one_each("priority", priority or 0, len(given), int),
    )
    return [GenerationRequest(*one) for one in zip(*each, strict=True)]


def submit(engine: Engine, encoded: EncodedPrompt, asked: GenerationRequest) -> Submission:
    """Puts a prompt into the engine, one request for each of its n sequences. Raises UserError for
    what could never run, and then leaves nothing in the engine."""
    (text, ids), params = encoded, asked.sampling_params
    each = [params] if params.n == 1 else [child_params(params, i) for i in range(params.n)]
    # The engine checks each; what it lets pass of the first one it lets pass of all.
    requests = [
        engine.add(ids, child, session_id=asked.session_id, priority=asked.priority)
        for child in each
    ]
    return Submission(text, tuple(requests), asked)


@contextmanager
def in_engine(engine: Engine) -> Iterator[list[Submission]]:
    """A list to keep what is submitted in: none of it is left behind by an error, an interrupt or a
    caller who stops listening."""
    submissions: list[Submission] = []
    try:
        yield submissions
    finally:
        engine.abort(r for s in submissions for r in s.requests)
        engine.drain()


def run_each(
    open_engine: Callable[[], Engine],
    requests: Iterator[GenerationRequest],
    max_in_flight: int,
    encode: Callable[[Prompt], EncodedPrompt],
    tokenizer: PreTrainedTokenizerFast | None,
) -> Iterator[tuple[GenerationRequest, RequestOutput | UserError]]:
    """See LLM.generate_each. open_engine: raises UserError when the engine may not be used; asked
    again whenever the caller had the word."""
    engine = open_engine()

    more = True
    with in_engine(engine) as running:
        while running or more:
            while more and len(running) < max_in_flight:
                asked = next(requests, None)
                if asked is None:
                    more = False
                    break
                refusal = None
                with deferred_interrupt():  # what is in the engine is in `running`
                    try:
                        running.append(submit(engine, encode(asked.prompt), asked))
                    except UserError as error:
                        refusal = error
                if refusal is not None:
                    yield asked, refusal
                    open_engine()
            if running:
                engine.step()
            # Not only what this step finished: the caller may use the engine between results.
            finished = [submission for submission in running if submission.finished]
            if finished:
                running[:] = [submission for submission in running if not submission.finished]
                for submission in finished:
                    assert submission.asked is not None
                    yield submission.asked, submission.output(tokenizer)
                    open_engine()


def run_stream(
    open_engine: Callable[[], Engine], encoded: EncodedPrompt, asked: GenerationRequest
) -> Iterator[str]:
    """See LLM.stream. open_engine: as of run_each."""
    engine = open_engine()
    with in_engine(engine) as submissions:
        submissions.append(submit(engine, encoded, asked))
        (request,) = submissions[0].requests
        while request.finish_reason is None:
            engine.step()
            if request.finish_reason is not None:
                request.ending.close()
            if piece := request.ending.stream():
                yield piece
                open_engine()


def run_scores(engine: Engine, sequences: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """See LLM.score_batch."""
    with in_engine(engine) as submissions:
        for ids in sequences:
            request = engine.add(list(ids[:-1]), SamplingParams(), list(ids[1:]))
            submissions.append(Submission(None, (request,)))
        while not all(s.finished for s in submissions):
            engine.step()
        return [np.asarray(s.requests[0].scores) for s in submissions]

"""Runs prompts through the engine for the methods of LLM and AsyncLLM."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from moejax.engine.loop import Engine
from moejax.errors import OutOfKV, UserError, as_user_error, user_errors
from moejax.interrupt import deferred_interrupt
from moejax.requests.outputs import RequestOutput
from moejax.requests.prompts import EncodedPrompt, list_of_prompts, one_each
from moejax.requests.request import GenerationRequest, Prompt, Request
from moejax.requests.sampling_params import SamplingParams, child_params
from moejax.requests.submission import Submission

if TYPE_CHECKING:
    from moejax.requests.tokenizer import Tokenizer


def require_owner(process: int) -> None:
    """Raises UserError unless this is the process that made an LLM. In a fork of it, jax's threads
    and the engine's are missing, and waiting for them never ends.

    - `process`: id of the process that made the LLM.
    """
    if os.getpid() != process:
        raise UserError(
            "this LLM was made before a fork and cannot be used after it; make it in the process "
            'that uses it (multiprocessing: the start method "spawn")'
        )


def list_requests(
    prompts: Prompt | Sequence[Prompt],
    sampling_params: SamplingParams | Sequence[SamplingParams],
    session_id: str | Sequence[str | None] | None,
    priority: int | Sequence[int] | None,
) -> list[GenerationRequest]:
    """Returns one request for each prompt of LLM.generate. Raises UserError for lists that do not
    match."""
    given = list_of_prompts(prompts)
    each = (
        given,
        one_each("sampling_params", sampling_params, len(given), SamplingParams),
        one_each("session_id", session_id, len(given), (str, type(None))),
        one_each("priority", 0 if priority is None else priority, len(given), int),
    )
    return [GenerationRequest(*one) for one in zip(*each, strict=True)]


def submit(
    engine: Engine, encoded: EncodedPrompt, asked: GenerationRequest, *, checked: bool = False
) -> Submission:
    """Puts a prompt into the engine, one request for each of its n sequences. Raises UserError for
    a request that could never run or fails, and then leaves nothing in the engine.

    - `checked`: whether `engine.check` was called with the prompt.
    """
    (text, ids), params, session_id = encoded, asked.sampling_params, asked.session_id
    requests: list[Request] = []
    try:
        with as_user_error("this request cannot be queued"):
            if not checked:
                engine.check(ids, params, session_id=session_id)
            add = functools.partial(engine.add, ids, session_id=session_id, checked=True)
            each = [params] if params.n == 1 else [child_params(params, i) for i in range(params.n)]
            for child in each:
                requests.append(add(child, priority=asked.priority))
    except BaseException:
        engine.abort(requests)
        raise
    return Submission(text, tuple(requests), asked)


@contextmanager
def in_engine(engine: Engine) -> Iterator[list[Submission]]:
    """Yields a list for submissions, each to be added under deferred_interrupt. At the end none of
    them stays in the engine, even after an error, an interrupt or a caller that stops listening."""
    submissions: list[Submission] = []

    def clear() -> None:
        with deferred_interrupt():
            engine.abort(r for s in submissions for r in s.requests)
            engine.drain()

    try:
        yield submissions
    finally:
        try:
            clear()
        except KeyboardInterrupt:  # before or after it was held back
            clear()
            raise


def run_all(
    engine: Engine,
    encode: Callable[[Prompt], EncodedPrompt],
    asked: Sequence[GenerationRequest],
    report: Callable[[int], None],
    interrupted: list,
) -> list[Submission]:
    """Runs all prompts (see LLM.generate). When it returns, nothing is in the engine.

    - `report`: called with the number of sequences that have ended.
    - `interrupted`: from the deferred_interrupt around this call; checked between prompts and
      steps.
    """
    encoded: list[EncodedPrompt] = []
    for one in asked:
        if interrupted:
            return []
        where = f"prompts[{len(encoded)}]: " if len(asked) > 1 else ""
        with user_errors(UserError, where):
            encoded.append(encode(one.prompt))
            engine.check(encoded[-1][1], one.sampling_params, session_id=one.session_id)
    ended, first = 0, 0  # the first that has not ended: asking all in each step is quadratic
    with in_engine(engine) as submissions:
        for prompt, one in zip(encoded, asked, strict=True):
            if interrupted:
                break
            submissions.append(submit(engine, prompt, one, checked=True))
        while not interrupted:
            while first < len(submissions) and submissions[first].finished:
                first += 1
            if first == len(submissions):
                break
            touched = engine.step()
            ended += sum(r.finish_reason is not None for r in touched)
            report(ended)
    return submissions


def run_each(
    engine: Engine,
    requests: Iterator[GenerationRequest],
    max_in_flight: int,
    encode: Callable[[Prompt], EncodedPrompt],
    tokenizer: Tokenizer | None,
) -> Generator[tuple[GenerationRequest, RequestOutput | UserError], None, None]:
    """Runs a stream of requests; see LLM.generate_each."""
    more = True
    with in_engine(engine) as running:
        while running or more:
            while more and len(running) < max_in_flight:
                asked = next(requests, None)
                if asked is None:
                    more = False
                    break
                try:
                    encoded = encode(asked.prompt)
                    with deferred_interrupt():  # what is in the engine is in `running`
                        running.append(submit(engine, encoded, asked))
                except UserError as error:
                    yield asked, error
            if running:
                try:
                    engine.step()
                except OutOfKV as error:
                    # Every request here waits forever; coming requests may need less.
                    stuck, running[:] = [*running], []
                    engine.abort(request for submission in stuck for request in submission.requests)
                    for submission in stuck:
                        assert submission.asked is not None
                        yield submission.asked, error
            # Not only what this step finished: the caller may use the engine between results.
            finished = [submission for submission in running if submission.finished]
            if finished:
                running[:] = [submission for submission in running if not submission.finished]
                for submission in finished:
                    assert submission.asked is not None
                    try:
                        result = submission.output(tokenizer)
                    except UserError as error:
                        result = error
                    yield submission.asked, result


def run_stream(
    engine: Engine, encoded: EncodedPrompt, asked: GenerationRequest
) -> Generator[str, None, None]:
    """Runs one prompt, which `engine.check` has taken, and yields its text; see LLM.stream."""
    with in_engine(engine) as submissions:
        with deferred_interrupt():
            submissions.append(submit(engine, encoded, asked, checked=True))
        (request,) = submissions[0].requests
        while request.finish_reason is None:
            engine.step()
            if request.error is not None:
                raise request.error
            if request.finish_reason is not None:
                request.ending.close()
            if piece := request.ending.stream():
                yield piece


def run_scores(
    engine: Engine, sequences: Iterable[Sequence[int]], most: int
) -> Generator[list[tuple[int, np.ndarray]], None, None]:
    """Yields after each step the (place, scores) of the sequences that ended with it (LLM.score).

    - `most`: most sequences in the engine at once.
    """
    waiting, places = enumerate(sequences), {}
    with in_engine(engine) as running:
        while True:
            with deferred_interrupt():  # what is in the engine is in `running`
                for place, ids in itertools.islice(waiting, most - len(running)):
                    request = engine.add(list(ids[:-1]), SamplingParams(), list(ids[1:]))
                    running.append(Submission(None, (request,)))
                    places[request] = place
            if not running:
                return
            engine.step()
            ended = [s.requests[0] for s in running if s.finished]
            running[:] = [s for s in running if not s.finished]
            for request in ended:
                if request.error is not None:
                    raise request.error
            yield [(places.pop(request), np.asarray(request.scores)) for request in ended]

"""A prompt in the engine, and its result so far."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from moejax.errors import as_user_error
from moejax.requests.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from moejax.requests.request import GenerationRequest, Request

if TYPE_CHECKING:
    from moejax.requests.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Submission:
    """A prompt in the engine."""

    text: str | None
    """The prompt's text; None: it was given as token ids."""
    requests: tuple[Request, ...]
    """One for each of its n sequences, in order of index."""
    asked: GenerationRequest | None = None

    @property
    def finished(self) -> bool:
        return all(request.finish_reason is not None for request in self.requests)

    @as_user_error("the result of this request cannot be made")
    def output(
        self, tokenizer: Tokenizer | None, before: RequestOutput | None = None
    ) -> RequestOutput:
        """The result so far, finished or not.

        - `before`: an earlier result, whose prompt and log-probabilities are reused, so that all
          results of a long request together cost as much as the last one.

        Raises UserError if one of its requests failed.
        """
        for request in self.requests:
            if request.error is not None:
                raise request.error
        first = self.requests[0]  # the only one whose prompt_logprobs count
        prompt_logprobs = None
        if first.params.prompt_logprobs is not None:
            known = [None] if before is None else before.prompt_logprobs or [None]
            new = first.prompt_logprobs[len(known) - 1 :]
            prompt_logprobs = [*known, *(_with_text(entry, tokenizer) for entry in new)]
        return RequestOutput(
            request_id=first.request_id,
            prompt=self.text,
            prompt_token_ids=list(first.prompt) if before is None else before.prompt_token_ids,
            outputs=[
                _completion(i, request, tokenizer, None if before is None else before.outputs[i])
                for i, request in enumerate(self.requests)
            ],
            finished=self.finished,
            metrics=_metrics(self.requests),
            prompt_logprobs=prompt_logprobs,
        )


def _completion(
    index: int,
    request: Request,
    tokenizer: Tokenizer | None,
    before: CompletionOutput | None,
) -> CompletionOutput:
    if request.finish_reason is not None:
        request.ending.close()  # an aborted one is still open
    logprobs, total = None, None
    if request.params.logprobs is not None:
        total = sum(chosen.logprob for chosen, _ in request.logprobs)
        known = [] if before is None else before.logprobs or []
        new = zip(request.output[len(known) :], request.logprobs[len(known) :], strict=True)
        logprobs = [
            *known,
            *(_with_text({**likely, token: chosen}, tokenizer) for token, (chosen, likely) in new),
        ]
    return CompletionOutput(
        index=index,
        text=request.ending.text,
        token_ids=list(request.output),
        cumulative_logprob=total,
        logprobs=logprobs,
        finish_reason=request.finish_reason,
        stop_reason=request.stop_reason,
    )


def _metrics(requests: Sequence[Request]) -> RequestMetrics:
    ended = [r.finished_s for r in requests if r.finished_s is not None]
    return RequestMetrics(
        arrival_s=min(r.arrival_s for r in requests),
        scheduled_s=min(
            (r.scheduled_s for r in requests if r.scheduled_s is not None), default=None
        ),
        first_token_s=min(
            (r.first_token_s for r in requests if r.first_token_s is not None), default=None
        ),
        finished_s=max(ended) if len(ended) == len(requests) else None,
        tpot_s=[list(r.token_times) for r in requests],
        missed_routes=sum(r.missed_routes for r in requests),
        cached_tokens=sum(r.cached_tokens for r in requests),
        preemptions=sum(r.preemptions for r in requests),
        recomputed=any(r.recomputed for r in requests),
    )


def _with_text(found: dict[int, Logprob], tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    if tokenizer is None:
        return found
    return {
        token: dataclasses.replace(entry, decoded_token=tokenizer.decode([token]))
        for token, entry in found.items()
    }

"""What a request returns. Names are vLLM's, but those of RequestMetrics, which say their unit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from moejax.requests.request import Request
    from moejax.step.parts import PromptLogprobs

FinishReason = Literal["stop", "length", "abort"]
"""`stop`: an end-of-sequence token, a stop token or a stop string. `length`: max_tokens. `abort`:
cancelled."""


@dataclasses.dataclass(frozen=True)
class Logprob:
    """The log-probability of one token at one position, of the raw logits."""

    logprob: float
    rank: int | None = None
    """1 for the likeliest token."""
    decoded_token: str | None = None
    """None without a tokenizer."""


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One generated sequence."""

    index: int
    """Its place among the request's n sequences."""
    text: str
    """Empty without a tokenizer. Special tokens, and the stop string or token that ended it, are
    left out unless the sampling parameters say otherwise; of a running sequence also what may
    become part of a stop string."""
    token_ids: list[int]
    """All of them, those of a stop string and of what follows it in the same token too."""
    cumulative_logprob: float | None = None
    """Sum over token_ids; None unless logprobs were asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    """One dict a token, from token id to Logprob: the chosen token and the likeliest ones."""
    finish_reason: FinishReason | None = None
    """None while the sequence is running."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended the sequence, None for the model's own end of
    sequence."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
    """When things happened to a request, in seconds of one monotonic clock, and what they cost.

    Of several sequences: the first time, for finished_s the last one, and the sum of counts.
    """

    arrival_s: float
    scheduled_s: float | None = None
    """When it first got a row."""
    first_token_s: float | None = None
    finished_s: float | None = None
    """When its last sequence ended; None before."""
    tpot_s: list[list[float]] = dataclasses.field(default_factory=list)
    """Time per output token: per sequence the seconds between its tokens, one fewer than tokens."""
    missed_routes: int = 0
    """Routed (layer, expert) pairs of its tokens, the prompt's included, that were not resident."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was there already."""
    preemptions: int = 0
    """How often it was moved out while it ran."""
    recomputed: bool = False
    """Generated tokens went through the prefill path once more, which changes bits."""

    @property
    def queue_s(self) -> float | None:
        """Time until it was first scheduled; None before."""
        return None if self.scheduled_s is None else self.scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, waiting included; None before there is one."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A request and what it has generated so far."""

    request_id: str
    prompt: str | None
    """None when the prompt was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """One a sequence, in order of their index."""
    finished: bool
    metrics: RequestMetrics | None = None
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """One dict a prompt token, from token id to Logprob: the token itself and the likeliest ones at
    its place; None for the first, which nothing precedes. None unless asked for."""


def request_output(
    requests: Sequence[Request],
    prompt: str | None,
    tokenizer: PreTrainedTokenizerFast | None,
    before: RequestOutput | None = None,
) -> RequestOutput:
    """The result of a request, finished or not.

    requests: one a sequence, in order of index; the first one's prompt_logprobs count. prompt: its
    text, if it was given as text. before: an earlier result of it, whose log-probabilities are
    taken over: all results of a long request then cost as much as its last one.
    """
    first = requests[0]
    prompt_logprobs = None
    if first.params.prompt_logprobs is not None:
        known = [None] if before is None else before.prompt_logprobs or [None]
        new = first.prompt_logprobs[len(known) - 1 :]
        prompt_logprobs = [*known, *(_with_text(entry, tokenizer) for entry in new)]
    return RequestOutput(
        request_id=first.request_id,
        prompt=prompt,
        prompt_token_ids=list(first.prompt),
        outputs=[
            _completion(i, request, tokenizer, None if before is None else before.outputs[i])
            for i, request in enumerate(requests)
        ],
        finished=all(request.finish_reason is not None for request in requests),
        metrics=_metrics(requests),
        prompt_logprobs=prompt_logprobs,
    )


def append_logprobs(request: Request, logprobs: Sequence[np.ndarray], row: int) -> None:
    """Adds the log-probabilities of the request's newest token, as many as it wants.

    logprobs: what sampler.logprobs returns, on the host. row: the request's, when it was chosen.
    """
    assert request.params.logprobs is not None
    chosen, rank, top_ids, top = (values[row] for values in logprobs)
    likeliest = _likeliest(top_ids, top, request.params.logprobs)
    request.logprobs.append((Logprob(float(chosen), int(rank)), likeliest))


def append_prompt_logprobs(
    request: Request, scores: PromptLogprobs, chunk: int, rows: Sequence[int]
) -> None:
    """Adds the log-probabilities of the next prompt tokens, as many as the request wants.

    scores: of a prefill step, on the host. rows: places in that chunk whose targets they were,
    ascending; so the first of them has the target prompt[1 + len(request.prompt_logprobs)].
    """
    wanted = request.params.prompt_logprobs
    assert wanted is not None
    chosen, rank, top_ids, top = (values[chunk] for values in scores)
    for row in rows:
        token = request.prompt[1 + len(request.prompt_logprobs)]
        entry = _likeliest(top_ids[row], top[row], wanted)
        entry[token] = Logprob(float(chosen[row]), int(rank[row]))
        request.prompt_logprobs.append(entry)


def _completion(
    index: int,
    request: Request,
    tokenizer: PreTrainedTokenizerFast | None,
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


def _likeliest(top_ids: np.ndarray, top: np.ndarray, wanted: int) -> dict[int, Logprob]:
    return {int(top_ids[i]): Logprob(float(top[i]), i + 1) for i in range(min(wanted, len(top)))}


def _with_text(
    found: dict[int, Logprob], tokenizer: PreTrainedTokenizerFast | None
) -> dict[int, Logprob]:
    if tokenizer is None:
        return found
    return {
        token: dataclasses.replace(entry, decoded_token=tokenizer.decode([token]))
        for token, entry in found.items()
    }

"""What a request returns. The names are vLLM's."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from moejax.tokenizer import Detokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

    from moejax.scheduler import Request

FinishReason = Literal["stop", "length", "abort"]
"""`stop`: an end-of-sequence token. `length`: max_tokens. `abort`: cancelled."""


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
    """Its place among the request's sequences; 0, as a request has one."""
    text: str
    """Without special tokens; empty without a tokenizer."""
    token_ids: list[int]
    cumulative_logprob: float | None = None
    """Sum over token_ids; None unless logprobs were asked for."""
    logprobs: list[dict[int, Logprob]] | None = None
    """One dict a token, from token id to Logprob: the chosen token and the likeliest ones."""
    finish_reason: FinishReason | None = None
    """None while the sequence is running."""
    stop_reason: int | str | None = None
    """The stop token id that ended the sequence, None for the model's own end of sequence."""

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
    """When things happened to a request, in seconds of one monotonic clock."""

    arrival_s: float
    first_token_s: float | None = None
    finished_s: float | None = None

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
    finished: bool
    metrics: RequestMetrics | None = None


def request_output(
    request: Request, prompt: str | None, tokenizer: PreTrainedTokenizerFast | None
) -> RequestOutput:
    """The result of a request, finished or not. prompt: its text, if it was given as text."""
    text = ""
    if tokenizer is not None:
        detokenizer = Detokenizer(tokenizer, request.prompt)
        text = detokenizer.push(request.output) + detokenizer.finish()
    logprobs, total = None, None
    if request.params.logprobs is not None:
        total = sum(chosen.logprob for chosen, _ in request.logprobs)
        logprobs = [
            _with_text({**likeliest, token: chosen}, tokenizer)
            for token, (chosen, likeliest) in zip(request.output, request.logprobs, strict=True)
        ]
    completion = CompletionOutput(
        index=0,
        text=text,
        token_ids=list(request.output),
        cumulative_logprob=total,
        logprobs=logprobs,
        finish_reason=request.finish_reason,
    )
    return RequestOutput(
        request_id=request.request_id,
        prompt=prompt,
        prompt_token_ids=list(request.prompt),
        outputs=[completion],
        finished=request.finish_reason is not None,
        metrics=RequestMetrics(request.arrival_s, request.first_token_s, request.finished_s),
    )


def _with_text(
    found: dict[int, Logprob], tokenizer: PreTrainedTokenizerFast | None
) -> dict[int, Logprob]:
    if tokenizer is None:
        return found
    return {
        token: dataclasses.replace(entry, decoded_token=tokenizer.decode([token]))
        for token, entry in found.items()
    }

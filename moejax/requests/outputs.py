"""Results of a request. Names are vLLM's, except in RequestMetrics, whose names state units."""

from __future__ import annotations

import dataclasses
from typing import Literal

FinishReason = Literal["stop", "length", "abort"]
"""`stop`: an end-of-sequence token, stop token or stop string. `length`: max_tokens. `abort`: the
request was cancelled."""


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
    """Its number among the request's n sequences."""
    text: str
    """The text; empty without a tokenizer. Special tokens, and the stop string or token that ended
    the sequence, are left out unless the sampling parameters say otherwise. The text of a running
    sequence also lacks characters that may become part of a stop string."""
    token_ids: list[int]
    """All token ids, including those of a stop string and of text after it in the same token."""
    cumulative_logprob: float | None = None
    """Sum over token_ids; None if no logprobs were requested."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each token, token id → Logprob of the chosen token and the likeliest ones."""
    finish_reason: FinishReason | None = None
    """None while the sequence is running."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended the sequence, None for the model's own end of
    sequence."""

    def finished(self) -> bool:
        return self.finish_reason is not None

    def since(self, before: CompletionOutput) -> CompletionOutput:
        """Returns this sequence with only what an earlier state of it lacks."""
        tokens = len(before.token_ids)
        return dataclasses.replace(
            self,
            text=self.text[len(before.text) :],
            token_ids=self.token_ids[tokens:],
            logprobs=None if self.logprobs is None else self.logprobs[tokens:],
        )


@dataclasses.dataclass(frozen=True)
class RequestMetrics:
    """Times of a request, in seconds of one monotonic clock, and counts of its work.

    With several sequences: the first time, for finished_s the last, and the sum of counts.
    """

    arrival_s: float
    scheduled_s: float | None = None
    """When it first got a row."""
    first_token_s: float | None = None
    finished_s: float | None = None
    """When its last sequence ended; None while one runs."""
    tpot_s: list[list[float]] = dataclasses.field(default_factory=list)
    """Time per output token: for each sequence, the seconds between its tokens."""
    missed_routes: int = 0
    """Routed (layer, expert) pairs of its tokens, prompt included, that were not resident."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was already in pages."""
    preemptions: int = 0
    """How often it was preempted: moved out while it ran."""
    recomputed: bool = False
    """Whether generated tokens were computed again by the prefill path, which changes bits."""

    @property
    def queue_s(self) -> float | None:
        """Seconds until it was first scheduled; None before that."""
        return None if self.scheduled_s is None else self.scheduled_s - self.arrival_s

    @property
    def ttft_s(self) -> float | None:
        """Seconds to the first token, waiting included; None before the first token."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A request and its results so far."""

    request_id: str
    prompt: str | None
    """The prompt's text; None if it was given as token ids."""
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """One for each sequence, in order of index."""
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """For each prompt token, token id → Logprob of the token itself and the likeliest ones at its
    place; None for the first token. The whole is None if it was not requested."""

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose KV was already in pages."""
        return self.metrics.cached_tokens

    def since(self, before: RequestOutput | None) -> RequestOutput:
        """Returns this result with only the text, tokens and log-probabilities that an earlier one
        lacks."""
        if before is None:
            return self
        pairs = zip(self.outputs, before.outputs, strict=True)
        return dataclasses.replace(self, outputs=[new.since(old) for new, old in pairs])

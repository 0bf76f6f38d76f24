"""What a request returns. Names are vLLM's, but those of RequestMetrics, which say their unit."""

from __future__ import annotations

import dataclasses
from typing import Literal

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

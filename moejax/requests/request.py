"""Requests of callers, and the sequences that the engine makes of them."""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from host_offload.memory.sequence_blocks import SequenceBlocks
from moejax.errors import UserError, shown
from moejax.requests.outputs import FinishReason, Logprob
from moejax.requests.sampling_params import SamplingParams
from moejax.requests.stopping import Ending
from moejax.requests.token_rules import TokenRules

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with `prompt`, `prompt_token_ids`, or `messages` and perhaps
`chat_template_kwargs`, values of names in the chat template, `tools`, a list as in OpenAI's API,
`chat_template`, `add_generation_prompt` and `continue_final_message`, as in `LLM.chat`."""


@dataclasses.dataclass(frozen=True)
class GenerationRequest:
    """One prompt and its parameters; `LLM.generate_each` takes a stream of these."""

    prompt: Prompt
    sampling_params: SamplingParams = dataclasses.field(default_factory=SamplingParams)
    """By default not the model's, which `LLM.get_default_sampling_params` has."""
    session_id: str | None = None
    """Requests with the same session id are turns of one conversation. The KV of a finished turn is
    kept for the next turn as long as there is room."""
    priority: int = 0
    """A smaller number runs earlier, as in vLLM."""
    tag: object = None
    """Any value of the caller; it is returned with the result."""

    def __post_init__(self):
        """Raises UserError for a value of a wrong type, and for several sequences in a session."""
        params = self.sampling_params
        require_type("sampling_params", params, SamplingParams, "SamplingParams or None")
        require_type("session_id", self.session_id, str | None, "a string or None")
        require_type("priority", self.priority, int, "an integer")
        if self.session_id is not None and params.n > 1:
            raise UserError("a session continues one answer; leave out session_id or n")


def require_type(name: str, value: object, kind: Any, what: str) -> None:
    """Raises UserError for a value that is not of `kind`. what: the expected kind, in words."""
    if isinstance(value, bool) or not isinstance(value, kind):
        raise UserError(f"{name} must be {what}, got {shown(value)}")


PrefillKind = Literal["prefill", "score", "prompt_logprobs"]
"""The executable that computes a prompt."""


@dataclasses.dataclass(eq=False)
class Session:
    """A conversation: its turns run one after the other."""

    session_id: str
    number: int
    blocks: SequenceBlocks
    """Blocks of the session. A running turn also holds those that it continues, and replaces all of
    them when it ends."""
    tokens: list[int] = dataclasses.field(default_factory=list)
    """Tokens whose KV is in `blocks`, in order."""
    pure: int = 0
    """Leading tokens that the prefill path computed. Decode computed generated tokens, whose KV has
    different bits."""
    dropped: bool = False
    """Whether KV of its history was dropped, now or some turns ago. Computed again it has other
    bits, and all later turns continue from them."""
    turn: Request | None = None
    """The turn that waits or runs; None: none does."""
    queue: deque[Request] = dataclasses.field(default_factory=deque)
    """Later turns."""


@dataclasses.dataclass(eq=False)
class Request:
    """One sequence in the engine. Counts are ahead of `output`, since a step is dispatched before
    the tokens of the step before it were read."""

    request_id: str
    number: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    arrival_s: float
    ending: Ending
    """Reads the tokens and keeps their text."""
    rules: TokenRules | None = None
    """Which tokens may come next; None: any."""
    priority: int = 0
    """Lower runs first."""
    session: Session | None = None
    targets: list[int] | None = None
    """For scoring: the token to score at each prompt position. The request then generates
    nothing."""
    row: int | None = None
    """Row in the decode batch and the block table while it runs."""
    blocks: SequenceBlocks = dataclasses.field(init=False, repr=False)
    """Set when it is queued."""
    computed: int = 0
    """Leading tokens whose KV is computed or dispatched."""
    pure: int = 0
    """Leading tokens of `computed` that the prefill path computed."""
    prefill_to: int = 0
    """Tokens that the prefill path computes: the prompt, and after recomputation also generated
    tokens."""
    dispatched: int = 0
    """Generated tokens that are dispatched."""
    output: list[int] = dataclasses.field(default_factory=list)
    logprobs: list[tuple[Logprob, dict[int, Logprob]]] = dataclasses.field(default_factory=list)
    """For each token, its log-probability and those of the likeliest tokens, if requested."""
    prompt_logprobs: list[dict[int, Logprob]] = dataclasses.field(default_factory=list)
    """For each prompt token except the first, if requested."""
    scores: list[float] = dataclasses.field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: UserError | None = None
    """Why this request alone failed; it has then ended."""
    admitted_pages: int = 0
    """Pages that it may need at most, once it is admitted."""
    scheduled_s: float | None = None
    """When it first got a row."""
    first_token_s: float | None = None
    token_times: list[float] = dataclasses.field(default_factory=list)
    """Seconds between its tokens."""
    last_token_s: float | None = None
    finished_s: float | None = None
    missed_routes: int = 0
    """Routed (layer, expert) pairs of its tokens that were not resident."""
    cached_tokens: int = 0
    """Prompt tokens whose KV was there already."""
    preemptions: int = 0
    recomputed: bool = False
    """Generated tokens went through the prefill path once more, which changes bits."""
    block_keys: list[bytes] | None = None
    """Names of the prompt's whole blocks, computed when they are first needed."""

    @functools.cached_property
    def to_generate(self) -> int:
        if self.targets is not None:
            return 0
        assert self.params.max_tokens is not None, "Engine.add gives it a number"
        return self.params.max_tokens

    @property
    def prefill_done(self) -> bool:
        return self.computed >= self.prefill_to

    @property
    def prefill_kind(self) -> PrefillKind:
        if self.targets is not None:
            return "score"
        return "prefill" if self.params.prompt_logprobs is None else "prompt_logprobs"

    @functools.cached_property
    def order(self) -> tuple[int, int]:
        """The order of requests: by priority, then by arrival."""
        return self.priority, self.number

    def tokens(self, start: int, stop: int) -> list[int]:
        """Prompt and generated tokens [start, stop)."""
        n = len(self.prompt)
        return self.prompt[start:stop] + self.output[max(start - n, 0) : max(stop - n, 0)]


def append_logprobs(request: Request, logprobs: Sequence[np.ndarray], row: int) -> None:
    """Adds the log-probabilities of the request's newest token, as many as it wants.

    - `logprobs`: the result of pallas_kernels.sample.logprobs, on the host.
    - `row`: the request's row when the token was chosen.
    """
    assert request.params.logprobs is not None
    chosen, rank, top_ids, top = (values[row] for values in logprobs)
    likeliest = _likeliest(top_ids, top, request.params.logprobs)
    request.logprobs.append((Logprob(float(chosen), int(rank)), likeliest))


def append_prompt_logprobs(
    request: Request, scores: Sequence[np.ndarray], chunk: int, rows: Sequence[int]
) -> None:
    """Adds the log-probabilities of the next prompt tokens, as many as the request wants.

    - `scores`: the PromptLogprobs of a prefill step, on the host.
    - `rows`: places in that chunk, ascending, whose targets were the next tokens. The first one has
      the target prompt[1 + len(request.prompt_logprobs)].
    """
    wanted = request.params.prompt_logprobs
    assert wanted is not None
    chosen, rank, top_ids, top = (values[chunk] for values in scores)
    for row in rows:
        token = request.prompt[1 + len(request.prompt_logprobs)]
        entry = _likeliest(top_ids[row], top[row], wanted)
        entry[token] = Logprob(float(chosen[row]), int(rank[row]))
        request.prompt_logprobs.append(entry)


def _likeliest(top_ids: np.ndarray, top: np.ndarray, wanted: int) -> dict[int, Logprob]:
    return {int(top_ids[i]): Logprob(float(top[i]), i + 1) for i in range(min(wanted, len(top)))}

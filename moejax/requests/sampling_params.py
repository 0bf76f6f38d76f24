"""How a request's tokens are chosen and when it ends."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterable, Mapping, Sequence

from moejax.errors import UserError

MAX_LOGPROBS = 20
"""Most log-probabilities per token (vLLM's default ``max_logprobs``); they are a compiled shape."""

MAX_SEED = 2**32 - 1

MAX_N = 16384
"""Most sequences of a request (vLLM's default VLLM_MAX_N_SEQUENCES)."""

MAX_LOGIT_BIAS = 300
"""Most tokens that a request's logit_bias names (OpenAI's limit); they are a compiled shape."""

MAX_STOP_TOKEN_IDS = 128
"""Most stop_token_ids of a request: min_tokens bans them through the list of biases."""

MAX_BIASES = 512
"""Biases of a row, a compiled shape: logit_bias, stop_token_ids and end-of-sequence tokens."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy (vLLM's ``_SAMPLING_EPS``)."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. Names, defaults and ranges are vLLM's.

    Sequences and mappings become tuples, so that the whole is hashable. Raises UserError for a
    value out of range and TypeError for an unknown name.
    """

    n: int = 1
    """Sequences to generate for the prompt, 1 to 16384; more than one needs temperature > 0."""
    temperature: float = 1.0
    """Randomness, in [0, 2]. 0 (anything below 1e-5) takes the likeliest token every time."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together have this probability, in (0, 1]. 1: all."""
    top_k: int = 0
    """Draw from this many of the likeliest tokens. 0 (or -1): all."""
    min_p: float = 0.0
    """Draw from tokens at least this much as likely as the likeliest, in [0, 1]. 0: all."""
    repetition_penalty: float = 1.0
    """Divides the positive and multiplies the negative logits of tokens in the prompt or generated
    before; above 0. Over 1 fewer repetitions, below 1 more."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens generated before, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it was generated before, in [-2, 2]."""
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None = None
    """Token id → what is added to its logit, clamped to [-100, 100]; at most 300 tokens. Kept as
    ascending pairs; an empty one becomes None."""
    seed: int | None = None
    """Seed of this request's draws, in [0, 2^32). None (or -1): the engine chooses one."""
    max_tokens: int = 16
    """Most tokens to generate."""
    min_tokens: int = 0
    """Tokens to generate before the sequence may end: until then end-of-sequence and stop tokens
    cannot be chosen, and stop strings do not count. At most max_tokens."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
    stop: str | Sequence[str] | None = None
    """Strings that end the sequence when they appear in its text; the text ends before them.
    Kept as a tuple."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the sequence, at most 128; token_ids has them, the text does not. Kept as a
    tuple without repetitions."""
    include_stop_str_in_output: bool = False
    """Leave in the text the stop string or stop token that ended it."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logprobs: int | None = None
    """Log-probabilities of this many likeliest tokens at each position, beside the chosen one's;
    0 to 20. None: none at all."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt. Such a prompt is computed whole, no prefix reused."""

    def __post_init__(self):
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        for name in (*_PENALTIES, "temperature", "top_p", "min_p"):
            put(name, _number(name, getattr(self, name)))
        for name in ("n", "top_k", "max_tokens", "min_tokens"):
            put(name, _integer(name, getattr(self, name)))
        for name in ("seed", "logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                put(name, _integer(name, getattr(self, name)))
        put("stop", _strings(self.stop))
        put("stop_token_ids", _token_ids(self.stop_token_ids))
        put("logit_bias", _biases(self.logit_bias))
        if self.top_k == -1:
            put("top_k", 0)
        if self.seed == -1:
            put("seed", None)
        self._check_sampling()
        self._check_ending()

    def _check_sampling(self) -> None:
        self._require("n", self.n >= 1, "at least 1")
        self._require("n", self.n <= MAX_N, f"at most {MAX_N}")
        self._require("temperature", 0.0 <= self.temperature <= 2.0, "in [0, 2]")
        if self.n > 1 and self.temperature < GREEDY_BELOW:
            raise UserError(
                f"n must be 1 when using greedy sampling, got {self.n}: all would be equal; "
                "raise temperature"
            )
        self._require("top_p", 0.0 < self.top_p <= 1.0, "in (0, 1]")
        self._require("top_k", self.top_k >= 0, "0 (disable), or at least 1")
        self._require("min_p", 0.0 <= self.min_p <= 1.0, "in [0, 1]")
        self._require("repetition_penalty", self.repetition_penalty > 0.0, "greater than zero")
        for name in ("presence_penalty", "frequency_penalty"):
            self._require(name, -2.0 <= getattr(self, name) <= 2.0, "in [-2, 2]")
        seeds = f"in [0, {MAX_SEED}]"
        self._require("seed", self.seed is None or 0 <= self.seed <= MAX_SEED, seeds)
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= MAX_LOGPROBS:
                raise UserError(
                    f"{name} must be in [0, {MAX_LOGPROBS}] or None, got {value}; "
                    f"{MAX_LOGPROBS} is the most (the whole vocabulary, vLLM's -1, is not offered)"
                )

    def _check_ending(self) -> None:
        most = f"less than or equal to max_tokens={self.max_tokens}"
        self._require("max_tokens", self.max_tokens >= 1, "at least 1")
        self._require("min_tokens", self.min_tokens >= 0, "greater than or equal to 0")
        self._require("min_tokens", self.min_tokens <= self.max_tokens, most)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            self._require(name, isinstance(getattr(self, name), bool), "True or False")

    def _require(self, name: str, holds: bool, range_: str) -> None:
        if not holds:
            raise UserError(f"{name} must be {range_}, got {getattr(self, name)!r}")


_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")


def child_params(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of sequence `index` of a request for n: n = 1, and seed + index (modulo 2^32)
    where there is a seed, so sequence i of seed s is the only one of seed s + i (vLLM's
    ParentRequest). Only the first one computes prompt_logprobs, which are the same for all."""
    seed = None if params.seed is None else (params.seed + index) % (MAX_SEED + 1)
    prompt_logprobs = params.prompt_logprobs if index == 0 else None
    return dataclasses.replace(params, n=1, seed=seed, prompt_logprobs=prompt_logprobs)


def _number(name: str, value: object) -> float:
    if isinstance(value, bool | str | bytes) or not hasattr(value, "__float__"):
        raise UserError(f"{name} must be a number, got {value!r}")
    number = float(value)  # pyright: ignore[reportArgumentType]
    if not math.isfinite(number):
        raise UserError(f"{name} must be a finite number, got {number}")
    return number


def _integer(name: str, value: object) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise UserError(f"{name} must be an integer, got {value!r}")
    return operator.index(value)  # pyright: ignore[reportArgumentType]


def _strings(value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(strings, Iterable) or isinstance(strings, bytes | Mapping):
        raise UserError(f"stop must be a string or a list of strings, got {value!r}")
    found: list[str] = []
    for string in strings:
        if not isinstance(string, str):
            raise UserError(f"stop must be a string or a list of strings, got {string!r} in it")
        if not string:
            raise UserError("stop cannot contain an empty string")
        found.append(string)
    return tuple(found)


def _token_ids(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise UserError(f"stop_token_ids must be a list of token ids, got {value!r}")
    ids = tuple(dict.fromkeys(_integer("each of stop_token_ids", token) for token in value))
    if any(token < 0 for token in ids):
        raise UserError(f"stop_token_ids must be token ids of 0 or more, got {min(ids)}")
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise UserError(f"at most {MAX_STOP_TOKEN_IDS} stop_token_ids are possible, got {len(ids)}")
    return ids


def _biases(value: object) -> tuple[tuple[int, float], ...] | None:
    if value is None:
        return None
    if isinstance(value, Mapping):
        value = value.items()
    try:
        pairs = list(value)  # pyright: ignore[reportArgumentType]
        given = [(token, bias) for token, bias in pairs]
    except (TypeError, ValueError):
        raise UserError(
            f"logit_bias must map token ids to numbers, got {value!r}; for example {{42: -5}}"
        ) from None
    found: dict[int, float] = {}
    for token, bias in given:
        # JSON has only strings for keys.
        is_number = isinstance(token, str) and token.isdecimal()
        token = int(token) if is_number else _integer("a token id in logit_bias", token)
        if token < 0:
            raise UserError(f"a token id in logit_bias must be 0 or more, got {token}")
        found[token] = min(100.0, max(-100.0, _number(f"logit_bias[{token}]", bias)))
    if len(found) > MAX_LOGIT_BIAS:
        raise UserError(
            f"at most {MAX_LOGIT_BIAS} logit_bias tokens are possible, got {len(found)}"
        )
    return tuple(sorted(found.items())) or None

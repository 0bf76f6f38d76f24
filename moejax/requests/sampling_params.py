"""How a request's tokens are chosen and when it ends."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from moejax.errors import UserError, shown
from moejax.requests.structured_outputs import StructuredOutputsParams
from pallas_kernels.option_text import nearest

MAX_LOGPROBS = 20
"""Most log-probabilities per token (vLLM's default ``max_logprobs``); they are a compiled shape."""

MAX_SEED = 2**32 - 1

MAX_COUNT = 2**31 - 1
"""Largest value of what is counted in int32: top_k, tokens."""

MAX_REPETITION = 1e10
"""Largest repetition_penalty: logits times it, or over its inverse, stay finite in float32."""

MAX_N = 16384
"""Most sequences of a request (vLLM's default VLLM_MAX_N_SEQUENCES)."""

MAX_LOGIT_BIAS = 300
"""Most tokens that a request's logit_bias names (OpenAI's limit); they are a compiled shape."""

MAX_STOP = 1024
"""Most stop strings of a request: the engine looks for each of them after every token."""

MAX_STOP_TOKEN_IDS = 128
"""Most stop_token_ids of a request: min_tokens bans them through the list of biases."""

MAX_BAD_WORDS = 1 << 16
"""Most characters of all bad_words, which the engine's thread reads."""

MAX_VALUES = 1 << 16
"""Most values that are read from a list, repetitions included, since it may be endless."""

MAX_BIASES = 512
"""Biases of a row, a compiled shape: logit_bias, stop_token_ids and end-of-sequence tokens."""

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy (vLLM's ``_SAMPLING_EPS``)."""


OTHER_NAMES = {
    "do_sample": "temperature=0 always takes the likeliest token",
    "temp": "temperature is the randomness",
    "repeat_penalty": "repetition_penalty is the factor",
    **dict.fromkeys(
        ("max_new_tokens", "max_length", "max_completion_tokens", "n_predict"),
        "max_tokens is most tokens to generate",
    ),
    **dict.fromkeys(("best_of", "num_return_sequences"), "n is how many texts to generate"),
}
"""Names of transformers, llama.cpp and OpenAI for fields, and what to use here."""

C = TypeVar("C")


def _name_unknown(cls: type[C]) -> type[C]:
    """Decorates a dataclass: its TypeError for an unknown name says which is meant."""
    known = [field.name for field in dataclasses.fields(cls) if field.init]  # pyright: ignore[reportArgumentType]
    make = cls.__init__

    @functools.wraps(make)
    def checked(self: C, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in known:
                instead = OTHER_NAMES.get(name)
                hint = nearest(name, known) if instead is None else f"; {instead}"
                raise TypeError(f"{cls.__name__} has no field {name!r}{hint}")
        make(self, *args, **given)

    cls.__init__ = checked
    return cls


@_name_unknown
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. Names, defaults and ranges are vLLM's.

    Sequences and mappings become tuples, so that the object is hashable. Raises UserError for a
    value out of range and TypeError for an unknown name.
    """

    n: int = 1
    """Sequences to generate for the prompt, 1 to 16384; more than one needs temperature > 0."""
    temperature: float = 1.0
    """Randomness, in [0, 2]. 0 (anything below 1e-5) takes the likeliest token every time."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together have this probability, in (0, 1]. 1: all."""
    top_k: int = 0
    """Draw from this many of the likeliest tokens, at most 2^31 - 1. 0 (or -1): all."""
    min_p: float = 0.0
    """Draw from tokens at least this share as likely as the likeliest one, in [0, 1]. 0: all."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens that are in the prompt or were
    generated; from 1e-10 to 1e10. Above 1 there are fewer repetitions, below 1 more."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that were generated, in [-2, 2]."""
    frequency_penalty: float = 0.0
    """Subtracted from a token's logit for each time it was generated, in [-2, 2]."""
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float]] | None = None
    """Token id → number that is added to its logit, clamped to [-100, 100]; at most 300 tokens.
    Stored as ascending pairs; an empty mapping becomes None."""
    seed: int | None = None
    """Seed of this request's draws, in [0, 2^32). None (or -1): the engine chooses one."""
    max_tokens: int | None = 16
    """Most tokens to generate. None: as many as max_model_len leaves room for."""
    min_tokens: int = 0
    """Tokens to generate before the sequence may end, at most max_tokens. Until then
    end-of-sequence and stop tokens cannot be chosen, and stop strings do not count."""
    ignore_eos: bool = False
    """Continue after the end-of-sequence token."""
    stop: str | Sequence[str] | None = None
    """At most 1024 strings that end the sequence when they appear in its text. The text ends before
    them. Stored as a tuple."""
    stop_token_ids: Sequence[int] | None = None
    """At most 128 tokens that end the sequence. They are in token_ids but not in the text. Stored
    as a tuple without repetitions."""
    include_stop_str_in_output: bool = False
    """Keep the stop string or stop token that ended the sequence in the text."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    logprobs: int | None = None
    """Return the log-probability of the chosen token and of this many likeliest tokens at each
    position; 0 to 20. None: return none."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt, which is then computed whole, without a shared
    prefix."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these tokens can be chosen. Stored as an ascending tuple."""
    bad_words: Sequence[str] | None = None
    """At most 1024 words that the text will not have: the token that would complete one cannot be
    chosen. A word counts with and without a space before it. Stored as a tuple."""
    structured_outputs: StructuredOutputsParams | Mapping[str, object] | None = None
    """What the text must be: JSON by a schema, a regular expression, a grammar or a choice."""

    def __post_init__(self):
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        for name, allowed in _RANGES.items():
            put(name, allowed.check(name, getattr(self, name)))
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(given := getattr(self, name), bool):
                raise UserError(f"{name} must be True or False, got {shown(given)}")
        put("stop", _strings("stop", self.stop))
        put("bad_words", _bad_words(self.bad_words))
        put("allowed_token_ids", _allowed(self.allowed_token_ids))
        put("structured_outputs", _structured(self.structured_outputs))
        stop = _token_ids("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS)
        put("stop_token_ids", stop)
        put("logit_bias", _biases(self.logit_bias))
        put("top_k", max(self.top_k, 0))
        put("seed", None if self.seed == -1 else self.seed)
        if self.n > 1 and self.temperature < GREEDY_BELOW:
            raise UserError(
                f"n must be 1 when using greedy sampling, got {self.n}: all would be equal; "
                "raise temperature"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise UserError(
                f"min_tokens must be less than or equal to max_tokens={self.max_tokens}, got "
                f"{self.min_tokens}"
            )


def child_params(params: SamplingParams, index: int) -> SamplingParams:
    """The parameters of sequence `index` of a request with n sequences: n = 1, and seed + index
    (modulo 2^32) if there is a seed. So sequence i of seed s equals the only sequence of seed s +
    i, as in vLLM's ParentRequest. Only the first sequence computes prompt_logprobs, which all
    share."""
    seed = None if params.seed is None else (params.seed + index) % (MAX_SEED + 1)
    prompt_logprobs = params.prompt_logprobs if index == 0 else None
    return dataclasses.replace(params, n=1, seed=seed, prompt_logprobs=prompt_logprobs)


def _number(name: str, value: object) -> float:
    try:
        if isinstance(value, bool | str | bytes):
            raise TypeError
        number = float(value)  # pyright: ignore[reportArgumentType]
    except (TypeError, ValueError):
        raise UserError(f"{name} must be a number, got {shown(value)}") from None
    except OverflowError:  # an integer of hundreds of digits
        number = math.inf
    if not math.isfinite(number):
        raise UserError(f"{name} must be a finite number, got {shown(value)}")
    return number


def _integer(name: str, value: object) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise UserError(f"{name} must be an integer, got {shown(value)}") from None


@dataclasses.dataclass(frozen=True)
class _Range:
    """The range of one numeric parameter, from least to most, both included."""

    least: float
    most: float
    demanded: str
    """The allowed values in words, for messages: an interval, or only the least value."""
    number: Callable[[str, object], float] = _integer
    optional: bool = False
    hint: str = ""

    def check(self, name: str, given: object) -> float | None:
        """The number as int or float. Raises UserError for another type or a value outside the
        range."""
        if given is None and self.optional:
            return None
        value = self.number(name, given)
        if not self.least <= value <= self.most:
            interval = value < self.least or self.demanded.startswith("in ")
            demanded = self.demanded if interval else f"at most {self.most}"
            raise UserError(f"{name} must be {demanded}, got {shown(value)}{self.hint}")
        return value


_PENALTY = _Range(-2, 2, "in [-2, 2]", _number)
_LOGPROBS = _Range(
    *(0, MAX_LOGPROBS, f"in [0, {MAX_LOGPROBS}] or None"),
    optional=True,
    hint=f"; {MAX_LOGPROBS} is the most (the whole vocabulary, vLLM's -1, is not offered)",
)
_RANGES = {
    "n": _Range(1, MAX_N, "at least 1"),
    "temperature": _Range(0, 2, "in [0, 2]", _number),
    "top_p": _Range(sys.float_info.min, 1, "in (0, 1]", _number),
    "top_k": _Range(-1, MAX_COUNT, "0 (disable), or at least 1"),
    "min_p": _Range(0, 1, "in [0, 1]", _number),
    "repetition_penalty": _Range(1 / MAX_REPETITION, MAX_REPETITION, "greater than zero", _number),
    "presence_penalty": _PENALTY,
    "frequency_penalty": _PENALTY,
    "seed": _Range(-1, MAX_SEED, f"in [0, {MAX_SEED}]", optional=True),
    "max_tokens": _Range(1, MAX_COUNT, "at least 1", optional=True),
    "min_tokens": _Range(0, MAX_COUNT, "greater than or equal to 0"),
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
}
"""The ranges of all numeric parameters. They fit the dtypes of the compiled step."""


def _values(name: str, value: Iterable) -> tuple:
    """The values of an iterable. Raises UserError for more than MAX_VALUES."""
    found = tuple(itertools.islice(value, MAX_VALUES + 1))
    if len(found) > MAX_VALUES:
        raise UserError(f"{name} has more than {MAX_VALUES} values")
    return found


def _strings(name: str, value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else () if value is None else value
    if not isinstance(strings, Iterable) or isinstance(strings, bytes | Mapping):
        raise UserError(f"{name} must be a string or a list of strings, got {shown(value)}")
    found = _values(name, strings)
    for string in found:
        if not isinstance(string, str):
            wrong = shown(string)
            raise UserError(f"{name} must be a string or a list of strings, got {wrong} in it")
        if not string:
            raise UserError(f"{name} cannot contain an empty string")
    if len(found) > MAX_STOP:
        raise UserError(f"at most {MAX_STOP} strings are possible in {name}, got {len(found)}")
    return found


def _bad_words(value: object) -> tuple[str, ...] | None:
    found = _strings("bad_words", value)
    if sum(map(len, found)) > MAX_BAD_WORDS:
        raise UserError(f"bad_words have more than {MAX_BAD_WORDS} characters together")
    return found or None


def _token_ids(name: str, value: object, most: int) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise UserError(f"{name} must be a list of token ids, got {shown(value)}")
    ids = tuple(dict.fromkeys(_integer(f"each of {name}", each) for each in _values(name, value)))
    if any(token < 0 for token in ids):
        raise UserError(f"{name} must be token ids of 0 or more, got {shown(min(ids))}")
    if len(ids) > most:
        raise UserError(f"at most {most} {name} are possible, got {len(ids)}")
    return ids


def _allowed(value: object) -> tuple[int, ...] | None:
    ids = _token_ids("allowed_token_ids", value, MAX_VALUES)
    if value is not None and not ids:
        raise UserError("allowed_token_ids is empty, so no token could be chosen; leave it out")
    return tuple(sorted(ids)) or None


def _structured(value: object) -> StructuredOutputsParams | None:
    if isinstance(value, Mapping):
        known = {field.name for field in dataclasses.fields(StructuredOutputsParams)}
        if unknown := [key for key in value if key not in known]:
            hint = nearest(str(unknown[0]), known)
            raise UserError(f"structured_outputs has no {shown(unknown[0])}{hint}")
        return StructuredOutputsParams(**value)
    if isinstance(value, StructuredOutputsParams | None):
        return value
    raise UserError(
        f"structured_outputs must be StructuredOutputsParams or a mapping, got {shown(value)}"
    )


def _biases(value: object) -> tuple[tuple[int, float], ...] | None:
    if value is None:
        return None
    if isinstance(value, Mapping):
        value = value.items()
    try:
        pairs = _values("logit_bias", value)  # pyright: ignore[reportArgumentType]
        given = [(token, bias) for token, bias in pairs]
    except UserError:
        raise
    except (TypeError, ValueError):
        raise UserError(
            f"logit_bias must map token ids to numbers, got {shown(value)}; for example {{42: -5}}"
        ) from None
    found: dict[int, float] = {}
    for token, bias in given:
        # JSON has only strings for keys.
        is_number = isinstance(token, str) and token.isdecimal()
        token = int(token) if is_number else _integer("a token id in logit_bias", token)
        if token < 0:
            raise UserError(f"a token id in logit_bias must be 0 or more, got {shown(token)}")
        found[token] = min(100.0, max(-100.0, _number(f"logit_bias[{shown(token)}]", bias)))
    if len(found) > MAX_LOGIT_BIAS:
        raise UserError(
            f"at most {MAX_LOGIT_BIAS} logit_bias tokens are possible, got {len(found)}"
        )
    return tuple(sorted(found.items())) or None

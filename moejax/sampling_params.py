"""How a request's tokens are chosen and when it ends."""

from __future__ import annotations

import dataclasses
import math
import operator

from moejax.errors import UserError

MAX_LOGPROBS = 20
"""Most log-probabilities per token (vLLM's default ``max_logprobs``); they are a compiled shape."""

MAX_SEED = 2**32 - 1


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. Names, defaults and ranges are vLLM's.

    Raises UserError for a value out of range and TypeError for an unknown name.
    """

    temperature: float = 1.0
    """Randomness, in [0, 2]. 0 (anything below 1e-5) takes the likeliest token every time."""
    top_p: float = 1.0
    """Draw from the likeliest tokens that together have this probability, in (0, 1]. 1: all."""
    top_k: int = 0
    """Draw from this many of the likeliest tokens. 0 (or -1): all."""
    min_p: float = 0.0
    """Draw from tokens at least this much as likely as the likeliest, in [0, 1]. 0: all."""
    seed: int | None = None
    """Seed of this request's draws, in [0, 2^32). None (or -1): the engine chooses one."""
    max_tokens: int = 16
    """Most tokens to generate."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
    logprobs: int | None = None
    """Log-probabilities of this many likeliest tokens at each position, beside the chosen one's;
    0 to 20. None: none at all."""

    def __post_init__(self):
        for name in ("temperature", "top_p", "min_p"):
            object.__setattr__(self, name, _number(name, getattr(self, name)))
        for name in ("top_k", "max_tokens"):
            object.__setattr__(self, name, _integer(name, getattr(self, name)))
        for name in ("seed", "logprobs"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _integer(name, getattr(self, name)))
        if self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        if self.seed == -1:
            object.__setattr__(self, "seed", None)

        if not 0.0 <= self.temperature <= 2.0:
            raise UserError(f"temperature must be in [0, 2], got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError(f"top_p must be in (0, 1], got {self.top_p}")
        if self.top_k < 0:
            raise UserError(f"top_k must be 0 (disable), or at least 1, got {self.top_k}")
        if not 0.0 <= self.min_p <= 1.0:
            raise UserError(f"min_p must be in [0, 1], got {self.min_p}")
        if self.seed is not None and not 0 <= self.seed <= MAX_SEED:
            raise UserError(f"seed must be in [0, {MAX_SEED}], got {self.seed}")
        if self.max_tokens < 1:
            raise UserError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not isinstance(self.ignore_eos, bool):
            raise UserError(f"ignore_eos must be True or False, got {self.ignore_eos!r}")
        if self.logprobs is not None and not 0 <= self.logprobs <= MAX_LOGPROBS:
            raise UserError(
                f"logprobs must be in [0, {MAX_LOGPROBS}] or None, got {self.logprobs}; "
                f"{MAX_LOGPROBS} is the most (the whole vocabulary, vLLM's -1, is not offered)"
            )


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

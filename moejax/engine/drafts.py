"""Speculative decoding: drafts of the next tokens, and when they pay.

A decode step verifies a draft in rows that no request uses: row i computes the draft's token i at
its position, with the pages of its sequence. The bits of a row do not depend on other rows, so each
row chooses the token that a step of its own would have chosen. The draft is accepted as far as it
equals these tokens; a rejected row's keys are overwritten before any row reads them.
"""

from __future__ import annotations

import abc
import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from moejax.engine.step_work import Guess, ScheduledWork, Step
from moejax.requests.request import Request

WINDOW = 16
"""Decode steps over which a rate is measured."""
TRIAL = 4
"""Decode steps after which a measurement of the other way ends if that way is slower."""
GAIN = 1.05
"""How much faster the other way must be before the engine changes to it."""
COST = 0.02
"""Share of the tokens that measurements of the other way may cost."""
HOLDS = 64, 1024
"""Tokens a request for which a choice is kept before the other way is measured again: at least, and
at most."""


def look_up(tokens: np.ndarray, longest: int, shortest: int, most: int) -> np.ndarray:
    """Guesses what follows `tokens` by prompt lookup (Saxena, 2023; vLLM's method "ngram").

    - `tokens`: int32[N].
    - `longest`, `shortest`: how many last tokens must occur earlier. The longest match counts; of
      equal ones the last.
    - `most`: how many tokens to guess.

    Returns int32[most], or int32[0] without a match. A match that overlaps the end goes on in a
    circle.
    """
    places = np.flatnonzero(tokens[:-1] == tokens[-1])
    matched = int(len(places) > 0)
    while matched and matched < longest:
        further = places[places >= matched]
        further = further[tokens[further - matched] == tokens[-1 - matched]]
        if not len(further):
            break
        places, matched = further, matched + 1
    if matched < max(shortest, 1) or most < 1:
        return tokens[:0]
    return np.resize(tokens[places[-1] + 1 :], most)


class Histories:
    """Prompt and output of requests as arrays, which grow with the output."""

    def __init__(self):
        self._held: WeakKeyDictionary[Request, tuple[np.ndarray, int]] = WeakKeyDictionary()

    def tokens(self, request: Request) -> np.ndarray:
        """Returns int32[N], the request's tokens so far."""
        prompt, held = len(request.prompt), self._held.get(request)
        array, size = held or (np.empty(prompt + request.to_generate, np.int32), 0)
        total = prompt + len(request.output)
        array[size:total] = request.tokens(size, total)
        self._held[request] = array, total
        return array[:total]


@dataclasses.dataclass
class Choice:
    """How long drafts are for one number of requests, 0 being none: rates of the lengths, measured
    by turns.

    A measurement of a slower length costs the tokens that the other one would have given beside.
    The next one comes when these are COST of the tokens since.
    """

    lengths: tuple[int, ...] = (0, 1)
    """Tokens of a draft, ascending, the first one 0."""
    on: int = 0
    """The fastest length so far. Steps begin without drafts."""
    trying: int | None = None
    """The length that is measured now; None: `on`."""
    rates: dict[int, float] = dataclasses.field(default_factory=dict)
    """Tokens a second and request at each length when it was measured last, the last one last."""
    hold: float = 0.0
    """Tokens a request after which another length is measured."""
    kept: float = 0.0
    """Tokens a request since one was."""
    steps: int = 0
    tokens: float = 0.0
    """Tokens a request of the window so far."""
    seconds: float = 0.0

    @property
    def length(self) -> int:
        """Tokens of a draft in the next step."""
        return self.on if self.trying is None else self.trying

    def add(self, tokens: float, seconds: float) -> None:
        """Takes a decode step of the present length.

        - `tokens`: that it gave, a request.
        """
        self.steps, self.tokens = self.steps + 1, self.tokens + tokens
        self.seconds += seconds
        rate = self.tokens / max(self.seconds, 1e-9)
        slower = self.trying is not None and rate < self.rates[self.on]
        if self.steps < (TRIAL if slower else WINDOW):
            return
        self.rates.pop(self.length, None)
        self.rates[self.length] = rate
        if self.trying is not None:
            self._compare(self.trying, rate, self.rates[self.on])
        else:
            self.kept += self.tokens
            self.trying = self._next(rate)
        self.steps, self.tokens, self.seconds = 0, 0.0, 0.0

    def _next(self, rate: float) -> int | None:
        """Returns the length to measure, if any: one that was faster than the present one is now,
        or, after the hold, the one whose measurement is the oldest, the longest first."""
        others = [length for length in self.lengths[::-1] if length != self.on]
        fastest = max(others, key=lambda length: self.rates.get(length, 0.0))
        if GAIN * rate < self.rates.get(fastest, 0.0):
            return fastest
        measured = [*self.rates]
        oldest = min(others, key=lambda n: measured.index(n) if n in measured else -1)
        return oldest if self.kept >= self.hold else None

    def _compare(self, length: int, rate: float, present: float) -> None:
        """Ends the measurement of another length.

        - `rate`, `present`: of that length, and of the one so far.
        """
        self.trying, self.kept, self.hold = None, 0.0, HOLDS[0]
        if rate > GAIN * present:
            self.on = length
        else:
            lost = self.seconds * present - self.tokens
            self.hold = min(max(lost / COST, HOLDS[0]), HOLDS[1])


class Drafts(abc.ABC):
    """Guesses of requests' next tokens, how many pay, and statistics of them.

    - `most`: tokens of a draft, at most.
    - `adaptive`: whether drafts have half as many or none where that is faster.
    """

    def __init__(self, most: int, *, adaptive: bool = True):
        self.most, self.adaptive = most, adaptive
        self.choices: dict[int, Choice] = {}
        """By the power of two that the number of requests is at most."""
        self.counts: Counter[str] = Counter()
        self.histories = Histories()

    @abc.abstractmethod
    def propose(self, asked: Mapping[Request, int], rows: int) -> Mapping[Request, Sequence[int]]:
        """Guesses tokens that come next.

        - `asked`: how many tokens of each request at most. All its tokens were read.
        - `rows`: that verify them. Requests share these evenly.
        """

    def wanted(self, requests: int) -> bool:
        """Whether the next decode step of so many requests has drafts."""
        return requests > 0 and self.length(requests) > 0

    def length(self, requests: int) -> int:
        """Returns the tokens of a draft in the next decode step of so many requests."""
        return self._choice(requests).length if self.adaptive else self.most

    def guess(self, work: ScheduledWork, rows: int) -> dict[Request, Guess]:
        """Returns guesses for the requests of a decode step with so many free rows, those without
        one left out. All tokens of the requests must have been read. A guess ends before a token
        that may not come."""
        found: dict[Request, Guess] = {}
        # The step's own token is one of those to come.
        left = {request: request.to_generate - request.dispatched for _, request in work.rows}
        most = min(self.length(len(work.rows)), rows)
        asked = {request: min(most, count) for request, count in left.items() if count > 0}
        if not most or not asked:
            return found
        for request, tokens in self.propose(asked, rows).items():
            rules = request.rules
            words = [None] * len(tokens) if rules is None else rules.ahead(tokens, request.output)
            if words:
                found[request] = Guess(tokens[: len(words)], words)
        return found

    def after_dispatch(self, step: Step) -> None:
        """Asks for what `observe` reads, before a later step is dispatched, for whose end it would
        wait otherwise."""
        return None  # most need nothing of it

    def observe(self, step: Step) -> None:
        """Takes what a step computed, whose tokens were read, before `after_read`."""
        return None

    def after_read(self, work: ScheduledWork, seconds: float | None) -> None:
        """Takes a decode step whose tokens were read.

        - `seconds`: that it took; None: not a time to learn from.
        """
        accepted = sum(draft.accepted for draft in work.drafts)
        if work.drafts:
            self.counts["steps"] += 1
            self.counts["drafted"] += sum(len(draft.tokens) for draft in work.drafts)
            self.counts["accepted"] += accepted
        requests = len(work.rows)
        if requests and seconds is not None:
            choice = self._choice(requests)
            if work.drafting == choice.length:  # else the step was dispatched before a change
                choice.add(1 + accepted / requests, seconds)

    def _choice(self, requests: int) -> Choice:
        lengths = 0, *sorted({max(self.most // 2, 1), self.most})
        return self.choices.setdefault((requests - 1).bit_length(), Choice(lengths))

    def stats(self) -> dict[str, Any]:
        """Returns the part of LLM.stats() on drafts as plain data."""
        drafted, accepted = self.counts["drafted"], self.counts["accepted"]
        return {
            "num_speculative_tokens": self.most,
            "drafted_tokens": drafted,
            "accepted_tokens": accepted,
            "acceptance_rate": accepted / drafted if drafted else None,
            "steps": self.counts["steps"],
            "choices": [self._said(bits) for bits in sorted(self.choices)],
        }

    def _said(self, bits: int) -> dict[str, Any]:
        choice = self.choices[bits]
        return {
            "requests_at_most": 1 << bits,
            "tokens": choice.on if self.adaptive else self.most,
            "tokens_per_s": {str(length): rate for length, rate in sorted(choice.rates.items())},
        }


class NgramDrafts(Drafts):
    """Drafts by n-grams of each request's own tokens.

    - `longest`, `shortest`: see `look_up`.
    """

    def __init__(self, most: int, longest: int, shortest: int, *, adaptive: bool = True):
        super().__init__(most, adaptive=adaptive)
        self.longest, self.shortest = longest, shortest

    def propose(self, asked: Mapping[Request, int], rows: int) -> Mapping[Request, Sequence[int]]:
        lengths = self.longest, self.shortest
        return {
            request: look_up(self.histories.tokens(request), *lengths, most).tolist()
            for request, most in asked.items()
        }

    def stats(self) -> dict[str, Any]:
        own = {"prompt_lookup_max": self.longest, "prompt_lookup_min": self.shortest}
        return {"method": "ngram", **own, **super().stats()}

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

from moejax.engine.step_work import Guess, ScheduledWork
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
    """Whether drafts pay for one number of requests: rates of both ways, measured by turns.

    A measurement of the slower way costs the tokens that the other way would have given beside. The
    next one comes when these are COST of the tokens since.
    """

    on: bool = False
    """The faster way so far. Steps begin without drafts."""
    trying: bool = False
    """Whether the other way is measured now."""
    rates: dict[bool, float] = dataclasses.field(default_factory=dict)
    """Tokens a second and request, with and without drafts, when each was measured last."""
    hold: float = 0.0
    """Tokens a request after which the other way is measured."""
    kept: float = 0.0
    """Tokens a request since it was."""
    steps: int = 0
    tokens: float = 0.0
    """Tokens a request of the window so far."""
    seconds: float = 0.0

    @property
    def drafts(self) -> bool:
        """Whether the next step has drafts."""
        return self.on != self.trying

    def add(self, tokens: float, seconds: float) -> None:
        """Takes a decode step of the present way.

        - `tokens`: that it gave, a request.
        """
        self.steps, self.tokens = self.steps + 1, self.tokens + tokens
        self.seconds += seconds
        rate = self.tokens / max(self.seconds, 1e-9)
        slower = self.trying and rate < self.rates[self.on]
        if self.steps < (TRIAL if slower else WINDOW):
            return
        self.rates[self.drafts] = rate
        if self.trying:
            self._compare(rate, self.rates[self.on])
        else:
            self.kept += self.tokens
            # As soon as it is slower than the other way was, too.
            self.trying = self.kept >= self.hold or GAIN * rate < self.rates.get(not self.on, 0)
        self.steps, self.tokens, self.seconds = 0, 0.0, 0.0

    def _compare(self, rate: float, present: float) -> None:
        """Ends the measurement of the other way.

        - `rate`, `present`: of the other way, and of the one so far.
        """
        self.trying, self.kept, self.hold = False, 0.0, HOLDS[0]
        if rate > GAIN * present:
            self.on = not self.on
        else:
            lost = self.seconds * present - self.tokens
            self.hold = min(max(lost / COST, HOLDS[0]), HOLDS[1])


class Drafts(abc.ABC):
    """Guesses of requests' next tokens, whether they pay, and statistics of them.

    - `most`: tokens of a draft.
    - `adaptive`: whether steps go without drafts where that is faster.
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
        return requests > 0 and (not self.adaptive or self._choice(requests).drafts)

    def guess(self, work: ScheduledWork, rows: int) -> dict[Request, Guess]:
        """Returns guesses for the requests of a decode step with so many free rows, those without
        one left out. All tokens of the requests must have been read. A guess ends before a token
        that may not come."""
        found: dict[Request, Guess] = {}
        # The step's own token is one of those to come.
        left = {request: request.to_generate - request.dispatched for _, request in work.rows}
        most = min(self.most, rows)
        asked = {request: min(most, count) for request, count in left.items() if count > 0}
        if not most or not asked:
            return found
        for request, tokens in self.propose(asked, rows).items():
            rules = request.rules
            words = [None] * len(tokens) if rules is None else rules.ahead(tokens, request.output)
            if words:
                found[request] = Guess(tokens[: len(words)], words)
        return found

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
            if work.drafting == choice.drafts:  # else the step was dispatched before a change
                choice.add(1 + accepted / requests, seconds)

    def _choice(self, requests: int) -> Choice:
        return self.choices.setdefault((requests - 1).bit_length(), Choice())

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
        with_drafts, without = choice.rates.get(True), choice.rates.get(False)
        return {
            "requests_at_most": 1 << bits,
            "on": choice.on or not self.adaptive,
            "tokens_per_s_with": with_drafts,
            "tokens_per_s_without": without,
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

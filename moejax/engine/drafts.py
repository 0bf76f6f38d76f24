"""Speculative decoding: drafts of the next tokens, and when they pay.

A decode step verifies a draft in rows that no request uses: row i computes the draft's token i at
its position, with the pages of its sequence. The bits of a row do not depend on other rows, so each
row chooses the token that a step of its own would have chosen. The draft is accepted as far as it
equals these tokens; a rejected row's keys are overwritten before any row reads them.
"""

from __future__ import annotations

import abc
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from host_offload.control.interface import Costs
from moejax.engine.draft_length import Acceptance, DraftLength
from moejax.engine.step_work import Guess, ScheduledWork, Step
from moejax.requests.request import Request

JUDGING = 0.005
"""Share of the time of decode steps that looking for drafts which nothing verifies may take."""


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


class Drafts(abc.ABC):
    """Guesses of requests' next tokens, how many pay, and statistics of them.

    - `most`: tokens of a draft, at most.
    - `adaptive`: whether drafts have fewer or none where that is faster.
    """

    costs: Costs | None = None
    """Measured costs of the engine's steps, if there are any."""
    prior = 0.5
    """Probability that a token of a draft is right, before any was seen."""
    clock: Callable[[], float] = staticmethod(time.perf_counter)

    def __init__(self, most: int, *, adaptive: bool = True):
        self.most, self.adaptive = most, adaptive
        self.acceptance = Acceptance(self.prior)
        self.choices: dict[int, DraftLength] = {}
        """By the power of two that the number of requests is at most."""
        self._last: DraftLength | None = None
        self._recalled: dict[int, dict[int, float]] = {}
        """DraftLength.extra of `choices` that an earlier run measured."""
        self._turn = 0
        self._may_judge_s = 0.0
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
        return self._choice(requests).now if self.adaptive else self.most

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

    def after_read(self, work: ScheduledWork, seconds: float | None, rows: int) -> str | None:
        """Takes a decode step whose tokens were read. Returns `why`, if drafts have another length
        from then on.

        - `seconds`: that it took; None: not a time to learn from.
        - `rows`: of the engine.
        """
        accepted = sum(draft.accepted for draft in work.drafts)
        if work.drafts:
            self.counts["steps"] += 1
            self.counts["drafted"] += sum(len(draft.tokens) for draft in work.drafts)
            self.counts["accepted"] += accepted
        if not (requests := len(work.rows)) or not self.adaptive:
            return None
        # A request a step, by turns, so that as many steps count whatever their requests.
        self._turn += 1
        _, request = work.rows[self._turn % requests]
        if work.drafting:
            mine = next((draft for draft in work.drafts if draft.request is request), None)
            self.acceptance.add(mine.accepted if mine else 0, len(mine.tokens) if mine else 0)
        elif self._may_judge_s >= 0:
            began = self.clock()
            if found := self.judge(request):
                self.acceptance.add(*found)
            self._may_judge_s -= self.clock() - began
        self._may_judge_s = min(self._may_judge_s + JUDGING * (seconds or 0.0), 0.0)
        if not (free := rows - requests):
            return None  # nothing is left to choose: no row is free for a draft
        choice = self._last = self._choice(requests)
        choice.most, before = max(free // requests, 1), choice.now
        # Others were dispatched before a change.
        if seconds is not None and work.drafting == choice.now:
            choice.add(1 + accepted / requests, seconds, len(work.drafts) / requests)
        return None if choice.now == before else self.why()

    def judge(self, request: Request) -> tuple[int, int] | None:
        """Returns Acceptance.add of a draft that was not verified, by the tokens that came without;
        None where that is not known."""
        return None  # a model's drafts would cost its steps

    def _choice(self, requests: int) -> DraftLength:
        bits = (requests - 1).bit_length()
        if bits not in self.choices:
            lengths = 0, *sorted({1, max(self.most // 2, 1), self.most})
            choice = DraftLength(1 << bits, lengths, self.acceptance, self.costs)
            choice.extra = {n: x for n, x in self._recalled.get(bits, {}).items() if n in lengths}
            self.choices[bits] = choice
        return self.choices[bits]

    def learned(self) -> dict[str, Any]:
        """Returns what the next run may begin with, as plain data."""
        extra = {bits: choice.extra for bits, choice in self.choices.items() if choice.extra}
        return {"guesses": self.acceptance.last, "extra": {**self._recalled, **extra}}

    def recall(self, found: Mapping[str, Any]) -> None:
        """Begins with what an earlier run learned, before any step. Raises KeyError, TypeError,
        ValueError or AttributeError, and changes nothing, if it is not what `learned` returns."""
        guesses = [(int(right), int(guessed)) for right, guessed in found["guesses"]]
        self._recalled = {
            int(bits): {int(n): float(x) for n, x in extra.items()}
            for bits, extra in found["extra"].items()
        }
        for right, guessed in guesses:
            self.acceptance.add(right, guessed)

    def stats(self) -> dict[str, Any]:
        """Returns the part of LLM.stats() on drafts as plain data."""
        drafted, accepted = self.counts["drafted"], self.counts["accepted"]
        return {
            "num_speculative_tokens": self.most,
            "drafted_tokens": drafted,
            "accepted_tokens": accepted,
            "acceptance_rate": accepted / drafted if drafted else None,
            "steps": self.counts["steps"],
            "choices": [choice.said() for _, choice in sorted(self.choices.items())]
            if self.adaptive
            else [],
        }

    def why(self) -> str | None:
        """Returns how long drafts are for the last number of requests, and why, in a line; None
        before there was one."""
        if not self.adaptive or (choice := self._last) is None:
            return None
        return f"drafts of up to {choice.requests} requests at once: {choice.why()}"


class NgramDrafts(Drafts):
    """Drafts by n-grams of each request's own tokens.

    - `longest`, `shortest`: see `look_up`.
    """

    prior = 0.25

    def __init__(self, most: int, longest: int, shortest: int, *, adaptive: bool = True):
        super().__init__(most, adaptive=adaptive)
        self.longest, self.shortest = longest, shortest
        self._judged: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        """How many tokens of a request the next draft to judge follows."""

    def propose(self, asked: Mapping[Request, int], rows: int) -> Mapping[Request, Sequence[int]]:
        lengths = self.longest, self.shortest
        return {
            request: look_up(self.histories.tokens(request), *lengths, most).tolist()
            for request, most in asked.items()
        }

    def judge(self, request: Request) -> tuple[int, int] | None:
        tokens, most = self.histories.tokens(request), self.most
        first = max(len(request.prompt) + 1, len(tokens) - 2 * most)
        start = max(self._judged.get(request, 0), first)
        if start + most > len(tokens):
            return None
        guess = look_up(tokens[:start], self.longest, self.shortest, most)
        right = next((i for i, t in enumerate(guess) if t != tokens[start + i]), len(guess))
        self._judged[request] = start + right + 1
        return right, len(guess)

    def stats(self) -> dict[str, Any]:
        own = {"prompt_lookup_max": self.longest, "prompt_lookup_min": self.shortest}
        return {"method": "ngram", **own, **super().stats()}

"""How many tokens drafts have: none until they are seen to pay, and none again at a bounded loss.

A decode step with drafts takes longer than one without, and gives more tokens. How many more is
known before: guesses are compared with what steps without drafts chose. How much longer is
estimated until the first steps with drafts measure it, those that wait for a draft and find none
among them. What drafts lose until they end, about LOSS steps' time, is paid for by COST of each
step's time, less after each loss, before they begin again.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import deque
from typing import Any

import numpy as np

from host_offload.control.interface import Costs

WINDOW = 16
"""Decode steps whose times count."""
TRIAL = 4
"""Decode steps after which the length is chosen again."""
GAIN = 1.05
"""How much faster another length must be before the engine changes to it."""
COST = 0.02
"""Share of the time that drafts may lose in the long run."""
LOSS, WON = 2.0, 8.0
"""Times of a step without drafts that drafts may lose before they end, and beyond that what they
won before, at most: answers that repeat their prompt have stretches that do not."""
HOLDS = 2 * TRIAL, 16 * WINDOW
"""Steps with drafts after which those without are measured again: at first, and at most."""
SHOWN = 0.1
"""Share of the time that this may cost, however soon it comes."""
WAITS = 4
"""How many times slower than at first a loss may be paid back."""
LOOK = 0.25
"""What a step takes longer that looks for drafts, which begins only when the one before was read,
over what drafts add to it."""
OUTLIER = 3.0
"""A step that took so many times as long as those around it was disturbed and does not count."""
SEEN, KEPT = 32, 8
"""Guesses that count, and those of an earlier run: fewer, since its load may have been another."""


class Acceptance:
    """How many tokens of the last guesses proved right.

    - `prior`: probability that a token is right, before any was seen.
    """

    def __init__(self, prior: float):
        self.prior = prior
        self._seen: deque[tuple[int, int]] = deque(maxlen=SEEN)
        self._expected: list[float] = []
        """Of 1, 2, … tokens, as far as it was asked for since a guess came."""
        self._share: float | None = None

    def add(self, right: int, guessed: int) -> None:
        """Takes a guess of `guessed` tokens, the first `right` of which were right; 0: there was
        none."""
        self._seen.append((right, guessed))
        self._expected, self._share = [], None

    @property
    def last(self) -> list[tuple[int, int]]:
        """The last KEPT of what was added."""
        return [*self._seen][-KEPT:]

    @property
    def share(self) -> float:
        """Share of a step's requests with a guess."""
        if self._share is None:
            guesses = sum(guessed > 0 for _, guessed in self._seen)
            self._share = (1 + guesses) / (1 + len(self._seen))
        return self._share

    def expected(self, most: int) -> float:
        """Returns how many tokens of a guess of `most` tokens are likely to be right."""
        if most <= len(self._expected):
            return self._expected[most - 1] if most else 0.0
        self._expected, total, alive, rate = [], 0.0, 1.0, self.prior
        for place in range(most):
            seen = [
                right > place for right, guessed in self._seen if place <= right and place < guessed
            ]
            if seen or not place:  # beyond what was guessed, the next token stays as likely
                rate = (sum(seen) + self.prior) / (len(seen) + 1)
            alive *= rate
            total += alive
            self._expected.append(total)
        return total


def prior_ratio(requests: int, length: int, costs: Costs | None = None) -> float:
    """Returns how many times as long as without drafts a step with drafts of `length` tokens takes,
    as far as that is known before one was measured.

    - `costs`: measured ones, if there are any. Without, a step takes two rows' time beside that of
      its rows, as measured on two cores.
    """
    plain, drafted = requests, requests * (1 + length)
    if costs is None or len(costs.step_s) < 2:
        return (drafted + 2) / (plain + 2)
    rows = sorted(costs.step_s)
    seconds = np.interp([plain, drafted], rows, [costs.step_s[count] for count in rows])
    return max(float(seconds[1] / seconds[0]), 1.0)


@dataclasses.dataclass
class DraftLength:
    """How long drafts are for one number of requests."""

    requests: int
    lengths: tuple[int, ...]
    """Tokens of a draft, ascending, the first one 0."""
    acceptance: Acceptance
    costs: Costs | None = None
    """See prior_ratio."""
    most: int | None = None
    """Tokens of a draft for which there are rows; None: any."""
    now: int = 0
    """Tokens of a draft in the next step. Steps begin without drafts."""
    extra: dict[int, float] = dataclasses.field(default_factory=dict)
    """By length that was measured, times of a step without drafts that a step with a draft for each
    request takes beyond one."""
    plain_s: float = 0.0
    """Seconds of a step without drafts."""
    times: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=WINDOW))
    """Seconds of the last steps of the present length."""
    shares: deque[float] = dataclasses.field(default_factory=lambda: deque(maxlen=WINDOW))
    """Shares of these steps' requests that had a draft."""
    steps: int = -1
    """Of the present length. The first one's time does not count: it was prepared otherwise."""
    resumes: bool = False
    """Whether steps without drafts are measured again, for steps with them that pay."""
    back: tuple[int, float] | None = None
    """Until steps without drafts were measured again: the length before, and plain_s then."""
    spent: float = 0.0
    """Times of a step without drafts that steps with them took since plain_s was measured."""
    lost: float = 0.0
    """Times of a step without drafts that drafts lost, at least −WON. A step without them pays COST
    of its time back, over `wait`."""
    hold: int = HOLDS[0]
    wait: int = 1
    """Twice as much each time that drafts end since they did not pay."""

    def add(self, tokens: float, seconds: float, share: float) -> None:
        """Takes a decode step of the present length.

        - `tokens`: that it gave, a request.
        - `share`: of its requests that had a draft.
        """
        self.steps += 1
        if self.now:
            took = min(seconds / self.plain_s, 2 * (1 + self._extra(self.now)))
            self.spent += took
            self.lost = max(self.lost + took - tokens, -WON)
        elif not self.steps and self.plain_s:
            # What was prepared for it while drafts were verified is nothing.
            self.lost += min(max(seconds / self.plain_s - 1, 0.0), OUTLIER)
        elif self.lost > 0:
            self.lost = max(self.lost - COST / self.wait, 0.0)
        if not self.steps:
            return
        self.times.append(seconds)
        self.shares.append(share)
        if self.now:
            if len(self.times) >= TRIAL:
                self._measured(self.now, self._extra_now())
            if self.lost > LOSS:
                return self._end()
        if self.steps % TRIAL == 0:
            if not self.now:
                self.plain_s = typical_s(self.times)
            self._choose()

    def _extra_now(self) -> float:
        """Returns `extra` of the present length as its last steps took."""
        # Those with a draft may be few, and take far longer than others.
        taken = typical_s(self.times, few=True) / self.plain_s - 1
        return taken / _part(statistics.fmean(self.shares))

    def tokens(self, length: int) -> float:
        """Returns how many tokens a step with drafts of this length gives a request, likely."""
        return 1 + self.acceptance.share * self.acceptance.expected(length)

    def ratio(self, length: int) -> float:
        """Returns how many times as long as without drafts a step of this length takes."""
        return 1 + _part(self.acceptance.share) * self._extra(length)

    def gain(self, length: int) -> float:
        """Returns how many times as many tokens a second as without drafts are expected."""
        return self.tokens(length) / self.ratio(length)

    @property
    def _fitting(self) -> list[int]:
        """Lengths of drafts for which there are rows."""
        return [n for n in self.lengths[1:] if self.most is None or n <= self.most]

    def _extra(self, length: int) -> float:
        if not self.extra:
            return prior_ratio(self.requests, length, self.costs) - 1
        known = min(self.extra, key=lambda other: abs(other - length))
        # Looking for drafts takes about a row's time, whatever their length.
        return self.extra[known] * (1 + length) / (1 + known)

    def _measured(self, length: int, extra: float) -> None:
        """Takes what was measured of a length. What others took changes with it."""
        extra = max(extra, 0.01)
        change = extra / self.extra.get(length, extra)
        self.extra = {n: before * change for n, before in self.extra.items()} | {length: extra}

    def _choose(self) -> None:
        """Chooses the length of the next steps."""
        resumes, self.resumes = self.resumes, False
        if self.back is not None:
            self._correct(*self.back)
        gains = {n: self.gain(n) for n in reversed(self._fitting)}
        best = max(gains, key=lambda length: gains[length])
        if not self.now:
            paid = self.lost <= 0 or resumes
            if paid and (gains[best] >= GAIN or self._may_try(best)):
                self._begin(best)
        elif gains.get(self.now, 0.0) < 1:
            self._end()
        elif gains[best] > GAIN * gains[self.now]:
            self._begin(best)
        elif self.steps >= max(self.hold, TRIAL * (gains[self.now] - 1) / SHOWN):
            self.resumes, self.wait = True, 1
            self.hold = min(2 * self.hold, HOLDS[1])
            self._begin(0)

    def _correct(self, length: int, before: float) -> None:
        """Takes that the machine's speed changed while drafts were on: what they took was in times
        of a step as long as `before`, and so was a loss, if it became slower."""
        change = before / self.plain_s
        if length in self.extra:
            self._measured(length, (1 + self.extra[length]) * change - 1)
        self.lost = min(self.lost, max(self.lost + self.spent * (change - 1), 0.0))
        self.back, self.spent = None, 0.0

    def _may_try(self, length: int) -> bool:
        """Whether a trial, whose measurement may say that this length pays, costs little enough."""
        tokens = self.tokens(length)
        loss = TRIAL * (self.ratio(length) - tokens)
        return tokens >= GAIN and self.steps >= max(loss / COST, WINDOW)

    def _begin(self, length: int) -> None:
        if self.now and not length:
            self.back = self.now, self.plain_s
        self.now, self.steps = length, -1
        self.times.clear()
        self.shares.clear()

    def _end(self) -> None:
        """Goes on without drafts, which did not pay."""
        self.hold, self.wait = HOLDS[0], min(2 * self.wait, WAITS)
        self._begin(0)

    def said(self) -> dict[str, Any]:
        """Returns the choice, and what it is made from, as plain data."""
        return {
            "requests_at_most": self.requests,
            "tokens": self.now,
            "tokens_a_step": {str(n): self.tokens(n) for n in self._fitting},
            "times_as_long": {str(n): self.ratio(n) for n in self._fitting},
        }

    def why(self) -> str:
        """Returns the choice and its reason in a few words."""
        length = self.now or max(self._fitting, key=self.gain)
        tokens, ratio = self.tokens(length), self.ratio(length)
        reason = f"{tokens:.1f} tokens a step in {ratio:.1f} times the time"
        drafted = f"{length} token{'s' * (length > 1)}"
        return f"{drafted}, {reason}" if self.now else f"none; {drafted} would give {reason}"


def _part(share: float) -> float:
    """Returns what steps take longer in which so large a share of the requests has a draft, over
    what they take longer if all have one."""
    return (share + LOOK) / (1 + LOOK)


def typical_s(times: deque[float], *, few: bool = False) -> float:
    """Returns the mean of times without those of disturbed steps. few: a quarter of the others may
    take longer than the rest."""
    most = OUTLIER * sorted(times)[len(times) * (3 if few else 2) // 4]
    return statistics.fmean(time for time in times if time <= most)

"""Bytes of the arena by tier, reserved before a copy begins: the budget is never exceeded."""

from __future__ import annotations

from collections.abc import Mapping


class BudgetTracker:
    """Accounts of bytes, one a tier, under one budget (DynaExq's BudgetTracker).

    A copy reserves its bytes where it will lie, so what is being copied is inside the budget and
    there is no staging area beside it. `commit` makes a reservation held, `cancel` gives it up,
    `release` gives up what is held.

    budget: bytes of all tiers together. limits: tier → most bytes of it.
    """

    def __init__(self, budget: int, limits: Mapping[str, int]):
        self.budget, self.limits = budget, dict(limits)
        self.held = dict.fromkeys(limits, 0)
        """Tier → bytes of complete copies."""
        self.reserved = dict.fromkeys(limits, 0)
        """Tier → bytes of copies that are on their way."""
        self.peak = 0
        """Most bytes held and reserved since the budget changed."""

    @property
    def used(self) -> int:
        """Bytes held and reserved, all tiers together."""
        return sum(self.held.values()) + sum(self.reserved.values())

    def resize(self, budget: int, limits: Mapping[str, int]) -> None:
        """Other bytes from now on. What is held and reserved must lie within the budget; a tier may
        have more than its limit, and then nothing more is reserved there. peak begins anew: what
        another budget allowed says nothing about this one."""
        self.budget, self.limits, self.peak = budget, dict(limits), self.used
        self._check()

    def try_reserve(self, tier: str, nbytes: int) -> bool:
        """Reserves the bytes. False, changing nothing, where they do not fit."""
        of_tier = self.held[tier] + self.reserved[tier] + nbytes
        if of_tier > self.limits[tier] or self.used + nbytes > self.budget:
            return False
        self.reserved[tier] += nbytes
        self._check()
        return True

    def commit(self, tier: str, nbytes: int) -> None:
        """The copy is complete: what was reserved is held."""
        self.reserved[tier] -= nbytes
        self.held[tier] += nbytes
        self._check()

    def cancel(self, tier: str, nbytes: int) -> None:
        """The copy does not take place."""
        self.reserved[tier] -= nbytes
        self._check()

    def release(self, tier: str, nbytes: int) -> None:
        """A held copy is gone."""
        self.held[tier] -= nbytes
        self._check()

    def _check(self) -> None:
        self.peak = max(self.peak, self.used)
        assert self.used <= self.budget, f"{self.used} bytes in a budget of {self.budget}"
        for accounts in (self.held, self.reserved):
            assert min(accounts.values()) >= 0, f"more was given up than there was: {accounts}"

"""Whether every expert is in a cell, as far as the host knows without waiting for the device."""

from __future__ import annotations

import dataclasses

import jax

from pallas_kernels.plan import Tables

LOOK_EVERY = 64
"""Steps after which the host looks again: each costs a launch, and a step that needs no plan is a
few launches a layer shorter."""


@dataclasses.dataclass
class Completeness:
    """Follows tables from step to step. Each of its fields is about one Tables object, so that
    whatever else gives the runner other tables ends what was known, without telling anybody."""

    complete: Tables | None = None
    """Nobody is absent from these."""
    looked: tuple[jax.Array, Tables] | None = None
    """The least address of tables, and what steps without transfers have made of those by now: no
    expert leaves in such a step unless one is missing."""
    steps: int = LOOK_EVERY
    """Since the host looked last."""

    def due(self, tables: Tables) -> bool:
        """Whether it is time to look at these tables."""
        known = tables is self.complete
        return not known and self.looked is None and self.steps >= LOOK_EVERY

    def look(self, least_address: jax.Array, tables: Tables) -> None:
        """Keeps what was asked of these tables, until the device has answered."""
        least_address.copy_to_host_async()
        self.looked, self.steps = (least_address, tables), 0

    def is_complete(self, tables: Tables) -> bool:
        """Whether every expert is known to be in a cell by these tables."""
        if self.looked is not None:
            least, last = self.looked
            if last is not tables:
                self.looked = None
            elif least.is_ready():  # pyright: ignore[reportAttributeAccessIssue]  not in jax's stubs
                self.looked, self.complete = None, tables if int(least) >= 0 else None
        return tables is self.complete

    def stepped(self, before: Tables, after: Tables) -> None:
        """A step without transfers made `after` of `before`."""
        self.steps += 1
        if self.complete is before:
            self.complete = after
        if self.looked is not None and self.looked[1] is before:
            self.looked = self.looked[0], after

"""One byte budget for experts and KV: the arithmetic of WiSP's split
(docs/explanation/miss_curves.md).

In the paper's units, every layer has `cap` C cells, and one more cell in every layer costs b_e
bytes; a KV page costs b_k. The two streams share B = C·b_e + N·b_k bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

import numpy as np

from host_offload.control.interface import Costs, Spec


class SplitError(ValueError):
    """An impossible split. The message has the arithmetic."""


@dataclasses.dataclass(frozen=True)
class Division:
    """The memory to divide, in bytes. KV comes in units (in the arena: slots) of `unit_pages`
    pages; the paper's unit is one page.

    Raises SplitError if the floor and the least cap do not fit.
    """

    total_bytes: int
    """B"""
    cap_bytes: int
    """b_e: one slot in every layer."""
    page_bytes: int
    """b_k"""
    caps: int
    """E, the largest cap."""
    floor_pages: int
    """N_floor, equation (6): n_conc sessions of so many tokens each."""
    least_cap: int = 0
    """C_min; the paper's is top-k. With read-through 0 is legal."""
    unit_bytes: int | None = None
    """Bytes of a KV unit; None: page_bytes."""
    unit_pages: int = 1
    page_tokens: int = 1
    """T_b, for messages."""

    def __post_init__(self):
        sizes = self.total_bytes, self.cap_bytes, self.page_bytes, self.unit, self.unit_pages
        if min(sizes) < 1 or not 0 <= self.least_cap <= self.caps or self.floor_pages < 0:
            raise SplitError(f"sizes must be positive and 0 ≤ least_cap ≤ caps: {self}")
        self.check(self.least_cap)

    @property
    def unit(self) -> int:
        """Bytes of a KV unit."""
        return self.page_bytes if self.unit_bytes is None else self.unit_bytes

    def pages_at(self, cap: int) -> int:
        """Returns N, the pages that fit beside so many cells a layer; below 0 if the cells alone
        exceed the memory."""
        return (self.total_bytes - cap * self.cap_bytes) // self.unit * self.unit_pages

    @functools.cached_property
    def pages(self) -> np.ndarray:
        """int64[E + 1]: pages_at of every cap."""
        return np.array([self.pages_at(cap) for cap in range(self.caps + 1)])

    @functools.cached_property
    def legal(self) -> np.ndarray:
        """bool[E + 1]: caps that leave KV its floor, from the least on."""
        return (self.pages >= self.floor_pages) & (np.arange(self.caps + 1) >= self.least_cap)

    @functools.cached_property
    def largest_cap(self) -> int:
        """The largest legal cap."""
        return int(np.flatnonzero(self.legal)[-1])

    def check(self, cap: int) -> None:
        """Raises SplitError for a cap that leaves KV less than its floor."""
        pages = self.pages_at(cap)
        if pages < self.floor_pages:
            tokens = max(pages, 0) * self.page_tokens
            least = self.floor_pages * self.page_tokens
            if not self.legal.any():
                most = f"no cap from {self.least_cap} on works: raise the memory or lower the floor"
            else:
                most = f"the largest cap that works is {self.largest_cap}"
            raise SplitError(
                f"cap {cap} takes {cap * self.cap_bytes} of {self.total_bytes} bytes and leaves KV "
                f"{tokens} tokens, fewer than its floor of {least}; {most}"
            )

    def cap_at(self, split: float) -> int:
        """Returns the cap C = ⌊s·B / b_e⌋ of a split s = B_E / B (equation 1), clamped to legal
        caps."""
        # A hair more, or the split of a cap could round to the cap below.
        cap = math.floor(split * self.total_bytes / self.cap_bytes + 1e-9)
        return min(max(cap, self.least_cap), self.largest_cap)

    def split_at(self, cap: int) -> float:
        """Returns the split of a cap, s = C·b_e / B."""
        return cap * self.cap_bytes / self.total_bytes


def division_of(spec: Spec, least_cap: int = 0) -> Division:
    """Returns the memory that an engine's policies divide: its arena in slots, one for a cell."""
    (sizes,) = [*spec.version_bytes.values()][:1]
    slot = spec.slot_bytes or max(int(sizes.max()), spec.page_bytes)
    return Division(
        total_bytes=spec.budget_bytes // slot * slot,
        cap_bytes=slot * spec.layers,
        page_bytes=spec.page_bytes,
        caps=min(spec.experts, spec.cell_bound),
        floor_pages=-(-spec.kv_floor_bytes // spec.page_bytes),
        least_cap=max(least_cap, int(spec.min_cells.max(initial=0))),
        unit_bytes=slot,
        unit_pages=max(slot // spec.page_bytes, 1),
        page_tokens=spec.page_tokens,
    )


class MissCosts(NamedTuple):
    """Seconds of a miss; measured or given, never built in."""

    expert_s: float
    """c_E = b·σ: seconds of an expert over the link."""
    page_s: float
    """c_K = r·T_b: seconds of a missing KV page."""


def miss_costs(costs: Costs, spec: Spec, kv_miss: str = "swap") -> MissCosts:
    """Returns the cost of misses by measured costs.

    - `kv_miss`: what happens to KV that does not fit, as LLM's kv_overflow. The paper recomputes it
      (r·T_b); this engine moves it out and back by default.

    Raises SplitError if an expert's miss costs nothing.
    """
    size = float(next(iter(spec.link_bytes.values())).mean())
    expert = float(costs.fill[0]) + size * float(costs.fill[1])
    if expert <= 0:
        raise SplitError(
            "the measured costs say that a missing expert costs nothing, so there is nothing to "
            "weigh; measure them again on a quiet machine (`moejax calibrate MODEL --force`), or "
            "leave out budget"
        )
    if kv_miss == "recompute":
        per_token = float(costs.recompute_s_per_token or costs.prefill_s_per_token)
        return MissCosts(expert, spec.page_tokens * per_token)
    return MissCosts(expert, 2 * spec.page_bytes * float(costs.kv_swap_s_per_byte))


# ---- equation (4)


def objective(
    division: Division, expert_misses: np.ndarray, kv_misses: np.ndarray, costs: MissCosts
) -> np.ndarray:
    """Returns J of equation (4), seconds, at every cap: float64[E + 1]; inf for a cap that is not
    legal.

    - `expert_misses`: [E + 1], M_E of all layers together.
    - `kv_misses`: [P + 1], M_K; pools larger than P miss like P.
    """
    pages = np.clip(division.pages, 0, len(kv_misses) - 1)
    total = costs.expert_s * np.asarray(expert_misses, np.float64)
    total = total + costs.page_s * np.asarray(kv_misses, np.float64)[pages]
    return np.where(division.legal, total, np.inf)


# ---- equations (8) to (10)


def peak_headroom(
    division: Division, *, peak_pages: int, headroom: float, cap: int, dead: int
) -> int | None:
    """Returns C* by equations (8) to (10), or None for no move. KV gets its peak and headroom,
    experts the rest; Division.pages_at(C*) is N*.

    - `peak_pages`: P, most pages in use at a time.
    - `headroom`: h.
    - `cap`: the current C.
    - `dead`: Δ_C, the smallest change of the cap that is a move.
    """
    wanted = max(math.ceil((1 + headroom) * peak_pages), division.floor_pages)  # (8)
    wanted = -(-wanted // division.unit_pages) * division.unit
    rest = (division.total_bytes - wanted) // division.cap_bytes
    found = min(max(rest, division.least_cap), division.largest_cap)  # (9)
    return None if abs(found - cap) < dead else found


# ---- algorithm 2


@dataclasses.dataclass(frozen=True)
class SplitRule:
    """Parameters of WiSP's online controller (Algorithm 2). The paper does not have its values;
    these are ours."""

    decay: float = 0.95
    """γ, of both histograms, once a turn. Turns beyond the last 1 / (1 − γ) are as good as
    forgotten, so it must reach over all sessions that take turns
    (docs/explanation/miss_curves.md)."""
    points: int = 41
    """Points of the grid of splits in [0, 1] where costs are compared, across gaps of distances."""
    gate: float = 0.02
    """The least gain that moves the split, as a part of J."""
    rate: float = 0.1
    """The largest move in a turn."""
    dead: float = 0.02
    """The smallest move; nearer targets are ignored."""

    def __post_init__(self):
        if not (0 <= self.decay <= 1 and self.points >= 2 and 0 < self.rate <= 1):
            raise ValueError(f"decay lies in [0, 1], points ≥ 2, rate in (0, 1]: {self}")
        if not (0 <= self.gate < 1 and 0 <= self.dead < 1):
            raise ValueError(f"gate and dead lie in [0, 1): {self}")

    def next_split(
        self,
        split: float,
        division: Division,
        expert_misses: np.ndarray,
        kv_misses: np.ndarray,
        costs: MissCosts,
    ) -> float:
        """Returns the split after a turn. The curves are the tails of the decayed histograms. A
        split below the floor (6) moves up to it at once, regardless of gate and rate."""
        split = min(max(split, 0.0), division.split_at(division.largest_cap))
        seconds = objective(division, expert_misses, kv_misses, costs)
        grid, caps = _grid(division, self.points)
        now, at = seconds[division.cap_at(split)], seconds[caps]
        best = at.min(initial=np.inf)
        # The nearest of equals: a flat stretch is no reason to move.
        nearest = grid[at == best]
        target = float(nearest[np.argmin(np.abs(nearest - split))]) if len(nearest) else split
        if abs(target - split) < self.dead or now - best <= self.gate * now:
            return split
        return split + min(max(target - split, -self.rate), self.rate)


@functools.lru_cache(maxsize=16)
def _grid(division: Division, points: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (splits float64[G], their caps int64[G]): splits of the grid that leave KV its floor
    and experts their least cap, and the largest legal split, which may lie between two points."""
    grid = np.linspace(0, 1, points)
    edges = [division.split_at(cap) for cap in (division.least_cap, division.largest_cap)]
    grid = np.unique([*grid[(grid >= edges[0]) & (grid <= edges[1])], *edges])
    return grid, np.array([division.cap_at(split) for split in grid])

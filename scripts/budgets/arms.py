"""The arms of the command `compare`: each is a schedule of cells and KV pages at equal bytes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from host_offload.sizing.cell_allocation import ALLOCATIONS, allocate
from host_offload.sizing.configurator import Streams, Turn, configure, histograms_of
from host_offload.sizing.kv_reuse import PageRecency, expected_returns, page_references
from host_offload.sizing.miss_curves import curves_of, tails
from host_offload.sizing.split import Division, MissCosts, SplitRule, peak_headroom
from scripts.budgets.replay import replay_split


@dataclasses.dataclass(frozen=True)
class Arm:
    """What each turn finds: cells int[L] while it runs, KV pages at its end."""

    name: str
    cells: Sequence[np.ndarray]
    pages: Sequence[int]
    streamed: int | None = None
    """Layers whose experts are all moved in every step; None: cells are a cache."""

    def misses(self, turns: Sequence[Turn], first: int = 0) -> tuple[int, int]:
        """(experts, KV pages) of the turns from `first` on; those before it only warm both up."""
        found = replay_split(turns, self.cells, self.pages)
        experts = int(found.expert_misses[first:].sum())
        if self.streamed is not None:
            steps = sum(len(turn.active) for turn in turns[first:])
            experts = steps * self.streamed * turns[0].active[0].shape[1]
        return experts, int(found.kv_misses[first:].sum())

    def most_bytes(self, division: Division) -> int:
        """The most that the schedule ever holds."""
        slot = division.unit
        return max(
            int(np.sum(c)) * slot + max(p, 0) // division.unit_pages * slot
            for c, p in zip(self.cells, self.pages, strict=True)
        )


def cost_of(experts: int, pages: int, costs: MissCosts) -> float:
    """Seconds."""
    return costs.expert_s * experts + costs.page_s * pages


def held(name: str, division: Division, layers: int, cap: int, turns: int) -> Arm:
    """One split for all turns."""
    return Arm(name, [np.full(layers, cap)] * turns, [division.pages_at(cap)] * turns)


def arms_of(
    turns: Sequence[Turn],
    before: Sequence[Turn],
    workflow: np.ndarray,
    division: Division,
    costs: MissCosts,
) -> list[Arm]:
    """Every way to divide the bytes. before: turns that what is chosen ahead is chosen from.
    workflow int[n]: of each turn."""
    layers, count = turns[0].active[0].shape[0], len(turns)

    def fixed(name: str, split: float) -> Arm:
        return held(name, division, layers, division.cap_at(split), count)

    offline = configure(before, division, costs).cap
    even = fixed("50-50", 0.5)
    best, each = oracle_caps(turns, workflow, division, costs)
    resident = int(even.cells[0].sum()) // division.caps

    def running(decay: float) -> list[int]:
        rule = SplitRule(decay=decay)
        return online_caps([*before, *turns], division, costs, rule)[len(before) :]

    cold = online_caps(turns, division, costs, SplitRule())
    printed = online_caps(turns, division, costs, SplitRule(), expect_returns=False)
    return [
        scheduled("mv_wsa", division, layers, running(SplitRule().decay)),
        scheduled("mv_wsa cold", division, layers, cold),
        scheduled("as printed, cold", division, layers, printed),
        scheduled("mv_wsa γ 0.8", division, layers, running(0.8)),
        held("mv_wsa offline", division, layers, offline, count),
        scheduled("peak", division, layers, peak_caps(turns, division)),
        even,
        fixed("25-75", 0.25),
        fixed("75-25", 0.75),
        held("flux-prop", division, layers, flux_cap(before, division), count),
        dataclasses.replace(even, name="static layers", streamed=layers - resident),
        scheduled("per workflow", division, layers, each),
        held("hindsight", division, layers, best, count),
    ]


def scheduled(name: str, division: Division, layers: int, caps: Sequence[int]) -> Arm:
    return Arm(name, [np.full(layers, cap) for cap in caps], [division.pages_at(c) for c in caps])


def online_caps(
    turns: Sequence[Turn],
    division: Division,
    costs: MissCosts,
    rule: SplitRule,
    expect_returns: bool = True,
) -> list[int]:
    """Algorithm 2: the cap that each turn runs with is what the ones before it say. See MvWsa."""
    split, caps, held = 0.5, [], PageRecency()
    known: Streams | None = None
    most = int(division.pages[0])
    for number, (turn, histogram) in enumerate(
        zip(turns, histograms_of(turns, most), strict=True), 1
    ):
        caps.append(division.cap_at(split))
        known = (
            histogram
            if known is None
            else Streams(
                *(rule.decay * old + new for old, new in zip(known, histogram, strict=True))
            )
        )
        experts = known.expert_misses.sum(axis=0)
        held, _ = page_references(held, turn.pages, most)
        pages = known.pages[:-1]  # what no pool can keep is forgotten, as in MvWsa
        if expect_returns:
            pages = pages + expected_returns(held, most, rule.decay, number)
        split = rule.next_split(split, division, experts, tails(pages), costs)
    return caps


def peak_caps(turns: Sequence[Turn], division: Division, window: int = 16) -> list[int]:
    """Equations (8) to (10) after every turn. In use are the pages of the sessions seen in the
    last `window` turns."""
    cap, caps, seen = division.cap_at(0.5), [], []
    for turn in turns:
        caps.append(cap)
        seen = [*seen, turn.pages][-window:]
        last = {int(pages[0, 0]): len(pages) for pages in seen if len(pages)}
        found = peak_headroom(
            division, peak_pages=sum(last.values()), headroom=0.1, cap=cap, dead=2
        )
        cap = cap if found is None else found
    return caps


def flux_cap(turns: Sequence[Turn], division: Division) -> int:
    """C = min(E, distinct experts of a turn), the mean over turns and layers of decode steps; as
    much of it as leaves KV its floor."""
    steps = [turn.active[1:] or turn.active for turn in turns if len(turn.active)]
    distinct = [np.any(active, axis=0).sum(axis=1).mean() for active in steps]
    return min(int(np.ceil(np.mean(distinct))), division.largest_cap)


def oracle_caps(
    turns: Sequence[Turn], workflow: np.ndarray, division: Division, costs: MissCosts
) -> tuple[int, list[int]]:
    """(the best cap for all turns, the cap of each turn where a workflow has one of its own), by
    exact replays of every legal cap.

    The second begins with the first and goes on workflow by workflow, once, since what one leaves
    changes what the next finds: never worse than the first, and not always the best there is.
    """
    caps = np.flatnonzero(division.legal).tolist()
    layers, order = turns[0].active[0].shape[0], workflow.tolist()

    def seconds(of: dict[int, int]) -> float:
        arm = scheduled("", division, layers, [of[w] for w in order])
        return cost_of(*arm.misses(turns), costs)

    best = min(caps, key=lambda cap: seconds(dict.fromkeys(order, cap)))
    chosen = dict.fromkeys(order, best)
    if len(chosen) > 1:
        for which in chosen:
            chosen[which] = min(caps, key=lambda cap: seconds({**chosen, which: cap}))
    return best, [chosen[w] for w in order]


def half_of(turns: Sequence[Turn]) -> int:
    """Turns that layers' cells are chosen by; those from there on are counted."""
    return max(len(turns) // 2, 1)


def layer_arms(turns: Sequence[Turn], division: Division) -> list[Arm]:
    """Cells of layers at equal bytes, half of the memory for experts: by the curves of the turns
    before `half_of`, held over all."""
    seen = turns[: half_of(turns)]
    curves = curves_of(active for turn in seen for active in turn.active)
    layers, cap = curves.misses.shape[0], division.cap_at(0.5)
    pages = [division.pages_at(cap)] * len(turns)
    arms = []
    for rule in ALLOCATIONS:
        cells = allocate(rule, curves.misses[:, : division.caps + 1], cap * layers).cells
        arms.append(Arm(rule, [cells] * len(turns), pages))
    return arms

"""Shares the arena's bytes between experts and KV.

It is arithmetic only: the user's budgets (`memory`, `expert_budget`, `kv_budget`) become whole
slots. `Budget.notes` has every rounding and every cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # these import jax, and the command line must answer without it
    from host_offload.memory.device_memory import FreeMemory
    from host_offload.memory.layout import SlotLayout

KV_SHARE = 8
"""KV gets 1/KV_SHARE of the arena if not everything fits and no budget says otherwise."""


class BudgetError(ValueError):
    """Budgets that contradict each other or exceed the device; the message has the arithmetic."""


class ArenaTooSmall(BudgetError):
    """Raised if KV could not hold one sequence of max_model_len tokens."""

    def __init__(self, message: str, smallest_bytes: int, largest_model_len: int):
        super().__init__(message)
        self.smallest_bytes = smallest_bytes
        """The least `kv_budget` that works, if one was given, else the least arena."""
        self.largest_model_len = largest_model_len
        """The largest max_model_len that works with the budgets as given; 0 if none does."""


@dataclasses.dataclass(frozen=True)
class Share:
    """A share of all experts, from 0 (none resident) to 1 (all resident)."""

    fraction: float

    def __post_init__(self):
        if not 0.0 <= self.fraction <= 1.0:
            raise ValueError(f"a share of the experts is from 0 to 1, not {self.fraction}")

    def __str__(self) -> str:
        return f"{self.fraction * 100:.6g}%"


@dataclasses.dataclass(frozen=True)
class Budget:
    """The split of the arena in slots: ``expert_slots + kv_slots <= slots``; the rest is free."""

    slots: int
    expert_slots: int
    """Slots of one expert each, of all layers together."""
    kv_slots: int
    pages: int
    """KV pages in kv_slots."""
    notes: tuple[str, ...]
    """Lines for people: the resulting sizes, and what was cut."""
    memory: FreeMemory | None = None
    """The memory that the arena was taken from; None: the device does not report it."""
    cut: bool = False
    """Whether experts or KV got less than they can use without a budget of their own."""
    in_place: int = 0
    """Experts that are resident in the store, all or none. They take no slots."""


class _Need(NamedTuple):
    """Slots that a model and its limits can use."""

    experts: int
    """Every expert of every layer."""
    kv_least: int
    """KV of one sequence of max_model_len tokens."""
    kv_full: int
    """KV of max_num_seqs such sequences."""


def resolve_budget(
    layout: SlotLayout,
    *,
    moe_layers: int,
    experts: int,
    max_num_seqs: int,
    max_model_len: int,
    available_bytes: int,
    memory: int | None = None,
    expert_budget: int | Share | None = None,
    kv_budget: int | None = None,
    spare_slots: int = 0,
    in_place: bool = False,
) -> Budget:
    """Turns the user's budgets into whole slots, by the rules of docs/how-to/memory.md ("Numbers").

    - `moe_layers`, `experts`: L and E; there are L·E experts.
    - `available_bytes`: the largest arena that the device can take.
    - `memory`: bytes of the arena.
    - `expert_budget`: bytes, rounded down to slots, or a share, rounded to experts; at most L·E
      experts. 100% is every expert, even if a slot is larger than an expert.
    - `kv_budget`: bytes, rounded down to slots.
    - `spare_slots`: slots that experts can use beyond one each, below 0 if they need fewer.
    - `in_place`: the device reads the store like its own memory. If every expert fits, experts need
      no cells, and their bytes are those of the store, which is there already; budgets mean the
      same. If not every expert fits, experts get cells.

    Raises ArenaTooSmall if KV cannot hold one sequence, and BudgetError if budgets are negative,
    contradict each other or exceed available_bytes.
    """
    size = layout.slot_bytes
    per_sequence = layout.page.pages(max_model_len)
    need = _Need(
        experts=moe_layers * experts + spare_slots,
        kv_least=-(-per_sequence // layout.pages_per_slot),
        kv_full=-(-max_num_seqs * per_sequence // layout.pages_per_slot),
    )
    given = {"memory": memory, "expert budget": expert_budget, "kv budget": kv_budget}
    _check_given(given, size)
    wanted = None if expert_budget is None else expert_slots_of(expert_budget, need.experts, size)
    kv_wanted, free = None if kv_budget is None else kv_budget // size, available_bytes // size
    device = f"the {_exact(available_bytes)} that the device has free"
    where = device if memory is None else f"memory of {_exact(memory)}"
    room, expert_slots, kv_slots = 0, 0, 0
    for held in (need.experts, 0) if in_place else (0,):
        room = free + held if memory is None else memory // size
        if memory is not None and room > free + held:
            raise BudgetError(f"memory {format_bytes(memory)} exceeds {device}; lower it")
        # Without a budget, experts in place come first: KV would gain nothing from fewer of them.
        first = held if held and {memory, wanted, kv_wanted} == {None} else wanted
        expert_slots, kv_slots = _split(room, first, kv_wanted, need, memory is not None)
        in_place = held > 0
        if expert_slots == need.experts and kv_slots >= need.kv_least:
            break
    if kv_budget is not None and expert_slots + kv_slots > room:
        raise BudgetError(
            f"{format_bytes(expert_slots * size)} of experts + {format_bytes(kv_slots * size)} of "
            f"KV = {format_bytes((expert_slots + kv_slots) * size)}, more than {where} "
            f"({room} slots of {format_bytes(size)}); lower a budget"
        )
    if kv_slots < need.kv_least:
        raise _too_small(layout, max_model_len, need, expert_slots, kv_slots, where, kv_budget)
    pages = kv_slots * layout.pages_per_slot
    experts_cut = expert_budget is None and expert_slots < need.experts
    kv_cut = kv_budget is None and kv_slots < need.kv_full
    notes = [
        _line("expert budget", expert_budget, f"{expert_slots} of {need.experts} experts")
        + f" ({format_bytes(expert_slots * size)})",
        _line("kv budget", kv_budget, f"{pages} pages of {layout.page.block_size} tokens")
        + f" ({format_bytes(kv_slots * size)})",
    ]
    if experts_cut:
        notes[0] += _cut(need.experts * size, expert_slots * size, where, kv_budget is not None)
    if kv_cut:
        beside = expert_budget is not None and not in_place
        notes[1] += _cut(need.kv_full * size, kv_slots * size, where, beside)
    if memory is not None:
        notes.append(f"memory {format_bytes(memory)} = {room} slots of {format_bytes(size)}")
    slots = room if memory is not None else expert_slots + kv_slots
    cut = experts_cut or kv_cut
    budget = Budget(slots, expert_slots, kv_slots, pages, tuple(notes), cut=cut)
    return _in_place(budget) if in_place else budget


def _in_place(budget: Budget) -> Budget:
    """Returns the budget with experts in place, without their slots."""
    experts, (first, *notes) = budget.expert_slots, budget.notes
    return dataclasses.replace(
        budget,
        slots=budget.slots - experts,
        expert_slots=0,
        in_place=experts,
        notes=(f"{first}, one copy, read in place from the store", *notes),
    )


def cells_per_layer(expert_slots: int, layers: int, experts: int) -> tuple[int, ...]:
    """Shares expert_slots evenly over the layers; the first layers get the remainder.

    - `experts`: experts of a layer, the most cells that it can use.

    Returns cells of each layer, whose sum is expert_slots. Raises ValueError if there are more
    slots than ``layers · experts``.
    """
    if not 0 <= expert_slots <= layers * experts:
        raise ValueError(
            f"expert_slots must be in [0, {layers * experts}] for {layers} layers of {experts} "
            f"experts, got {expert_slots}"
        )
    each, more = divmod(expert_slots, layers)
    return tuple(each + (layer < more) for layer in range(layers))


def cells_of_layers(cells: int, some: Sequence[bool], experts: int) -> tuple[int, ...]:
    """Shares cells evenly over some of the layers, which take at most one for each expert; the
    others get none.

    - `some`: bool[L].
    - `experts`: experts of a layer.
    """
    layers = sum(some)
    shares = iter(cells_per_layer(min(cells, layers * experts), layers, experts) if layers else ())
    return tuple(next(shares) if wanted else 0 for wanted in some)


def cells_of_versions(
    high: int, low: int, has_all_versions: Sequence[bool], experts: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the high and the low cells of each layer: layers without a high version get low ones
    alone, and no layer more of a version than its experts.

    - `high`, `low`: cells of all layers together.
    - `has_all_versions`: bool[L].
    - `experts`: experts of a layer.
    """
    every = [True] * len(has_all_versions)
    return cells_of_layers(high, has_all_versions, experts), cells_of_layers(low, every, experts)


def expert_slots_of(budget: int | Share, every: int, slot_bytes: int) -> int:
    """Returns how many slots, of one expert each, a budget buys.

    - `budget`: bytes, or a share of all experts.
    - `every`: number of all experts.
    """
    if isinstance(budget, Share):
        return round(budget.fraction * every)
    return min(budget // slot_bytes, every)


def format_bytes(count: int) -> str:
    """Formats bytes in binary units and four digits: ``1.5 MiB``, ``96 KiB``, ``12 B``."""
    value, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.4g} {unit}"


def _check_given(given: Mapping[str, int | Share | None], slot_bytes: int) -> None:
    """Raises BudgetError for negative budgets, and for one of fewer bytes than an expert."""
    for name, value in given.items():
        if isinstance(value, int) and value < 0:
            raise BudgetError(f"{name} must not be negative, got {value} bytes")
    experts = given["expert budget"]
    if isinstance(experts, int) and 0 < experts < slot_bytes:
        meant = f'; did you mean "{experts}%"?' if experts <= 100 else "."
        raise BudgetError(
            f"expert budget {experts} is bytes, and one expert takes {_exact(slot_bytes)}{meant} "
            'Give a share such as "25%", at least the bytes of one, or 0 for none'
        )


def _split(
    room: int, experts: int | None, kv: int | None, need: _Need, keep_rest: bool
) -> tuple[int, int]:
    """Returns (expert slots, KV slots), choosing those that are None. The caller checks that they
    fit.

    - `room`: slots of the arena.
    - `keep_rest`: the arena has `room` slots in any case, so KV takes more than it needs too.
    """
    if kv is not None:
        return (min(need.experts, max(room - kv, 0)) if experts is None else experts), kv
    if experts is None:
        floor = min(need.kv_full, max(room // KV_SHARE, need.kv_least))
        experts = min(need.experts, max(room - floor, 0))
    return experts, (room - experts if keep_rest else min(need.kv_full, room - experts))


def _too_small(
    layout: SlotLayout,
    max_model_len: int,
    need: _Need,
    expert_slots: int,
    kv_slots: int,
    where: str,
    kv_budget: int | None,
) -> ArenaTooSmall:
    size, left = layout.slot_bytes, max(kv_slots, 0)
    tokens = layout.page.tokens(left * layout.pages_per_slot)
    least = need.kv_least * size
    smallest = least + (0 if kv_budget is not None else expert_slots * size)
    if kv_budget is not None:
        why = f"the kv budget is {format_bytes(kv_budget)}; raise it to {_exact(smallest)}"
    else:
        after = f" after {format_bytes(expert_slots * size)} of experts" if expert_slots else ""
        why = f"{where} leaves {format_bytes(left * size)}{after}; "
        why += f"the smallest arena that works is {_exact(smallest)}"
        why += ", or lower the expert budget (0 is legal)" if expert_slots else ""
    why += f", or set max_model_len to at most {tokens}" if tokens else ""
    return ArenaTooSmall(
        f"arena too small: one sequence of max_model_len {max_model_len} needs {_exact(least)} of "
        f"KV and {why}",
        smallest,
        tokens,
    )


def _line(name: str, given: int | Share | None, result: str) -> str:
    if given is None:
        return f"{name}: {result}"
    return f"{name} {given if isinstance(given, Share) else format_bytes(given)} = {result}"


def _cut(wanted: int, got: int, where: str, other_given: bool) -> str:
    other = " less the other budget" if other_given else ""
    return f", cut from {format_bytes(wanted)} to {format_bytes(got)} to fit {where}{other}"


def _exact(count: int) -> str:
    """Formats bytes, with the exact number, since a user may have to type it."""
    return format_bytes(count) if count < 1024 else f"{format_bytes(count)} ({count} bytes)"

import dataclasses
import math

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from host_offload.memory.budget import (
    ArenaTooSmall,
    BudgetError,
    Share,
    cells_per_layer,
    resolve_budget,
)
from host_offload.memory.layout import slot_layout

# The demo model: slots of 96 KiB, pages of 16 tokens and 16 KiB, 6 pages in a slot.
DEMO = slot_layout(hidden=128, width=128, itemsize=2, layers=4, rows_per_token=4, row_values=32)
SLOT = DEMO.slot_bytes
MODEL = dict(moe_layers=4, experts=16, max_num_seqs=16, max_model_len=1024)
EVERY = 64
LEAST = 11  # 64 pages of one sequence
FULL = 171  # 1024 pages of 16 sequences
PLENTY = 1 << 40


def resolve(available_bytes=PLENTY, **budgets):
    return resolve_budget(DEMO, **{**MODEL, "available_bytes": available_bytes, **budgets})


def slots_of(budget):
    return budget.slots, budget.expert_slots, budget.kv_slots


@pytest.mark.parametrize(
    ("given_numbers", "expected"),
    [
        (dict(), (FULL, 0, FULL, EVERY)),
        (dict(memory=90 * SLOT), (26, 0, 26, EVERY)),
        (dict(kv_budget=12 * SLOT), (12, 0, 12, EVERY)),
        # The store is there already, so what is free is KV's, which is cut before the experts.
        (dict(available_bytes=20 * SLOT), (20, 0, 20, EVERY)),
        # Where numbers leave out an expert, and where a sequence has no room, as ever.
        (dict(expert_budget=63 * SLOT), (63 + FULL, 63, FULL, 0)),
        (dict(available_bytes=40 * SLOT, kv_budget=30 * SLOT), (30, 0, 30, EVERY)),
    ],
)
def test_experts_in_place_take_no_slots(given_numbers, expected):
    budget = resolve(in_place=True, **given_numbers)
    assert (*slots_of(budget), budget.in_place) == expected
    assert ("one copy" in budget.notes[0]) == (budget.in_place > 0)
    if not budget.in_place:
        assert budget == resolve(**given_numbers)


@pytest.mark.parametrize(
    ("given_numbers", "expected"),
    [
        (dict(), (EVERY + FULL, EVERY, FULL)),
        (dict(expert_budget=Share(0.25)), (16 + FULL, 16, FULL)),
        (dict(expert_budget=3 * SLOT - 1), (2 + FULL, 2, FULL)),
        (dict(expert_budget=1000 * SLOT), (EVERY + FULL, EVERY, FULL)),
        (dict(kv_budget=20 * SLOT, expert_budget=5 * SLOT), (25, 5, 20)),
        (dict(memory=100 * SLOT, kv_budget=60 * SLOT), (100, 40, 60)),
        (dict(memory=30 * SLOT, expert_budget=5 * SLOT, kv_budget=20 * SLOT), (30, 5, 20)),
        # Only memory: an eighth or one sequence for KV; then what experts cannot use.
        (dict(memory=72 * SLOT), (72, 61, LEAST)),
        (dict(memory=90 * SLOT), (90, EVERY, 26)),
        (dict(memory=LEAST * SLOT), (LEAST, 0, LEAST)),
        (dict(memory=200 * SLOT), (200, EVERY, 136)),
        # Cut to what is available.
        (dict(available_bytes=100 * SLOT, expert_budget=5 * SLOT), (100, 5, 95)),
        (dict(available_bytes=50 * SLOT, kv_budget=20 * SLOT), (50, 30, 20)),
        (dict(available_bytes=(EVERY + FULL - 1) * SLOT), (EVERY + FULL - 1, EVERY, FULL - 1)),
    ],
)
def test_what_is_given_fixes_the_rest(given_numbers, expected):
    budget = resolve(**given_numbers)
    assert slots_of(budget) == expected
    assert budget.pages == budget.kv_slots * 6


def test_notes_say_what_was_rounded():
    notes = resolve(memory=30 * SLOT + 5, expert_budget=Share(0.26)).notes
    assert notes == (
        "expert budget 26% = 17 of 64 experts (1.594 MiB)",
        "kv budget: 78 pages of 16 tokens (1.219 MiB), cut from 16.03 MiB to 1.219 MiB to fit "
        "memory of 2.813 MiB (2949125 bytes) less the other budget",
        "memory 2.813 MiB = 30 slots of 96 KiB",
    )


@pytest.mark.parametrize(
    ("given_numbers", "message"),
    [
        (
            dict(memory=30 * SLOT, expert_budget=20 * SLOT, kv_budget=15 * SLOT),
            r"1.875 MiB of experts \+ 1.406 MiB of KV = 3.281 MiB, more than memory of 2.812 MiB "
            r"\(2949120 bytes\) \(30 slots of 96 KiB\); lower a budget",
        ),
        (
            dict(available_bytes=30 * SLOT, expert_budget=20 * SLOT, kv_budget=15 * SLOT),
            r"= 3.281 MiB, more than the 2.812 MiB \(2949120 bytes\) that the device has free",
        ),
        (
            dict(available_bytes=30 * SLOT, kv_budget=31 * SLOT),
            r"0 B of experts \+ 2.906 MiB of KV = 2.906 MiB, more than the 2.812 MiB",
        ),
        (
            dict(available_bytes=30 * SLOT, memory=31 * SLOT),
            r"memory 2.906 MiB exceeds the 2.812 MiB \(2949120 bytes\) that the device has free",
        ),
        (dict(memory=-1), "memory must not be negative, got -1 bytes"),
        (dict(expert_budget=-1), "expert budget must not be negative, got -1 bytes"),
        (dict(expert_budget=25), 'one expert takes .*; did you mean "25%"\\? Give a share'),
        (dict(expert_budget=101), 'one expert takes [^;]*\\. Give a share such as "25%"'),
        (dict(kv_budget=-1), "kv budget must not be negative, got -1 bytes"),
    ],
)
def test_contradictions_are_refused_with_the_arithmetic(given_numbers, message):
    with pytest.raises(BudgetError, match=message) as caught:
        resolve(**given_numbers)
    assert not isinstance(caught.value, ArenaTooSmall)


@pytest.mark.parametrize(
    ("given_numbers", "smallest", "model_len", "message"),
    [
        (
            dict(memory=10 * SLOT),
            LEAST,
            960,
            r"arena too small: one sequence of max_model_len 1024 needs 1.031 MiB \(1081344 bytes\)"
            r" of KV and memory of 960 KiB \(983040 bytes\) leaves 960 KiB; the smallest arena that"
            r" works is 1.031 MiB \(1081344 bytes\), or set max_model_len to at most 960",
        ),
        (dict(memory=5), LEAST, 0, r"leaves 0 B; the smallest arena that works is [^,]*$"),
        (dict(available_bytes=10 * SLOT), LEAST, 960, "that the device has free leaves 960 KiB"),
        (
            dict(memory=70 * SLOT, expert_budget=Share(1.0)),
            LEAST + EVERY,
            576,
            r"leaves 576 KiB after 6 MiB of experts; .* or lower the expert budget \(0 is legal\)",
        ),
        (dict(memory=50 * SLOT, expert_budget=60 * SLOT), LEAST + 60, 0, "leaves 0 B after 5.6"),
        (dict(kv_budget=2 * SLOT), LEAST, 192, "the kv budget is 192 KiB; raise it to 1.031 MiB"),
        (dict(kv_budget=0), LEAST, 0, "the kv budget is 0 B; raise it to"),
    ],
)
def test_less_than_one_sequence_is_refused_with_what_would_work(
    given_numbers, smallest, model_len, message
):
    with pytest.raises(ArenaTooSmall, match=message) as caught:
        resolve(**given_numbers)
    assert caught.value.smallest_bytes == smallest * SLOT
    assert caught.value.largest_model_len == model_len


SLOTS = st.integers(0, 400 * SLOT)
EXPERT_BUDGETS = st.one_of(
    st.none(), st.just(0), st.integers(SLOT, 400 * SLOT), st.floats(0, 1).map(Share)
)


@given(st.none() | SLOTS, EXPERT_BUDGETS, st.none() | SLOTS, st.integers(0, 500 * SLOT))
def test_sums_and_idempotence(memory, expert_budget, kv_budget, available):
    numbers = dict(memory=memory, expert_budget=expert_budget, kv_budget=kv_budget)
    try:
        budget = resolve(available, **numbers)
    except ArenaTooSmall as error:
        # What the message promises is true.
        room = available if memory is None else memory
        if error.largest_model_len:
            resolve(available, **numbers, max_model_len=error.largest_model_len)
        smallest = error.smallest_bytes
        if kv_budget is not None:
            assume(memory is None)
            resolve(max(available, smallest), expert_budget=Share(0.0), kv_budget=smallest)
        else:
            assert smallest > room
            resolve(smallest, expert_budget=expert_budget)
            resolve(smallest, memory=smallest, expert_budget=expert_budget)
        return
    except BudgetError:
        assert memory is not None or kv_budget is not None
        return
    assert 0 <= budget.expert_slots <= EVERY
    assert budget.kv_slots >= LEAST
    assert budget.expert_slots + budget.kv_slots <= budget.slots
    assert budget.slots * SLOT <= (available if memory is None else memory)
    assert budget.slots * SLOT <= available
    if kv_budget is not None:
        assert budget.kv_slots * SLOT <= kv_budget
    if isinstance(expert_budget, int):
        assert budget.expert_slots * SLOT <= expert_budget

    again = resolve(
        available,
        memory=budget.slots * SLOT,
        expert_budget=budget.expert_slots * SLOT,
        kv_budget=budget.kv_slots * SLOT,
    )
    assert slots_of(again) == slots_of(budget)


@given(st.integers(1, 64), st.integers(1, 256), st.data())
def test_cells_are_shared_evenly(layers, experts, data):
    slots = data.draw(st.integers(0, layers * experts))
    cells = cells_per_layer(slots, layers, experts)
    assert len(cells) == layers and sum(cells) == slots
    assert max(cells) <= min(experts, math.ceil(slots / layers))
    assert max(cells) - min(cells) <= 1 and list(cells) == sorted(cells, reverse=True)
    with pytest.raises(ValueError, match=r"expert_slots must be in \[0, .*\].* got"):
        cells_per_layer(layers * experts + 1, layers, experts)


def test_a_share_is_between_none_and_all():
    assert str(Share(0.125)) == "12.5%"
    for fraction in (-0.1, 1.1, math.nan):
        with pytest.raises(ValueError, match="a share of the experts is from 0 to 1"):
            Share(fraction)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Share(0.5).fraction = 1.0  # pyright: ignore[reportAttributeAccessIssue]

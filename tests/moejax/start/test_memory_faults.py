"""Text comes where host memory cannot be pinned, or the arena does not get its memory."""

import functools

import jax
import numpy as np
import pytest

from host_offload.memory import arena, store
from host_offload.queue import pinned
from moejax import LLM, SamplingParams, UserError
from moejax.checkpoints import loaded_model

BY_JAX = {"ops": "move=xla", "max_model_len": 256, "max_num_seqs": 1, "progress": False}
"""The arena is an array, as on a GPU."""


def text_of(**options):
    with LLM("demo", **{**BY_JAX, **options}) as llm:
        (output,) = llm.generate("The old house", SamplingParams(max_tokens=6, temperature=0))
        return output.outputs[0].text, llm


def limited(function, room, size, lost, pool=True):
    """The function, which raises as jax does once it was asked for more bytes than `room`.

    - `size`: bytes that a call asks for, by its arguments.
    - `pool`: whether calls share the room.
    """

    @functools.wraps(function)
    def allocate(*arguments):
        nonlocal room
        if size(*arguments) > room:
            lost.append(size(*arguments))
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")
        if pool:
            room -= size(*arguments)
        return function(*arguments)

    return allocate


@pytest.fixture
def pinned_room(monkeypatch):
    """A CPU whose pinned memory is apart from its other memory, and small."""
    for module in (store, loaded_model):
        monkeypatch.setattr(module, "shares_memory", lambda device: False)
    lost: list[int] = []

    def room(nbytes):
        whole = limited(
            store.allocate_pinned, nbytes, lambda shape, _: 2 * int(np.prod(shape)), lost
        )
        piece = limited(pinned.pin, nbytes, lambda array, _: array.nbytes, lost)
        monkeypatch.setattr(store, "allocate_pinned", whole)
        monkeypatch.setattr(pinned, "pin", piece)
        return lost

    return room


@pytest.mark.slow
def test_experts_that_cannot_be_pinned_stay_in_pageable_memory(pinned_room, caplog):
    wanted, llm = text_of()
    whole = llm.plan.spec.layers * llm.plan.spec.experts * llm.plan.steps.layout.records[0].nbytes
    lost = pinned_room(whole // 4)
    text, llm = text_of()
    assert text == wanted and lost[0] == whole and len(lost) == 2
    assert llm.plan.steps.driver == "host"
    first, second = caplog.messages[-1].split("\n")
    assert "cannot allocate" in first and "of pinned host memory" in first
    assert "driver host copies experts" in second and "moejax doctor" in second


def test_asked_for_another_way_it_is_refused(pinned_room):
    pinned_room(0)
    with pytest.raises(UserError, match="of pinned host memory"):
        text_of(transfers="ops")


@pytest.mark.slow
def test_an_arena_that_is_not_given_is_smaller(monkeypatch, caplog):
    size = lambda rows, hidden, device: 2 * rows * hidden  # noqa: E731
    wanted, llm = text_of(kv_budget="1MiB", eviction="lru")
    nbytes = llm.plan.budget.slots * llm.plan.steps.layout.slot_bytes
    lost: list[int] = []
    make = limited(arena.make_zeros, nbytes - 1, size, lost, pool=False)
    monkeypatch.setattr(arena, "make_zeros", make)
    text, llm = text_of(kv_budget="1MiB", eviction="lru")
    assert text == wanted and lost == [nbytes]
    assert llm.plan.budget.slots * llm.plan.steps.layout.slot_bytes < nbytes
    first, second = caplog.messages[0].split("\n")
    assert first.startswith("an arena of ") and "RESOURCE_EXHAUSTED" in first
    assert second == "it is tried again with an eighth less"
    with pytest.raises(UserError, match=r"an arena of .* lower memory"):
        text_of(memory=nbytes, eviction="lru")

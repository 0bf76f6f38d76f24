"""Text comes where host memory cannot be pinned, or the arena does not get its memory."""

import dataclasses
import functools
import threading

import jax
import numpy as np
import pytest

from host_offload.memory import arena, store
from host_offload.memory.device_memory import FreeMemory
from host_offload.queue import pinned
from moejax import LLM, SamplingParams, UserError
from moejax.checkpoints import loaded_model, versions
from moejax.checkpoints.tensor_tasks import OpenTensor
from moejax.device import pinned_gib
from moejax.models.config import load_config
from moejax.models.hub import model_directory
from moejax.serve import llm
from moejax.start import build as start_build
from moejax.start.decide import drafter
from moejax.start.decide.store_choice import estimate_arrays
from moejax.start.options import Config
from moejax.start.report.dry_run import dry_run
from moejax.start.settings import settings_of
from tests.moejax.predictors import write_predicted
from tests.pallas_kernels.contract import NATIVE

GiB = 1 << 30

BY_JAX = {"ops": "move=xla", "max_model_len": 256, "max_num_seqs": 1, "progress": False}
"""The arena is an array, as on a GPU."""


def text_of(**options):
    with LLM("demo", **{**BY_JAX, **options}) as llm:
        (output,) = llm.generate("The old house", SamplingParams(max_tokens=6, temperature=0))
        return output.outputs[0].text, llm


class Pool:
    """jax's pool of pinned memory, whose regions grow as XLA's bfc_allocator.cc says, before a
    driver that pins `room` bytes.

    - `once`: as older XLA, which asks for less than it wanted to only once.
    """

    def __init__(self, limit, room, once=False):
        self.limit, self.room, self.once, self.stuck = limit, room, once, False
        self.size, self.lock = 2 << 10, threading.Lock()
        self.asked, self.left, self.arrays = [], [], []

    def take(self, nbytes):
        """Returns the number of the region."""
        for array, region in self.arrays:
            self.left[region] += array.nbytes * array.is_deleted()
        self.arrays = [found for found in self.arrays if not found[0].is_deleted()]
        for region, left in enumerate(self.left):
            if left >= nbytes:
                self.left[region] -= nbytes
                return region
        rest, before = self.limit - sum(self.asked), self.size
        if nbytes <= rest:
            while nbytes > self.size:
                self.size *= 2
            asked = min(self.size, rest)
            while asked >= nbytes:
                if sum(self.asked) + asked <= self.room:
                    self.size *= 1 + (self.size == before)
                    self.asked.append(asked)
                    self.left.append(asked - nbytes)
                    return len(self.left) - 1
                if self.stuck:
                    break
                asked = asked * 9 // 10
            self.stuck = self.once
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")

    def guard(self, function, size):
        """The function, whose result lies in the pool. `size`: its bytes, by the arguments."""

        @functools.wraps(function)
        def allocate(*arguments):
            with self.lock:
                region = self.take(size(*arguments))
                array = function(*arguments)
                self.arrays.append((array, region))
            return array

        return allocate


@pytest.mark.parametrize("sizes", [(54,), (30.5,), (9,), (54, 14), (54, 14, 7)])
def test_the_driver_is_asked_for_the_experts_and_4_gib_at_most(sizes):
    arrays = [int(size * GiB) for size in sizes]
    pool = Pool(pinned_gib(512 * GiB, 500 * GiB, arrays) * GiB, 512 * GiB)
    staging = pool.take(store.STAGING_BYTES)
    pool.left[staging] += store.STAGING_BYTES
    for nbytes in arrays:
        pool.take(nbytes)
    assert max(pool.asked) <= sum(arrays) + 4 * GiB
    if len(sizes) == 1:
        assert sum(pool.asked) <= arrays[0] + 5 * GiB


@pytest.fixture
def pinned_room(monkeypatch):
    """A CPU whose pinned memory is apart from its other memory, and small."""
    for module in (store, pinned, loaded_model, versions):
        monkeypatch.setattr(module, "shares_memory", lambda device: False)
    whole, piece, updater = store.allocate_pinned, pinned.pin, store._updater

    def room(pool):
        def write(array, *rest, sharding):
            found = updater(sharding)(array, *rest)
            pool.arrays = [(found if a is array else a, region) for a, region in pool.arrays]
            return found

        in_place = lambda sharding: functools.partial(write, sharding=sharding)  # noqa: E731
        monkeypatch.setattr(store, "_updater", in_place)
        bytes_of = lambda shape, _: 2 * int(np.prod(shape))  # noqa: E731
        monkeypatch.setattr(store, "allocate_pinned", pool.guard(whole, bytes_of))
        monkeypatch.setattr(pinned, "pin", pool.guard(piece, lambda array, _: array.nbytes))

    return room


@pytest.mark.slow
@pytest.mark.parametrize(
    ("once", "share", "precision"),
    [
        (False, 0.25, "dense"),
        (False, 1.2, "int4"),  # dense records fit, those made from them do not
        pytest.param(True, 0.25, "dense", marks=pytest.mark.nightly),
    ],
)
def test_experts_that_cannot_be_pinned_stay_in_pageable_memory(
    pinned_room, monkeypatch, caplog, once, share, precision
):
    wanted, llm = text_of(precision=precision)
    whole, *made = estimate_arrays(settings_of(llm.options))
    monkeypatch.setattr(store, "STAGING_BYTES", whole // 16)
    pool = Pool(4 * whole, int(share * whole), once)
    pinned_room(pool)
    text, llm = text_of(precision=precision)
    assert text == wanted and llm.plan.steps.driver == "host"
    held = sum(array.nbytes for array, _ in pool.arrays if array.ndim == 2)
    # An older pool, once refused, has no more than the region of copies of pageable arrays.
    assert held < whole / 8 if once else sum(made) or whole / 8 < held < whole / 4
    pool.take(whole // 16)
    first, second = caplog.messages[0].split("\n")
    assert "cannot allocate" in first and "of pinned host memory" in first
    assert "driver host copies experts" in second and "moejax doctor" in second
    # Where dense records fitted before, they were freed and fit again.
    assert "".join(caplog.messages).count("others stay in pageable memory") == 1


def test_the_cap_knows_what_is_made_and_what_is_cached():
    of = lambda **options: estimate_arrays(settings_of(Config.of("demo", **options)))  # noqa: E731
    dense, made = of(precision="int4")
    assert of() == of(precision="dense") == (dense,) and 0 < made < dense / 2
    assert of(store="file,host_memory=4MiB", driver="host", transfers="queue") == (4 << 20,)
    assert of(store="file") == ()


class Asked(Exception):
    """The device was asked for."""


@pytest.mark.parametrize("start", [LLM.from_config, dry_run])
@pytest.mark.parametrize("method", ["draft_model", "mtp", "ngram"])
def test_the_cap_counts_the_model_that_drafts(method, start, tmp_path, monkeypatch):
    """Also in a dry run, which may come first in a process, as in that of a grid."""

    def ask(*_, arrays, **__):
        raise Asked(*arrays)

    monkeypatch.setattr(drafter, "select_device", ask)
    model = write_predicted(tmp_path / "m", "DeepseekV3ForCausalLM") if method == "mtp" else "demo"
    speculation = {"method": method} | ({"model": "demo"} if method == "draft_model" else {})
    with pytest.raises(Asked) as asked:
        start(Config.of(model, speculative_config=speculation))
    own, *drafts = asked.value.args
    (alone,) = estimate_arrays(settings_of(Config.of(model)))
    layers = sum(load_config(model_directory(model)).moe_layers)
    assert own == alone and layers > 1
    assert drafts == {"draft_model": [alone], "mtp": [alone // layers], "ngram": []}[method]


def test_asked_for_another_way_it_is_refused(pinned_room):
    pinned_room(Pool(0, 0))
    with pytest.raises(UserError, match="of pinned host memory"):
        text_of(transfers="ops")


@pytest.mark.slow
def test_an_arena_that_is_not_given_is_smaller(monkeypatch, caplog):
    wanted, llm = text_of(kv_budget="1MiB", eviction="lru")
    nbytes = llm.plan.budget.slots * llm.plan.steps.layout.slot_bytes
    make, lost = arena.make_zeros, []

    def limited(rows, hidden, device):
        if 2 * rows * hidden < nbytes:
            return make(rows, hidden, device)
        lost.append(2 * rows * hidden)
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating")

    monkeypatch.setattr(arena, "make_zeros", limited)
    text, llm = text_of(kv_budget="1MiB", eviction="lru")
    assert text == wanted and lost == [nbytes]
    assert llm.plan.budget.slots * llm.plan.steps.layout.slot_bytes < nbytes
    first, second = caplog.messages[0].split("\n")
    assert first.startswith("an arena of ") and "RESOURCE_EXHAUSTED" in first
    assert second == "it is tried again with an eighth less"
    with pytest.raises(UserError, match=r"an arena of .* lower memory"):
        text_of(memory=nbytes, eviction="lru")


@NATIVE
@pytest.mark.parametrize("budget", ["100%", "50%"])
def test_experts_are_read_while_the_engine_is_built(monkeypatch, budget):
    """What is not read yet takes memory that is free now."""
    facts, divide, free = start_build.device_facts, start_build.divide, []

    def device_facts(*args, **named):
        return dataclasses.replace(facts(*args, **named), memory=FreeMemory(10 * GiB))

    def note_free(*args):
        free.append(args[-1].free)
        return divide(*args)

    monkeypatch.setattr(start_build, "device_facts", device_facts)
    monkeypatch.setattr(start_build, "divide", note_free)
    options = {"max_model_len": 256, "max_num_seqs": 1, "expert_budget": budget, "ops": "auto"}
    wanted, _ = text_of(**options)
    build, read, begun = llm.start_engine, OpenTensor.read_record, threading.Event()
    nbytes = []

    def start(loaded, *args, **named):
        nbytes.append(loaded.store.unread)
        assert nbytes[0] == loaded.store.nbytes
        begun.set()
        return build(loaded, *args, **named)

    def late(*args):
        assert begun.wait(60)
        return read(*args)

    monkeypatch.setattr(llm, "start_engine", start)
    monkeypatch.setattr(OpenTensor, "read_record", late)
    found, _ = text_of(**options)
    assert free[-1] == 10 * GiB - nbytes[0]
    assert found == wanted and not [t for t in threading.enumerate() if t.name == "moejax-load"]

    def damaged(*args):
        assert begun.wait(60)
        raise UserError("the disk says no")

    monkeypatch.setattr(OpenTensor, "read_record", damaged)
    with pytest.raises(UserError, match="the disk says no"):
        text_of(**options)
    assert not [t for t in threading.enumerate() if t.name in ("moejax-load", "moejax-read")]

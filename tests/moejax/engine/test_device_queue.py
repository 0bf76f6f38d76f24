"""A host driver that brings experts by jax's own copies gives the bits of experts that are all
there; what does not come ends the requests of its step, and no others.

Ops that compute are native, as in most tests, but one that touches the arena is XLA's, so that the
arena is an array, as on a GPU.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from host_offload.queue.pinned import PinnedRecords
from moejax import LLM, SamplingParams, UserError
from moejax.step.drivers.queued import QueuedRunner
from moejax.step.programs import STAGES
from pallas_kernels.stage import Entries
from tests.moejax.engine.test_transfers import set_budget_to_nothing_resident
from tests.moejax.engine_runs import Job, Recorded, mixed_jobs, run, set_budget
from tests.pallas_kernels.contract import NATIVE

LIMITS = {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 256}
QUEUE = {"transfers": "queue", "driver": "host", "ops": "move=xla"}


def open_llm(**options) -> LLM:
    return LLM("demo", progress=False, **{**LIMITS, **QUEUE, **options})


def jobs() -> list[Job]:
    """Prompts of one to three chunks, greedy and sampled."""
    return mixed_jobs()[1:4]


@functools.cache
def at_rest(ops: str = "auto"):
    with LLM("demo", progress=False, ops=ops, **LIMITS) as llm:
        return run(llm, jobs(), check=False)


def assert_same_bits(ours: list[Recorded], theirs: list[Recorded]) -> None:
    assert all(a.same_bits(b) for a, b in zip(ours, theirs, strict=True))


@jax.jit
def _late(trips, *pieces):
    """The same arrays, after a while."""
    x = jax.lax.fori_loop(0, trips, lambda _, x: jnp.sin(x), jnp.ones(256))
    never = (x[0] > 2).astype(jnp.uint16)
    return [piece + never for piece in pieces]


_PUTS: dict[int, Any] = {}
"""A queue's own put."""


def delay(llm: LLM, trips: int) -> None:
    """Every copy takes so much longer."""
    queue = llm.engine.runner.device_queue
    put = _PUTS.setdefault(id(queue), queue.put)
    queue.put = lambda pieces: _late(trips, *put(pieces))


def slow(**options):
    return pytest.param(options, marks=pytest.mark.slow)


@NATIVE
@pytest.mark.parametrize(
    "options",
    [
        {"expert_budget": "60%", "prefetch": "random", "prefill_waves": 2},
        slow(expert_budget=0),
        slow(expert_budget="40%", prefetch="coactivation", chunk_bytes=20000, transfer_threads=9),
        slow(expert_budget="40%", prefetch="fate"),
        pytest.param({"expert_budget": "40%", "ops": "xla"}, marks=pytest.mark.nightly),
    ],
    ids=str,
)
def test_the_bits_are_those_of_experts_that_are_there(options):
    """The second run's copies are late, so most records are waited for in stream order. Integrity
    is checked at the end only, since it waits for what is on its way."""
    with open_llm(**options) as llm:
        assert isinstance(llm.engine.runner, QueuedRunner)
        found = []
        for trips in (0, 300):
            delay(llm, trips)
            found.append(run(llm, jobs(), check=False))
            assert not llm.engine.runner.faults()
        stats = llm.stats()
        assert stats["arena_owner"] != "library" and stats["store_bytes"] > 0
        stats = stats["transfers"]
        assert stats["bytes"]["demand"] > 0 and stats["waits"] > 0 and stats["failed"] == 0
        assert stats["in_flight"]["transfers"] == 0 and stats["busy_s"] > 0
        if options.get("prefetch"):
            assert sum(stats["prefetches"].values()) > 0
    for ours in found:
        assert_same_bits(ours, at_rest(options.get("ops", "auto")))


class Bringing:
    """Hooks that bring what a layer was routed to, just before it computes that, or into the next
    layer's cells, which has other wishes. The first 8 experts."""

    def __init__(self, ahead: int):
        self.ahead = ahead

    def after_embedding(self, embedding):
        return None

    def before_routing(self, layer):
        return None

    def after_routing(self, layer, ids, weights):
        lists = np.full((len(Entries._fields), STAGES), -1, np.int32)
        for i, expert in enumerate(np.unique(ids[ids < 16])[:STAGES]):
            lists[:, i] = layer + self.ahead, expert, 0, i
        return Entries._make(lists)

    def before_experts(self, layer):
        return None


@NATIVE
@pytest.mark.parametrize("ahead", [0, 1])
def test_what_tables_have_and_cells_have_not(ahead):
    """Hits, by the tables, whose copies begin when they are needed, are waited for; what was on its
    way into a cell that another expert got is not taken for that."""
    with open_llm(expert_budget=["60%", "25%"][ahead], hooks=Bringing(ahead)) as llm:
        found = run(llm, jobs(), check=False)
        assert not llm.engine.runner.faults()
        stats = llm.stats()["transfers"]
        assert min(stats["prefetches"]["late"], stats["cancelled"] + (not ahead) * 100) > 20
    assert_same_bits(found, at_rest())


@NATIVE
def test_the_store_is_separate_arrays_instead_of_one_and_programs_get_none_of_it():
    others = {id(array): array for array in jax.live_arrays()}  # of tests before, in this process
    with open_llm(expert_budget="40%") as llm:
        runner = llm.engine.runner
        (records,) = runner.store.arrays.values()
        assert isinstance(records, PinnedRecords)
        mine = [array for array in jax.live_arrays() if id(array) not in others]
        largest = max(array.nbytes for array in mine if array.dtype == jnp.uint16)
        assert largest == runner.arena.nbytes < records.nbytes
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=2, temperature=0))
        for compiled in runner.compiled():
            sizes = [a.shape for a in jax.tree.leaves(compiled.in_avals)]
            assert records.shape not in sizes


@NATIVE
def test_a_copy_that_fails_ends_the_requests_of_its_step_only():
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    prompts = [[5, 6, 7, 300], list(range(20, 90))]
    with open_llm(expert_budget="40%") as llm:
        engine, queue = llm.engine, llm.engine.runner.device_queue
        want = [llm.generate(p, params)[0].outputs[0].token_ids for p in prompts]
        put = queue.put

        def broken(pieces):
            raise OSError("an injected error")

        queue.put = broken
        first, second = (engine.add(p, params) for p in prompts)
        set_budget_to_nothing_resident(engine)
        while first.error is None:
            engine.step()
        said = "could not be read: OSError: an injected error"
        assert "expert" in str(first.error) and said in str(first.error)
        assert first.finish_reason == "abort"
        queue.put = put
        while not engine.idle:
            engine.step()
        if second.error is None:  # it was in none of the steps that were under way
            assert second.output == want[1]
        assert not engine.runner.faults()
        assert llm.stats()["transfers"]["failed"] > 0
        # What failed is absent, and comes again.
        assert [llm.generate(p, params)[0].outputs[0].token_ids for p in prompts] == want


@NATIVE
@pytest.mark.slow
def test_a_prefetch_that_fails_harms_nobody():
    """Who needs its expert brings it as a demand."""
    with open_llm(expert_budget="60%", prefetch="random") as llm:
        queue = llm.engine.runner.device_queue
        put, begin = queue.put, queue._begin

        def broken(pieces):
            raise MemoryError("no staging")

        def breaking(ticket, chunks):
            queue.put = put if queue._staged[ticket].transfer.demand else broken
            begin(ticket, chunks)

        queue._begin = breaking
        found = run(llm, jobs(), check=False)
        assert not llm.engine.runner.faults()
        assert llm.stats()["transfers"]["failed"] > 0
    assert_same_bits(found, at_rest())


@NATIVE
@pytest.mark.slow
def test_budgets_move_while_experts_fly():
    with open_llm(expert_budget="100%", prefetch="random", eviction="lru") as llm:
        delay(llm, 300)
        for cells in ([3, 9, 16, 0], [12] * 4, [1, 1, 1, 1]):
            set_budget(llm, cells, 3)
            found = run(llm, jobs(), check=False)
            assert not llm.engine.runner.faults()
            assert_same_bits(found, at_rest())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"driver": "device"},
            "runs as one executable: use driver='host', or transfers='ops'",
        ),
        (
            {"link_rate": "2GB/s"},
            "link_rate is for a CPU with native ops, whose transfers",
        ),
        ({"link_latency": "2us"}, "jax's copies pass the link as it is: leave link_latency out"),
        ({"precision": "int8"}, "brings dense experts, not precision int8: use transfers='ops'"),
        (
            {"precision": "lossless12,in_transit=true"},
            "brings dense experts, not precision",
        ),
        ({"resize": "mv_wsa"}, "what steps cost there is not measured, and these policies"),
        ({"chunk_bytes": 0}, "chunk_bytes must be at least 1"),
        ({"transfers": "ssd"}, "transfers is one of ops, queue, not 'ssd'"),
        ({"transfers": "ops", "link_rate": "2GB/s"}, "link_rate is of a queue of transfers; leave"),
        pytest.param(
            {"transfers": "ops", "store": "file", "ops": "auto"},
            "store='file' is read by a queue of transfers;",
            marks=NATIVE,
        ),
        pytest.param(
            {"store": "file"},
            "store='file' is read through a cache in pinned host memory here: say how large",
            marks=NATIVE,
        ),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_with_what_to_write(options, message):
    with pytest.raises(UserError) as refused:
        open_llm(expert_budget="40%", **options).close()
    assert message in str(refused.value)


@NATIVE
@pytest.mark.slow
def test_where_ops_are_native_their_own_queue_runs():
    with open_llm(expert_budget="40%", ops="auto", driver="device") as llm:
        found = run(llm, jobs(), check=False)
        assert llm.engine.runner.queue is not None
        assert llm.stats()["transfers"]["bytes"]["demand"] > 0
    assert_same_bits(found, at_rest())

"""Residents that are packed without loss: the bits of full residency, in the bytes that FluxMoE's
C_exp says, from two backends at once."""

from __future__ import annotations

import pytest

import moejax.step.experts
from host_offload.control.window import PACKED_VERSION
from moejax import LLM, UserError
from moejax.device import select_device
from moejax.start.tiers import measured_rates
from tests.faults import Faults, inject
from tests.moejax.engine.test_stream import LIMITS, LINK, at_rest, out_of_order
from tests.moejax.engine_runs import mixed_jobs, run
from tests.pallas_kernels.contract import NATIVE

pytestmark = NATIVE

LAYERS, EXPERTS = 4, 16
DENSE_BYTES, PACKED_BYTES = 98304, 74752


def open_llm(tiers: str, **options) -> LLM:
    given = {"driver": "stream", **LIMITS, **options}
    return LLM("demo", progress=False, tiers=tiers, **given)


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


# ---- bits and memory


@pytest.mark.parametrize(
    ("tiers", "dense", "packed", "options"),
    [
        ("flux,packed=50%,planner=none", 0, 8, LINK),
        slow("flux,dense=25%,packed=0.5,planner=none", 4, 8, {"chunk_bytes": 10_000}),
        slow("flux,packed=100%,planner=none", 0, 16, {"transfer_threads": 1}),
        slow("flux-direct,dense=1,planner=none", 16, 0, {}),
        slow("flux-direct,packed=50%,planner=none", 0, 8, LINK),
    ],
)
def test_the_bits_and_bytes_of_packed_residents(tiers, dense, packed, options):
    """Peak expert bytes are C_exp: x·P_total + κ·y·P_total and two layers of what streams; every
    step asserts it (StreamRunner.check_results). Once with all invariants after every step, once
    with delays of up to 200 µs a chunk and no wait but the ops' own."""
    direct = tiers.startswith("flux-direct")
    with open_llm(tiers, **options) as llm:
        found = [run(llm, mixed_jobs()[:4])]
        inject(llm.engine.runner.queue, Faults(seed=1, delay=2e-4))
        found.append(run(llm, mixed_jobs()[:4], check=False))
        assert not llm.engine.runner.faults()
        stats = llm.stats()
        stream, moved = stats["stream"], stats["transfers"]
        streamed = EXPERTS - dense - (packed if direct else 0)
        assert stream["bytes"] == LAYERS * (dense * DENSE_BYTES + packed * PACKED_BYTES) + (
            2 * streamed * DENSE_BYTES
        )
        assert stream["resident_per_layer"] == dense and stream["packed_per_layer"] == packed
        # The layer ahead of the last step has come too.
        once = (0 if direct else packed) * (1 + LAYERS * stream["steps"])
        assert moved["unpacked"]["experts"] == once
        assert moved["unpacked"]["bytes"] == once * DENSE_BYTES
        host = (EXPERTS - dense - packed) * (1 + LAYERS * stream["steps"]) * DENSE_BYTES
        residents = LAYERS * (dense * DENSE_BYTES + packed * PACKED_BYTES)
        assert sum(moved["bytes"].values()) == host + residents
        assert moved["cancelled"] == moved["failed"] == 0
    for one in found:
        assert all(a.same_bits(b) for a, b in zip(one, at_rest(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("tiers", ["flux,by=layers,dense=75%", "flux,by=layers,packed=75%"])
def test_whole_layers_in_a_tier_have_the_same_bits(tiers):
    """vLLM-O's and FluxMoE-H's placements: the front layers resident, dense or packed."""
    with open_llm(tiers, **LINK) as llm:
        found = run(llm, mixed_jobs()[:4])
        stats = llm.stats()
        assert stats["stream"]["bytes_per_step"] == EXPERTS * DENSE_BYTES  # the last layer alone
    assert all(a.same_bits(b) for a, b in zip(found, at_rest(), strict=True))


def test_by_the_rates_the_split_is_balanced_and_leaves_kv_its_room():
    with open_llm("flux,planner=none", link_rate="100MB/s") as llm:
        stream, notes = llm.stats()["stream"], " ".join(llm.stats()["notes"])
        # Decoding is many times as fast as that link.
        assert stream["packed_per_layer"] >= EXPERTS - 2
        assert "packed residents in each" in notes and "and decodes" in notes
        kv = llm.stats()["arena"]["kv_slots"]
        wanted = llm.stats()["arena"]["slots"]
    with open_llm("flux,planner=none", link_rate="100MB/s", memory=(32 + 11 + 9) * 98304) as llm:
        stats = llm.stats()
        assert stats["arena"]["kv_slots"] >= kv and stats["arena"]["slots"] < wanted
        assert stats["stream"]["packed_per_layer"] == 9 * DENSE_BYTES // (LAYERS * PACKED_BYTES)


def test_rates_are_measured_where_the_link_states_none():
    with open_llm("flux,packed=50%,planner=none") as llm:
        rates = measured_rates(llm.engine.runner.steps, select_device())
    assert rates.host > 1e8 and rates.packed > 1e8


# ---- mistakes


def from_the_neighbour(monkeypatch) -> None:
    """The first expert is decoded from the packed record of the second one."""
    original = moejax.step.experts.unpack

    def unpack(arena, layer, expert, source, row, count, *, packed):
        source = source.at[0].set(source[1])
        return original(arena, layer, expert, source, row, count, packed=packed)

    monkeypatch.setattr(moejax.step.experts, "unpack", unpack)


def over_the_link(monkeypatch) -> None:
    """Packed residents are left where they are, and everything comes from the store."""
    monkeypatch.setattr(moejax.step.experts, "PACKED_VERSION", PACKED_VERSION + 1)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", [from_the_neighbour, over_the_link])
def test_a_mistake_with_packed_residents_is_found(mistake, monkeypatch):
    mistake(monkeypatch)
    with pytest.raises(AssertionError):
        test_the_bits_and_bytes_of_packed_residents("flux,packed=50%,planner=none", 0, 8, {})


@pytest.mark.parametrize("layers", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_both_backends_are_in_order_under_random_durations(layers):
    """Checkable property 1 with two loading streams."""
    options = {"tiers": "flux,packed=50%,planner=none"}
    assert not out_of_order(layers, load=2e-4, **options)
    assert not out_of_order(layers, compute=1000, **options)


# ---- refusals


@pytest.mark.parametrize(
    ("tiers", "options", "message"),
    [
        ("flex", {}, "unknown tiers 'flex'; known: flux, flux-direct"),
        ("flux", {"driver": "device"}, "use driver='stream', or leave it out"),
        ("flux", {"precision": "int8"}, "packs dense experts of a store in memory, not precision"),
        ("flux", {"dtype": "float32"}, "lossless12 holds bfloat16 weights, not float32"),
        ("flux", {"chunk_bytes": 1001}, "decodes whole values; use an even chunk_bytes"),
        ("flux,dense=x", {}, "tiers dense= is a share from 0 to 1 or in %, not 'x'"),
        ("flux,dense=60%,packed=60%", {}, "dense=0.6 and packed=0.6 are more than all"),
        ("flux,by=row", {}, "tiers by= is one of experts, layers, not 'row'"),
        ("flux,planner=off", {}, "tiers planner= is one of live, one-layer, none, not 'off'"),
        ("flux,interval=0", {}, "tiers interval= is a number of steps from 1 on, not '0'"),
        ("flux,alpha=1", {}, "tiers takes dense, packed, by, planner, interval as KEY=VALUE"),
        ("flux,by=layers,planner=live", {}, "by=layers stay as they begin; use planner=none"),
        ("flux,packed=1", {"expert_budget": "50%"}, "and expert_budget is 3 MiB; lower them"),
    ],
)
def test_what_tiers_cannot_be_is_refused(tiers, options, message):
    with pytest.raises(UserError) as refused:
        open_llm(tiers, **options).close()
    assert message in str(refused.value)

"""Experts in other versions: which bits change, which do not, and what is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from host_offload.policies.precision.maps import HI, LO
from host_offload.policies.precision.names import precision_of
from host_offload.simulate.replay import replay
from host_offload.traces.reader import read_trace
from host_offload.traces.schema import TraceError
from host_offload.versions.encoders import decode, encode
from moejax import LLM, SamplingParams, UserError
from moejax.commands import main as cli
from moejax.start.options import Options
from moejax.start.precision import precision_stats
from moejax.start.settings import parse_precision
from pallas_kernels.records import RecordFormat
from scripts.parts.version_history import version_history

PROMPTS = ["The old house stood", "def area(width, height):", "Question: Ann has 12 apples"]
GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=1)
SMALL = dict(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=256, progress=False)


def tokens_and_logprobs(llm: LLM):
    """What the prompts become, and the log-probability of each token."""
    outputs = [o.outputs[0] for o in llm.generate(PROMPTS, GREEDY)]
    return [
        (o.token_ids, [p[t].logprob for p, t in zip(o.logprobs, o.token_ids, strict=True)])
        for o in outputs
    ]


def started(**options) -> LLM:
    return LLM("demo", **{**SMALL, **options})


@pytest.fixture(scope="module")
def dense():
    with started() as llm:
        yield tokens_and_logprobs(llm)


def decoded_store(version: str):
    """The demo's records, as dense ones of what the version decodes to."""
    with started() as llm:
        runner = llm.engine.runner
        (store,) = runner.stores
        records = np.asarray(store)
        formats = [
            RecordFormat(v, llm.config.hidden_size, llm.config.moe_intermediate_size, llm.dtype)
            for v in ("dense", version)
        ]
        weights = decode(records.reshape(-1, *records.shape[2:]), formats[0])
        coarse = decode(encode(weights, formats[1]), formats[1])
        made = encode(coarse, formats[0]).reshape(records.shape)
        runner.stores = (jax.device_put(made, store.sharding),)
        found = tokens_and_logprobs(llm)
        runner.stores = (store,)
    return found


# ---- one version for all


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    ["lossless12", pytest.param("lossless12,in_transit=true", marks=pytest.mark.nightly)],
)
def test_lossless12_keeps_every_bit(dense, text):
    """With half of the experts resident, so that fills, hits and read-through all happen."""
    with started(precision=text, expert_budget="50%") as llm:
        assert tokens_and_logprobs(llm) == dense
        stats = llm.stats()
        assert stats["experts"]["fills"] > 0
        assert stats["precision"]["changes_bits"] is False
        record = 96 * 1024
        # A quarter fewer bytes over the link, whether or not they lie so in the arena.
        assert stats["bytes"]["fill"] < 0.8 * record * stats["experts"]["fills"]
        assert (stats["arena"]["slot_bytes"] < record) == (text == "lossless12")


@pytest.mark.nightly
@pytest.mark.parametrize("version", ["int8", "int4", "int2"])
def test_a_lossy_version_computes_with_what_it_decodes_to(dense, version):
    wanted = decoded_store(version)
    assert wanted != dense
    with started(precision=version, expert_budget="50%") as llm:
        assert tokens_and_logprobs(llm) == wanted
        stats = llm.stats()
        assert stats["precision"]["changes_bits"] is True
        assert stats["experts"]["fills"] > 0
        assert any("other bits than with dense experts" in note for note in stats["notes"])


# ---- two versions


@pytest.mark.nightly
def test_a_map_is_between_its_ends(dense, tmp_path):
    """All high has the bits of dense, all low those of int4, something between neither's."""
    layers, experts = 4, 16
    results = {}
    for name, high in (("hi", experts), ("lo", 0), ("some", experts // 2)):
        versions = np.full((layers, experts), LO)
        versions[:, :high] = HI
        np.save(tmp_path / "map.npy", versions)
        with started(precision=f"map={tmp_path / 'map.npy'}") as llm:
            results[name] = tokens_and_logprobs(llm)
            assert llm.stats()["experts"]["fills"] == 0
    assert results["hi"] == dense
    assert results["lo"] == decoded_store("int4")
    assert results["some"] not in (results["hi"], results["lo"])


@pytest.mark.nightly
def test_dynaexq_through_the_command_line(tmp_path, capsys):
    """The issue's command: what it did is in --json, and the trace has the same."""
    options = ["--precision", "dynaexq,margin=0", "--hi", "dense", "--lo", "int4"]
    options += ["--interval", "8 tokens", "--memory", "6MiB", "--max-model-len", "256"]
    options += ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--max-tokens", "48"]
    options += ["--temperature", "0", "--ignore-eos", "--json", "--trace", str(tmp_path / "t")]
    assert cli.main(["generate", "The old house stood on", *options]) == 0
    first = capsys.readouterr()
    stats = json.loads(first.err.splitlines()[-1])
    found = stats["precision"]
    assert found["name"] == "dynaexq" and found["changes_bits"] is True
    assert found["versions"] == ["dense", "int4"] and found["interval"] == "8 tokens"
    assert found["promotions"] > 0 and found["deferred"] > found["queued"]
    assert found["absent"] == 0 and found["hi"] + found["lo"] == 64
    assert found["peak_bytes"] <= found["budget_bytes"]
    assert stats["experts"]["hit_rate"] == 1.0
    history = version_history(read_trace(tmp_path / "t"))
    moved = {cause: int(counts.sum()) for cause, counts in history.moved.items()}
    assert moved["promotion"] == found["promotions"]
    assert moved["demotion"] == found["demotions"]
    assert np.all(history.version[0] == LO)
    promoted = np.sum(history.version == HI, axis=(1, 2))
    assert promoted.max() <= found["hi"] + moved["demotion"] and promoted[-1] > 0


@pytest.mark.nightly
def test_intervals_of_seconds_are_replayed(tmp_path):
    """The trace has the times at which the policy was asked."""
    plan = dict(hi="dense", lo="int4", interval="0.05 seconds")
    named = "dynaexq,margin=0,alpha=0"
    with started(precision=named, memory="6MiB", trace=tmp_path / "t", **plan) as llm:
        for _ in range(3):
            llm.generate(PROMPTS, GREEDY)
        stats = llm.stats()
    decided = stats["control"]["decisions"]
    assert max(decided.values()) > 3 and stats["precision"]["promotions"] > 3
    trace = read_trace(tmp_path / "t")
    found = replay(trace, policies=precision_of(named, **plan).policies).control
    assert found is not None and found["decisions"].items() <= decided.items()
    assert max(found["decisions"].values()) > 3
    assert found["precision"].items() <= stats["precision"].items()
    # Asked at other times, the policy wants something else.
    rarely = precision_of(named, **{**plan, "interval": "1000 seconds"}).policies
    with pytest.raises(TraceError, match="the trace"):
        replay(trace, policies=rarely)


@pytest.mark.nightly
def test_the_same_requests_give_the_same_history_and_bits(tmp_path):
    """Decisions come from what was counted, never from a clock."""
    found = []
    for name in ("a", "b"):
        options = dict(precision="dynaexq,margin=0", interval="16 tokens", hi_share=0.25)
        with started(trace=tmp_path / name, **options) as llm:
            found.append(tokens_and_logprobs(llm))
        found.append(version_history(read_trace(tmp_path / name)).version)
    assert found[0] == found[2]
    np.testing.assert_array_equal(found[1], found[3])
    # Other settings, another history: the equality above says something.
    with started(trace=tmp_path / "c", **{**options, "interval": "48 tokens"}) as llm:
        tokens_and_logprobs(llm)
    other = version_history(read_trace(tmp_path / "c")).version
    assert not np.array_equal(other, found[1])


# ---- refusals


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": "int3"}, "unknown precision 'int3'; known: dense"),
        ({"precision": "int4", "hi": "dense"}, "hi means nothing to precision 'int4'"),
        ({"precision": "dynaexq", "interval": "4 bytes"}, "interval '4 bytes' is not a number of"),
        ({"precision": precision_of("int4"), "lo": "int2"}, "lo is a part of the Precision that"),
        ({"precision": "dynaexq", "cells": "marginal"}, "cells that layers share, so budget and c"),
        (
            {"precision": "dynaexq,paged=true", "cells": "optimal"},
            "cells of both versions once, at",
        ),
        ({"precision": "dynaexq,spares=0"}, "spares must be at least 1"),
        ({"precision": "int4", "quantizer": "best"}, "quantizer 'best' is unknown; choose rtn"),
    ],
)
def test_options_that_mean_nothing_are_refused_before_loading(options, message):
    with pytest.raises(UserError, match=message):
        LLM("/no/such/model", **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"expert_budget": "1MiB"}, "precision dynaexq: 64 experts in int4 and 1 spare of each"),
        ({"expert_budget": "3MiB", "hi_share": 0.5}, "hi_share and expert_budget both say how"),
        ({"prefetch": "random"}, "writes 'stages', and every expert is resident"),
        ({"dtype": "float32", "hi": "lossless12"}, "lossless12"),
    ],
)
def test_what_does_not_fit_together_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        started(precision="dynaexq", **options)


def test_a_map_of_another_model_is_refused(tmp_path):
    np.save(tmp_path / "map.npy", np.zeros((4, 8), int))
    with pytest.raises(
        UserError, match="the map is of 4 layers × 8 experts, this model has 4 × 16"
    ):
        started(precision=f"map={tmp_path / 'map.npy'}")


def test_stats_without_control_say_what_was_asked_for():
    plan = parse_precision(Options("", precision="int4"))
    engine: Any = SimpleNamespace(statistics=SimpleNamespace(copy_s_per_byte=None))
    made = {"quantizers": {"int4": "rtn"}}
    assert precision_stats(plan, None, engine, {"int4": "rtn"}) == plan.report() | made
    counts = {"precision": {"promotions": 3}}
    assert precision_stats(plan, counts, engine, {})["promotions"] == 3

"""What an engine cannot be is refused at its start, with what to write instead."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from examples.recent_prefetch import RecentPrefetch
from host_offload.control.interface import Moment
from host_offload.policies.eviction.eviction_names import POLICIES
from host_offload.policies.prefetch.expert_map.in_step import ExpertMapInStep
from moejax import UserError
from moejax.commands.main import main
from moejax.start import conflicts
from moejax.start.options import OPTIONS
from tests.host_offload.control.policy_runs import scripted
from tests.moejax.engine.scenes import EXPERTS, LINK, QUEUE, RECORD, STREAM_QUEUE, open_llm
from tests.moejax.models.families import write_checkpoint
from tests.pallas_kernels.contract import NATIVE

TIMES = "per_token=50us,startup=300us,accelerator=200us,attention=500us"
PLACED = {**LINK, "driver": "host", "placement": f"prescope,{TIMES}"}
PLACED_QUEUE = {**QUEUE, "placement": f"prescope,{TIMES},load=1ms"}
PEAK = {"resize": "peak_headroom"}
LFU = {"eviction": "lfu", "driver": "host"}
ROUTED = scripted(moments={Moment.ROUTED})
FLUX = "stream,tiers=flux"
MAPS = {"policies": [ExpertMapInStep()]}
TWO_VERSIONS = {"precision": "dynaexq,margin=0,interval=16 tokens"}
IN_TRANSIT = {"precision": "lossless12,in_transit=true"}

REFUSED: list[tuple[dict[str, Any], list[tuple[dict[str, Any], str]]]] = [
    (
        {},
        [
            ({"driver": "tape"}, "unknown driver 'tape'; known: device, host, stream"),
            ({"eviction": "mru"}, "unknown eviction policy 'mru'; known: lru, lfu, lfru, global-"),
            ({"policies": RecentPrefetch()}, "must be a list of policies, not RecentPrefetch"),
            ({"policies": [RecentPrefetch]}, "RecentPrefetch is a class; give an object"),
            ({"policies": ["lru"]}, "policy str must be decorated with @dataclasses.dataclass"),
            (
                {"eviction": "static", "policies": [RecentPrefetch()]},
                "both write 'stages'; l",
            ),
            (
                {"policies": [ROUTED]},
                "Scripted asks for ROUTED, which driver='device' lacks; driver=",
            ),
            ({"prefetch": "fate"}, "Fate asks for ROUTED, which driver='device' lacks"),
            ({"prefetch": "belady"}, "unknown prefetch policy 'belady'"),
            (
                {**LFU, "prefetch": "moe-infinity"},
                "LFU and MoEInfinity both write 'victim_we",
            ),
            (
                {"trace": "x,arrays=logits"},
                "unknown array of a trace 'logits'; known: embedding, gate_input, probs, token",
            ),
            (
                {"driver": "stream,waves=2"},
                "driver 'stream' has no setting 'waves=2'; known: tiers",
            ),
        ],
    ),
    (
        {**LINK, "expert_budget": "40%"},
        [
            ({"ops": "fill=xla"}, "runs as one executable: use driver='host', or transfers='ops'"),
            (
                {"ops": "kv_write=xla"},
                "transfers='queue' and kv_write xla do not go",
            ),
            (IN_TRANSIT, "transfers='queue' and precision lossless12 do not go"),
            ({"transfers": "queue,rate=fast"}, "rate='fast' is not a rate; write bytes per second"),
            ({"transfers": "queue,latency=-1us"}, "latency='-1us' is not a time; write 20us, 1.5"),
            ({"transfers": "queue,chunk_bytes=0"}, "chunk_bytes='0' is not a size"),
            ({"transfers": "ssd"}, "unknown transfers 'ssd'; known: ops, queue"),
            (
                {"precision": "hobbit", "prefetch": "fate"},
                "precision hobbit and prefetch do not go together: it decides what a miss brings",
            ),
            ({"transfers": "ops,rate=2GB/s"}, "transfers 'ops' has no setting 'rate=2GB/s'"),
        ],
    ),
    (
        {**QUEUE, "expert_budget": "40%"},
        [
            ({"driver": "device"}, "runs as one executable: use driver='host', or transfers='ops'"),
            (
                {"transfers": "queue,latency=2us"},
                "ive and rate and latency of transfers='queue' do not go",
            ),
            ({"precision": "lossless12"}, "that are not native and precision lossless12 do not"),
            (IN_TRANSIT, " that are not native and precision lossless12 do not go"),
            ({"resize": "mv_wsa"}, "ative and policies or budgets that need costs do not go"),
            (
                {"transfers": "ops", "store": "file", "ops": "auto"},
                "transfers=ops and store=file do not go",
            ),
            ({"store": "file"}, "file,host_memory=SIZE' (--store file,host_memory=16GiB)"),
        ],
    ),
    (
        {"driver": "stream"},
        [
            ({"ops": "kv_write=xla"}, "transfers='queue' and kv_write xla do not go"),
            ({"precision": "dynaexq"}, "driver=stream and precision dynaexq do not go"),
            ({"precision": "random"}, "driver=stream and precision random do not go"),
            (IN_TRANSIT, "driver=stream and precision lossless12 do not go"),
            ({"eviction": "lfu"}, "driver=stream and eviction do not go"),
            ({"prefetch": "random"}, "driver=stream and prefetch do not go"),
            ({"placement": "prescope"}, "driver=stream and placement do not go"),
            ({"resize": "mv_wsa"}, "driver=stream and resize do not go"),
            ({"cells": "9,9,9,9"}, "so cells says nothing"),
            ({"expert_budget": "25%"}, "two layers of experts, 3 MiB (3145728 bytes), and expert"),
            ({"trace": "nowhere"}, "so trace says nothing"),
            ({"memory": "3MiB"}, "arena too small"),
            ({"cache_aware_routing": 0.1}, "cache_aware_routing and driver=stream do not go"),
        ],
    ),
    (
        {**STREAM_QUEUE, "enable_prefix_caching": False},
        [
            ({"precision": "lossless12"}, "that are not native and precision lossless12 do not"),
            (
                {"transfers": "queue,rate=2GB/s"},
                "ive and rate and latency of transfers='queue' do not go",
            ),
            ({"store": "file"}, "file,host_memory=SIZE' (--store file,host_memory=16GiB)"),
            ({"memory": EXPERTS * RECORD}, "the next layer's experts take in staging 1.5 MiB of d"),
            ({"store": "shared"}, "with ops that are not native and store=shared do not go"),
            ({"transfers": "ops"}, "transfers=ops and driver=stream do not go"),
            ({"expert_budget": "20%"}, "holds a layer, beside the next one in staging, of experts"),
        ],
    ),
    (
        {"driver": "stream,tiers=flux"},
        [
            (
                {"driver": "stream,tiers=flex"},
                "is not one of flux, flux-direct, did you mean 'flux'",
            ),
            ({"driver": "stream,dense=50%"}, "dense is of tiers; add tiers=flux"),
            ({"precision": "int8"}, "tiers=flux and precision int8 do not go"),
            ({"dtype": "float32"}, "lossless12 holds bfloat16 weights, not float32"),
            ({"transfers": "queue,chunk_bytes=1001"}, "tiers=flux and this chunk_bytes do not go"),
            ({"driver": f"{FLUX},dense=60%,packed=60%"}, "dense=0.6 and packed=0.6 are more than"),
            ({"driver": f"{FLUX},alpha=1"}, "driver 'stream' has no setting 'alpha=1'; known: ti"),
            ({"driver": f"{FLUX},by=layers,planner=live"}, "stay as they begin; use planner=none"),
            (
                {"driver": f"{FLUX},packed=1", "expert_budget": "50%"},
                "and expert_budget is 3 MiB",
            ),
        ],
    ),
    (
        {**PLACED, "enable_prefix_caching": False},
        [
            (
                {"driver": "device"},
                "PlacementPolicy asks for EXPERTS_BEGIN, which driver='device' lacks",
            ),
            ({"placement": "cpu"}, "unknown placement 'cpu'; known: prescope"),
            ({"driver": "host,speed=1ms"}, "has no setting 'speed=1ms'; known: waves=…"),
            ({"store": "file"}, "placement and store=file do not go"),
            ({"precision": "dynaexq"}, "nothing is missed; add paged=true"),
            ({"precision": "lossless12"}, "placement and precision lossless12 do not go"),
            ({"placement": "fate", "prefetch": "learned=nowhere"}, "nowhere"),
        ],
    ),
    (
        {**PLACED_QUEUE, "expert_budget": "40%", "enable_prefix_caching": False},
        [
            ({"placement": "prescope"}, "(a placement takes stated ones: per_token=TIME,startup="),
            ({"transfers": "queue,chunk_bytes=16KiB"}, "placement and chunk_bytes do not go"),
            (
                {"driver": "device"},
                "PlacementPolicy asks for EXPERTS_BEGIN, which driver='device' lacks",
            ),
            ({"placement": "recorded=nowhere"}, "nowhere"),
        ],
    ),
    (
        {"cache_aware_routing": 0.1},
        [
            ({"cache_aware_routing": -0.1}, "a number from 0 up such as 0.05, not -0.1"),
            ({"cache_aware_routing": float("nan")}, "from 0 up such as 0.05, not nan"),
            ({"cache_aware_routing": float("inf")}, "from 0 up such as 0.05, not inf"),
            ({"cache_aware_routing": "much"}, "must be a number, got 'much'"),
        ],
    ),
    (
        {**TWO_VERSIONS, "enable_prefix_caching": False},
        [
            ({"resize": "mv_wsa"}, "precision dynaexq and resize=mv_wsa do not go"),
            ({"resize": "joint"}, "use resize=peak_headroom"),
            ({**PEAK, "precision": "dynaexq,hi_share=50%"}, "hi_share and resize do not go"),
            ({**PEAK, "precision": "random"}, "versions are fixed"),
            (
                {**PEAK, "precision": "dynaexq,paged=true"},
                "cells of two versions are laid out",
            ),
        ],
    ),
    (
        MAPS,
        [
            ({"driver": "host"}, "driver='host' does not; use driver='device'"),
            ({"precision": "dynaexq"}, "one version of the experts"),
            ({"memory": "1MiB", "policies": [ExpertMapInStep(capacity=10_000)]}, "lower the maps'"),
            ({"policies": [ExpertMapInStep(distance=4)]}, "distance must lie in 1…3"),
            ({"policies": [ExpertMapInStep(capacity=0)]}, "capacity must be at least 1"),
            ({"policies": [ExpertMapInStep(most=0)]}, "most must be at least 1, not 0"),
        ],
    ),
]


@NATIVE
@pytest.mark.parametrize(
    ("options", "message"),
    [({**base, **each}, message) for base, cases in REFUSED for each, message in cases],
    ids=[message[:50] for _, cases in REFUSED for _, message in cases],
)
def test_what_cannot_be_is_refused_with_what_to_write(options, message):
    with pytest.raises((UserError, ValueError)) as refused:
        open_llm(**options).close()
    assert message in str(refused.value)


def test_a_prefetch_is_refused_before_anything_is_read(capsys):
    with pytest.raises(UserError, match="which driver='device' lacks"):
        open_llm("/nowhere", prefetch="fate")
    assert main(["generate", "x", "--model", "/nowhere", "--prefetch", "promoe"]) == 2
    assert "prefetch 'promoe' needs a file that its fit wrote" in capsys.readouterr().err


def test_a_router_that_takes_no_correction_is_refused(tmp_path):
    directory = write_checkpoint(tmp_path, "PhimoeForCausalLM")
    with pytest.raises(UserError, match="cache_aware_routing and a sparsemixer router do not go"):
        open_llm(directory, cache_aware_routing=0.1).close()


def test_the_help_names_every_eviction_policy():
    said = OPTIONS["eviction"].help
    assert all(re.search(rf"\b{name}\b", said) for name in POLICIES)


def test_every_part_of_the_table_is_one_that_a_start_may_have():
    written = set(re.findall(r'^ +"([^"]+)": ', inspect.getsource(conflicts), re.MULTILINE))
    assert {part for together in conflicts.CONFLICTS for part in together} <= written

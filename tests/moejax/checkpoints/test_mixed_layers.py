"""Two versions of a checkpoint whose layers differ in format: high experts are as the files have
them, in each layer its own way."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from host_offload.control.paging import PagedSpec, version_cells
from host_offload.memory.budget import format_bytes
from host_offload.policies.precision.precision_names import CHECKPOINT, precision_of
from host_offload.simulate import auto
from host_offload.simulate.auto import Auto
from host_offload.simulate.replay import replay
from host_offload.traces.reader import read_trace
from host_offload.versions.encoders import encode
from host_offload.versions.quantizers import rtn
from moejax import LLM, SamplingParams
from moejax.checkpoints.conversion import convert
from moejax.checkpoints.load import load_checkpoint
from moejax.checkpoints.random_model import shape
from moejax.checkpoints.versions import with_versions
from moejax.errors import UserError
from moejax.start import auto as start
from moejax.start.decide.facts import DeviceFacts
from moejax.start.decide.start_plan import step_spec
from moejax.start.options import Config
from moejax.start.precision import spare_slots_of
from moejax.start.report.dry_run import dry_run, facts_without_weights
from moejax.start.report.model_info import read_headers
from moejax.start.settings import settings_of
from pallas_kernels.records import decode
from tests.conftest import REPOSITORY
from tests.moejax.engine_runs import check_residents
from tests.moejax.gguf_models import gguf_model
from tests.moejax.quantized_models import quantized_model
from tests.pallas_kernels.contract import NATIVE

pytestmark = pytest.mark.torch
LAYERS, EXPERTS = 4, 8
LIMITS = {"max_model_len": 128, "max_num_seqs": 4, "progress": False, "dtype": "float32"}
GREEDY = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, logprobs=0)
PROMPTS = [[5, 6, 7, 30], list(range(20, 90)), [9, 3]]
Q4_K_M = REPOSITORY / "tests" / "models" / "llama_cpp" / "Q4_K_M.gguf"
SIZES = {"num_experts": EXPERTS, "num_hidden_layers": LAYERS}
WIDE = {"hidden_size": 256, "moe_intermediate_size": 256, **SIZES}


def choose_by_layer(name):
    """One layer in bfloat16, the others in 4 bits."""
    return None if ".layers.1." in name and ".experts." in name else "int4-16-bf16"


SOURCES = {
    "Q4_K_M.gguf": ("int2", range(LAYERS)),
    "Q8_0 and Q4_0.gguf": ("int4", (0, 1)),
    "dense and int4": ("int2", range(LAYERS)),
}
"""Source → the low version, and the layers that it makes smaller."""


@functools.cache
def written(directory, source):
    path = directory / source
    if source == "Q4_K_M.gguf":
        gguf_model(path, experts="Q4_K", down=("Q6_K", "Q4_K", "Q4_K", "Q6_K"), **WIDE)
    elif source == "dense and int4":
        quantized_model(path, choose_by_layer, **SIZES)
    else:
        gguf_model(path, experts=("Q8_0", "Q8_0", "Q4_0", "Q4_0"), **SIZES)
    return path


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("layers")


def run(path, **options):
    """Statistics, and tokens with their log-probabilities; all residents checked in every step."""
    with LLM(path, **LIMITS, **options) as llm:
        check_residents(llm)
        outputs = [one.outputs[0] for one in llm.generate(PROMPTS, GREEDY)]
        return llm.stats(), [(o.token_ids, [*o.logprobs]) for o in outputs]


def test_the_low_version_is_made_of_each_layer_in_its_own_format():
    loaded = load_checkpoint(Q4_K_M, "float32", versions=(CHECKPOINT,))
    layouts, high = loaded.store.layouts, loaded.store.arrays
    own = {version: np.array(high[version]) for version in high}
    store = with_versions(loaded, (CHECKPOINT, "int2")).store
    assert [*store.layouts] == ["q4_k", "q4_k+q4_k+q6_k", "int2"]
    assert store.layers == {"q4_k": (0,), "q4_k+q4_k+q6_k": (1,)}
    low = np.asarray(store.arrays["int2"])
    for layer, (version, (records,)) in enumerate(own.items()):
        np.testing.assert_array_equal(np.asarray(store.arrays[version])[0], records)
        weights = np.stack([np.asarray(decode(record, layouts[version])) for record in records])
        made = encode(weights, store.layouts["int2"], rtn, np.zeros_like(low[layer]))
        np.testing.assert_array_equal(low[layer], made)


def test_a_low_version_that_makes_no_layer_smaller_is_refused():
    mixed = "random,hi=checkpoint,lo=int8,hi_share=0.5"
    with pytest.raises(UserError, match=r"no more than 130048 in q4_k\+q4_k\+q6_k; take a lo with"):
        dry_run(Config.of(Q4_K_M, precision=mixed, **LIMITS))


def test_the_plan_names_the_formats_of_high_experts():
    mixed = "dynaexq,hi=checkpoint,lo=int2,hi_share=0.5"
    plan, _ = dry_run(Config.of(Q4_K_M, precision=mixed, **LIMITS))
    notes = " ".join(plan.budget.notes)
    assert "2 of 4 experts at most as in the checkpoint, the others in int2;" in notes
    assert "q4_k in 1 layers and q4_k+q4_k+q6_k in 1 layers, in cells of 130048 bytes" in notes
    sizes = [n.tolist() for n in plan.spec.version_bytes.values()]
    assert sizes[0] == [113664, 130048] and sizes[1][0] == sizes[1][1] < 60000


def test_layers_with_low_experts_alone_take_fewer_slots():
    layout = shape("demo", layers=4).slot_layout(2, ("dense", "int4"))
    assert layout.cells_per_slot == (1, 4)
    for text, wanted in (("dynaexq", 17 + 13), ("dynaexq,paged=true", 16 + 16)):
        one = precision_of(text), layout, 16, [False, True, False, False]
        assert spare_slots_of(*one) == wanted - 4 * 16
        assert spare_slots_of(*one[:3], [True] * 4) == 2 * one[0].spares
    cells = version_cells(layout, 32, 4, 16, None, one[3])
    assert cells.T.tolist() == [[0, 16, 0, 0], [16] * 4]


@pytest.mark.slow
def test_a_kernel_must_read_every_layer(tmp_path):
    path = tmp_path / "model.gguf"
    gguf_model(path, experts=("Q4_K", "Q8_0", "Q8_0", "Q8_0"), **WIDE)
    config, _ = read_headers(path)
    options = LIMITS | {"dtype": "bfloat16", "precision": "random,hi=checkpoint,lo=int4"}
    settings = settings_of(Config.of(path, **options))
    model = facts_without_weights(config, "bfloat16", (CHECKPOINT, "int4"))
    device = DeviceFacts("gpu", "NVIDIA H100", "CUDA 13", 227)
    ops = step_spec(settings.of_model(*config.expert_layers), model, device).ops
    assert ops.expert_ffn == "xla" != ops.linear


VARIANTS = {
    "auto": [
        {"driver": "host"},
        {"transfers": "queue"},
        {"paged": True, "expert_budget": "30%"},
        {"paged": True, "expert_budget": "0", "driver": "host"},
        {"paged": True, "expert_budget": "50%", "transfers": "queue", "prefetch": "random"},
        {"paged": True, "expert_budget": "30%", "driver": "host", "eviction": "lfu"},
    ],
    "xla": [
        {"driver": "host", "transfers": "queue"},
        {"paged": True, "expert_budget": "30%"},
        {"paged": True, "expert_budget": "40%", "driver": "host", "transfers": "queue"},
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "ops"),
    [
        pytest.param(
            source, ops, marks=[pytest.mark.nightly] * (source != "Q4_K_M.gguf" or ops != "auto")
        )
        for source in SOURCES
        for ops in VARIANTS
    ],
)
def test_no_budget_driver_transport_or_conversion_changes_a_bit(source, ops, directory, tmp_path):
    """With versions that a map fixes."""
    path, (low, smaller) = written(directory, source), SOURCES[source]
    versions = {
        "high": np.zeros((LAYERS, EXPERTS), np.int8),
        "low": np.ones((LAYERS, EXPERTS), np.int8),
        "some": np.random.default_rng(1).integers(0, 2, (LAYERS, EXPERTS)).astype(np.int8),
    }
    found = {}
    for name, version in versions.items():
        np.save(tmp_path / f"{name}.npy", version)
        plan = f"map={tmp_path / name}.npy,hi=checkpoint,lo={low}"
        stats, found[name] = run(path, ops=ops, precision=plan)
        assert stats["precision"]["versions"] == [CHECKPOINT, low]
    assert found["high"] == run(path, ops=ops)[1]
    assert found["low"] not in (found["high"], found["some"]) and found["some"] != found["high"]
    if [*smaller] == [*range(LAYERS)]:
        assert found["low"] == run(path, ops=ops, precision=low)[1]
    converted = convert(path, tmp_path / "converted", "float32").directory
    assert run(converted, ops=ops, precision=plan)[1] == found["some"]
    for options in VARIANTS[ops]:
        paged = ",paged=true" if options.get("paged") else ""
        rest = {name: value for name, value in options.items() if name != "paged"}
        assert run(path, ops=ops, precision=plan + paged, **rest)[1] == found["some"], options


@pytest.mark.slow
@pytest.mark.parametrize(
    "source", [pytest.param("Q4_K_M.gguf", marks=pytest.mark.nightly), "Q8_0 and Q4_0.gguf"]
)
def test_copies_by_jax_stream_every_layer_in_its_format(source, directory):
    path = written(directory, source)
    _, found = run(path, ops="xla")
    for options in (
        {},
        {"expert_budget": "80%"},
        {"expert_budget": "50%", "store": "file,host_memory=8MiB"},
    ):
        assert run(path, ops="xla", driver="stream", **options)[1] == found, options


PLACED = "fiddler,per_token=50us,startup=300us,load=1ms,accelerator=9us,attention=9us"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "ops"),
    [
        ("Q8_0 and Q4_0.gguf", "auto"),
        pytest.param("Q8_0 and Q4_0.gguf", "xla", marks=pytest.mark.nightly),
        pytest.param("Q4_K_M.gguf", "auto", marks=pytest.mark.nightly),
    ],
)
def test_a_second_processor_computes_each_layer_in_its_format(source, ops, directory):
    path, low = written(directory, source), SOURCES[source][0]
    options = {"ops": ops, "driver": "host", "expert_budget": "40%", "placement": PLACED}
    for more in ({}, {"transfers": "queue"}):
        stats, found = run(path, **options, **more)
        assert stats["placement"]["experts"] > 0 and stats["placement"]["same_bits"]
        assert found == run(path, ops=ops)[1], more
    paged = f"random,hi=checkpoint,lo={low},paged=true"
    stats, found = run(path, **options, precision=paged)
    assert stats["placement"]["experts"] > 0
    del options["placement"]
    assert found == run(path, **options, precision=paged)[1]


@pytest.mark.slow
def test_a_stream_and_a_cache_count_the_bytes_of_every_layer(directory):
    path = written(directory, "Q8_0 and Q4_0.gguf")
    stats, _ = run(path, driver="stream")
    assert stats["stream"]["bytes_per_step"] == stats["store_bytes"]
    notes = dry_run(Config.of(path, driver="stream", **LIMITS))[0].budget.notes
    assert any(f"32 experts, {format_bytes(stats['store_bytes'])}, beside" in n for n in notes)
    cached = {"store": f"file,host_memory={stats['store_bytes']}", "transfers": "queue"}
    plan = dry_run(Config.of(path, driver="host", ops="xla", **cached, **LIMITS))[0]
    assert any("are a cache of 32 of them" in note for note in plan.budget.notes)


MOVED = [
    ({"hi_share": 0.3}, [{"driver": "host"}, {"transfers": "queue"}, {"ops": "xla"}]),
    ({"paged": "true"}, [{"driver": "host"}, {"transfers": "queue"}]),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "settings", "others"),
    [
        pytest.param(
            source, *case, marks=[pytest.mark.nightly] * (source != "Q8_0 and Q4_0.gguf" or i > 0)
        )
        for source in SOURCES
        for i, case in enumerate(MOVED)
    ],
)
def test_experts_change_their_versions_and_a_trace_is_replayed(
    source, settings, others, directory, tmp_path
):
    path, (low, smaller) = written(directory, source), SOURCES[source]
    said = ",".join(f"{name}={value}" for name, value in settings.items())
    text = f"dynaexq,hi=checkpoint,lo={low},margin=0,interval=8 tokens,{said}"
    share = "40%" if len(smaller) == LAYERS else "80%"  # of fewer slots
    budget = {"expert_budget": share} if "paged" in settings else {}
    stats, found = run(path, precision=text, trace=tmp_path / "trace", **budget)
    counted = stats["precision"]
    assert counted["promotions"] > 0 and counted["demotions"] > 0
    trace = read_trace(tmp_path / "trace")
    again = replay(trace, policies=precision_of(text).policies)
    assert again.bytes is not None and again.control is not None
    assert again.bytes.sum() == trace.array("step.bytes").sum()
    for name in ("promotions", "demotions", "promoted_bytes", "demoted_bytes", "hi", "lo"):
        assert again.control["precision"][name] == counted[name], name
    sizes = trace.header.spec["version_bytes"]
    high, least = (np.broadcast_to(each, LAYERS) for each in sizes.values())
    assert np.flatnonzero(high > least).tolist() == [*smaller]
    if source == "Q4_K_M.gguf":  # each layer's own bytes are counted
        few, most = 113664, 130048
        larger, rest = divmod(counted["promoted_bytes"] - counted["promotions"] * few, most - few)
        assert rest == 0 < larger < counted["promotions"]
    for options in others:
        if options == {"ops": "xla"}:
            assert run(path, precision=text, **budget, **options)[0]["precision"]["promotions"] > 0
        else:
            assert run(path, precision=text, **budget, **options)[1] == found, options


@NATIVE
@pytest.mark.slow
def test_auto_knows_the_cells_of_layers_without_a_high_version(directory, tmp_path, monkeypatch):
    """Its arms change at random, every 4 steps, and a replay repeats it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(start, "Auto", functools.partial(Auto, window=4, forced=7))
    monkeypatch.setattr(auto, "LONGEST", 0)  # no rests
    path = written(directory, "Q8_0 and Q4_0.gguf")
    mixed = "dynaexq,hi=checkpoint,lo=int4,margin=0,interval=8 tokens,paged=true"
    options = {"policy": "auto", "precision": mixed, "expert_budget": "80%", **LIMITS}
    with LLM(path, trace=tmp_path / "trace", **options) as llm:
        many = dataclasses.replace(GREEDY, max_tokens=60)
        llm.generate([PROMPTS[0], PROMPTS[2]], many)
        said, plan = llm.stats()["control"]["said"]["auto"], llm.plan
    assert said["switches"] > 2 and len(said["step_s"]) == 3
    assert isinstance(plan.mixed, PagedSpec)
    high, low = plan.mixed.cells.T
    assert [high[layer] > 0 for layer in range(LAYERS)] == [True, True, False, False]
    state = plan.settings.policies[0].init(plan.spec)
    # Of the high version, of the low one, and of the precision.
    np.testing.assert_array_equal(state.shadows.cells, [high, low, low, high, low])
    replay(read_trace(tmp_path / "trace"))


@pytest.mark.nightly
def test_misses_of_little_weight_come_in_the_low_version(directory, tmp_path):
    options = {"driver": "host", "expert_budget": "40%", "trace": tmp_path / "trace"}
    text = "hobbit,hi=checkpoint,lo=int4,threshold=0.3"
    run(written(directory, "Q8_0 and Q4_0.gguf"), precision=text, **options)
    trace = read_trace(tmp_path / "trace")
    again = replay(trace, policies=precision_of(text).policies)
    assert again.bytes is not None
    assert again.bytes.sum() == trace.array("step.bytes").sum() > 0

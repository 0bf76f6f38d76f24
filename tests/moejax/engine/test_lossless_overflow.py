"""Layers with an expert that lossless12 cannot hold stay dense, counted, and no bit differs."""

from __future__ import annotations

import json

import numpy as np
import pytest

from host_offload.memory.tables import with_contents
from host_offload.policies.precision.dynaexq import DynaExq
from host_offload.simulate.replay import replay
from host_offload.traces.reader import read_trace
from host_offload.versions.layer_versions import LayerVersions, layer_versions
from moejax import LLM, SamplingParams, UserError
from moejax.checkpoints.load import load_checkpoint
from moejax.checkpoints.orbax.manifest import MANIFEST, read_manifest
from moejax.checkpoints.orbax.own import read_expert
from moejax.checkpoints.versions import with_versions
from moejax.commands import main as cli
from moejax.evaluate.quantization import quantize
from pallas_kernels.records import RecordFormat
from pallas_kernels.records.versions import VersionFormats
from tests.moejax.checkpoints.conversions import contents
from tests.moejax.checkpoints.random_checkpoint import BF16, CONFIG, random_tensors, write
from tests.moejax.engine.scenes import same_bits
from tests.moejax.engine_runs import Job, Recorded, check_residents, run

pytestmark = pytest.mark.slow

# Layers of one kind, which are one program.
MODEL = CONFIG | {
    "vocab_size": 64,
    "hidden_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_hidden_layers": 3,
    "mlp_only_layers": [],
}
POISONED = 1
LIMITS = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 128}
GREEDY = {"temperature": 0, "ignore_eos": True}
JOBS = [
    Job(tuple(range(3, 3 + length)), SamplingParams(max_tokens=8, **GREEDY), arrival)
    for length, arrival in ((5, 0), (40, 2), (17, 9))
]


def poisoned(layers) -> dict[str, np.ndarray]:
    """Tensors of the model; an expert of these layers has uniformly random signs and mantissas, and
    exponents of finite values small enough for sums to stay finite."""
    tensors = random_tensors(MODEL)
    for name, values in tensors.items():
        tensors[name] = (0.3 * values.astype(np.float32)).astype(BF16)
    rng = np.random.default_rng(3)
    for layer in layers:
        for part in ("gate", "up", "down"):
            name = f"model.layers.{layer}.mlp.experts.3.{part}_proj.weight"
            bits = rng.integers(0, 1 << 16, tensors[name].shape) & 0x807F
            exponents = rng.integers(64, 125, tensors[name].shape) << 7
            tensors[name] = (bits | exponents).astype(np.uint16).view(BF16)
    return tensors


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return write(tmp_path_factory.mktemp("hf") / "model", poisoned([POISONED]), MODEL)


@pytest.fixture(scope="module")
def hopeless(tmp_path_factory):
    return write(tmp_path_factory.mktemp("hf") / "model", poisoned([0, 1, 2]), MODEL)


def started(source, precision: str | None, **options) -> LLM:
    return LLM(source, precision=precision, progress=False, **{**LIMITS, **options})


# Room for 5 of 8 experts of a layer.
PAGED = {"expert_budget": "63%", "prefetch": "random"}


def played(source, precision, **options) -> tuple[list[Recorded], dict]:
    """The jobs, the tables and bytes of all residents checked after every step, and stats."""
    with started(source, precision, **{**PAGED, **options}) as llm:
        check_residents(llm)
        return run(llm, JOBS, check=False), llm.stats()


@pytest.mark.parametrize(
    "precision",
    ["lossless12", pytest.param("lossless12,in_transit=true", marks=pytest.mark.nightly)],
)
def test_the_bits_are_those_of_dense_experts(source, precision):
    """And who prefetches sees what it sees of a dense run; fewer bytes pass the link."""
    (wanted, said), (recorded, stats) = played(source, None), played(source, precision)
    assert same_bits(recorded, wanted)
    assert all(np.isfinite(logits).all() for job in recorded for logits in job.logits)
    assert stats["precision"]["dense_layers"] == 1 and not stats["precision"]["changes_bits"]
    assert any("those of MoE layers 1, dense" in text for text in stats["notes"])
    assert stats["experts"] == said["experts"]
    for name, count in stats["bytes"].items():
        assert 0.7 < count / said["bytes"][name] < 1


@pytest.mark.nightly
def test_a_layer_in_the_wrong_version_is_found(source):
    """Mutation: tables that take every layer's version for number 0. (Native ops refuse them.)"""
    options = {**PAGED, "enable_prefix_caching": False, "ops": "xla"}
    with started(source, "lossless12,in_transit=true", driver="host", **options) as llm:
        tables = llm.engine.runner.tables
        expected = np.repeat([[0], [1], [0]], 8, axis=1)
        for name in ("version", "fill_version", "cell_version"):
            np.testing.assert_array_equal(np.asarray(getattr(tables, name)), expected)
        whole = run(llm, JOBS[1:2], check=False)
        wrong = {"version": expected * 0, "fill_version": expected * 0}
        llm.engine.runner.tables = with_contents(llm.engine.runner.tables, wrong)
        assert not run(llm, JOBS[1:2], check=False)[0].same_bits(whole[0])


def test_as_the_low_version_it_is_refused(source):
    """Low cells would be as large as high ones."""
    with pytest.raises(UserError, match="lossless12 cannot hold expert 3 of MoE layer 1: too many"):
        with_versions(load_checkpoint(source), ("dense", "lossless12"))


# ---- beside a second version


MISSING = {"prefetch": None, "driver": "host"}
PAIR = "dynaexq,margin=0,alpha=0,paged=true,interval=6 tokens"


def test_beside_a_second_version_it_is_a_pair_of_dense_and_low(source, tmp_path):
    """As many transitions, the same bits; fewer bytes over the link."""
    runs = []
    for hi in ("dense", "lossless12"):
        runs.append(played(source, f"{PAIR},hi={hi}", **MISSING, trace=tmp_path / hi))
    (wanted, said), (recorded, stats) = runs
    assert all(a.same_bits(b) for a, b in zip(recorded, wanted, strict=True))
    assert all(np.isfinite(logits).all() for job in recorded for logits in job.logits)
    found, other = stats["precision"], said["precision"]
    assert found["dense_layers"] == 1 and "dense_layers" not in other
    assert any("MoE layers 1 stay dense, so high cells" in text for text in stats["notes"])
    for name in ("promotions", "demotions", "hi", "lo", "absent", "budget_bytes"):
        assert found[name] == other[name], name
    assert found["promotions"] > 4 and found["demotions"] > 0
    assert found["demoted_bytes"] == other["demoted_bytes"]
    assert 0.7 < found["promoted_bytes"] / other["promoted_bytes"] < 1
    assert stats["experts"] == said["experts"]

    traces = [read_trace(tmp_path / hi) for hi in ("dense", "lossless12")]
    hot = DynaExq(alpha=0, margin=0, interval="6 tokens", paged=True)
    again = replay(traces[1], policies=[hot])
    assert again.bytes is not None
    assert again.bytes.sum() == traces[1].array("step.bytes").sum()
    assert again.bytes.sum() < traces[0].array("step.bytes").sum()


def test_where_every_layer_overflows_it_is_refused(hopeless, tmp_path):
    with pytest.raises(UserError, match=r"in every MoE layer .* nothing to gain; use dense"):
        started(hopeless, "lossless12")
    with pytest.raises(UserError, match="nothing to gain; leave this version out"):
        quantize(hopeless, tmp_path / "model", ("lossless12",))


def test_quantize_leaves_the_layer_out(source, tmp_path, capsys):
    arguments = ["--versions", "lossless12,int4", "--json"]
    assert cli.main(["quantize", str(source), str(tmp_path / "model"), *arguments]) == 0
    written = json.loads(capsys.readouterr().out)["versions"]
    assert written["lossless12"]["dense_layers"] == [POISONED]
    assert written["lossless12"]["relative_error"] == [0, 0, 0]
    assert written["int4"]["dense_layers"] == []
    directory = tmp_path / "model"
    manifest = read_manifest(directory / MANIFEST)
    assert manifest.dense_layers == {"lossless12": (POISONED,)}
    assert list(manifest.experts["lossless12"]) == [0, 2]

    assert cli.main(["info", str(directory), "--json"]) == 0
    weights = json.loads(capsys.readouterr().out)["weights"]
    assert weights["dense_layers"] == {"lossless12": [POISONED]}
    assert cli.main(["info", str(directory)]) == 0
    assert "lossless; 1 of 3 layers dense" in capsys.readouterr().out

    found = load_checkpoint(directory, versions=("lossless12",)).store
    made = with_versions(load_checkpoint(source), ("lossless12",)).store
    assert found.layers == made.layers and list(found.arrays) == list(made.arrays)
    for version, array in made.arrays.items():
        np.testing.assert_array_equal(np.asarray(found.arrays[version]), np.asarray(array))
    assert list(load_checkpoint(directory, versions=("int4", "lossless12")).store.arrays) == [
        "dense",
        "int4",
    ]
    with pytest.raises(UserError, match=r"MoE layer 1 of version 'lossless12'.*lacks layers \[1\]"):
        read_expert(directory, POISONED, 0, "lossless12")

    with pytest.raises(UserError, match="lossless12 lacks MoE layers that only dense holds"):
        load_checkpoint(directory, versions=("lossless12",), in_files=True)

    again = quantize(directory, tmp_path / "again", ("lossless12", "int4")).conversion
    assert contents(again.directory) == contents(directory)


def test_versions_of_layers_at_the_border():
    fmt = RecordFormat("dense", 64, 32, "bfloat16")

    def formats(*places):
        return tuple(VersionFormats(fmt, fmt, each) for each in places)

    assert layer_versions(None) is None and layer_versions(formats(None, None)) is None
    versions = layer_versions(formats((0, -1, 1), (-1, 0, -1)))
    assert versions == LayerVersions(((0,), (1,), (0,)))
    told = versions.contents({"fill_version": np.array([[0, -1]] * 3), "prior": 7})
    assert told["prior"] == 7
    np.testing.assert_array_equal(told["fill_version"], [[0, -1], [1, -2], [0, -1]])
    whole = VersionFormats(fmt, fmt)
    pairs = layer_versions((*formats((0, -1, 1), (-1, 0, -1)), whole))
    assert pairs == LayerVersions(((0, 2), (1, 2), (0, 2)))
    np.testing.assert_array_equal(
        pairs.of(np.array([[0, 1, -1, -2]] * 3)), [[0, 2, -1, -3], [1, 2, -2, -3], [0, 2, -1, -3]]
    )
    some = layer_versions(formats((0, -1, 1), (-1, 0, -1), (0, -1, 1)))  # the low store lacks one
    assert some == LayerVersions(((0, 2), (1, 1), (0, 2)))
    np.testing.assert_array_equal(some.of(np.array([[0, -2]] * 3)), [[0, -3], [1, -2], [0, -3]])
    with pytest.raises(ValueError, match="layer 1 is in 2 stores"):
        layer_versions(formats((0, 1), (-1, 0), (0, -1)))
    with pytest.raises(ValueError, match="layer 0 is in 0 stores"):
        layer_versions(formats((-1, 0), (-1, -1)))

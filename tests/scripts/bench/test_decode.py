"""The bench runs, reports every figure beside its floor, and refuses what cannot run."""

import contextlib

import jax
import numpy as np
import pytest

from moejax.checkpoints.random_model import SHAPES, random_model, shape
from moejax.errors import UserError
from moejax.start.report.info import model_info
from moejax.step.parts import StepShapes
from scripts.bench import decode as bench_decode
from scripts.bench import kernel_profile
from scripts.parts import bench_engine, decode_timing
from tests.scripts.runs import json_lines, refusal

QUICK = ("--steps", "2", "--warmup", "1", "--context", "8")
GiB = 1 << 30


def lines(capsys, *args: str) -> list[dict]:
    return json_lines(capsys, bench_decode.main, *QUICK, *args)


def check(line: dict) -> None:
    for field in ("ms_per_step", "ms_per_step_p99", "floor_memory_ms", "link_rate_gb_per_s"):
        assert line[field] > 0, field
    assert line["memory_rate_gb_per_s"] > 0
    assert line["floor_ms"] == max(line["floor_memory_ms"], line["floor_link_ms"])
    assert line["tokens_per_s"] == pytest.approx(line["batch"] / line["ms_per_step"] * 1e3)
    assert line["ceiling_tokens_per_s"] == pytest.approx(line["batch"] / line["floor_ms"] * 1e3)
    misses = line["misses_per_step"]
    assert misses == pytest.approx(line["fills_per_step"] + line["read_through_per_step"])
    assert line["least_misses_per_step"] <= misses <= line["active_per_step"]
    assert (line["floor_link_ms"] > 0) == (line["link_gb_per_s"] > 0) == (misses > 0)
    assert line["steps"] == 2
    assert line["ops"]["fill"] in ("xla", "cpu")


@pytest.mark.nightly
@pytest.mark.slow
def test_demo_by_batches_and_cells(capsys):
    found = lines(capsys, "--batch", "1,2", "--cells", "0,25%,16")
    keys = [(line["batch"], line["cells_per_layer"]) for line in found]
    assert keys == [(b, c) for b in (1, 2) for c in (0, 4, 16)]
    for line in found:
        check(line)
        if line["cells_per_layer"] == 0:
            assert line["read_through_per_step"] == line["active_per_step"] > 0
        if line["batch"] == 1:  # 4 layers, 4 experts a token
            assert line["active_per_step"] == 16


FORCED = ("--layers", "2", "--batch", "3", "--cells", "0,16", "--routing")
"""One set of shapes for many runs: compiled once, in the persistent cache after that."""


@pytest.mark.nightly
@pytest.mark.slow
def test_forced_routing_on_random_weights(capsys):
    found = lines(capsys, *FORCED, "zipf")
    assert len(found) == 2
    for line in found:
        check(line)
        assert (line["layers"], line["routing"]) == (2, "zipf")
        assert "profile" not in line
    # The same routing whatever the cells.
    assert found[0]["active_per_step"] == found[1]["active_per_step"]


@pytest.mark.nightly
@pytest.mark.parametrize("as_json", [True, False])
def test_table_and_profile_of_each_row(capsys, monkeypatch, as_json):
    """The way from --profile to the report, with a device and a trace that a CPU lacks."""
    cpu, weights, traced = jax.devices("cpu")[0], bench_engine.weights_of, []
    engine = bench_engine.compiled_engine
    graphs: list[str] = []

    def record(work, steps):
        work()
        traced.append(steps)
        kernel = kernel_profile.Kernel("expert_ffn", calls=4.0, us=90.0, share=1.0)
        return kernel_profile.Profile(steps, (kernel,), 100.0, 90.0, 3.0, 6.0, 2.0, 4.0)

    class GPU:
        platform = "gpu"

    def cpu_weights(args, config, device):
        assert isinstance(device, GPU)
        return weights(args, config, cpu)

    def cpu_engine(args, loaded, device, limits):
        return engine(args, loaded, cpu, limits)

    monkeypatch.setattr(kernel_profile, "record", record)
    monkeypatch.setattr(kernel_profile, "profile_graphs", lambda: graphs.append("on"))
    monkeypatch.setattr(kernel_profile, "require_track", lambda device: None)
    monkeypatch.setattr(bench_engine, "check_fits", lambda *args, **sizes: None)
    monkeypatch.setattr(bench_engine, "weights_of", cpu_weights)
    monkeypatch.setattr(bench_engine, "compiled_engine", cpu_engine)
    args = [*FORCED, "uniform", "--profile"]
    monkeypatch.setattr(bench_decode, "select_device", lambda: graphs.append("started") or GPU())
    if as_json:
        for line in lines(capsys, *args):
            check(line)
            assert line["profile"]["kernels"][0]["name"] == "expert_ffn"
            assert line["profile"]["idle_percent"] == pytest.approx(10)
    else:
        assert bench_decode.main([*QUICK, *args]) == 0
        rows, *profiles = capsys.readouterr().out.split("\n\n")
        title, rates, heading, *rows = rows.splitlines()
        assert title.startswith("demo, 2 layers of 16 experts, bfloat16")
        assert "link" in rates and "memory" in rates
        assert heading.split()[:4] == ["batch", "cells", "ms/step", "p99"]
        assert [row.split()[:2] for row in rows] == [["3", "0"], ["3", "16"]]
        assert [text.splitlines()[0] for text in profiles] == [
            "batch 3, 0 cells a layer",
            "batch 3, 16 cells a layer",
        ]
        assert all(text.splitlines()[-1].split()[-1] == "expert_ffn" for text in profiles)
    assert traced == [1] * 2  # 2 steps in 2 repeats
    assert graphs == ["on", "started"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--shape", "gpt-4"], "shape 'gpt-4' is unknown; choose demo, qwen3-30b-a3b"),
        (["--layers", "0"], "layers must be at least 1"),
        (["--shape", "qwen3-30b-a3b", "--layers", "4000"], "needs of host memory"),
        (["--cells", "17"], "more than a layer's 16 experts"),
        (["--cells", "some"], "whole numbers"),
        (["--batch", "0"], "--batch must be at least 1"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--warmup", "-1"], "--warmup must not be negative"),
        (["--routing", "random"], "routing 'random' is unknown; choose real, uniform, zipf"),
        (["--context", "1024"], "lower --context"),
        (["--dtype", "int8"], "dtype 'int8' is unknown"),
        (["--ops", "cuda"], "no implementation 'cuda'"),
        (["--eviction", "fifo", "--layers", "1"], "fifo"),
        (["--profile"], "--profile reads the GPU's track of the trace, and this is a cpu"),
    ],
)
def test_a_mistake_is_explained(capsys, monkeypatch, args, message):
    monkeypatch.setattr(kernel_profile, "profile_graphs", lambda: None)  # it sets XLA_FLAGS
    assert message in refusal(capsys, bench_decode.main, *args)


def test_memory_that_is_missing_is_counted_in_layers():
    config = shape("qwen3-30b-a3b")
    with pytest.raises(
        UserError, match=r"48 layers needs of host memory 54 GiB .* use --layers 12$"
    ):
        bench_engine.check_memory(config, "qwen3-30b-a3b", "auto", cells=0, host=17 * GiB)
    with pytest.raises(UserError, match="not even one layer fits"):
        bench_engine.check_memory(config, "qwen3-30b-a3b", "auto", cells=128, host=4 * GiB)
    # What is advised fits, and no more would.
    for layers in (12, 13):
        config = shape("qwen3-30b-a3b", layers)
        with pytest.raises(UserError) if layers == 13 else contextlib.nullcontext():
            bench_engine.check_memory(config, "qwen3-30b-a3b", "auto", cells=0, host=17 * GiB)


def test_memory_that_a_device_lacks_is_counted_apart_from_the_hosts():
    config = shape("qwen3-30b-a3b")
    plenty = dict(host=200 * GiB, tokens=8 * 1024, prefill=2048)
    bench_engine.check_memory(config, "qwen3-30b-a3b", "auto", 128, device=80 * GiB, **plenty)
    with pytest.raises(UserError, match=r"of device memory .* 54 GiB for an arena of 128 cells"):
        bench_engine.check_memory(config, "qwen3-30b-a3b", "auto", 128, device=40 * GiB, **plenty)
    tokens = 96 * GiB // (48 * 2 * 4 * 128 * 2)  # layers, K and V, heads, head_dim, bytes
    with pytest.raises(UserError, match=r"96 GiB for KV and activations"):
        bench_engine.check_memory(config, "qwen3-30b-a3b", "auto", 0, 80 * GiB, tokens=tokens)


@pytest.mark.parametrize(
    ("text", "cells"), [("all,25%,0", [16, 4, 0]), ("3, 3,100%", [3, 16]), ("16,all", [16])]
)
def test_cells_are_numbers_shares_or_all(text, cells):
    assert bench_engine.parse_cells(text, 16) == cells


def test_compiling_while_measuring_is_found():
    class Executables:
        def executables(self):
            return ("decode",)

    with bench_engine.no_compilation(Executables()):
        pass
    with (
        pytest.raises(RuntimeError, match="1 compilations while measuring"),
        bench_engine.no_compilation(Executables()),
    ):
        jax.jit(lambda x: x * 3 + 1).lower(1.5).compile()


def test_forced_routing_is_distinct_ascending_and_skewed_for_zipf():
    class Runner:
        stores = (np.empty((3, 16, 0, 0)),)
        shapes = StepShapes(rows=64, buckets=(64,), chunk=64, prefill_chunks=1, blocks=4)
        config = type("Config", (), {"num_experts_per_tok": 4})

    top = {}
    for kind in ("uniform", "zipf"):
        routings = decode_timing.forced_routings(kind, Runner(), 33, 5, np.random.default_rng(0))
        ids = np.stack([routing.ids for routing in routings])
        assert ids.shape == (5, 3, 64, 4)
        assert (np.diff(ids, axis=-1) > 0).all()
        counts = np.stack([np.bincount(ids[:, layer].ravel(), minlength=16) for layer in range(3)])
        top[kind] = counts.max(axis=1) / counts.mean(axis=1)
    assert (top["uniform"] < 1.3).all() and (top["zipf"] > 1.7).all()
    assert decode_timing.forced_routings("real", Runner(), 1, 2, np.random.default_rng(0)) == [
        None,
        None,
    ]


def test_shapes_have_the_bytes_of_their_models():
    sizes = {name: model_info(shape(name)).bytes for name in SHAPES}
    experts = {name: of_parts["experts"] / GiB for name, of_parts in sizes.items()}
    assert experts["qwen3-30b-a3b"] == 54
    assert experts["mixtral-8x7b"] == 84
    assert experts["olmoe"] == 12
    total = sum(sizes["qwen3-30b-a3b"].values())
    assert total == pytest.approx(30.5e9 * 2, rel=0.01)  # "30B", bfloat16


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_random_model_is_repeatable_and_its_experts_differ(dtype):
    config = shape("demo", layers=2)
    loaded, again = random_model(config, dtype, seed=3), random_model(config, dtype, seed=3)
    other = random_model(config, dtype, seed=4)
    store = np.asarray(loaded.store.arrays["dense"])
    assert store.shape == (2, 16, loaded.layout.rows, 128)
    assert np.array_equal(store, np.asarray(again.store.arrays["dense"]))
    assert not np.array_equal(store, np.asarray(other.store.arrays["dense"]))
    assert len({record.tobytes() for record in store.reshape(32, -1)}) == 32
    weights = store.view(loaded.params["embed"].dtype).astype(np.float32)
    assert np.isfinite(weights).all()
    assert weights.std() == pytest.approx(0.02, rel=0.05)
    for ours, theirs in zip(*map(jax.tree.leaves, (loaded.params, again.params)), strict=True):
        assert np.array_equal(np.asarray(ours), np.asarray(theirs))
    assert (np.asarray(loaded.params["runs"][0]["q_norm"]) == 1).all()
    assert loaded.dtype == dtype
    for model in (loaded, again, other):
        model.store.delete()

"""The bench runs, reports every figure beside its floor, and refuses what cannot run."""

import contextlib
import json

import jax
import numpy as np
import pytest

from moejax.decode_timing import forced_routings, no_compilation
from moejax.errors import UserError
from moejax.random_model import SHAPES, model_bytes, random_model, shape
from moejax.step import StepShapes
from scripts import bench_decode

QUICK = ("--steps", "2", "--warmup", "1", "--context", "8", "--json")
GiB = 1 << 30


def lines(capsys, *args: str) -> list[dict]:
    status = bench_decode.main([*QUICK, *args])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    return [json.loads(line) for line in captured.out.splitlines()]


def refusal(capsys, *args: str) -> str:
    assert bench_decode.main(args) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


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


def test_demo_through_runner_and_llm(capsys):
    found = lines(capsys, "--batch", "1,2", "--cells", "0,25%,16")
    keys = [(line["through"], line["batch"], line["cells_per_layer"]) for line in found]
    assert keys == [(t, b, c) for t in ("runner", "llm") for b in (1, 2) for c in (0, 4, 16)]
    for line in found:
        check(line)
        if line["cells_per_layer"] == 0:
            assert line["read_through_per_step"] == line["active_per_step"] > 0
        if line["batch"] == 1:  # 4 layers, 4 experts a token
            assert line["active_per_step"] == 16


@pytest.mark.parametrize("routing", ["uniform", "zipf"])
def test_forced_routing_on_random_weights(capsys, routing):
    found = lines(capsys, "--layers", "2", "--batch", "3", "--cells", "0,16", "--routing", routing)
    assert [line["through"] for line in found] == ["runner", "runner"]
    for line in found:
        check(line)
        assert (line["layers"], line["routing"]) == (2, routing)
    # The same routing whatever the cells.
    assert found[0]["active_per_step"] == found[1]["active_per_step"]


def test_table_has_a_line_for_each_case(capsys):
    args = ["--layers", "1", "--batch", "1", "--cells", "0,8", "--steps", "1", "--warmup", "0"]
    assert bench_decode.main([*args, "--context", "4"]) == 0
    title, rates, heading, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("demo, 1 layers of 16 experts, bfloat16")
    assert "link" in rates and "memory" in rates
    assert heading.split()[:4] == ["through", "batch", "cells", "ms/step"]
    assert [row.split()[:3] for row in rows] == [["runner", "1", "0"], ["runner", "1", "8"]]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--shape", "gpt-4"], "shape 'gpt-4' is unknown; choose demo, qwen3-30b-a3b"),
        (["--layers", "0"], "layers must be at least 1"),
        (["--shape", "qwen3-30b-a3b", "--layers", "9999"], "use --layers"),
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
    ],
)
def test_a_mistake_is_explained(capsys, args, message):
    assert message in refusal(capsys, *args)


def test_memory_that_is_missing_is_counted_in_layers():
    config = shape("qwen3-30b-a3b")
    with pytest.raises(UserError, match=r"48 layers needs 54 GiB .* use --layers 12$"):
        bench_decode.check_memory(config, "qwen3-30b-a3b", "auto", cells=0, available=17 * GiB)
    with pytest.raises(UserError, match="not even one layer fits"):
        bench_decode.check_memory(config, "qwen3-30b-a3b", "auto", cells=128, available=4 * GiB)
    # What is advised fits, and no more would.
    for layers in (12, 13):
        config = shape("qwen3-30b-a3b", layers)
        with pytest.raises(UserError) if layers == 13 else contextlib.nullcontext():
            bench_decode.check_memory(config, "qwen3-30b-a3b", "auto", cells=0, available=17 * GiB)


def test_compiling_while_measuring_is_found():
    class Executables:
        def executables(self):
            return ("decode",)

    with no_compilation(Executables()):
        pass
    with (
        pytest.raises(RuntimeError, match="1 compilations while measuring"),
        no_compilation(Executables()),
    ):
        jax.jit(lambda x: x * 3 + 1).lower(1.5).compile()


def test_forced_routing_is_distinct_ascending_and_skewed_for_zipf():
    class Runner:
        stores = (np.empty((3, 16, 0, 0)),)
        shapes = StepShapes(rows=64, buckets=(64,), chunk=64, sweep_chunks=1, blocks=4)
        config = type("Config", (), {"num_experts_per_tok": 4})

    top = {}
    for kind in ("uniform", "zipf"):
        routings = forced_routings(kind, Runner(), 33, 5, np.random.default_rng(0))
        ids = np.stack([routing.ids for routing in routings])
        assert ids.shape == (5, 3, 64, 4)
        assert (np.diff(ids, axis=-1) > 0).all()
        counts = np.stack([np.bincount(ids[:, layer].ravel(), minlength=16) for layer in range(3)])
        top[kind] = counts.max(axis=1) / counts.mean(axis=1)
    assert (top["uniform"] < 1.3).all() and (top["zipf"] > 1.7).all()
    assert forced_routings("real", Runner(), 1, 2, np.random.default_rng(0)) == [None, None]


def test_shapes_have_the_bytes_of_their_models():
    experts = {name: model_bytes(shape(name))[0] / GiB for name in SHAPES}
    assert experts["qwen3-30b-a3b"] == 54
    assert experts["mixtral-8x7b"] == 84
    assert experts["olmoe"] == 12
    total = sum(model_bytes(shape("qwen3-30b-a3b")))
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

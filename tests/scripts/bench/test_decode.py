"""The bench runs, reports every figure beside its floor, and refuses what cannot run."""

import json

import jax
import pytest

from moejax.checkpoints.random_model import shape
from moejax.errors import UserError
from scripts.bench import decode as bench_decode
from scripts.bench import kernel_profile
from scripts.parts import bench_engine
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


FORCED = ("--layers", "2", "--batch", "3", "--cells", "0,16", "--routing")
"""One set of shapes for both tests: compiled once."""


@pytest.mark.slow
def test_what_ends_a_run_leaves_its_rows(capsys, monkeypatch, tmp_path):
    def line(*args, cells, **kwargs):
        if cells == 0:
            raise KeyboardInterrupt
        return measured(*args, cells=cells, **kwargs)

    measured = bench_decode.measured_line
    monkeypatch.setattr(bench_decode, "measured_line", line)
    output = tmp_path / "rows.jsonl"
    args = ("--layers", "1", "--batch", "1", "--cells", "all,0", "--output", str(output))
    with pytest.raises(KeyboardInterrupt):
        bench_decode.main([*QUICK, *args])
    (row,) = map(json.loads, output.read_text().splitlines())
    check(row)
    assert row["misses_per_step"] == 0  # its prompt has filled every cell
    assert f"{row['ms_per_step']:.2f}" in capsys.readouterr().out.splitlines()[-1].split()


@pytest.mark.slow
def test_forced_routing_on_random_weights(capsys):
    found = lines(capsys, *FORCED, "zipf")
    assert len(found) == 2
    for line in found:
        check(line)
        assert (line["layers"], line["routing"]) == (2, "zipf")
    # The same routing whatever the cells.
    assert found[0]["active_per_step"] == found[1]["active_per_step"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--shape", "gpt-4"], "shape 'gpt-4' is unknown; choose demo, qwen3-30b-a3b"),
        (["--shape", "qwen3-30b-a3b", "--layers", "4000"], "needs of host memory"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--routing", "random"], "routing 'random' is unknown; choose real, uniform, zipf"),
        (["--context", "1024"], "lower --context"),
        (["--ops", "cuda"], "no implementation 'cuda'"),
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
